"""The runbook has an entry for every reason to stall and for everything that a rotation waits for."""

import ast
import inspect
import itertools
from collections.abc import Iterator
from datetime import timedelta

import pytest

from keyvault.backends.base import Mount
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from keyvault.services.secrets.stored_copies import ForeignWriterError
from rotation.domain import states
from rotation.domain.events import OUTCOMES, Event, RotationState
from rotation.domain.runbook import (
    REMEDY_LABELS,
    STALLS,
    UNKNOWN,
    WAITS,
    Case,
    Remedy,
    RunbookEntry,
    find_stall,
    find_wait,
    fit_advice,
    runbook_markdown,
)
from rotation.domain.states import WHY, Move, Wait
from rotation.domain.windows import Blackout, Window
from tests.rotation.situation import ACTIVE, NOW, QUIET, SUSPENDED, plan, step, used

S = RotationState

OF_ITSELF = ("nothing: the rotation is closed", "an operator to resolve the stall", "its start time, ")
"""Waits that need no advice, or whose advice is that of the stall."""


def waits_in_the_code() -> Iterator[str]:
    """Yield the start of each `waiting_for` text in `states`."""
    for node in ast.walk(ast.parse(inspect.getsource(states))):
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in {"Wait", "RotationAction"}:
            continue
        waiting_for = node.args[0]
        if isinstance(waiting_for, ast.JoinedStr):
            waiting_for = waiting_for.values[0]
        if isinstance(waiting_for, ast.Constant):
            yield str(waiting_for.value)


def stalls_in_the_code() -> Iterator[str]:
    """Yield each reason with which `states` itself stalls a rotation."""
    for node in ast.walk(ast.parse(inspect.getsource(states))):
        is_move = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Move"
        if is_move and isinstance(node, ast.Call) and ast.unparse(node.args[0]) == "S.STALLED":
            yield ast.literal_eval(node.args[1])


def test_runbook_has_an_entry_for_every_reason_to_stall() -> None:
    reasons = list(stalls_in_the_code())
    assert len(reasons) >= 2
    assert [reason for reason in reasons if find_stall(reason) is UNKNOWN] == []


@pytest.mark.parametrize("event", [event for event in Event if S.STALLED in OUTCOMES[event].values()])
def test_runbook_has_an_entry_for_every_stalling_event(event: Event) -> None:
    assert find_stall(WHY[event]) is not UNKNOWN


def test_runbook_has_an_entry_for_a_window_that_never_opens() -> None:
    closed = Window("UTC", (), blackouts=(Blackout(NOW - timedelta(days=1), NOW + timedelta(days=2_000)),))
    found = step(S.SCHEDULED, plan=plan(window=closed))
    assert isinstance(found, Move)
    assert (found.to, find_stall(found.why).title) == (S.STALLED, "The window has no further opening")


def test_runbook_has_entries_for_stalls_of_the_worker() -> None:
    foreign = ForeignWriterError(Mount.SANDBOX, "a/path", 3)
    assert find_stall(foreign.detail).title == "The secret backend holds an unknown version"
    assert find_stall("the secret backend denies access: no").title == "The secret backend denies access"
    assert find_stall("a step kept failing: permission denied").title == "A step kept failing"
    assert find_stall("something unforeseen") is UNKNOWN


@pytest.mark.parametrize("waiting_for", sorted(set(waits_in_the_code())))
def test_runbook_has_an_entry_for_every_wait(waiting_for: str) -> None:
    assert waiting_for.startswith(OF_ITSELF) or find_wait(waiting_for, is_failing=True) is not None


@pytest.mark.parametrize("state", [S.QUARANTINE, S.ROLLING_BACK])
def test_runbook_of_a_quarantine_is_not_that_of_a_key_in_use(state: RotationState) -> None:
    keys = {"replacement" if state is S.ROLLING_BACK else "predecessor": SUSPENDED}
    found = step(state, written_back_at=NOW, quarantined_at=NOW, entered_at=NOW, observed_through=NOW, **keys)
    assert isinstance(found, Wait)
    entry = find_wait(found.waiting_for, is_failing=False)
    assert entry is not None
    assert entry.title == "The quarantine has not ended yet"


@pytest.mark.parametrize("state", [S.OVERLAP, S.ROLLING_BACK])
def test_runbook_has_an_entry_for_an_unused_key(state: RotationState) -> None:
    key, later = used(1, 1, NOW - 2 * QUIET), NOW - QUIET / 2
    old, new = (used(1, 1, later), ACTIVE) if state is S.OVERLAP else (key, used(1, 1, later))
    found = step(state, written_back_at=NOW - 3 * QUIET, observed_through=NOW, predecessor=old, replacement=new)
    assert isinstance(found, Wait)
    entry = find_wait(found.waiting_for, is_failing=False)
    assert entry is not None
    assert entry.title == "The key that stays was not used last"


def test_runbook_of_a_side_effect_applies_only_after_a_failure() -> None:
    waiting_for = "the secret backend to hold the replacement"
    assert find_wait(waiting_for, is_failing=False) is None
    entry = find_wait(waiting_for, is_failing=True)
    assert entry is not None
    assert entry.title == "A step that needs the secret backend fails"


CASES = [Case(*case) for case in itertools.product(Delivery, KeyKind, [True, False], [True, False])]


def untrue_texts(case: Case) -> Iterator[str]:
    """Yield the statements that are untrue for such a rotation."""
    if not case.has_old_key:
        yield from ("both keys verify", "both keys stay", "old key stays", "the old key verifies", "roll back")
        yield from ("rolls back",)
    is_read_there = case.kind is KeyKind.PRIVATE and case.delivery is Delivery.SECRET_BACKEND
    if not is_read_there:
        yield from ("waits in the secret backend", "lies in the secret backend")
    if not case.has_endpoint:
        yield "reminds them at"
    if case.kind is KeyKind.PUBLIC:
        yield from ("shown once", "sealed to", "waits for silence", "reinstate")
    else:
        yield from ("own page, where it is shown as often", "shipped in their pages and apps")
        yield from {"shown once", "sealed to"} - {_OWN_WORDS.get(case.delivery, "")}


_OWN_WORDS = {Delivery.SHOW_ONCE: "shown once", Delivery.SEALED: "sealed to"}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("entry", [*STALLS, UNKNOWN, *WAITS], ids=lambda entry: entry.title)
def test_runbook_entry_is_true_for_the_rotation(entry: RunbookEntry, case: Case) -> None:
    """Advice for another delivery, or for a key that is still good, costs time in an emergency."""
    if not case.has_old_key and entry in _WITH_OLD_KEY:
        return
    advice = fit_advice(entry, case)
    advice_text = " ".join((advice.happened, *advice.steps)).lower()
    assert advice.steps
    assert [phrase for phrase in untrue_texts(case) if phrase in advice_text] == []


_NEEDS_THE_OLD_KEY = {
    "The quarantine was lifted by hand",
    "The window has no further opening",
    "The merchant does not use the replacement yet",
    "It waits for an operator's confirmation",
    "The replacement is in use, but not for long enough",
    "A key is still in use, or its silence is not proved yet",
    "The key that stays was not used last",
    "No verifier reports",
    "The old public key waits for its retirement date",
}
"""Entries that never apply once the old key has ended: such a rotation has no deadline and no window and is proved by
delivery.
"""
_WITH_OLD_KEY = [entry for entry in (*STALLS, *WAITS) if entry.title in _NEEDS_THE_OLD_KEY]


@pytest.mark.parametrize(
    ("delivery", "phrase"),
    [
        (Delivery.SECRET_BACKEND, "waits in the secret backend"),
        (Delivery.SHOW_ONCE, "shown once"),
        (Delivery.SEALED, "sealed to"),
    ],
)
def test_runbook_of_an_unused_replacement_names_its_place(delivery: Delivery, phrase: str) -> None:
    entry = find_wait("traffic on the replacement: 0 of 5", is_failing=False)
    assert entry is not None
    advice = fit_advice(entry, Case(delivery, KeyKind.PRIVATE, has_old_key=True, has_endpoint=True))
    assert phrase in " ".join((advice.happened, *advice.steps))
    assert (Remedy.COLLECT in advice.remedies) == (delivery is Delivery.SHOW_ONCE)


def test_runbook_of_an_unconfirmed_public_key_names_its_place() -> None:
    entry = find_wait("an operator to confirm", is_failing=False)
    assert entry is not None
    advice_text = fit_advice(entry, Case(Delivery.SECRET_BACKEND, KeyKind.PUBLIC, has_old_key=True, has_endpoint=True))
    assert "own page, where it is shown as often" in advice_text.happened


def test_runbook_entry_has_an_instruction() -> None:
    titles = [entry.title for entry in (*STALLS, *WAITS)]
    assert len(set(titles)) == len(titles)
    for entry in (*STALLS, UNKNOWN, *WAITS):
        advice = fit_advice(entry, CASES[0])
        assert advice.steps
        assert all(text.endswith(".") for text in (advice.happened, *advice.steps))


def test_runbook_of_every_stall_names_a_remedy_and_an_end() -> None:
    for entry in (*STALLS, UNKNOWN):
        assert {Remedy.RESUME, Remedy.EXTEND, Remedy.REQUEST_AGAIN} & set(entry.remedies)
        assert {Remedy.ABORT, Remedy.ROLL_BACK} & set(entry.remedies)


def test_runbook_markdown_holds_every_entry_and_no_long_line() -> None:
    text = runbook_markdown()
    assert all(f"#### {entry.title}\n" in text for entry in (*STALLS, *WAITS))
    assert max(map(len, text.splitlines())) <= 120
    assert set(REMEDY_LABELS) == set(Remedy)

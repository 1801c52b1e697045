"""The off-host check finds and locates every change of the log that was made without the signing key."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from keyvault_client.export_check import ExportCheck, ExportError

from keyvault.domain.audit import Break, ChainedEntry
from keyvault.domain.audit_records import ChainHead, ExportStart, gather_kept, parse_record
from keyvault.domain.checkpoints import (
    UNSIGNED_FOR,
    Checkpoint,
    CheckpointWalk,
    Head,
    KeptCheckpoints,
    SignedCheckpoint,
    checkpoint_bytes,
    parse_checkpoint,
    scope_of,
)

from .logbook import ACME, AT, CHAINS, GLOBEX, KEY, OTHER_KEY, PUBLIC_KEYS, SCOPES, Logbook, signed

STEPS = [*CHAINS, *SCOPES]


def book(steps: list[str]) -> Logbook:
    """Each step is a chain that gets an entry, or a scope that gets a checkpoint if it has unsigned entries."""
    made = Logbook()
    for number, step in enumerate(steps):
        if step in CHAINS:
            made.write(step, f"text {number}")
        elif made.heads(step) != made.signed_heads(step):
            made.sign(step)
    return made


def signed_book(steps: list[str]) -> Logbook:
    """One with two checkpoints of the sandbox at least, a few entries before each, and a few after the last."""
    first, second = [ACME, ACME, GLOBEX, "sandbox"], [ACME, GLOBEX, ACME, "sandbox", ACME, CHAINS[2], "service"]
    return book([*first, *steps, *second])


books = st.lists(st.sampled_from(STEPS), max_size=12).map(signed_book)
any_books = st.lists(st.sampled_from(STEPS), max_size=20).map(book)


def checked(made: Logbook, kept: KeptCheckpoints | None = None, lines: list[bytes] | None = None) -> ExportCheck:
    check = ExportCheck(PUBLIC_KEYS, kept or {})
    for line in made.lines() if lines is None else lines:
        check.take(parse_record(line))
    check.finish()
    return check


def found(made: Logbook, kept: KeptCheckpoints | None = None) -> Break:
    broken = checked(made, kept).first_broken
    assert broken is not None, "nothing was noticed"
    assert broken.why
    return broken


def kept_of(made: Logbook) -> KeptCheckpoints:
    return gather_kept(made.lines(), PUBLIC_KEYS)


# --- what is whole ---------------------------------------------------------------------------------------------


@given(books)
def test_export_check_of_an_untouched_log_holds(made: Logbook) -> None:
    check = checked(made, kept_of(made))
    assert check.first_broken is None
    assert {name: scope.unsigned for name, scope in check.scopes.items()} == {
        scope: sum(len(made.chains[chain]) - made.signed_length(chain) for chain in chains)
        for scope, chains in (("sandbox", [ACME, GLOBEX]), ("service", ["platform"]))
    }


@given(any_books)
def test_export_check_of_a_scope_that_nobody_signed_does_not_hold(made: Logbook) -> None:
    """Guarantee: a log without a checkpoint, which anyone could have written, does not pass as complete."""
    unsigned = any(made.heads(scope) and not made.checkpoints[scope] for scope in SCOPES)
    assert (checked(made).first_broken is not None) == unsigned


# --- tampering -------------------------------------------------------------------------------------------------


def draw_signed(data: st.DataObject, made: Logbook) -> tuple[str, int]:
    """A chain and the index of an entry of it that a checkpoint signs."""
    chain = data.draw(st.sampled_from(CHAINS))
    return chain, data.draw(st.integers(0, made.signed_length(chain) - 1))


@given(books, st.data(), st.booleans())
def test_export_check_edit_of_any_byte_of_a_signed_entry_is_found(made: Logbook, data: Any, rechained: bool) -> None:
    """Guarantee: a change of any byte is found, even when all later entries are rehashed."""
    chain, index = draw_signed(data, made)
    entry = made.chains[chain][index]
    at = data.draw(st.integers(0, len(entry.body) - 1))
    flipped = bytes([entry.body[at] ^ data.draw(st.integers(1, 255))])
    made.chains[chain][index] = replace(entry, body=entry.body[:at] + flipped + entry.body[at + 1 :])
    if rechained:
        made.rechain(chain)
    else:
        assert found(made) == Break(chain, index + 1, "its bytes do not match its hash")
    found(made)


@given(books, st.data(), st.booleans())
def test_export_check_two_entries_swapped_are_found(made: Logbook, data: Any, rechained: bool) -> None:
    chain, index = draw_signed(data, made)
    entries = made.chains[chain]
    other = data.draw(st.integers(0, len(entries) - 1).filter(lambda other: other != index))
    entries[index], entries[other] = entries[other], entries[index]
    if rechained:
        made.rechain(chain)
    found(made)


@given(books, st.data(), st.booleans())
def test_export_check_entry_deleted_is_found(made: Logbook, data: Any, rechained: bool) -> None:
    chain, index = draw_signed(data, made)
    del made.chains[chain][index]
    if rechained:
        made.rechain(chain)
    found(made)


@given(books, st.data())
def test_export_check_tail_cut_off_with_its_head_moved_back_is_found(made: Logbook, data: Any) -> None:
    """Guarantee: a truncated chain with a matching head is found by its checkpoint."""
    chain, index = draw_signed(data, made)
    del made.chains[chain][index:]
    broken = found(made)
    assert broken.chain.startswith("checkpoints:")
    assert "is missing" in broken.why


@given(books, st.data())
def test_export_check_checkpoint_dropped_from_the_middle_is_found(made: Logbook, data: Any) -> None:
    index = data.draw(st.integers(0, len(made.checkpoints["sandbox"]) - 2))
    del made.checkpoints["sandbox"][index]
    assert found(made) == Break(
        "checkpoints:sandbox", index + 2, f"checkpoint {index + 1} is missing; {index + 2} follows"
    )


@given(books, st.data())
def test_export_check_log_rewritten_and_signed_with_another_key_is_found(made: Logbook, data: Any) -> None:
    """Guarantee: a log that is rewritten and signed with another key, checkpoints included, is found."""
    chain, index = draw_signed(data, made)
    scope = "service" if chain == "platform" else "sandbox"
    forged = Logbook(made.chains, {**made.checkpoints, scope: []})
    forged.chains[chain] = forged.chains[chain][:index]
    forged.write(chain, "forged")
    for _ in made.checkpoints[scope]:
        forged.sign(scope, OTHER_KEY)
    assert found(forged).why == "its signature is not the signer's"


@given(books, st.data())
def test_export_check_log_set_back_with_its_checkpoints_is_found_only_with_kept_ones(made: Logbook, data: Any) -> None:
    """Guarantee: a restored old database, intact in itself, is found by the auditor's own copy of the checkpoints."""
    scope = data.draw(st.sampled_from(SCOPES))
    made.sign(scope)
    made.sign(scope)
    kept = kept_of(made)
    count = data.draw(st.integers(1, len(made.checkpoints[scope]) - 1))
    made.checkpoints[scope] = made.checkpoints[scope][:count]
    for chain in made.chains:
        if scope_of(chain) == scope:
            made.chains[chain] = made.chains[chain][: made.signed_length(chain)]
    assert checked(made).first_broken is None
    broken = found(made, kept)
    assert (broken.chain, broken.sequence) == (f"checkpoints:{scope}", count + 1)
    assert "rolled back" in broken.why


def test_export_check_log_written_on_after_it_was_set_back_is_found_with_kept_ones() -> None:
    """Guarantee: it is found even after the service has signed later entries."""
    made = signed_book([])
    kept = kept_of(made)
    del made.checkpoints["sandbox"][-1]
    del made.chains[ACME][3:]
    made.write(ACME, "another story")
    made.sign("sandbox")
    assert checked(made).first_broken is None
    broken = found(made, kept)
    why = "it differs from the one that was recorded outside the database: the log was rewritten"
    assert broken == Break("checkpoints:sandbox", 2, why)


def test_export_check_edit_after_the_newest_checkpoint_is_chained_and_no_more() -> None:
    """A documented limit: an entry that no checkpoint signs yet may be rewritten."""
    made = signed_book([])
    made.chains[ACME].pop()
    made.write(ACME, "another story")
    check = checked(made)
    assert (check.first_broken, check.scopes["sandbox"].unsigned) == (None, 1)


def _at(made: Logbook, number: int = 2) -> Checkpoint:
    return parse_checkpoint(made.checkpoints["sandbox"][number - 1].body)


def _put(made: Logbook, checkpoint: SignedCheckpoint) -> None:
    made.checkpoints["sandbox"][1] = checkpoint


def _swap_checkpoints(made: Logbook) -> None:
    first, second, *rest = made.checkpoints["sandbox"]
    made.checkpoints["sandbox"] = [second, first, *rest]


ODDITIES: dict[str, tuple[Callable[[Logbook], None], str]] = {
    "body altered": (
        lambda made: _put(made, replace(made.checkpoints["sandbox"][1], body=checkpoint_bytes(_at(made, 1)))),
        "its columns differ from its bytes",
    ),
    "signature of another": (
        lambda made: _put(
            made, replace(made.checkpoints["sandbox"][1], signature=made.checkpoints["sandbox"][0].signature)
        ),
        "its signature is not the signer's",
    ),
    "signature of a wrong length": (
        lambda made: _put(made, replace(made.checkpoints["sandbox"][1], signature=b"")),
        "its signature is not the signer's",
    ),
    "an unknown key version": (
        lambda made: _put(made, replace(made.checkpoints["sandbox"][1], key_version=7)),
        "there is no public key of vault:keyvault-anchor/audit (version 7) to check its signature with",
    ),
    "order": (_swap_checkpoints, "checkpoint 1 is missing; 2 follows"),
    "no link to the previous checkpoint": (
        lambda made: _put(made, signed(replace(_at(made), previous=bytes(32)))),
        "it does not contain the digest of the checkpoint before it",
    ),
    "a chain set back": (
        lambda made: _put(made, signed(replace(_at(made), heads={ACME: Head(1, made.chains[ACME][0].hash)}))),
        f"chain {ACME} was longer at an earlier checkpoint",
    ),
    "a head of another entry": (
        lambda made: _put(made, signed(replace(_at(made), heads={**_at(made).heads, ACME: Head(4, bytes(32))}))),
        f"entry 4 of chain {ACME} differs from the one that it signs",
    ),
}


@pytest.mark.parametrize("name", ODDITIES)
def test_export_check_odd_checkpoint_is_named_with_what_is_wrong(name: str) -> None:
    alter, why = ODDITIES[name]
    made = signed_book([])
    alter(made)
    assert found(made).why == why


def test_export_check_first_checkpoint_that_depends_on_another_is_named() -> None:
    made = signed_book([])
    made.checkpoints["sandbox"] = [signed(replace(_at(made, 1), previous=bytes([1] * 32)))]
    assert found(made).why == "it is the first but contains a previous digest"


def test_export_check_reports_a_checkpoint_that_signs_an_old_entry() -> None:
    """Until an entry is signed, a database writer can change it, so the check claims nothing about that time."""
    made = signed_book([])
    scope = checked(made).scopes["sandbox"]
    assert (scope.walk.late, scope.walk.first_late) == (0, None)
    made.write(ACME)
    number, newest = len(made.checkpoints["sandbox"]) + 1, made.checkpoints["sandbox"][-1]
    late = Checkpoint("sandbox", number, AT + 2 * UNSIGNED_FOR, newest.digest, made.heads("sandbox"))
    made.checkpoints["sandbox"].append(signed(late))
    check = checked(made)
    assert check.first_broken is None
    assert check.scopes["sandbox"].walk.late == 1
    assert f"checkpoint {number} " in str(check.scopes["sandbox"].walk.first_late)
    assert check.scopes["service"].walk.late == 0


def test_export_check_reports_a_chain_that_is_not_signed_any_more() -> None:
    """A service that was made to skip a chain leaves its new entries open to change, and the check says so."""
    made = signed_book([])
    made.write(GLOBEX)
    number, newest = len(made.checkpoints["sandbox"]) + 1, made.checkpoints["sandbox"][-1]
    heads = {ACME: made.heads("sandbox")[ACME]}
    for hours in (0, 2):
        at = AT + hours * UNSIGNED_FOR + timedelta(minutes=10)
        newest = signed(Checkpoint("sandbox", number, at, newest.digest, heads))
        made.checkpoints["sandbox"].append(newest)
        number += 1
    scope = checked(made).scopes["sandbox"]
    assert (scope.broken, scope.walk.late) == (None, 1)
    assert f"does not sign an entry of chain {GLOBEX}" in str(scope.walk.first_late)


def _find_nothing(chain: str, sequence: int) -> None:
    return None


def test_walk_body_that_is_no_checkpoint_is_named() -> None:
    """Guarantee: no bytes in the checkpoint table can abort the check."""
    walk = CheckpointWalk("sandbox", None)
    for body in (b"", b"\xff", b"[1]", b"{}", b"[" * 100_000, checkpoint_bytes(_at(signed_book([]))) + b" "):
        found = SignedCheckpoint("sandbox", 1, body, KEY.sign(body), "x", 1)
        assert walk.take(found, _find_nothing, _find_nothing) == "its bytes are not a checkpoint"


# --- the file --------------------------------------------------------------------------------------------------


@given(books, st.data())
def test_export_check_finds_every_altered_byte_that_changes_the_meaning(made: Logbook, data: Any) -> None:
    """Guarantee: an export that is altered in transit passes the check only with its original meaning."""
    whole = b"".join(made.lines())
    at = data.draw(st.integers(0, len(whole) - 1))
    altered = whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :]
    try:
        check = checked(made, kept_of(made), altered.splitlines(keepends=True))
        records = [parse_record(line) for line in altered.splitlines()]
    except ValueError:
        return
    if check.first_broken is None:
        assert [record for record in records if not isinstance(record, ExportStart)] == list(made.records())[1:]


@given(books, st.data())
def test_export_check_line_missing_is_found(made: Logbook, data: Any) -> None:
    lines = made.lines()
    del lines[data.draw(st.integers(0, len(lines) - 1))]
    try:
        assert checked(made, None, lines).first_broken is not None
    except ExportError:
        return


def test_export_check_lines_that_no_export_has_are_refused() -> None:
    made = signed_book([])
    lines = made.lines()
    for wrong in ([], lines[1:], lines[:-1], [*lines, lines[1]], [lines[0], *lines], [lines[0]]):
        with pytest.raises(ExportError):
            checked(made, None, wrong)


def test_export_check_of_no_scope_is_refused() -> None:
    """An export of nothing would hold."""
    with pytest.raises(ExportError, match="names no scope"):
        ExportCheck(PUBLIC_KEYS, {}).take(ExportStart(_at(signed_book([])).at, (), None))


def test_export_check_entry_of_a_scope_that_the_export_does_not_name_is_refused() -> None:
    made = signed_book([])
    check = ExportCheck(PUBLIC_KEYS, {})
    check.take(ExportStart(_at(made).at, ("production",), None))
    with pytest.raises(ExportError, match="no scope"):
        check.take(made.chains[ACME][0])


@given(books, st.data())
def test_export_check_from_a_checkpoint_on_holds_and_finds_what_comes_after(made: Logbook, data: Any) -> None:
    """An export that begins at a signed checkpoint is checked from there as strictly."""
    records = [record for record in made.records() if not _is_before_second(record, made)]
    check = ExportCheck(PUBLIC_KEYS, kept_of(made))
    check.take(ExportStart(_at(made).at, ("sandbox",), _at(made).at))
    for record in records:
        check.take(record)
    scope = check.scopes["sandbox"]
    scope.finish()
    assert scope.broken is None
    assert scope.begins_with == 2
    assert scope.unsigned == sum(len(made.chains[chain]) - made.signed_length(chain) for chain in (ACME, GLOBEX))
    assert check.count_uncompared() == len(made.checkpoints["service"])


def test_export_check_of_a_partial_export_needs_every_entry_signed_after_its_time() -> None:
    """Guarantee: a partial export omits no entry that was signed after the time that it names."""
    made = signed_book([])
    for since, number in ((AT, 1), (_at(made, 1).at, 2)):
        check = ExportCheck(PUBLIC_KEYS, {})
        check.take(ExportStart(AT, SCOPES, since))
        for record in made.records():
            if isinstance(record, SignedCheckpoint | ChainHead) and scope_of_record(record) == "sandbox":
                check.take(record)
        broken = check.scopes["sandbox"].broken
        assert broken is not None
        assert (broken.chain, broken.sequence) == ("checkpoints:sandbox", number)
        assert broken.why.endswith("which it signs, is missing")


def scope_of_record(record: SignedCheckpoint | ChainHead) -> str | None:
    return record.scope if isinstance(record, SignedCheckpoint) else scope_of(record.chain)


def test_export_check_of_a_partial_export_without_new_entries_holds() -> None:
    made = signed_book([])
    made.chains[ACME].pop()
    check = ExportCheck(PUBLIC_KEYS, {})
    check.take(ExportStart(AT, ("sandbox",), _at(made).at))
    for record in made.records():
        if isinstance(record, SignedCheckpoint | ChainHead) and scope_of_record(record) == "sandbox":
            check.take(record)
    check.scopes["sandbox"].finish()
    assert (check.first_broken, check.scopes["sandbox"].begins_with) == (None, 2)


def _is_before_second(record: Any, made: Logbook) -> bool:
    """Return whether the record is outside the sandbox, or an entry that its first two checkpoints sign."""
    match record:
        case ChainedEntry():
            heads = {**_at(made, 1).heads, **_at(made).heads}
            return record.chain == "platform" or record.sequence <= heads[record.chain].sequence
        case SignedCheckpoint():
            return record.scope != "sandbox"
    return getattr(record, "chain", "platform") == "platform"

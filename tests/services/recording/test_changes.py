"""The feed's writers: every act that alters a verdict is in it, and told to the host before the act has returned."""

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import transaction
from pytest_django import DjangoCaptureOnCommitCallbacks

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.domain.errors import StateConflictError
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Change, Key
from keyvault.models.recording import Subject
from keyvault.services.keys import lifecycle
from keyvault.services.merchants import merchants
from keyvault.services.recording import changes as feed
from keyvault.services.recording import transaction as recording
from keyvault.services.recording.changes import ChangeBatch
from keyvault.services.recording.host_generation import HostGeneration
from tests.factories import grant, issue, now
from tests.services.conftest import Scene, make_scene
from tests.services.recording.test_transaction import ACTS
from tests.services.rows import last_ids, written_since
from tests.services.tokens.test_customer_tokens import holder_of

pytestmark = pytest.mark.database


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostGeneration:
    """A word of the test's own, as another process of the host has it."""
    own = HostGeneration(tmp_path / "generation")
    monkeypatch.setattr(feed, "generation", lambda: own)
    return HostGeneration(tmp_path / "generation")


def unique(subjects: list[Subject]) -> list[Subject]:
    return list(dict.fromkeys(subjects))


# ------------------------------------------------------------------------------------------------------- every act


@pytest.mark.django_db
@pytest.mark.parametrize("name", [name for name, act in ACTS.items() if act.changes])
def test_services_act_tells_the_host_what_its_change_rows_say(
    scene: Scene,
    name: str,
    shared: HostGeneration,
    django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks,
) -> None:
    """Whatever is in the feed is announced on this host by the commit, and nothing is announced before."""
    act = ACTS[name].prepare(scene)
    before, seen = last_ids(), shared.words[0]
    with django_capture_on_commit_callbacks(execute=True):
        act()
        assert shared.words[0] == seen
    _, changes = written_since(before)
    assert changes
    told = shared.since(seen)[1]
    assert told is not None
    assert sorted(unique(told)) == sorted(unique(changes))


@pytest.mark.django_db
def test_services_act_that_is_rolled_back_tells_nobody(scene: Scene, shared: HostGeneration) -> None:
    """Inside somebody's transaction nothing is announced until that commits."""
    key, _ = issue(scene.sandbox)
    seen = shared.words[0]
    with transaction.atomic():
        lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), key)
        transaction.set_rollback(True)
    assert shared.words[0] == seen
    assert Key.objects.get().state == "active"


@pytest.fixture
def busy(transactional_db: None) -> Scene:
    return make_scene()


def _revoke(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    allowed = grant(scene.admin, P.KEYS_REVOKE, scene.sandbox)
    return lambda: lifecycle.revoke_key(allowed, key, RevocationReason.SUPERSEDED)


def _suspend_merchant(scene: Scene) -> Callable[[], object]:
    allowed = grant(HOST, P.MERCHANTS_WRITE)
    return lambda: merchants.suspend_merchant(allowed, scene.merchant)


def _nested(scene: Scene) -> Callable[[], object]:
    """A service called by a service: the outermost transaction is what counts."""
    key, _ = issue(scene.sandbox)
    allowed = grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox)

    def act() -> None:
        with recording.recorded(allowed, P.KEYS_SUSPEND, "test.outer", account=scene.sandbox):
            lifecycle.suspend_key(allowed, key)

    return act


@pytest.mark.parametrize("prepare", [_revoke, _suspend_merchant, _nested])
def test_services_act_has_told_the_host_when_it_returns(
    busy: Scene, shared: HostGeneration, prepare: Callable[[Scene], Callable[[], object]]
) -> None:
    """On one host nobody can say yes after the revocation returned: the word was raised before, after the commit."""
    act = prepare(busy)
    before, seen = last_ids(), shared.words[0]
    act()
    word = shared.words[0]
    assert word != seen
    _, changes = written_since(before)
    assert shared.since(seen) == (word, unique(changes))


ENDS = [
    "keys.lifecycle.revoke_key",
    "keys.lifecycle.report_compromise",
    "keys.lifecycle.revoke_own_key",
    "tokens.customer_tokens.revoke_customer_token",
    "tokens.service_tokens.revoke_service_token",
]


@pytest.mark.parametrize("name", ENDS)
def test_services_end_is_told_to_the_host_again_by_whoever_asks_for_it_again(
    busy: Scene, shared: HostGeneration, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who made it may have died between commit and word: whoever has an answer then has it after the word."""
    act = ACTS[name].prepare(busy)
    before, seen = last_ids(), shared.words[0]
    with monkeypatch.context() as killed:
        killed.setattr(feed, "notify_host", lambda subjects: None)
        act()
    _, changes = written_since(before)
    assert (len(changes), shared.words[0]) == (1, seen)
    with suppress(StateConflictError):
        act()
    assert shared.since(seen) == (shared.words[0], changes)


def test_services_end_of_a_key_that_somebody_else_has_just_ended_is_told_and_one_of_long_ago_is_not(
    busy: Scene, shared: HostGeneration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever repeats it for ever keeps no verifier busy."""
    issued, _ = issue(busy.sandbox)
    seen_before = Key.objects.get(pk=issued.pk)
    with monkeypatch.context() as killed:
        killed.setattr(feed, "notify_host", lambda subjects: None)
        lifecycle.report_compromise(grant(busy.responder, P.KEYS_REPORT_COMPROMISE, busy.sandbox), issued)
    for later, told in ((timedelta(0), [issued.alters()]), (timedelta(minutes=2), [])):
        seen = shared.words[0]
        allowed = grant(holder_of(issued), P.KEYS_REVOKE_SELF, busy.sandbox, at=now() + later)
        lifecycle.revoke_own_key(allowed, seen_before)
        assert shared.since(seen) == (shared.words[0], told)


def test_services_act_on_a_host_whose_word_cannot_be_written_is_done_and_logged(
    busy: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk stops no revocation; the feed has it."""
    act = _revoke(busy)

    def fail() -> HostGeneration:
        raise OSError("no space left on device")

    monkeypatch.setattr(feed, "generation", fail)
    before = last_ids()
    act()
    assert Key.objects.get().state == "deactivated"
    assert len(written_since(before)[1]) == 1
    (told,) = [record for record in caplog.records if record.name == feed.__name__]
    assert told.levelno == logging.CRITICAL


def test_services_act_that_is_refused_tells_nobody(busy: Scene, shared: HostGeneration) -> None:
    """A refusal costs the verifiers nothing."""
    key, _ = issue(busy.sandbox)
    allowed = grant(busy.admin, P.KEYS_SUSPEND, busy.sandbox)
    stale = Key.objects.get(pk=key.pk)
    lifecycle.suspend_key(allowed, key)
    seen = shared.words[0]
    with pytest.raises(StateConflictError):
        lifecycle.suspend_key(allowed, stale)
    assert shared.words[0] == seen


# -------------------------------------------------------------------------------------------------------- the rows


@pytest.mark.django_db
def test_feed_returns_the_last_of_its_sequences() -> None:
    with transaction.atomic():
        last = feed.announce_changes({("key", "a"): True, ("limit", "b"): False}, now())
    assert list(Change.objects.values_list("subject_kind", "subject_id").order_by("sequence")) == [
        ("key", "a"),
        ("limit", "b"),
    ]
    assert last == Change.objects.latest("sequence").sequence


@pytest.mark.django_db
def test_feed_of_nothing_is_nothing(shared: HostGeneration) -> None:
    with transaction.atomic():
        assert feed.announce_changes({}, now()) is None
    assert not Change.objects.exists()


@pytest.mark.django_db
def test_feed_is_read_above_a_sequence() -> None:
    with transaction.atomic():
        first = feed.announce_changes({("key", "a"): True}, now())
        second = feed.announce_changes({("key", "b"): True}, now())
    assert first is not None
    look = feed.poll_feed(first)
    assert [(row.sequence, row.subject) for row in look.rows] == [(second, ("key", "b"))]
    assert look.drawn == second


@pytest.mark.django_db
def test_feed_is_read_to_the_letter_and_in_its_order() -> None:
    """Whatever a subject is called: one that is not recognised is one that is not forgotten."""
    subjects = [("key", name) for name in ("", '"', "\\", "[1,2]", "null", "a\nb\t", "O'Neill; --", "%s é 収納 🛒")]
    with transaction.atomic():
        last = feed.announce_changes(dict.fromkeys(subjects, True), now())
    assert last is not None
    look = feed.poll_feed(last - len(subjects))
    assert [row.subject for row in look.rows] == subjects
    assert [row.sequence for row in look.rows] == list(Change.objects.values_list("pk", flat=True).order_by("pk"))
    assert feed.poll_feed(last) == ChangeBatch(last, look.holders, [])


@pytest.mark.django_db
def test_feed_tells_times_apart_to_the_microsecond() -> None:
    """A restored database may draw the same sequence for the same subject a moment later."""
    at = now().replace(microsecond=0)
    for _ in range(2):
        for microseconds in (0, 1, 500_000, 999_999):
            Change.objects.create(subject_kind="key", subject_id="a", at=at + timedelta(microseconds=microseconds))
    first, again = (rows := [row.at for row in feed.poll_feed(0).rows])[:4], rows[4:]
    assert len(set(first)) == 4
    assert first == again


def test_feed_nothing_that_can_fail_comes_before_the_announcement() -> None:
    """Of the callbacks after a commit the first that fails is the last that runs. The revocation log's comes after
    the feed's and its failure is swallowed; whoever adds another one has to see to that too.
    """
    root = Path(feed.__file__).parents[3]
    callers = {
        str(path.relative_to(root)): re.findall(r"on_commit\(.*", path.read_text())
        for folder in ("keyvault", "rotation")
        for path in (root / folder).rglob("*.py")
        if "on_commit(" in path.read_text()
    }
    assert set(callers) <= {"keyvault/services/recording/changes.py", "keyvault/services/recording/revocation_log.py"}
    assert all("robust=True" in call for call in callers.get("keyvault/services/recording/revocation_log.py", []))

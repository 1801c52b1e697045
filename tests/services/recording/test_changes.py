"""Change feed: every service that alters a verdict writes to it and notifies the host before it returns."""

import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from pathlib import Path

import pytest
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext
from pytest_django import DjangoCaptureOnCommitCallbacks

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.domain.errors import StateConflictError
from keyvault.domain.ids import Subject
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Change, Key
from keyvault.services.keys import lifecycle
from keyvault.services.merchants import merchants
from keyvault.services.recording import changes as feed
from keyvault.services.recording import transaction as recording
from keyvault.services.recording.changes import ChangeBatch
from keyvault.services.recording.host_generation import HostGeneration
from keyvault.services.tokens.customer_tokens import revoke_customer_token
from tests.factories import grant, issue, now
from tests.services.conftest import Scene, make_scene
from tests.services.racing import TIMEOUT_SECONDS, start
from tests.services.recording.test_transaction import ACTIONS
from tests.services.rows import last_ids, written_since
from tests.services.tokens.test_customer_tokens import holder_of, token_of

pytestmark = pytest.mark.database


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostGeneration:
    """The host generation as another process maps it, on a file of the test's own."""
    own = HostGeneration(tmp_path / "generation")
    monkeypatch.setattr(feed, "generation", lambda: own)
    return HostGeneration(tmp_path / "generation")


def unique(subjects: list[Subject]) -> list[Subject]:
    return list(dict.fromkeys(subjects))


# ------------------------------------------------------------------------------------------------------- every action


@pytest.mark.postgres_once
@pytest.mark.django_db
@pytest.mark.parametrize("name", [name for name, action in ACTIONS.items() if action.changes])
def test_service_notifies_the_host_of_its_change_rows(
    scene: Scene,
    name: str,
    shared: HostGeneration,
    django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks,
) -> None:
    """The commit announces on this host what the feed contains; nothing is announced before."""
    action = ACTIONS[name].prepare(scene)
    before, seen = last_ids(), shared.memory[0]
    with django_capture_on_commit_callbacks(execute=True):
        action()
        assert shared.memory[0] == seen
    _, changes = written_since(before)
    assert changes
    announced = shared.since(seen)[1]
    assert announced is not None
    assert sorted(unique(announced)) == sorted(unique(changes))


@pytest.mark.django_db
def test_service_that_is_rolled_back_notifies_nobody(scene: Scene, shared: HostGeneration) -> None:
    """Inside a caller's transaction nothing is announced until that commits."""
    key, _ = issue(scene.sandbox)
    seen = shared.memory[0]
    with transaction.atomic():
        lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), key)
        transaction.set_rollback(True)
    assert shared.memory[0] == seen
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
    """A service called inside another recorded block; the outermost transaction counts."""
    key, _ = issue(scene.sandbox)
    allowed = grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox)

    def action() -> None:
        with recording.recorded(allowed, P.KEYS_SUSPEND, "test.outer", account=scene.sandbox):
            lifecycle.suspend_key(allowed, key)

    return action


@pytest.mark.parametrize("prepare", [_revoke, _suspend_merchant, _nested])
def test_service_has_notified_the_host_when_it_returns(
    busy: Scene, shared: HostGeneration, prepare: Callable[[Scene], Callable[[], object]]
) -> None:
    """After a revocation returned, no process of the host allows the key: the generation was raised before."""
    action = prepare(busy)
    before, seen = last_ids(), shared.memory[0]
    action()
    generation = shared.memory[0]
    assert generation != seen
    _, changes = written_since(before)
    assert shared.since(seen) == (generation, unique(changes))


REVOCATIONS = [
    "keys.lifecycle.revoke_key",
    "keys.lifecycle.report_compromise",
    "keys.lifecycle.revoke_own_key",
    "tokens.customer_tokens.revoke_customer_token",
    "tokens.service_tokens.revoke_service_token",
]


@pytest.mark.postgres_once
@pytest.mark.parametrize("name", REVOCATIONS)
def test_service_revocation_repeated_notifies_the_host_again(
    busy: Scene, shared: HostGeneration, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process may have been killed between commit and notification."""
    action = ACTIONS[name].prepare(busy)
    before, seen = last_ids(), shared.memory[0]
    with monkeypatch.context() as killed:
        killed.setattr(feed, "notify_host", lambda subjects: None)
        action()
    _, changes = written_since(before)
    assert (len(changes), shared.memory[0]) == (1, seen)
    with suppress(StateConflictError):
        action()
    assert shared.since(seen) == (shared.memory[0], changes)


def test_service_revocation_repeated_notifies_only_shortly_after_the_first(
    busy: Scene, shared: HostGeneration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeating an old revocation causes no work for the verifiers."""
    issued, _ = issue(busy.sandbox)
    seen_before = Key.objects.get(pk=issued.pk)
    with monkeypatch.context() as killed:
        killed.setattr(feed, "notify_host", lambda subjects: None)
        lifecycle.report_compromise(grant(busy.responder, P.KEYS_REPORT_COMPROMISE, busy.sandbox), issued)
    for later, announced in ((timedelta(0), [issued.alters()]), (timedelta(minutes=2), [])):
        seen = shared.memory[0]
        allowed = grant(holder_of(issued), P.KEYS_REVOKE_SELF, busy.sandbox, at=now() + later)
        lifecycle.revoke_own_key(allowed, seen_before)
        assert shared.since(seen) == (shared.memory[0], announced)


def test_service_revocation_of_a_customer_token_repeated_notifies_only_shortly_after_the_first(
    busy: Scene, shared: HostGeneration
) -> None:
    key, _ = issue(busy.sandbox)
    token, _ = token_of(key)
    for later, announced in ((0, [token.alters()]), (0, [token.alters()]), (2, [])):
        seen = shared.memory[0]
        allowed = grant(holder_of(key), P.CUSTOMER_TOKENS_WRITE, busy.sandbox, at=now() + timedelta(minutes=later))
        revoke_customer_token(allowed, busy.sandbox, token.token_id)
        assert shared.since(seen) == (shared.memory[0], announced)


def test_service_on_a_host_without_a_writable_generation_succeeds_and_logs(
    busy: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk blocks no revocation, because the feed contains it."""
    action = _revoke(busy)

    def fail() -> HostGeneration:
        raise OSError("no space left on device")

    monkeypatch.setattr(feed, "generation", fail)
    before = last_ids()
    action()
    assert Key.objects.get().state == "deactivated"
    assert len(written_since(before)[1]) == 1
    (announced,) = [record for record in caplog.records if record.name == feed.__name__]
    assert announced.levelno == logging.CRITICAL


def test_service_that_is_refused_notifies_nobody(busy: Scene, shared: HostGeneration) -> None:
    key, _ = issue(busy.sandbox)
    allowed = grant(busy.admin, P.KEYS_SUSPEND, busy.sandbox)
    stale = Key.objects.get(pk=key.pk)
    lifecycle.suspend_key(allowed, key)
    seen = shared.memory[0]
    with pytest.raises(StateConflictError):
        lifecycle.suspend_key(allowed, stale)
    assert shared.memory[0] == seen


# -------------------------------------------------------------------------------------------------------- the rows


@pytest.mark.django_db
def test_feed_returns_the_last_drawn_sequence() -> None:
    with transaction.atomic():
        last = feed.announce_changes({("key", "a"): True, ("limit", "b"): False}, now())
    assert list(Change.objects.values_list("subject_kind", "subject_id").order_by("sequence")) == [
        ("key", "a"),
        ("limit", "b"),
    ]
    assert last == Change.objects.latest("sequence").sequence


@pytest.mark.django_db
def test_feed_without_changes_writes_nothing(shared: HostGeneration) -> None:
    with transaction.atomic():
        assert feed.announce_changes({}, now()) is None
    assert not Change.objects.exists()


@pytest.mark.django_db
def test_feed_poll_returns_rows_above_a_sequence() -> None:
    with transaction.atomic():
        first = feed.announce_changes({("key", "a"): True}, now())
        second = feed.announce_changes({("key", "b"): True}, now())
    assert first is not None
    batch = feed.poll_feed(first)
    assert [(row.sequence, row.subject) for row in batch.rows] == [(second, ("key", "b"))]
    assert batch.drawn == second


@pytest.mark.django_db
def test_feed_poll_returns_subjects_exactly_and_in_order() -> None:
    """An altered subject would not be recognized, and its cached verdict would stay."""
    subjects = [("key", name) for name in ("", '"', "\\", "[1,2]", "null", "a\nb\t", "O'Neill; --", "%s é 収納 🛒")]
    with transaction.atomic():
        last = feed.announce_changes(dict.fromkeys(subjects, True), now())
    assert last is not None
    batch = feed.poll_feed(last - len(subjects))
    assert [row.subject for row in batch.rows] == subjects
    assert [row.sequence for row in batch.rows] == list(Change.objects.values_list("pk", flat=True).order_by("pk"))
    assert feed.poll_feed(last) == ChangeBatch(last, batch.holders, [])


@pytest.mark.django_db
def test_feed_poll_distinguishes_times_to_the_microsecond() -> None:
    """A restored database may draw the same sequence for the same subject a moment later."""
    at = now().replace(microsecond=0)
    for _ in range(2):
        for microseconds in (0, 1, 500_000, 999_999):
            Change.objects.create(subject_kind="key", subject_id="a", at=at + timedelta(microseconds=microseconds))
    first, again = (rows := [row.at for row in feed.poll_feed(0).rows])[:4], rows[4:]
    assert len(set(first)) == 4
    assert first == again


def test_feed_announcement_is_the_first_commit_callback_that_can_fail() -> None:
    """Django runs no commit callback after the first that raises, so every other one is registered as robust."""
    root = Path(feed.__file__).parents[3]
    callers = {
        str(path.relative_to(root)): re.findall(r"transaction\.(on_commit\(.*)", path.read_text())
        for folder in ("keyvault", "rotation")
        for path in (root / folder).rglob("*.py")
        if "transaction.on_commit(" in path.read_text()
    }
    first, *others = callers.pop("keyvault/services/recording/changes.py")
    assert first == "on_commit(partial(notify_host, tuple(subjects)))"
    assert [call for call in (*others, *chain.from_iterable(callers.values())) if "robust=True" not in call] == []


# ------------------------------------------------------------------------------------------------------ other hosts


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The statements that wake other hosts, and a process that has sent none."""
    sent: list[bytes] = []
    monkeypatch.setattr(feed, "execute", sent.append)
    monkeypatch.setattr(feed, "_notice_sender", feed._NoticeSender())
    return sent


@pytest.mark.postgres
@pytest.mark.django_db
def test_change_wakes_other_hosts_after_its_commit(
    scene: Scene, notices: list[bytes], django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks
) -> None:
    """PostgreSQL commits transactions that notify one after the other, so a change does not notify in its own."""
    key, _ = issue(scene.sandbox)
    with django_capture_on_commit_callbacks(execute=True), CaptureQueriesContext(connection) as queries:
        lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), key)
        assert not [query["sql"] for query in queries if "notify" in query["sql"].lower()]
        assert notices == []
    assert len(notices) == 1


def test_wake_ups_within_some_milliseconds_are_merged(notices: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is sent immediately; one of the next waits, and covers all commits before it is sent."""
    is_waiting, may_send = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        is_waiting.set()
        assert may_send.wait(TIMEOUT_SECONDS)

    monkeypatch.setattr(feed, "_MERGE_SECONDS", 1e6)
    monkeypatch.setattr(time, "sleep", sleep)
    wake_up = feed._NoticeSender()
    wake_up.send()
    assert len(notices) == 1
    second = start(wake_up.send)
    assert is_waiting.wait(TIMEOUT_SECONDS)
    wake_up.send()
    wake_up.send()
    assert len(notices) == 1
    may_send.set()
    second.result(TIMEOUT_SECONDS)
    assert len(notices) == 2
    wake_up.send()
    assert len(notices) == 3, "a commit after the second notice needs another"


def test_wake_up_that_fails_harms_no_change(
    notices: list[bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The change is committed; other hosts find it at their next poll."""

    def fail(_: bytes) -> None:
        raise OperationalError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(feed, "execute", fail)
        patch.setattr(feed, "_MERGE_SECONDS", 0)
        feed._notice_sender.send()
        assert "could not wake other hosts" in caplog.text
    feed._notice_sender.send()
    assert len(notices) == 1

"""The journal of revocations: every end that was answered with a yes is in it, whatever happens to the database."""

import errno
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.revocation import RevocationReason
from keyvault.domain.revocation_log import CaughtUp, Committed, Dropped, Ended, Opened
from keyvault.models import AuditEntry, Change, Key, Notice, Verifier
from keyvault.models.recording import RecordedModel
from keyvault.services import offboarding
from keyvault.services.keys import lifecycle
from keyvault.services.merchants import merchants
from keyvault.services.recording import revocation_log
from keyvault.services.recording.revocation_log import ENDING, append_lines, read_journal
from keyvault.services.revocations import log_backfill, replay
from keyvault.services.revocations.log_backfill import LogBackfill
from keyvault.services.revocations.log_opening import open_journal
from keyvault.services.revocations.replay import read_counter
from keyvault.services.startup.startup_checks import require_current
from keyvault.services.tokens import service_tokens
from keyvault.services.tokens.customer_tokens import revoke_customer_token
from tests.factories import grant, have_peppers, issue, make_token, now, renew_journal
from tests.services.conftest import Scene, make_scene
from tests.services.tokens.test_customer_tokens import holder_of, token_of

pytestmark = [pytest.mark.database, pytest.mark.django_db(transaction=True)]

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def path(tmp_path: Path, settings: Any) -> Path:
    settings.JOURNAL = tmp_path / "own" / "revocations.journal"
    settings.JOURNAL.parent.mkdir()
    renew_journal(settings.JOURNAL)
    return Path(settings.JOURNAL)


@pytest.fixture
def scene() -> Scene:
    return make_scene()


def lines() -> list[Any]:
    """Behind the first one, which names the installation."""
    return [line for _, line in read_journal() if not isinstance(line, Opened)]


def ended() -> list[tuple[str, str, str, str]]:
    return [(line.kind, line.id, line.state, line.reason) for line in lines() if isinstance(line, Ended)]


def revoke(scene: Scene, reason: RevocationReason = RevocationReason.SUPERSEDED) -> Key:
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, reason)
    return key


def fail_to_revoke(scene: Scene) -> Key:
    """It is in the journal, and its commit fails: the caller gets an error, and the key stays active."""
    key, _ = issue(scene.sandbox)

    def lose() -> None:
        with transaction.atomic():
            lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
            raise RuntimeError("the connection is lost at the commit")

    with pytest.raises(RuntimeError, match="lost"):
        lose()
    assert Key.objects.get(pk=key.pk).state == "active"
    return key


def reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (revocation_log, log_backfill, replay):
        monkeypatch.setattr(module, "boot_id", lambda: "another")


def settle() -> None:
    """A verifier has confirmed everything: what PostgreSQL's healing waits for."""
    values = {"door": "test", "started_at": now(), "seen_at": now(), "staleness_ms": 2000}
    Verifier.objects.update_or_create(pk="v", defaults={**values, "confirmed_sequence": read_counter()})


# --- what is written --------------------------------------------------------------------------------------


def test_journal_knows_every_model_that_can_end() -> None:
    """A new kind of row that ends for ever is in the journal, or this test fails."""
    recorded_models = {model for model in apps.get_models() if issubclass(model, RecordedModel)}
    ending = {model for model in recorded_models if model.has_ended is not RecordedModel.has_ended}
    assert ending == set(ENDING.values())
    for kind, model in ENDING.items():
        assert model(**{str(model._meta.pk.attname): "x"}).alters() == (kind, "x")


def test_revocation_is_noted_with_its_reason_and_then_as_committed(scene: Scene) -> None:
    key = revoke(scene)
    assert ended() == [("key", key.key_id, "deactivated", "superseded")]
    end, mark = lines()
    assert mark == Committed(end.unit)
    change = Change.objects.get(subject_kind="key", subject_id=key.key_id, sequence=end.sequence)
    assert change.at == end.at


def test_every_end_is_noted(scene: Scene) -> None:
    compromised = revoke(scene, RevocationReason.KEY_COMPROMISE)
    token, _ = make_token()
    service_tokens.revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), token)
    key, _ = issue(scene.sandbox)
    customer, _ = token_of(key)
    offboarding.offboard_merchant(grant(scene.admin, P.MERCHANTS_OFFBOARD), scene.merchant, "gone")
    assert ended() == [
        ("key", compromised.key_id, "compromised", "key_compromise"),
        ("service_token", token.token_id, "", ""),
        ("merchant", "acme", "", ""),
        ("key", key.key_id, "deactivated", "cessation_of_operation"),
        ("customer_token", customer.token_id, "", ""),
    ]


def test_change_that_ends_nothing_does_not_touch_the_disk(scene: Scene, path: Path) -> None:
    key, _ = issue(scene.sandbox)
    lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), key)
    merchants.suspend_merchant(grant(scene.admin, P.MERCHANTS_WRITE), scene.merchant)
    assert lines() == []


def test_end_is_on_the_disk_before_its_transaction_commits(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synced, and then committed: one that commits and is answered is in the journal, even if the power goes."""
    key, _ = issue(scene.sandbox)
    synced: list[bool] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        real(descriptor)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            synced.append(connection.in_atomic_block)

    monkeypatch.setattr(os, "fsync", note)
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
    assert synced == [True], "one sync, inside the transaction"


def test_revocation_that_is_rolled_back_has_no_note_of_a_commit(scene: Scene) -> None:
    fail_to_revoke(scene)
    assert [type(line) for line in lines()] == [Ended]


def test_customer_token_is_noted_with_its_expiry(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    token, _ = token_of(key)
    revoke_customer_token(grant(holder_of(key), P.CUSTOMER_TOKENS_WRITE, scene.sandbox), scene.sandbox, token.token_id)
    assert [(line.id, line.expires_at) for line in lines() if isinstance(line, Ended)] == [
        (token.token_id, token.expires_at)
    ]


def test_journal_is_private(path: Path) -> None:
    """What ended is nobody's business on the host but ours."""
    have_peppers()
    shutil.rmtree(path.parent)
    previous = os.umask(0)
    try:
        assert open_journal(now())
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def _append_many(name: str, count: int) -> None:
    for number in range(count):
        append_lines([Ended(number, now(), "key", f"{name}{number}"), Committed(name * 500)], is_synced=False)


def test_journal_of_many_processes_loses_and_tears_nothing() -> None:
    """All processes of a host append at once, each its lines in one piece."""
    spawned = multiprocessing.get_context("fork")
    writers = [spawned.Process(target=_append_many, args=(name, 100)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    found = lines()
    assert None not in found
    for name in "abcd":
        mine = [line.id for line in found if isinstance(line, Ended) and line.id.startswith(name)]
        assert mine == [f"{name}{number}" for number in range(100)]
    assert all(isinstance(line, Ended if number % 2 == 0 else Committed) for number, line in enumerate(found))


# --- what breaks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cut", "left"), [(1, [CaughtUp(2)]), (2, []), (30, [])])
def test_torn_line_is_passed_over_and_does_not_spoil_the_next_one(path: Path, cut: int, left: list[CaughtUp]) -> None:
    """A power cut in the middle of a write costs the line that nobody was answered for, and no other."""
    append_lines([CaughtUp(1), CaughtUp(2)])
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    assert lines() == [CaughtUp(1)]
    append_lines([CaughtUp(3)])
    assert lines() == [CaughtUp(1), *left, CaughtUp(3)]


def test_torn_line_longer_than_a_block_is_taken_away(path: Path) -> None:
    append_lines([CaughtUp(1)])
    with path.open("ab") as file:
        file.write(b"x" * 10_000)
    append_lines([CaughtUp(2)])
    assert lines() == [CaughtUp(1), CaughtUp(2)]


def test_damaged_line_is_told_from_a_torn_one(path: Path) -> None:
    append_lines([CaughtUp(1), CaughtUp(2), CaughtUp(3)])
    path.write_bytes(path.read_bytes().replace(b'"sequence":2', b'"sequence":9', 1))
    assert lines() == [CaughtUp(1), None, CaughtUp(3)]


def test_disk_that_takes_a_part_only_is_left_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_lines([CaughtUp(1)])
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, text: real(descriptor, text[:7]))
    with pytest.raises(OSError, match="No space"):
        append_lines([CaughtUp(2)])
    monkeypatch.undo()
    assert lines() == [CaughtUp(1)]


def _refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_journal_that_cannot_be_written_stops_no_revocation_and_is_an_alarm(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk must not keep a leaked key alive. Operators are told, once until they have seen it."""
    monkeypatch.setattr(revocation_log, "append_lines", _refuse)
    first, second = revoke(scene), revoke(scene)
    assert {Key.objects.get(pk=key.pk).state for key in (first, second)} == {"deactivated"}
    notice = Notice.objects.get(kind=NoticeKind.JOURNAL_FAILED)
    assert (notice.is_alarm, notice.deliveries.count()) == (True, 0)
    assert notice.payload == {"why": "No space left on device"}
    assert "the revocation log cannot be written" in caplog.text


def test_note_of_a_commit_that_cannot_be_written_fails_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real: Callable[..., None] = revocation_log.append_lines

    def refuse_notes(written: list[Any], **options: Any) -> None:
        _refuse() if isinstance(written[0], Committed) else real(written, **options)

    monkeypatch.setattr(revocation_log, "append_lines", refuse_notes)
    key = revoke(scene)
    assert Key.objects.get(pk=key.pk).state == "deactivated"
    assert "the revocation log cannot be written" in caplog.text


# --- what heals -------------------------------------------------------------------------------------------


def test_healing_appends_what_the_journal_lacks_and_then_nothing(
    scene: Scene, path: Path, django_assert_max_num_queries: Any
) -> None:
    """What another host revoked comes into this one's journal too."""
    here = revoke(scene)
    path.rename(path.with_name("kept"))
    renew_journal(path)
    there = revoke(scene, RevocationReason.KEY_COMPROMISE)
    token, _ = make_token()
    service_tokens.revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), token)
    path.unlink()
    path.with_name("kept").rename(path)
    settle()
    backfill = LogBackfill()
    assert backfill.run(now()) == 2
    assert set(ended()) == {
        ("key", here.key_id, "deactivated", "superseded"),
        ("key", there.key_id, "compromised", "key_compromise"),
        ("service_token", token.token_id, "", ""),
    }
    size = path.stat().st_size
    with django_assert_max_num_queries(2):
        assert backfill.run(now()) == 0
    assert LogBackfill().run(now()) == 0, "another process finds how far it is in the journal"
    assert path.stat().st_size == size


def test_healing_in_a_new_process_reads_from_the_last_note_on(scene: Scene, path: Path) -> None:
    """A long journal costs a worker nothing; a damaged line before the note is the start's to tell."""
    revoke(scene)
    settle()
    append_lines([CaughtUp(read_counter())])
    path.write_bytes(path.read_bytes().replace(b"superseded", b"superseeed", 1))
    key = revoke(scene)
    settle()
    backfill = LogBackfill()
    assert (backfill.run(now()), backfill.position) == (0, read_counter())
    assert ended() == [("key", key.key_id, "deactivated", "superseded")]


def test_healing_of_a_database_that_went_back_says_so_and_goes_on_from_there(
    scene: Scene, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append_lines([CaughtUp(read_counter() + 1000)])
    settle()
    backfill = LogBackfill()
    assert (backfill.run(now()), backfill.position) == (0, read_counter())
    assert "the database went back" in caplog.text
    caplog.clear()
    revoke(scene)
    settle()
    assert (backfill.run(now()), caplog.text) == (0, "")


def test_healing_repeats_an_end_whose_commit_nobody_noted(scene: Scene, path: Path) -> None:
    """Killed between the commit and its note: whoever asks again is told that it is revoked, so the journal has to."""
    key = revoke(scene)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    settle()
    assert LogBackfill().run(now()) == 1
    *_, healed = lines()
    assert (healed.id, healed.unit) == (key.key_id, "")


def test_healing_notes_that_a_revoked_key_was_compromised(scene: Scene, path: Path) -> None:
    key = revoke(scene)
    before = path.read_bytes()
    lifecycle.report_compromise(grant(scene.admin, P.KEYS_REPORT_COMPROMISE, scene.sandbox), key)
    path.write_bytes(before)
    settle()
    backfill = LogBackfill()
    assert backfill.run(now()) == 1
    assert ended()[-1] == ("key", key.key_id, "compromised", "key_compromise")


def test_healing_sees_what_its_own_host_wrote_meanwhile(scene: Scene) -> None:
    backfill = LogBackfill()
    revoke(scene)
    settle()
    assert backfill.run(now()) == 0
    revoke(scene)
    settle()
    assert backfill.run(now()) == 0
    assert len(ended()) == 2


def test_healing_begins_again_with_a_journal_that_was_made_anew(scene: Scene, path: Path) -> None:
    key = revoke(scene)
    settle()
    backfill = LogBackfill()
    assert backfill.run(now()) == 0
    renew_journal(path)
    assert backfill.run(now()) == 1
    assert ended() == [("key", key.key_id, "deactivated", "superseded")]


def test_healing_goes_so_far_at_a_time(scene: Scene, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keyvault.services.revocations.log_backfill._BATCH", 2)
    revoked = {revoke(scene).key_id for _ in range(3)}
    renew_journal(path)
    settle()
    backfill, rounds = LogBackfill(), 0
    while backfill.position < read_counter():
        backfill.run(now())
        rounds += 1
    assert rounds > 2
    assert {name for _, name, _, _ in ended()} == revoked


def test_healing_that_cannot_write_is_an_alarm_and_goes_on_later(
    scene: Scene, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoke(scene)
    renew_journal(path)
    settle()
    backfill = LogBackfill()
    with monkeypatch.context() as full:
        full.setattr("keyvault.services.revocations.log_backfill.append_lines", _refuse)
        assert backfill.run(now()) == backfill.run(now()) == 0
    assert Notice.objects.filter(kind=NoticeKind.JOURNAL_FAILED, is_alarm=True).count() == 1
    assert AuditEntry.objects.filter(event="journal.failed").count() == 1
    assert backfill.run(now()) == 1


def test_healing_drops_an_end_whose_commit_failed_so_that_no_reboot_revokes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked got an error: the service starts after a reboot, and a replay ends no living key."""
    key = fail_to_revoke(scene)
    with monkeypatch.context() as early:
        reboot(early)
        with pytest.raises(ImproperlyConfigured, match="behind the revocation journal"):
            require_current()
    backfill = LogBackfill()
    assert backfill.run(now() + timedelta(seconds=50)) == 0
    assert [type(line) for line in lines()] == [Ended], "its commit may be on the way"
    assert backfill.run(now() + timedelta(seconds=61)) == backfill.run(now() + timedelta(seconds=99)) == 0
    end, mark = lines()
    assert mark == Dropped(end.unit)
    reboot(monkeypatch)
    require_current()
    assert replay.replay_revocations(grant(HOST, P.REVOCATIONS_REPLAY)).replayed == []
    assert Key.objects.get(pk=key.pk).state == "active"


def test_healing_marks_an_end_that_committed_without_its_note(scene: Scene, path: Path) -> None:
    """Killed between the commit and its note."""
    revoke(scene)
    end, mark = lines()
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    LogBackfill().run(now() + timedelta(seconds=61))
    assert lines() == [end, mark]


def test_healing_drops_a_failed_report_of_a_key_that_is_merely_revoked(scene: Scene, path: Path) -> None:
    """That the key has ended otherwise does not make the failed commit one that happened."""
    key = revoke(scene)
    renew_journal(path)
    kept = Ended(1, now(), "key", key.key_id, "compromised", "key_compromise", "u", revocation_log.boot_id())
    append_lines([kept])
    LogBackfill().run(now() + timedelta(seconds=61))
    assert lines()[:2] == [kept, Dropped("u")]


def test_healing_notes_no_look_above_an_end_that_waits(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process reads from the last look on, and has to find what is still to be settled."""
    monkeypatch.setattr(log_backfill, "_PROGRESS_INTERVAL", 1)
    fail_to_revoke(scene)
    settle()
    LogBackfill().run(now())
    assert [type(line) for line in lines()] == [Ended]
    issue(scene.sandbox)
    settle()
    LogBackfill().run(now() + timedelta(seconds=61))
    assert [type(line) for line in lines()] == [Ended, Dropped, CaughtUp]


@pytest.mark.postgres
def test_healing_drops_nothing_that_a_restored_database_has_not_drawn(scene: Scene) -> None:
    """The row lives in it, and was perhaps revoked in the one that is gone."""
    key, _ = issue(scene.sandbox)
    later = read_counter() + 1000
    append_lines([Ended(later, now(), "key", key.key_id, "deactivated", "superseded", "u", revocation_log.boot_id())])
    LogBackfill().run(now() + timedelta(seconds=61))
    assert [type(line) for line in lines()] == [Ended]


@pytest.mark.postgres
def test_healing_waits_for_what_may_still_appear_below(scene: Scene, path: Path) -> None:
    """On PostgreSQL a change may become visible after a higher one: nothing is passed over for good."""
    revoke(scene)
    renew_journal(path)
    backfill = LogBackfill()
    assert (backfill.run(now()), backfill.position) == (0, 0), "no verifier has confirmed anything"
    settle()
    assert backfill.run(now()) == 1


# --- what starts beside others ----------------------------------------------------------------------------


def test_start_beside_a_service_at_work_is_not_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others revoke while the journal is read is no sign of a database that is behind."""
    real = read_journal

    def read_late() -> Any:
        revoke(scene)
        return real()

    monkeypatch.setattr(replay, "read_journal", read_late)
    require_current()


# --- what is killed ---------------------------------------------------------------------------------------

REVOKER = """
import os, signal, sys
import django
django.setup()
from keyvault.access.permissions import Permission
from keyvault.access.principals import WORKER
from keyvault.domain.revocation import RevocationReason
from keyvault.services.keys import lifecycle
from keyvault.services.recording.authorization import authorize
from datetime import UTC, datetime
from pathlib import Path
from django.conf import settings

key_id, place, module, name = sys.argv[1:]
settings.JOURNAL = Path(place)
real = getattr(sys.modules[module], name)
def and_die(*args, **options):
    real(*args, **options)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(sys.modules[module], name, and_die)
key = lifecycle.get_key(key_id)
grant = authorize(WORKER, Permission.ISSUANCE_EXECUTE, key.credential.account, now=datetime.now(UTC))
lifecycle.revoke_key(grant, key, RevocationReason.SUPERSEDED)
"""


@pytest.mark.parametrize(
    ("module", "name", "state"),
    [
        ("keyvault.services.recording.transaction", "append_ended", "active"),
        ("keyvault.services.recording.revocation_log", "_note_committed", "deactivated"),
    ],
)
def test_revocation_killed_around_its_commit_lets_the_service_start(
    scene: Scene, path: Path, module: str, name: str, state: str
) -> None:
    """Killed before the commit, nothing is revoked and nobody was answered: start is not refused over it."""
    key, _ = issue(scene.sandbox)
    done = subprocess.run(
        [sys.executable, "-c", REVOKER, key.key_id, str(path), module, name], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == -9, done.stderr
    assert Key.objects.get(pk=key.pk).state == state
    assert [line.id for line in lines() if isinstance(line, Ended)] == [key.key_id]
    require_current()

"""The revocation log: it contains every acknowledged revocation, whatever happens to the database."""

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
from keyvault.domain.revocation_log import Anchored, CaughtUp, Committed, Dropped, Ended, Opened
from keyvault.models import AuditEntry, Change, Key, Notice, Verifier
from keyvault.models.recording import RecordedModel
from keyvault.services import offboarding
from keyvault.services.keys import lifecycle
from keyvault.services.merchants import merchants
from keyvault.services.recording import revocation_log
from keyvault.services.recording.revocation_log import ENDING, append_lines, find_anchored, read_lines
from keyvault.services.revocations import log_backfill, replay
from keyvault.services.revocations.log_backfill import LogBackfill
from keyvault.services.revocations.log_opening import open_revocation_log
from keyvault.services.revocations.replay import read_counter
from keyvault.services.startup.startup_checks import require_current
from keyvault.services.tokens import service_tokens
from keyvault.services.tokens.customer_tokens import revoke_customer_token
from tests.factories import grant, have_peppers, issue, make_token, now, renew_revocation_log
from tests.services.conftest import Scene, make_scene
from tests.services.tokens.test_customer_tokens import holder_of, token_of

pytestmark = [pytest.mark.database, pytest.mark.django_db(transaction=True)]

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def path(tmp_path: Path, settings: Any) -> Path:
    settings.REVOCATION_LOG = tmp_path / "own" / "revocation_log"
    settings.REVOCATION_LOG.parent.mkdir()
    renew_revocation_log(settings.REVOCATION_LOG)
    return Path(settings.REVOCATION_LOG)


@pytest.fixture
def scene() -> Scene:
    return make_scene()


def parsed_lines() -> list[Any]:
    """Return all lines but the first, which names the installation."""
    return [line for _, line in read_lines() if not isinstance(line, Opened)]


def read_ended() -> list[tuple[str, str, str, str]]:
    return [(line.kind, line.id, line.state, line.reason) for line in parsed_lines() if isinstance(line, Ended)]


def revoke(scene: Scene, reason: RevocationReason = RevocationReason.SUPERSEDED) -> Key:
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, reason)
    return key


def fail_to_revoke(scene: Scene) -> Key:
    """Revoke a key in a transaction that fails after the log line is written: an error, and the key stays active."""
    key, _ = issue(scene.sandbox)

    def revoke_and_fail() -> None:
        with transaction.atomic():
            lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
            raise RuntimeError("the connection is lost at the commit")

    with pytest.raises(RuntimeError, match="lost"):
        revoke_and_fail()
    assert Key.objects.get(pk=key.pk).state == "active"
    return key


def reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (revocation_log, log_backfill, replay):
        monkeypatch.setattr(module, "boot_id", lambda: "another")


def confirm_all() -> None:
    """Let a verifier confirm everything; on PostgreSQL the backfill waits for that."""
    values = {"entry_point": "test", "started_at": now(), "seen_at": now(), "staleness_ms": 2000}
    Verifier.objects.update_or_create(pk="v", defaults={**values, "confirmed_sequence": read_counter()})


# --- written lines ----------------------------------------------------------------------------------------


def test_log_covers_every_model_that_can_end() -> None:
    """A new model with a terminal state must be added to the log."""
    recorded_models = {model for model in apps.get_models() if issubclass(model, RecordedModel)}
    ending = {model for model in recorded_models if model.has_ended is not RecordedModel.has_ended}
    assert ending == set(ENDING.values())
    for kind, model in ENDING.items():
        assert model(**{str(model._meta.pk.attname): "x"}).alters() == (kind, "x")


def test_log_of_a_revocation_has_its_reason_and_its_commit(scene: Scene) -> None:
    key = revoke(scene)
    assert read_ended() == [("key", key.key_id, "deactivated", "superseded")]
    end, mark = parsed_lines()
    assert mark == Committed(end.unit)
    change = Change.objects.get(subject_kind="key", subject_id=key.key_id, sequence=end.sequence)
    assert change.at == end.at


def test_log_contains_every_kind_of_revocation(scene: Scene) -> None:
    compromised = revoke(scene, RevocationReason.KEY_COMPROMISE)
    token, _ = make_token()
    service_tokens.revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), token)
    key, _ = issue(scene.sandbox)
    customer, _ = token_of(key)
    offboarding.offboard_merchant(grant(scene.admin, P.MERCHANTS_OFFBOARD), scene.merchant, "gone")
    assert read_ended() == [
        ("key", compromised.key_id, "compromised", "key_compromise"),
        ("service_token", token.token_id, "", ""),
        ("merchant", "acme", "", ""),
        ("key", key.key_id, "deactivated", "cessation_of_operation"),
        ("customer_token", customer.token_id, "", ""),
    ]


def test_log_of_a_change_that_ends_nothing_is_not_written(scene: Scene, path: Path) -> None:
    key, _ = issue(scene.sandbox)
    lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), key)
    merchants.suspend_merchant(grant(scene.admin, P.MERCHANTS_WRITE), scene.merchant)
    assert parsed_lines() == []


def test_log_line_is_synced_before_its_transaction_commits(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An acknowledged revocation survives a power loss."""
    key, _ = issue(scene.sandbox)
    synced: list[bool] = []
    real = os.fsync

    def record_sync(descriptor: int) -> None:
        real(descriptor)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            synced.append(connection.in_atomic_block)

    monkeypatch.setattr(os, "fsync", record_sync)
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
    assert synced == [True], "expected one sync, inside the transaction"


def test_log_of_a_rolled_back_revocation_has_no_commit_line(scene: Scene) -> None:
    fail_to_revoke(scene)
    assert [type(line) for line in parsed_lines()] == [Ended]


def test_log_of_a_customer_token_has_its_expiry(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    token, _ = token_of(key)
    revoke_customer_token(grant(holder_of(key), P.CUSTOMER_TOKENS_WRITE, scene.sandbox), scene.sandbox, token.token_id)
    assert [(line.id, line.expires_at) for line in parsed_lines() if isinstance(line, Ended)] == [
        (token.token_id, token.expires_at)
    ]


def test_log_file_is_readable_only_by_its_owner(path: Path) -> None:
    have_peppers()
    shutil.rmtree(path.parent)
    previous = os.umask(0)
    try:
        assert open_revocation_log(now())
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def _append_many(name: str, count: int) -> None:
    for number in range(count):
        append_lines([Ended(number, now(), "key", f"{name}{number}"), Committed(name * 500)], is_synced=False)


def test_log_written_by_many_processes_loses_and_tears_no_line() -> None:
    """Each process appends its lines in one piece."""
    spawned = multiprocessing.get_context("fork")
    writers = [spawned.Process(target=_append_many, args=(name, 100)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    found_lines = parsed_lines()
    assert None not in found_lines
    for name in "abcd":
        own = [line.id for line in found_lines if isinstance(line, Ended) and line.id.startswith(name)]
        assert own == [f"{name}{number}" for number in range(100)]
    assert all(isinstance(line, Ended if number % 2 == 0 else Committed) for number, line in enumerate(found_lines))


def test_log_covers_the_anchor_only_up_to_what_it_took_from_there() -> None:
    """A database that was set back reuses sequences, so progress through its changes covers nothing of the anchor."""
    assert find_anchored() == 0
    append_lines([Anchored(5), CaughtUp(9)])
    assert find_anchored() == 5


# --- damage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cut", "remaining"), [(1, [CaughtUp(2)]), (2, []), (30, [])])
def test_log_with_a_torn_line_skips_it_and_keeps_the_next_one(path: Path, cut: int, remaining: list[CaughtUp]) -> None:
    """A power loss during a write costs only the unacknowledged line."""
    append_lines([CaughtUp(1), CaughtUp(2)])
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    assert parsed_lines() == [CaughtUp(1)]
    append_lines([CaughtUp(3)])
    assert parsed_lines() == [CaughtUp(1), *remaining, CaughtUp(3)]


def test_log_with_a_torn_line_longer_than_a_block_truncates_it(path: Path) -> None:
    append_lines([CaughtUp(1)])
    with path.open("ab") as file:
        file.write(b"x" * 10_000)
    append_lines([CaughtUp(2)])
    assert parsed_lines() == [CaughtUp(1), CaughtUp(2)]


def test_log_distinguishes_a_damaged_line_from_a_torn_one(path: Path) -> None:
    append_lines([CaughtUp(1), CaughtUp(2), CaughtUp(3)])
    path.write_bytes(path.read_bytes().replace(b'"sequence":2', b'"sequence":9', 1))
    assert parsed_lines() == [CaughtUp(1), None, CaughtUp(3)]


def test_log_on_a_disk_that_takes_only_a_part_is_left_unchanged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_lines([CaughtUp(1)])
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, text: real(descriptor, text[:7]))
    with pytest.raises(OSError, match="No space"):
        append_lines([CaughtUp(2)])
    monkeypatch.undo()
    assert parsed_lines() == [CaughtUp(1)]


def _refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_log_that_cannot_be_written_blocks_no_revocation_and_raises_an_alarm(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk must not keep a leaked key active. The alarm is raised once until it is seen."""
    monkeypatch.setattr(revocation_log, "append_lines", _refuse)
    first, second = revoke(scene), revoke(scene)
    assert {Key.objects.get(pk=key.pk).state for key in (first, second)} == {"deactivated"}
    notice = Notice.objects.get(kind=NoticeKind.REVOCATION_LOG_FAILED)
    assert (notice.is_alarm, notice.deliveries.count()) == (True, 0)
    assert notice.payload == {"why": "No space left on device"}
    assert "the revocation log cannot be written" in caplog.text


def test_log_whose_commit_line_cannot_be_written_fails_no_revocation(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real: Callable[..., None] = revocation_log.append_lines

    def refuse_notes(written: list[Any], **options: Any) -> None:
        _refuse() if isinstance(written[0], Committed) else real(written, **options)

    monkeypatch.setattr(revocation_log, "append_lines", refuse_notes)
    key = revoke(scene)
    assert Key.objects.get(pk=key.pk).state == "deactivated"
    assert "the revocation log cannot be written" in caplog.text


# --- backfill ---------------------------------------------------------------------------------------------


def test_backfill_appends_what_the_log_lacks(scene: Scene, path: Path, django_assert_max_num_queries: Any) -> None:
    """Revocations of another host are appended to this host's log too."""
    this_host = revoke(scene)
    path.rename(path.with_name("kept"))
    renew_revocation_log(path)
    other_host = revoke(scene, RevocationReason.KEY_COMPROMISE)
    token, _ = make_token()
    service_tokens.revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), token)
    path.unlink()
    path.with_name("kept").rename(path)
    confirm_all()
    backfill = LogBackfill()
    assert backfill.run(now()) == 2
    assert set(read_ended()) == {
        ("key", this_host.key_id, "deactivated", "superseded"),
        ("key", other_host.key_id, "compromised", "key_compromise"),
        ("service_token", token.token_id, "", ""),
    }
    size = path.stat().st_size
    with django_assert_max_num_queries(2):
        assert backfill.run(now()) == 0
    assert LogBackfill().run(now()) == 0, "another process must read its position from the log"
    assert path.stat().st_size == size


def test_backfill_in_a_new_process_reads_from_the_last_position(scene: Scene, path: Path) -> None:
    """A long log costs a worker nothing; a damaged line before the position is reported at startup."""
    revoke(scene)
    confirm_all()
    append_lines([CaughtUp(read_counter())])
    path.write_bytes(path.read_bytes().replace(b"superseded", b"superseeed", 1))
    key = revoke(scene)
    confirm_all()
    backfill = LogBackfill()
    assert (backfill.run(now()), backfill.position) == (0, read_counter())
    assert read_ended() == [("key", key.key_id, "deactivated", "superseded")]


def test_backfill_of_a_rewound_database_logs_it_and_continues_from_there(
    scene: Scene, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append_lines([CaughtUp(read_counter() + 1000)])
    confirm_all()
    backfill = LogBackfill()
    assert (backfill.run(now()), backfill.position) == (0, read_counter())
    assert "the database was set back" in caplog.text
    caplog.clear()
    revoke(scene)
    confirm_all()
    assert (backfill.run(now()), caplog.text) == (0, "")


def test_backfill_repeats_a_revocation_without_its_commit_line(scene: Scene, path: Path) -> None:
    """Killed before the commit line: a repeated request is acknowledged, so the log must contain the revocation."""
    key = revoke(scene)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    confirm_all()
    assert LogBackfill().run(now()) == 1
    *_, appended = parsed_lines()
    assert (appended.id, appended.unit) == (key.key_id, "")


def test_backfill_records_that_a_revoked_key_was_compromised(scene: Scene, path: Path) -> None:
    key = revoke(scene)
    before = path.read_bytes()
    lifecycle.report_compromise(grant(scene.admin, P.KEYS_REPORT_COMPROMISE, scene.sandbox), key)
    path.write_bytes(before)
    confirm_all()
    backfill = LogBackfill()
    assert backfill.run(now()) == 1
    assert read_ended()[-1] == ("key", key.key_id, "compromised", "key_compromise")


def test_backfill_skips_what_its_own_host_wrote(scene: Scene) -> None:
    backfill = LogBackfill()
    revoke(scene)
    confirm_all()
    assert backfill.run(now()) == 0
    revoke(scene)
    confirm_all()
    assert backfill.run(now()) == 0
    assert len(read_ended()) == 2


def test_backfill_of_a_log_that_was_created_again_starts_over(scene: Scene, path: Path) -> None:
    key = revoke(scene)
    confirm_all()
    backfill = LogBackfill()
    assert backfill.run(now()) == 0
    renew_revocation_log(path)
    assert backfill.run(now()) == 1
    assert read_ended() == [("key", key.key_id, "deactivated", "superseded")]


def test_backfill_processes_a_limited_number_per_run(scene: Scene, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keyvault.services.revocations.log_backfill._BATCH", 2)
    revoked = {revoke(scene).key_id for _ in range(3)}
    renew_revocation_log(path)
    confirm_all()
    backfill, rounds = LogBackfill(), 0
    while backfill.position < read_counter():
        backfill.run(now())
        rounds += 1
    assert rounds > 2
    assert {name for _, name, _, _ in read_ended()} == revoked


def test_backfill_that_cannot_write_raises_an_alarm_and_continues_later(
    scene: Scene, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoke(scene)
    renew_revocation_log(path)
    confirm_all()
    backfill = LogBackfill()
    with monkeypatch.context() as full:
        full.setattr("keyvault.services.revocations.log_backfill.append_lines", _refuse)
        assert backfill.run(now()) == backfill.run(now()) == 0
    assert Notice.objects.filter(kind=NoticeKind.REVOCATION_LOG_FAILED, is_alarm=True).count() == 1
    assert AuditEntry.objects.filter(event="journal.failed").count() == 1
    assert backfill.run(now()) == 1


def test_backfill_drops_a_revocation_whose_commit_failed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller got an error: after a reboot the service starts, and a replay revokes no active key."""
    key = fail_to_revoke(scene)
    with monkeypatch.context() as early:
        reboot(early)
        with pytest.raises(ImproperlyConfigured, match="behind the revocation log"):
            require_current()
    backfill = LogBackfill()
    assert backfill.run(now() + timedelta(seconds=50)) == 0
    assert [type(line) for line in parsed_lines()] == [Ended], "the commit may still happen"
    assert backfill.run(now() + timedelta(seconds=61)) == backfill.run(now() + timedelta(seconds=99)) == 0
    end, mark = parsed_lines()
    assert mark == Dropped(end.unit)
    reboot(monkeypatch)
    require_current()
    assert replay.replay_revocations(grant(HOST, P.REVOCATIONS_REPLAY)).replayed == []
    assert Key.objects.get(pk=key.pk).state == "active"


def test_backfill_marks_a_committed_revocation_without_its_commit_line(scene: Scene, path: Path) -> None:
    """The process was killed between the commit and the line."""
    revoke(scene)
    end, mark = parsed_lines()
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    LogBackfill().run(now() + timedelta(seconds=61))
    assert parsed_lines() == [end, mark]


def test_backfill_drops_a_failed_compromise_report_of_a_revoked_key(scene: Scene, path: Path) -> None:
    """The key's earlier revocation does not make the failed commit a successful one."""
    key = revoke(scene)
    renew_revocation_log(path)
    kept = Ended(1, now(), "key", key.key_id, "compromised", "key_compromise", "u", revocation_log.boot_id())
    append_lines([kept])
    LogBackfill().run(now() + timedelta(seconds=61))
    assert parsed_lines()[:2] == [kept, Dropped("u")]


def test_backfill_writes_no_position_above_an_unsettled_revocation(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process reads from the position, and must find what is unsettled."""
    monkeypatch.setattr(log_backfill, "_PROGRESS_INTERVAL", 1)
    fail_to_revoke(scene)
    confirm_all()
    LogBackfill().run(now())
    assert [type(line) for line in parsed_lines()] == [Ended]
    issue(scene.sandbox)
    confirm_all()
    LogBackfill().run(now() + timedelta(seconds=61))
    assert [type(line) for line in parsed_lines()] == [Ended, Dropped, CaughtUp]


@pytest.mark.postgres
def test_backfill_drops_nothing_above_the_sequence_of_a_restored_database(scene: Scene) -> None:
    """The key is active there, but may have been revoked in the lost database."""
    key, _ = issue(scene.sandbox)
    later = read_counter() + 1000
    append_lines([Ended(later, now(), "key", key.key_id, "deactivated", "superseded", "u", revocation_log.boot_id())])
    LogBackfill().run(now() + timedelta(seconds=61))
    assert [type(line) for line in parsed_lines()] == [Ended]


@pytest.mark.postgres
def test_backfill_waits_for_changes_that_may_still_appear_below(scene: Scene, path: Path) -> None:
    """On PostgreSQL a change may become visible after a higher one."""
    revoke(scene)
    renew_revocation_log(path)
    backfill = LogBackfill()
    assert (backfill.run(now()), backfill.position) == (0, 0), "it must wait for a verifier's confirmation"
    confirm_all()
    assert backfill.run(now()) == 1


# --- startup beside other processes -----------------------------------------------------------------------


def test_startup_beside_a_working_service_is_not_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Revocations made while the log is read are no sign of an outdated database."""
    real = read_lines

    def revoke_and_read() -> Any:
        revoke(scene)
        return real()

    monkeypatch.setattr(replay, "read_lines", revoke_and_read)
    require_current()


# --- killed processes -------------------------------------------------------------------------------------

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
settings.REVOCATION_LOG = Path(place)
real = getattr(sys.modules[module], name)
def and_die(*args, **options):
    real(*args, **options)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(sys.modules[module], name, and_die)
key = lifecycle.get_key(key_id)
grant = authorize(WORKER, Permission.ISSUANCE_EXECUTE, key.credential.account, now=datetime.now(UTC))
lifecycle.revoke_key(grant, key, RevocationReason.SUPERSEDED)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "name", "state"),
    [
        ("keyvault.services.recording.transaction", "append_ended", "active"),
        ("keyvault.services.recording.revocation_log", "_note_committed", "deactivated"),
    ],
)
def test_startup_after_a_revocation_killed_around_its_commit_succeeds(
    scene: Scene, path: Path, module: str, name: str, state: str
) -> None:
    """A revocation killed before its commit was not acknowledged, so startup is not refused."""
    key, _ = issue(scene.sandbox)
    done = subprocess.run(
        [sys.executable, "-c", REVOKER, key.key_id, str(path), module, name], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == -9, done.stderr
    assert Key.objects.get(pk=key.pk).state == state
    assert [line.id for line in parsed_lines() if isinstance(line, Ended)] == [key.key_id]
    require_current()

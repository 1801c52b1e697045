"""The revocation anchor: a host without its log, or with an older one, never accepts a revoked key again."""

import io
import itertools
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import OperationalError, transaction

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.backends import meters
from keyvault.backends.base import BackendUnavailableError, Mount
from keyvault.backends.local import LocalKeystore
from keyvault.domain.errors import PermissionMissingError, StateConflictError
from keyvault.domain.keys import DEAD_STATES
from keyvault.domain.revocation import RevocationReason
from keyvault.domain.revocation_log import Anchored, Ended, Opened, line_bytes
from keyvault.models import AuditEntry, Change, Key, Notice
from keyvault.services import maintenance
from keyvault.services.keys import lifecycle
from keyvault.services.recording.revocation_log import append_lines, describe_ended, host_name, read_lines
from keyvault.services.revocations import anchor as anchors
from keyvault.services.revocations import log_opening
from keyvault.services.revocations.anchor import (
    LATE_AFTER,
    Anchor,
    AnchorWriter,
    find_anchor,
    list_anchored,
    update_log,
)
from keyvault.services.revocations.log_opening import accept_loss
from keyvault.services.revocations.replay import read_counter
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.startup.startup_checks import require_current
from tests.backends.conftest import write_fake_logins
from tests.backends.stores import open_vault
from tests.backends.vault.fake import FakeVault, lost_reply, running_fake
from tests.factories import INSTALLATION, grant, issue, now, renew_revocation_log
from tests.services.conftest import Scene, make_scene
from tests.services.rows import dump_tables
from tests.verifiers import confirm, make_verifier

pytestmark = [pytest.mark.database, pytest.mark.django_db]


@pytest.fixture(autouse=True)
def path(tmp_path: Path, settings: Any) -> Path:
    """A log of the test's own."""
    settings.REVOCATION_LOG = tmp_path / "revocation_log"
    renew_revocation_log(settings.REVOCATION_LOG)
    return Path(settings.REVOCATION_LOG)


@pytest.fixture
def scene(db: None) -> Scene:
    return make_scene()


@pytest.fixture
def settle(scene: Scene) -> Callable[[], None]:
    """Let a verifier confirm every change, after which no earlier one can appear."""
    verifier = make_verifier()
    return lambda: confirm(verifier, read_counter())


def revoke(scene: Scene, key: Key, reason: RevocationReason = RevocationReason.SUPERSEDED) -> None:
    """Revoke a key, with its committed line in the log: a test's own transaction never commits."""
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, reason)
    append_lines(describe_ended([("key", key.key_id)], read_counter(), now()))


def issued(scene: Scene, count: int) -> list[Key]:
    return [issue(scene.sandbox, label=f"key {number}")[0] for number in range(count)]


def is_dead(key: Key) -> bool:
    return Key.objects.get(pk=key.pk).state in DEAD_STATES


def anchored_ids(after: int = 0) -> list[str]:
    anchor = find_anchor()
    return [] if anchor is None else [line.id for batch in list_anchored(anchor, after) for line in batch]


def replay() -> str:
    output = io.StringIO()
    call_command("replay_revocations", stdout=output)
    return output.getvalue()


# --- restored databases -----------------------------------------------------------------------------------------

LOGS: dict[str, Callable[[Path, bytes, bytes], object]] = {
    "kept": lambda path, older, whole: path.write_bytes(whole),
    "deleted": lambda path, older, whole: path.unlink(),
    "truncated": lambda path, older, whole: path.write_bytes(whole[:-20]),
    "older": lambda path, older, whole: path.write_bytes(older),
    "another host's": lambda path, older, whole: path.write_bytes(
        line_bytes(Opened(INSTALLATION, now())) + whole.splitlines(keepends=True)[-1]
    ),
}


UNDETECTABLE = {"truncated": "late alive", "older": "late alive", "another host's": "early alive"}
"""The keys that are good after a restore without an anchor, by log: neither file has ever named the others."""


@pytest.mark.parametrize(("is_anchored", "is_restored"), list(itertools.product((True, False), (True, False))))
# The damaged logs are files: the database gets the same statements.
@pytest.mark.parametrize("log", [pytest.param(log, marks=() if log == "kept" else pytest.mark.sqlite) for log in LOGS])
def test_revoked_keys_stay_revoked_after_a_restore(
    scene: Scene, settle: Callable[[], None], path: Path, log: str, is_anchored: bool, is_restored: bool
) -> None:
    """No start accepts a revoked key that the log or the anchor names: with an anchor none at all, and without one
    those of `UNDETECTABLE`, about which the replay warns.
    """
    early, late, alive = issued(scene, 3)
    before = transaction.savepoint()
    revoke(scene, early)
    older = path.read_bytes()
    revoke(scene, late, RevocationReason.KEY_COMPROMISE)
    settle()
    if is_anchored:
        assert AnchorWriter().run(now()) == 2
    if is_restored:
        transaction.savepoint_rollback(before)
    LOGS[log](path, older, path.read_bytes())
    if log == "deleted" and not is_anchored:
        with pytest.raises(ImproperlyConfigured, match="there is no revocation anchor"):
            require_current()
        with pytest.raises(CommandError, match="there is no revocation anchor"):
            replay()
        return
    good = UNDETECTABLE[log] if is_restored and not is_anchored and log in UNDETECTABLE else "alive"
    if is_restored:
        with pytest.raises(ImproperlyConfigured, match="revoked items are valid again"):
            require_current()
        assert ("nothing shows whether this log is complete" in replay()) == (not is_anchored)
    require_current()
    named = {"early": early, "late": late, "alive": alive}
    assert " ".join(name for name, key in named.items() if not is_dead(key)) == good
    if is_dead(late):
        assert Key.objects.get(pk=late.pk).state == "compromised"


def test_host_without_a_log_rebuilds_it_from_the_anchor(scene: Scene, settle: Callable[[], None], path: Path) -> None:
    """A container without a volume starts, and its new log protects it while the backend is unavailable."""
    keys = issued(scene, 3)
    before = transaction.savepoint()
    for key in keys:
        revoke(scene, key)
    settle()
    AnchorWriter().run(now())
    path.unlink()
    require_current()
    ids = [line.id for _, line in read_lines() if isinstance(line, Ended)]
    assert sorted(ids) == sorted(key.key_id for key in keys)
    whole = path.read_bytes()
    require_current()
    assert path.read_bytes() == whole, "a complete log grows no further"
    transaction.savepoint_rollback(before)
    with unavailable(), pytest.raises(ImproperlyConfigured, match="3 revoked items are valid again"):
        require_current()


def test_lost_log_is_refused_while_the_anchor_is_unavailable(
    scene: Scene, settle: Callable[[], None], path: Path
) -> None:
    (key,) = issued(scene, 1)
    revoke(scene, key)
    settle()
    AnchorWriter().run(now())
    path.unlink()
    with unavailable():
        with pytest.raises(ImproperlyConfigured, match=r"the revocation anchor cannot be read \(sealed\)"):
            require_current()
        with pytest.raises(CommandError, match="the revocation anchor cannot be read"):
            replay()
    assert not path.exists()
    require_current()


def test_kept_log_suffices_while_the_anchor_is_unavailable(
    scene: Scene, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A sealed backend keeps no process from starting."""
    issued(scene, 1)
    with unavailable(), caplog.at_level(logging.ERROR):
        require_current()
    assert "the revocation log was not compared with the revocation anchor" in caplog.messages


def test_comparison_missed_at_the_start_is_made_once_the_backend_answers(
    scene: Scene, settle: Callable[[], None], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The database and the log were restored together. The worker raises an alarm, and then revokes the keys again."""
    keys = issued(scene, 2)
    before, older = transaction.savepoint(), path.read_bytes()
    for key in keys:
        revoke(scene, key)
    settle()
    AnchorWriter().run(now())
    transaction.savepoint_rollback(before)
    path.write_bytes(older)
    with unavailable(), mock.patch.object(meters, "note_compared") as note:
        require_current()
        for _ in range(2):
            maintenance.compare_revocation_log()
    assert {call.args for call in note.call_args_list} == {(False,)}
    alarm = Notice.objects.get(kind="anchor.late")
    assert (alarm.is_alarm, alarm.payload) == (True, {"not_compared": "sealed"})
    assert not any(is_dead(key) for key in keys)
    with mock.patch.object(meters, "note_compared") as note:
        maintenance.compare_revocation_log()
    note.assert_called_once_with(True)
    assert all(is_dead(key) for key in keys)
    assert Change.objects.filter(subject_id__in=[key.key_id for key in keys]).exists(), "verifiers are notified"
    assert Notice.objects.filter(kind="anchor.late").latest("created_at").payload == {"revoked_again": 2}
    entries = AuditEntry.objects.count()
    maintenance.compare_revocation_log()
    assert AuditEntry.objects.count() == entries, "the comparison is made once"
    require_current()


def test_comparison_killed_between_log_and_replay_lets_nothing_start(
    scene: Scene, settle: Callable[[], None], path: Path
) -> None:
    (key,) = issued(scene, 1)
    before, older = transaction.savepoint(), path.read_bytes()
    revoke(scene, key)
    settle()
    AnchorWriter().run(now())
    transaction.savepoint_rollback(before)
    path.write_bytes(older)
    with unavailable():
        require_current()
    killed = mock.patch.object(log_opening, "replay_revocations", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):
        maintenance.compare_revocation_log()
    with pytest.raises(ImproperlyConfigured, match="1 revoked items are valid again"):
        require_current()
    maintenance.compare_revocation_log()
    assert is_dead(key)


def test_dry_run_reports_what_the_anchor_has_and_writes_nothing(
    scene: Scene, settle: Callable[[], None], path: Path
) -> None:
    """Neither the database nor the log nor the secret backend changes, whether the log is older or lost."""
    (key,) = issued(scene, 1)
    before, older = transaction.savepoint(), path.read_bytes()
    revoke(scene, key)
    settle()
    AnchorWriter().run(now())
    transaction.savepoint_rollback(before)
    anchor, tables = find_anchor(), dump_tables()
    for content in (older, None):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        output = io.StringIO()
        with pytest.raises(SystemExit):
            call_command("replay_revocations", "--dry-run", stdout=output)
        assert f"STILL ACTIVE: key {key.key_id}" in output.getvalue()
        assert (path.read_bytes() if path.exists() else None) == content
        path.touch()
    assert (find_anchor(), dump_tables()) == (anchor, tables)
    path.unlink()
    replay()
    assert is_dead(key)


def test_log_of_another_installation_is_neither_replayed_nor_completed(
    scene: Scene, settle: Callable[[], None], path: Path
) -> None:
    (key,) = issued(scene, 1)
    revoke(scene, key)
    settle()
    AnchorWriter().run(now())
    foreign = line_bytes(Opened("another", now()))
    path.write_bytes(foreign)
    tables = dump_tables()
    for options in ((), ("--dry-run",)):
        with pytest.raises(CommandError, match="belongs to installation another"):
            call_command("replay_revocations", *options, stdout=io.StringIO())
    with pytest.raises(CommandError, match="belongs to installation another"):
        call_command("setup", stdout=io.StringIO())
    assert (path.read_bytes(), dump_tables()) == (foreign, tables)


def test_anchor_of_another_installation_does_not_rebuild_the_log(
    scene: Scene, settle: Callable[[], None], path: Path
) -> None:
    (key,) = issued(scene, 1)
    revoke(scene, key)
    settle()
    with mock.patch.object(anchors, "installation_id", return_value="another"):
        AnchorWriter().run(now())
    path.unlink()
    with pytest.raises(ImproperlyConfigured, match="belongs to installation another"):
        require_current()


def test_malformed_anchor_does_not_rebuild_the_log(scene: Scene, settle: Callable[[], None], path: Path) -> None:
    (key,) = issued(scene, 1)
    revoke(scene, key)
    settle()
    AnchorWriter().run(now())
    stored = secret_backend().read(Mount.EVIDENCE, "service/revocations")
    labels = {**stored.labels, "lines": ""}
    secret_backend().put(Mount.EVIDENCE, "service/revocations", stored.secret, labels, expected_version=stored.version)
    path.unlink()
    with pytest.raises(ImproperlyConfigured, match="malformed"):
        require_current()


def test_loss_needs_two_persons_and_no_anchor(scene: Scene, settle: Callable[[], None], path: Path) -> None:
    (key,) = issued(scene, 1)
    allowed = grant(HOST, P.REVOCATIONS_REPLAY)
    lines = path.read_bytes()
    path.unlink()
    with pytest.raises(StateConflictError, match="second person"):
        accept_loss(allowed, scene.admin, scene.admin, "gone")
    with pytest.raises(PermissionMissingError):
        accept_loss(allowed, scene.admin, scene.tam, "gone")
    path.write_bytes(lines)
    revoke(scene, key)
    settle()
    AnchorWriter().run(now())
    path.unlink()
    with pytest.raises(StateConflictError, match="revocation anchor replaces"):
        accept_loss(allowed, scene.admin, scene.approver, "gone")
    with unavailable(), pytest.raises(BackendUnavailableError):
        accept_loss(allowed, scene.admin, scene.approver, "gone")
    assert not AuditEntry.objects.filter(event="journal.loss_accepted").exists()


# --- writing ------------------------------------------------------------------------------------------------


def set_back(anchor: Anchor | None) -> None:
    """Write an earlier state of the anchor, as a Vault has it after it was restored from a snapshot."""
    newest = find_anchor()
    assert anchor is not None
    assert newest is not None
    anchors._write(Anchor(version=newest.version), anchor.lines, anchor.sequence)


def unavailable() -> Any:
    error = BackendUnavailableError("The secrets manager does not answer.", internal="sealed")
    return mock.patch.object(anchors, "secret_backend", side_effect=error)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "SEGMENT_LINES", 3)


def test_anchor_moves_revocations_to_segments_in_order(
    scene: Scene, settle: Callable[[], None], short_segments: None
) -> None:
    """Each value stays small, and nothing is lost, repeated or reordered."""
    keys, writer, sequences = issued(scene, 8), AnchorWriter(), []
    for begin in range(0, 8, 2):
        for key in keys[begin : begin + 2]:
            revoke(scene, key)
        settle()
        assert writer.run(now()) == 2
        anchor = find_anchor()
        assert anchor is not None
        assert len(anchor.lines) < 3
        sequences.append(anchor.sequence)
    assert set(anchored_ids()) == {key.key_id for key in keys}
    assert len(anchored_ids()) == 8
    assert set(anchored_ids(sequences[1])) == {key.key_id for key in keys[4:]}
    assert anchored_ids(sequences[-1]) == []
    assert writer.run(now()) == 0
    assert AnchorWriter().run(now()) == 0, "another process begins where the anchor ends"


def test_writer_killed_between_segment_and_newest_part_repeats_without_loss(
    scene: Scene, settle: Callable[[], None], short_segments: None
) -> None:
    keys = issued(scene, 5)
    for key in keys:
        revoke(scene, key)
    settle()
    real = LocalKeystore.put

    def fail_at_newest(self: LocalKeystore, mount: Mount, place: str, *args: Any, **options: Any) -> int:
        if place == "service/revocations":
            raise BackendUnavailableError("The secrets manager does not answer.", internal="killed")
        return real(self, mount, place, *args, **options)

    with mock.patch.object(LocalKeystore, "put", fail_at_newest):
        assert AnchorWriter().run(now()) == 0
    assert find_anchor() is None
    assert AnchorWriter().run(now()) == 5
    assert sorted(anchored_ids()) == sorted(key.key_id for key in keys)


def test_two_writers_lose_nothing(scene: Scene, settle: Callable[[], None]) -> None:
    """The second one finds that the first was faster, and continues behind it."""
    first, second = AnchorWriter(), AnchorWriter()
    keys = issued(scene, 4)
    for writer in (first, second):
        writer.run(now())
    for key, writer in zip(keys, (first, second, second, first), strict=True):
        revoke(scene, key)
        settle()
        while not writer.run(now()):
            pass
    assert sorted(anchored_ids()) == sorted(key.key_id for key in keys)


def test_anchor_writer_that_loses_the_database_repeats_no_revocation(
    scene: Scene, settle: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second writer loses it between the anchor and the counter, after the first one was faster."""
    (key,), first, second = issued(scene, 1), AnchorWriter(), AnchorWriter()
    for writer in (first, second):
        writer.run(now())
    revoke(scene, key)
    settle()
    while not first.run(now()):
        pass
    calls: list[int] = []

    def lost_at_the_second_call() -> int:
        calls.append(read_counter())
        if len(calls) == 2:
            raise OperationalError("lost")
        return calls[-1]

    with monkeypatch.context() as fault:
        fault.setattr("keyvault.services.revocations.anchor.read_counter", lost_at_the_second_call)
        with pytest.raises(OperationalError):
            second.run(now())
    second.run(now())
    second.run(now())
    assert anchored_ids() == [key.key_id]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_anchor_that_was_set_back_is_completed(scene: Scene, settle: Callable[[], None], *, is_restarted: bool) -> None:
    """Guarantee: after a Vault was restored from a snapshot, no revocation stays missing.

    `is_restarted`: the worker had seen no revocation since its start.
    """
    keys, writer = issued(scene, 3), AnchorWriter()
    revoke(scene, keys[0])
    settle()
    writer.run(now())
    old = find_anchor()
    revoke(scene, keys[1])
    settle()
    writer.run(now())
    if is_restarted:
        writer = AnchorWriter()
        writer.run(now())
    set_back(old)
    assert anchored_ids() == [keys[0].key_id]
    revoke(scene, keys[2])
    settle()
    for _ in range(2):
        writer.run(now())
    assert sorted(anchored_ids()) == sorted(key.key_id for key in keys)


def test_started_worker_completes_an_anchor_that_was_set_back(scene: Scene, settle: Callable[[], None]) -> None:
    """The runbook restarts the workers: a running one reads the anchor only with the next revocation."""
    (key,) = issued(scene, 1)
    revoke(scene, key)
    settle()
    AnchorWriter().run(now())
    set_back(Anchor())
    assert anchored_ids() == []
    AnchorWriter().run(now())
    assert anchored_ids() == [key.key_id]


@pytest.mark.sqlite  # PostgreSQL's sequence does not go back with a savepoint
@pytest.mark.parametrize("batches", [(1, 5), (6,)])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_database_set_back_under_a_running_worker_hides_no_later_revocation(
    scene: Scene, path: Path, batches: tuple[int, ...], *, is_restarted: bool
) -> None:
    """The database draws sequences again that the anchor and other hosts have, and then new ones.

    `batches`: numbers of keys that are revoked between two rounds of the worker. `is_restarted`: the worker first read
    the anchor after the database was set back.
    """
    keys, writer = issued(scene, 8), AnchorWriter()
    before = transaction.savepoint()
    for key in keys[:2]:
        revoke(scene, key)
    writer.run(now())
    require_current()
    other_host = path.read_bytes()
    transaction.savepoint_rollback(before)
    if is_restarted:
        writer = AnchorWriter()
    writer.run(now())
    later = iter(keys[2:])
    for size in batches:
        for key in itertools.islice(later, size):
            revoke(scene, key)
        assert writer.run(now()) == size
    path.write_bytes(other_host)
    anchor = find_anchor()
    assert anchor is not None
    assert update_log(anchor, now()) == 6
    assert sorted(anchored_ids()) == sorted(key.key_id for key in keys)


def test_anchor_that_was_never_read_raises_the_alarm(scene: Scene, settle: Callable[[], None]) -> None:
    writer, began_at = AnchorWriter(), now()
    with unavailable():
        writer.run(began_at)
        assert not Notice.objects.filter(kind="anchor.late").exists()
        writer.run(began_at + LATE_AFTER + timedelta(seconds=1))
    assert Notice.objects.get(kind="anchor.late").is_alarm


def test_log_that_was_not_compared_raises_an_alarm_beside_the_one_about_the_lag(
    scene: Scene, settle: Callable[[], None]
) -> None:
    """Guarantee: an unseen alarm about one condition does not hide the other, whose consequences differ."""
    writer, began_at = AnchorWriter(), now()
    with unavailable():
        writer.run(began_at)
        writer.run(began_at + LATE_AFTER + timedelta(seconds=1))
        require_current()
        maintenance.compare_revocation_log()
    alarms = Notice.objects.filter(kind="anchor.late")
    assert {alarm.subject: list(alarm.payload) for alarm in alarms} == {
        "revocations": ["seconds"],
        host_name(): ["not_compared"],
    }


def test_writer_with_a_stale_version_writes_nothing(scene: Scene, settle: Callable[[], None]) -> None:
    keys = issued(scene, 2)
    revoke(scene, keys[0])
    settle()
    writer = AnchorWriter()
    real = anchors._write

    def after_another(*arguments: Any) -> None:
        with mock.patch.object(anchors, "_write", real):
            AnchorWriter().run(now())
        real(*arguments)

    with mock.patch.object(anchors, "_write", after_another):
        assert writer.run(now()) == 0
    assert anchored_ids() == [keys[0].key_id]
    writer.run(now())
    assert anchored_ids() == [keys[0].key_id]


def test_revocation_does_not_wait_for_the_backend_and_the_lag_is_shown(
    scene: Scene, settle: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The anchor is written after the commit; an alarm is raised once when it is late."""
    (key,) = issued(scene, 1)
    writer = AnchorWriter()
    settle()
    writer.run(now())
    with unavailable(), caplog.at_level(logging.WARNING):
        revoke(scene, key)
        settle()
        assert writer.run(now()) == 0
        at = now()
        with mock.patch.object(meters, "note_anchor") as note:
            writer.run(at + timedelta(minutes=1))
        assert note.call_args.args[0] <= at
        assert not Notice.objects.filter(kind="anchor.late").exists()
        for _ in range(2):
            writer.run(at + LATE_AFTER + timedelta(seconds=1))
    assert "the revocation anchor is not up to date" in caplog.messages
    alarm = Notice.objects.get(kind="anchor.late")
    assert alarm.is_alarm
    assert writer.run(now()) == 1
    with mock.patch.object(meters, "note_anchor") as note:
        writer.run(at)
    note.assert_called_once_with(at)


def test_update_log_killed_midway_is_repeated(scene: Scene, settle: Callable[[], None], path: Path) -> None:
    keys = issued(scene, 2)
    lines = path.read_bytes()
    for key in keys:
        revoke(scene, key)
    settle()
    AnchorWriter().run(now())
    path.write_bytes(lines)
    anchor = find_anchor()
    assert anchor is not None
    with mock.patch.object(anchors, "Anchored", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        update_log(anchor, now())
    assert update_log(anchor, now()) == 2
    assert update_log(anchor, now()) == 0
    assert isinstance([line for _, line in read_lines()][-1], Anchored)


# --- with a Vault that fails on demand ----------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeVault]:
    with running_fake() as made:
        write_fake_logins(made, tmp_path)
        backend = open_vault(tmp_path)
        with mock.patch.object(anchors, "secret_backend", return_value=backend):
            yield made


def test_lost_reply_of_the_vault_loses_and_repeats_nothing(
    scene: Scene, settle: Callable[[], None], fake: FakeVault, path: Path
) -> None:
    """The write took effect and its reply was lost: the next round finds it there."""
    keys, writer = issued(scene, 2), AnchorWriter()
    settle()
    writer.run(now())
    revoke(scene, keys[0])
    settle()
    fake.fail(lost_reply(), "data/revocations", "POST")
    assert writer.run(now()) == 0
    revoke(scene, keys[1])
    settle()
    while len(anchored_ids()) < 2:
        writer.run(now())
    assert sorted(anchored_ids()) == sorted(key.key_id for key in keys)
    path.unlink()
    require_current()

"""`manage.py replay_revocations`, and the start that is refused until it was run."""

import io
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connection

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.backends.base import BackendUnavailableError
from keyvault.domain.errors import StateConflictError
from keyvault.domain.revocation import RevocationReason
from keyvault.domain.revocation_log import CaughtUp, Ended
from keyvault.models import AuditEntry, Change, CustomerToken, Key, Merchant, Notice, ServiceToken
from keyvault.services import offboarding
from keyvault.services.keys import lifecycle
from keyvault.services.recording.audit_chain import verify_audit
from keyvault.services.recording.revocation_log import append_lines, describe_ended
from keyvault.services.revocations import anchor
from keyvault.services.revocations import replay as revocation_replays
from keyvault.services.revocations.replay import compare_revocation_log, read_counter
from keyvault.services.startup.startup_checks import require_current, require_ready
from keyvault.services.tokens import service_tokens
from tests.factories import grant, have_peppers, issue, make_merchant, make_token, now, renew_revocation_log
from tests.services.conftest import Scene, make_scene
from tests.services.keys.test_lifecycle import verdict
from tests.services.rows import dump_tables, last_body
from tests.services.tokens.test_customer_tokens import token_of

pytestmark = [pytest.mark.database, pytest.mark.django_db]


@pytest.fixture(autouse=True)
def path(tmp_path: Path, settings: Any) -> Path:
    settings.REVOCATION_LOG = tmp_path / "revocation_log"
    renew_revocation_log(settings.REVOCATION_LOG)
    return Path(settings.REVOCATION_LOG)


@pytest.fixture
def scene(db: None) -> Scene:
    return make_scene()


def replay(*more: str) -> tuple[int, Any]:
    """Return the exit code and the answer."""
    output, code = io.StringIO(), 0
    try:
        call_command("replay_revocations", *more, "--json", stdout=output)
    except SystemExit as end:
        code = int(str(end.code))
    return code, json.loads(output.getvalue())


def log_line(kind: str, name: str, state: str = "", reason: str = "", sequence: int = 1) -> Ended:
    """Return a log line of something that had ended before the backup was restored."""
    return Ended(sequence, now(), kind, name, state, reason)


def test_replay_reapplies_every_kind_of_revocation(scene: Scene) -> None:
    """Keys revoked, compromised or in preparation end again in their former state, with their reason, through the audit
    log.
    """
    revoked, text = issue(scene.sandbox, label="revoked")
    leaked, _ = issue(scene.sandbox, label="leaked")
    suspended, _ = issue(scene.sandbox, label="suspended")
    lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), suspended)
    engine = grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox)
    staged, _ = lifecycle.stage_key(engine, revoked.credential, expires_in_days=9)
    discarded, _ = lifecycle.stage_key(engine, leaked.credential, expires_in_days=9)
    service, _ = make_token()
    customer, _ = token_of(leaked)
    make_merchant("globex")
    assert verdict(text) is None
    append_lines(
        [
            log_line("key", revoked.key_id, "deactivated", "superseded", sequence=7),
            log_line("key", leaked.key_id, "deactivated", "superseded"),
            log_line("key", leaked.key_id, "compromised", "key_compromise"),
            log_line("key", suspended.key_id, "deactivated", "privilege_withdrawn"),
            log_line("key", staged.key_id, "deactivated", "cessation_of_operation"),
            log_line("key", discarded.key_id, "destroyed"),
            log_line("service_token", service.token_id),
            log_line("customer_token", customer.token_id),
            log_line("merchant", "globex"),
        ]
    )
    notices = Notice.objects.count()
    with pytest.raises(ImproperlyConfigured, match=r"8 revoked items are valid again.*manage.py replay_revocations"):
        require_current()
    code, answer = replay()
    assert (code, answer["ok"], len(answer["replayed"]), answer["left"], answer["unknown"]) == (0, True, 8, [], [])
    rows = {key.key_id: (key.state, key.retirement, key.reason) for key in Key.objects.all()}
    assert rows == {
        revoked.key_id: ("deactivated", "revoked", "superseded"),
        leaked.key_id: ("compromised", None, "key_compromise"),
        suspended.key_id: ("deactivated", "revoked", "privilege_withdrawn"),
        staged.key_id: ("destroyed", None, None),
        discarded.key_id: ("destroyed", None, None),
    }
    assert ServiceToken.objects.get(pk=service.pk).revoked_at is not None
    assert CustomerToken.objects.get(pk=customer.pk).revoked_at is not None
    assert Merchant.objects.get(pk="globex").status == "offboarded"
    assert verdict(text) == "key_revoked"
    entry = AuditEntry.objects.filter(event="key.revocation_replayed").order_by("id").first()
    assert entry is not None
    body = json.loads(bytes(entry.body))
    assert (body["actor"], body["details"]["key_id"]) == ("system:host", revoked.key_id)
    assert body["details"]["journal"]["sequence"] == 7
    assert AuditEntry.objects.filter(event__endswith="_replayed").count() == 8
    assert Change.objects.filter(subject_kind="key", subject_id=revoked.key_id).count() == 3, "verifiers are notified"
    assert Notice.objects.count() == notices, "notices were sent at the time"
    assert verify_audit().first_broken is None
    require_current()


def test_replay_of_a_compromise_marks_a_revoked_key_as_compromised(scene: Scene) -> None:
    """The backup contains the revocation but not the later compromise report."""
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
    append_lines([log_line("key", key.key_id, "compromised", "key_compromise")])
    assert replay()[0] == 0
    assert (Key.objects.get(pk=key.pk).state, last_body("key.revocation_replayed")["details"]["was"]) == (
        "compromised",
        "deactivated",
    )


def test_replay_skips_expired_customer_tokens(scene: Scene, django_assert_num_queries: Any) -> None:
    """Expired tokens do not verify, revoked or not, so start spends no queries on them."""
    key, _ = issue(scene.sandbox)
    token, _ = token_of(key)
    line = log_line("customer_token", token.token_id)
    append_lines([replace(line, sequence=read_counter(), expires_at=now())])
    with django_assert_num_queries(1):  # the sequence of changes
        found = compare_revocation_log()
    assert (found.lost, found.highest) == ({}, read_counter())
    append_lines([replace(line, expires_at=now() + timedelta(seconds=60))])
    assert list(compare_revocation_log().lost) == [("customer_token", token.token_id)]
    assert replay()[0] == 0
    assert CustomerToken.objects.get(pk=token.pk).revoked_at is not None


def test_replay_is_repeatable_and_dry_run_changes_nothing(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    append_lines([log_line("key", key.key_id, "deactivated", "superseded", sequence=read_counter() + 50)])
    before = dump_tables()
    code, answer = replay("--dry-run")
    assert (code, answer["ok"]) == (1, False), "a dry run repairs nothing"
    assert answer["left"] == [{"kind": "key", "id": key.key_id}]
    assert dump_tables() == before
    assert replay()[0] == 0
    before = dump_tables()
    code, answer = replay()
    assert (code, answer["replayed"]) == (0, [])
    assert dump_tables() == before


def test_replay_lists_lines_without_a_row() -> None:
    """A line without a row proves nothing: it is listed and does not prevent the start."""
    make_scene()
    append_lines([log_line("key", "Unknown1", "deactivated", "superseded"), log_line("merchant", "nobody")])
    require_current()
    code, answer = replay()
    assert code == 0
    assert answer["unknown"] == [{"kind": "key", "id": "Unknown1"}, {"kind": "merchant", "id": "nobody"}]


def test_replay_advances_the_sequence_so_that_no_receipt_goes_back(scene: Scene) -> None:
    """Start is refused while the database's sequence is behind the log, even when no known revocation was lost."""
    highest = read_counter() + 1000
    append_lines([CaughtUp(highest)])
    with pytest.raises(ImproperlyConfigured, match=f"the log's is {highest}.*manage.py replay_revocations"):
        require_current()
    code, answer = replay()
    assert (code, answer["sequence_before"], answer["sequence"]) == (0, highest - 1000, highest)
    assert last_body("changes.sequence_moved")["details"]["to"] == highest
    key, _ = issue(scene.sandbox)
    assert min(Change.objects.filter(subject_id=key.key_id).values_list("sequence", flat=True)) > highest
    require_current()


def test_replay_advances_the_sequence_of_a_new_database() -> None:
    """A new database beside a log of its installation."""
    have_peppers()
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("DELETE FROM sqlite_sequence WHERE name = 'keyvault_change'")
        assert read_counter() == 0
    append_lines([CaughtUp(read_counter() + 77)])
    expected = compare_revocation_log().highest
    assert (replay()[0], read_counter()) == (0, expected)


def test_replay_of_a_damaged_log_applies_readable_lines_and_exits_1(scene: Scene, path: Path) -> None:
    """A damaged line is reported by number with a remedy; the other lines are applied."""
    key, _ = issue(scene.sandbox)
    append_lines([log_line("key", key.key_id, "deactivated", "superseded"), CaughtUp(1)])
    path.write_bytes(path.read_bytes() + b"garbage\n")
    with pytest.raises(ImproperlyConfigured, match=r"line 4 fails its checksum.*replay_revocations"):
        require_current()
    code, answer = replay()
    assert (code, answer["damaged"], len(answer["replayed"])) == (1, [4], 1)
    assert Key.objects.get(pk=key.pk).state == "deactivated"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    assert replay()[0] == 0
    require_current()


def test_replay_of_a_contended_row_reports_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    key, _ = issue(scene.sandbox)
    append_lines([log_line("key", key.key_id, "deactivated", "superseded")])

    def lose(*_: object, **__: object) -> None:
        raise StateConflictError("Somebody else changed this meanwhile.")

    with monkeypatch.context() as busy:
        busy.setattr(revocation_replays, "reapply_revocation", lose)
        code, answer = replay()
    assert (code, answer["left"]) == (1, [{"kind": "key", "id": key.key_id}])
    assert replay()[0] == 0


def test_replay_killed_halfway_is_repeatable(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = [issue(scene.sandbox, label=f"key {number}")[0] for number in range(3)]
    append_lines([log_line("key", key.key_id, "deactivated", "superseded") for key in ended])
    real = lifecycle.reapply_revocation
    done: list[Any] = []

    def die(*arguments: Any, **details: Any) -> None:
        if done:
            raise KeyboardInterrupt
        done.append(real(*arguments, **details))

    with monkeypatch.context() as killed:
        killed.setattr(revocation_replays, "reapply_revocation", die)
        with pytest.raises(KeyboardInterrupt):
            replay()
    code, answer = replay()
    assert (code, len(answer["replayed"])) == (0, 2)
    assert set(Key.objects.values_list("state", flat=True)) == {"deactivated"}


def test_replay_of_an_empty_installation_changes_nothing(path: Path) -> None:
    path.unlink()
    have_peppers()
    code, answer = replay()
    assert (code, answer["lines"], answer["replayed"]) == (0, 0, [])
    require_current()


def test_replay_of_an_unreadable_log_is_refused(path: Path) -> None:
    path.unlink()
    path.mkdir()
    with pytest.raises(CommandError, match="cannot be used: Is a directory"):
        replay()
    with pytest.raises(ImproperlyConfigured, match="cannot be read: Is a directory"):
        require_current()


def test_replay_that_could_not_read_the_anchor_exits_1_and_says_so(scene: Scene) -> None:
    error = BackendUnavailableError("The secrets manager does not answer.", internal="the Vault is sealed")
    with mock.patch.object(anchor, "secret_backend", side_effect=error):
        code, answer = replay()
    assert (code, answer["ok"], answer["anchor_unread"]) == (1, False, "the Vault is sealed")


def test_replay_as_text_lists_what_was_done(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    append_lines([log_line("key", key.key_id, "deactivated", "superseded"), log_line("key", "Unknown1")])
    output = io.StringIO()
    call_command("replay_revocations", stdout=output)
    for text in (f"revoked again: key {key.key_id}", "1 are not in the database", "is not behind the log"):
        assert text in output.getvalue()


def test_replay_reads_a_long_log_in_batches(scene: Scene, django_assert_max_num_queries: Any) -> None:
    """Start reads every line in batches of ids, never one by one."""
    key, _ = issue(scene.sandbox)
    append_lines([log_line("key", f"Unknown{number}", "deactivated", "superseded") for number in range(5_000)])
    append_lines([log_line("key", key.key_id, "deactivated", "superseded")])
    with django_assert_max_num_queries(20):
        found = compare_revocation_log()
    assert (list(found.lost), len(found.unknown)) == ([("key", key.key_id)], 5_000)


def test_ordinary_revocations_agree_with_the_log(scene: Scene) -> None:
    """A database contains every end that the service recorded, so an ordinary restart is not refused."""
    ends = [issue(scene.sandbox, label=str(reason))[0] for reason in RevocationReason]
    for key, reason in zip(ends, RevocationReason, strict=True):
        lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, reason)
    token, _ = make_token()
    service_tokens.revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), token)
    offboarding.offboard_merchant(grant(scene.admin, P.MERCHANTS_OFFBOARD), scene.merchant, "gone")
    subjects = [("key", key.key_id) for key in ends] + [("service_token", token.token_id), ("merchant", "acme")]
    append_lines(describe_ended(subjects, read_counter(), now()))
    require_current()
    assert replay()[1]["replayed"] == []


def test_start_is_refused_while_the_database_is_behind() -> None:
    """Server and workers run this check before they serve."""
    make_scene()
    append_lines([CaughtUp(read_counter() + 1)])
    with pytest.raises(ImproperlyConfigured, match="the database is behind the revocation log"):
        require_ready()

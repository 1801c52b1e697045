"""A missing or empty revocation log counts as lost: nothing starts until it is back or an operator accepts the loss."""

import io
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.revocation import RevocationReason
from keyvault.domain.revocation_log import CaughtUp, Ended, Opened, line_bytes
from keyvault.models import AuditEntry, BreakGlass, CustomerToken, Key, Notice
from keyvault.services.keys import lifecycle
from keyvault.services.operators.operators import find_operator
from keyvault.services.recording import transaction
from keyvault.services.recording.revocation_log import append_lines, read_lines
from keyvault.services.revocations.log_backfill import LogBackfill
from keyvault.services.revocations.log_opening import accept_loss, has_issued, open_revocation_log
from keyvault.services.revocations.replay import read_counter
from keyvault.services.startup.startup_checks import require_current
from keyvault.services.tokens.customer_tokens import forget_expired_tokens, issue_customer_token
from tests.factories import INSTALLATION, grant, have_peppers, issue, make_token, now, renew_revocation_log
from tests.services.conftest import Scene, make_scene
from tests.services.rows import last_body
from tests.services.tokens.test_customer_tokens import holder_of, token_of
from tests.verifiers import confirm, make_verifier

pytestmark = [pytest.mark.database, pytest.mark.django_db]

OPENED = Opened(INSTALLATION, now())


@pytest.fixture(autouse=True)
def path(tmp_path: Path, settings: Any) -> Path:
    """A path without a log."""
    settings.REVOCATION_LOG = tmp_path / "revocation_log"
    return Path(settings.REVOCATION_LOG)


@pytest.fixture
def scene(db: None) -> Scene:
    return make_scene()


def parsed_lines() -> list[Any]:
    return [line for _, line in read_lines()]


def read_bytes_if_any(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def accept_loss_by(operator: Any, reason: str = "the disk is gone") -> None:
    accept_loss(grant(HOST, P.REVOCATIONS_REPLAY), operator, find_operator("approver", "root"), reason)


def command(*options: str) -> str:
    output = io.StringIO()
    call_command("replay_revocations", *options, stdout=output)
    return output.getvalue()


# --- first start ------------------------------------------------------------------------------------------


def test_first_start_creates_the_log(scene: Scene, path: Path) -> None:
    """Merchants and operators exist, but nothing that could have been revoked."""
    require_current()
    assert [replace(line, at=OPENED.at) for line in parsed_lines()] == [OPENED]
    before = path.read_bytes()
    require_current()
    issue(scene.sandbox)
    require_current()
    assert path.read_bytes() == before


def test_first_start_before_the_setup_names_the_command() -> None:
    with pytest.raises(ImproperlyConfigured, match=r"run: manage\.py setup"):
        require_current()


def test_first_start_with_an_unwritable_log_names_the_cause(path: Path, settings: Any) -> None:
    have_peppers()
    path.touch()
    settings.REVOCATION_LOG = path / "revocation_log"
    with pytest.raises(ImproperlyConfigured, match=r"revocation log .* cannot be .*: Not a directory"):
        require_current()


def test_setup_creates_the_log_for_what_is_issued_before_the_first_start(path: Path) -> None:
    call_command("setup", stdout=io.StringIO())
    make_token()
    require_current()
    path.unlink()
    with pytest.raises(CommandError, match=r"will not start: .*--accept-loss"):
        call_command("setup", stdout=io.StringIO())
    assert not path.exists(), "a set-up must not accept a loss"


# --- lost logs --------------------------------------------------------------------------------------------


def _key(scene: Scene) -> None:
    issue(scene.sandbox)


def _service_token(scene: Scene) -> None:
    make_token()


def _customer_token(scene: Scene) -> None:
    token_of(issue(scene.sandbox)[0])


def _deleted_customer_token(scene: Scene) -> None:
    """Issue a token whose row the retention deletes."""
    issued_at = now() - timedelta(days=365)
    key, _ = issue(scene.sandbox)
    allowed = grant(holder_of(key), P.CUSTOMER_TOKENS_WRITE, scene.sandbox, at=issued_at)
    issue_customer_token(allowed, scene.sandbox, key, customer_id="alice")
    forget_expired_tokens(now())
    assert not CustomerToken.objects.exists()


@pytest.mark.parametrize("issue_one", [_key, _service_token, _customer_token, _deleted_customer_token])
@pytest.mark.parametrize(
    "remaining",
    [
        None,
        pytest.param(b"", marks=pytest.mark.sqlite),
        pytest.param(line_bytes(OPENED)[:20], marks=pytest.mark.sqlite),
    ],
)
def test_start_without_the_log_of_an_issued_key_or_token_is_refused(
    scene: Scene, path: Path, issue_one: Callable[[Scene], None], remaining: bytes | None
) -> None:
    """The log is missing, empty, or cut within its first line; a key revoked after the backup must not verify again."""
    issue_one(scene)
    if remaining is not None:
        path.write_bytes(remaining)
    message = r"revocation log .*revocation_log is missing or empty.*copy another host's.*--accept-loss --by NAME"
    with pytest.raises(ImproperlyConfigured, match=message) as refused:
        require_current()
    assert "\n" not in str(refused.value)
    assert read_bytes_if_any(path) == remaining, "the next start must be refused too"
    for options in ((), ("--dry-run",)):
        with pytest.raises(CommandError, match=message):
            command(*options)


def test_start_checks_one_row_of_each_kind_without_counting(scene: Scene) -> None:
    with CaptureQueriesContext(connection) as queries:
        assert not has_issued()
    assert len(queries) == 2
    assert all(query["sql"].endswith("LIMIT 1") for query in queries)


def test_revocation_without_a_log_succeeds_alarms_and_creates_none(scene: Scene, path: Path) -> None:
    """A leaked key is revoked whatever happened to the log; a file created for it would pass for the lost one."""
    for remaining in (None, b""):
        if remaining is not None:
            path.write_bytes(remaining)
        key, _ = issue(scene.sandbox, label=str(remaining))
        lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
        assert Key.objects.get(pk=key.pk).state == "deactivated"
        assert read_bytes_if_any(path) == remaining
    assert Notice.objects.get(kind=NoticeKind.REVOCATION_LOG_FAILED).payload == {"why": "No such file or directory"}


@pytest.mark.parametrize("remaining", [None, b""])
def test_backfill_without_a_log_creates_none_and_alarms(scene: Scene, path: Path, remaining: bytes | None) -> None:
    """A running worker reports that the log was removed, and does not hide it."""
    renew_revocation_log(path)
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
    backfill = LogBackfill()
    backfill.run(now())
    path.unlink() if remaining is None else path.write_bytes(remaining)
    assert backfill.run(now()) == LogBackfill().run(now()) == 0
    assert read_bytes_if_any(path) == remaining
    assert Notice.objects.filter(kind=NoticeKind.REVOCATION_LOG_FAILED, is_alarm=True).count() == 1


def test_start_with_the_log_of_another_installation_is_refused(scene: Scene, path: Path) -> None:
    """Another installation's log does not record the revocations made here."""
    issue(scene.sandbox)
    path.write_bytes(line_bytes(replace(OPENED, installation="another")))
    before = path.read_bytes()
    with pytest.raises(ImproperlyConfigured, match=f"belongs to installation another, this database to {INSTALLATION}"):
        require_current()
    assert path.read_bytes() == before


def test_start_with_a_log_without_installation_is_refused(scene: Scene, path: Path) -> None:
    """It may be another installation's, or its beginning was lost."""
    issue(scene.sandbox)
    before = line_bytes(CaughtUp(1))
    path.write_bytes(before)
    with pytest.raises(ImproperlyConfigured, match="does not name its installation"):
        require_current()
    assert path.read_bytes() == before


def test_start_of_a_new_host_with_a_copied_log_succeeds(scene: Scene, path: Path) -> None:
    """A second host refuses what the first would, and appends the revocations from then on."""
    other = path.with_name("of-another-host")
    renew_revocation_log(other)
    key, _ = issue(scene.sandbox)
    with pytest.raises(ImproperlyConfigured, match="new host"):
        require_current()
    path.write_bytes(other.read_bytes())
    require_current()
    append_lines([Ended(1, now(), "key", key.key_id, "deactivated", "superseded")])
    with pytest.raises(ImproperlyConfigured, match="valid again"):
        require_current()


# --- accepted losses --------------------------------------------------------------------------------------


def test_loss_accepted_is_audited_alarmed_and_recorded_in_the_new_log(scene: Scene, path: Path) -> None:
    """Three places record the operator and the reason; the worker then fills the log from the rows."""
    renew_revocation_log(path)
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
    path.unlink()
    output = command("--accept-loss", "--by", "admin", "--approved-by", "approver", "--reason", "the disk is gone")
    assert "the loss is accepted" in output
    body = last_body("journal.loss_accepted")
    assert (body["actor"], body["channel"]) == ("system:host", "command_line")
    assert {name: body["details"][name] for name in ("by", "why", "journal")} == {
        "by": "admin",
        "why": "the disk is gone",
        "journal": str(path),
    }
    assert body["details"]["host_user"]
    act = BreakGlass.objects.get()
    assert (act.event, act.operator.username, act.is_claimed) == ("journal.loss_approved", "approver", True)
    assert act.requester_person == scene.admin.person
    notice = Notice.objects.get(kind=NoticeKind.REVOCATION_LOG_LOSS_ACCEPTED)
    assert (notice.is_alarm, notice.payload, notice.deliveries.count()) == (
        True,
        {"why": "the disk is gone"},
        0,
    )
    assert [replace(line, at=OPENED.at) for line in parsed_lines()] == [
        replace(OPENED, accepted_by="admin", reason="the disk is gone")
    ]
    require_current()
    verifier = make_verifier()
    confirm(verifier, read_counter())
    assert LogBackfill().run(now()) == 1
    assert parsed_lines()[1].id == key.key_id


def test_loss_accepted_without_an_audit_entry_is_refused(
    scene: Scene, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log without that entry would let the service start."""
    issue(scene.sandbox)

    def fail(**_: object) -> None:
        raise OSError("the log is full")

    monkeypatch.setattr(transaction, "append_entries", fail)
    with pytest.raises(OSError, match="the log is full"):
        accept_loss_by(scene.admin)
    assert not path.exists()


def test_loss_accepted_without_a_reason_or_a_known_operator_is_refused(scene: Scene, path: Path) -> None:
    issue(scene.sandbox)
    with pytest.raises(RequestInvalidError, match="requires a reason"):
        accept_loss_by(scene.admin, " ")
    with pytest.raises(CommandError, match="There is no operator unknown"):
        command("--accept-loss", "--by", "unknown", "--approved-by", "approver", "--reason", "x")
    for options in (("--accept-loss",), ("--accept-loss", "--by", "admin"), ("--by", "admin", "--reason", "x")):
        with pytest.raises(CommandError, match="go together") as usage:
            command(*options)
        assert usage.value.returncode == 2
    with pytest.raises(CommandError, match="cannot be combined with --dry-run"):
        command("--accept-loss", "--by", "admin", "--approved-by", "approver", "--reason", "x", "--dry-run")
    assert not path.exists()
    assert not AuditEntry.objects.filter(event="journal.loss_accepted").exists()


def test_loss_accepted_of_an_existing_log_is_refused(scene: Scene, path: Path) -> None:
    """An existing log is never discarded, not even a damaged one."""
    with pytest.raises(StateConflictError, match="nothing was issued"):
        accept_loss_by(scene.admin)
    issue(scene.sandbox)
    for text in (line_bytes(OPENED), line_bytes(replace(OPENED, installation="another")), b"garbage\n"):
        path.write_bytes(text)
        with pytest.raises(StateConflictError, match="is not lost"):
            accept_loss_by(scene.admin)
        assert path.read_bytes() == text
    assert not AuditEntry.objects.filter(event="journal.loss_accepted").exists()


def test_loss_accepted_with_a_secret_in_its_reason_is_redacted(scene: Scene, path: Path) -> None:
    """The reason is kept permanently, in the log too."""
    _, text = issue(scene.sandbox)
    accept_loss_by(scene.admin, f"lost {text.reveal()}")
    assert text.reveal() not in path.read_text()
    assert text.reveal() not in str(Notice.objects.get(kind=NoticeKind.REVOCATION_LOG_LOSS_ACCEPTED).payload)


def test_log_opened_twice_by_first_starts_has_one_opening_line(path: Path) -> None:
    have_peppers()
    assert open_revocation_log(now())
    assert open_revocation_log(now())
    assert len(parsed_lines()) == 1

"""A log that is missing or empty is lost, not new: nothing starts until it is back or somebody answers for it."""

import io
from collections.abc import Callable
from dataclasses import replace
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
from keyvault.models import AuditEntry, Key, Notice
from keyvault.services.keys import lifecycle
from keyvault.services.recording import transaction
from keyvault.services.recording.revocation_log import append_lines, read_lines
from keyvault.services.revocations.log_backfill import LogBackfill
from keyvault.services.revocations.log_opening import accept_loss, has_issued, open_revocation_log
from keyvault.services.revocations.replay import read_counter
from keyvault.services.startup.startup_checks import require_current
from tests.factories import INSTALLATION, grant, have_peppers, issue, make_token, now, renew_revocation_log
from tests.services.conftest import Scene, make_scene
from tests.services.rows import last_body
from tests.services.tokens.test_customer_tokens import token_of
from tests.verifiers import confirm, make_verifier

pytestmark = [pytest.mark.database, pytest.mark.django_db]

OPENED = Opened(INSTALLATION, now())


@pytest.fixture(autouse=True)
def path(tmp_path: Path, settings: Any) -> Path:
    """There is none."""
    settings.REVOCATION_LOG = tmp_path / "revocation_log"
    return Path(settings.REVOCATION_LOG)


@pytest.fixture
def scene(db: None) -> Scene:
    return make_scene()


def lines() -> list[Any]:
    return [line for _, line in read_lines()]


def read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def accept(operator: Any, reason: str = "the disk is gone") -> None:
    accept_loss(grant(HOST, P.REVOCATIONS_REPLAY), operator, reason)


def command(*words: str) -> str:
    output = io.StringIO()
    call_command("replay_revocations", *words, stdout=output)
    return output.getvalue()


# --- the first start --------------------------------------------------------------------------------------


def test_first_start_makes_the_revocation_log(scene: Scene, path: Path) -> None:
    """Merchants and operators are there, and nothing that could have been revoked."""
    require_current()
    assert [replace(line, at=OPENED.at) for line in lines()] == [OPENED]
    before = path.read_bytes()
    require_current()
    issue(scene.sandbox)
    require_current()
    assert path.read_bytes() == before


def test_first_start_before_the_setup_says_so() -> None:
    with pytest.raises(ImproperlyConfigured, match=r"run: manage\.py setup"):
        require_current()


def test_first_start_where_the_revocation_log_cannot_be_written_says_so(path: Path, settings: Any) -> None:
    have_peppers()
    path.touch()
    settings.REVOCATION_LOG = path / "revocation_log"
    with pytest.raises(ImproperlyConfigured, match=r"revocation log .* cannot be .*: Not a directory"):
        require_current()


def test_setup_makes_the_revocation_log_so_that_what_is_issued_before_the_first_start_is_no_riddle(path: Path) -> None:
    call_command("setup", stdout=io.StringIO())
    make_token()
    require_current()
    path.unlink()
    with pytest.raises(CommandError, match=r"will not start: .*--accept-loss"):
        call_command("setup", stdout=io.StringIO())
    assert not path.exists(), "a set-up is no acceptance"


# --- what is lost -----------------------------------------------------------------------------------------


def _key(scene: Scene) -> None:
    issue(scene.sandbox)


def _service_token(scene: Scene) -> None:
    make_token()


def _customer_token(scene: Scene) -> None:
    token_of(issue(scene.sandbox)[0])


@pytest.mark.parametrize("made", [_key, _service_token, _customer_token])
@pytest.mark.parametrize("left", [None, b"", line_bytes(OPENED)[:20]])
def test_start_without_the_revocation_log_of_what_was_issued_is_refused(
    scene: Scene, path: Path, made: Callable[[Scene], None], left: bytes | None
) -> None:
    """Missing, empty, or cut within its first line: a key that was revoked after the backup is not good again."""
    made(scene)
    if left is not None:
        path.write_bytes(left)
    wanted = r"revocation log .*revocation_log is missing or empty.*copy another host's.*--accept-loss --by NAME"
    with pytest.raises(ImproperlyConfigured, match=wanted) as refused:
        require_current()
    assert "\n" not in str(refused.value)
    assert read(path) == left, "and the next start is refused too"
    for words in ((), ("--dry-run",)):
        with pytest.raises(CommandError, match=wanted):
            command(*words)


def test_start_asks_for_one_row_of_each_kind_and_never_counts(scene: Scene) -> None:
    with CaptureQueriesContext(connection) as asked:
        assert not has_issued()
    assert len(asked) == 3
    assert all(query["sql"].endswith("LIMIT 1") for query in asked)


def test_revocation_without_a_revocation_log_goes_on_is_alarmed_and_makes_none(scene: Scene, path: Path) -> None:
    """A leaked key ends whatever became of the log; a file that began with it would pass for the lost one."""
    for left in (None, b""):
        if left is not None:
            path.write_bytes(left)
        key, _ = issue(scene.sandbox, label=str(left))
        lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
        assert Key.objects.get(pk=key.pk).state == "deactivated"
        assert read(path) == left
    assert Notice.objects.get(kind=NoticeKind.REVOCATION_LOG_FAILED).payload == {"why": "No such file or directory"}


@pytest.mark.parametrize("left", [None, b""])
def test_healing_makes_no_revocation_log_and_alarms(scene: Scene, path: Path, left: bytes | None) -> None:
    """A worker that runs on while the log is taken away tells of it, and does not hide it."""
    renew_revocation_log(path)
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
    backfill = LogBackfill()
    backfill.run(now())
    path.unlink() if left is None else path.write_bytes(left)
    assert backfill.run(now()) == LogBackfill().run(now()) == 0
    assert read(path) == left
    assert Notice.objects.filter(kind=NoticeKind.REVOCATION_LOG_FAILED, is_alarm=True).count() == 1


def test_start_with_the_revocation_log_of_another_installation_is_refused(scene: Scene, path: Path) -> None:
    """A path that leads to somebody else's log says nothing about what was revoked here."""
    issue(scene.sandbox)
    path.write_bytes(line_bytes(replace(OPENED, installation="another")))
    before = path.read_bytes()
    with pytest.raises(ImproperlyConfigured, match=f"belongs to installation another, this database to {INSTALLATION}"):
        require_current()
    assert path.read_bytes() == before


def test_start_with_the_revocation_log_of_an_earlier_release_takes_it_for_ours(scene: Scene, path: Path) -> None:
    """An upgrade needs no act where there is a log. One that the database is behind is not taken on trust."""
    issue(scene.sandbox)
    path.write_bytes(line_bytes(CaughtUp(read_counter() + 1)))
    with pytest.raises(ImproperlyConfigured, match="behind"):
        require_current()
    assert len(lines()) == 1
    path.write_bytes(line_bytes(CaughtUp(1)))
    require_current()
    assert [replace(line, at=OPENED.at) for line in lines()[1:]] == [OPENED]
    require_current()
    assert len(lines()) == 2


def test_start_of_a_new_host_with_a_copy_of_anothers_revocation_log(scene: Scene, path: Path) -> None:
    """How a second host joins: it refuses what the first one would, and appends what is revoked from then on."""
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


# --- what somebody answers for ----------------------------------------------------------------------------


def test_accepted_loss_is_audited_alarmed_and_noted_in_the_new_revocation_log(scene: Scene, path: Path) -> None:
    """Who answers for it, and why, is on record in three places; the worker then fills the log from the rows."""
    renew_revocation_log(path)
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
    path.unlink()
    answer = command("--accept-loss", "--by", "admin", "--reason", "the disk is gone")
    assert "the loss is accepted" in answer
    body = last_body("journal.loss_accepted")
    assert (body["actor"], body["channel"]) == ("system:host", "command_line")
    assert {name: body["details"][name] for name in ("by", "why", "journal")} == {
        "by": "admin",
        "why": "the disk is gone",
        "journal": str(path),
    }
    assert body["details"]["host_user"]
    notice = Notice.objects.get(kind=NoticeKind.REVOCATION_LOG_LOSS_ACCEPTED)
    assert (notice.is_alarm, notice.payload, notice.deliveries.count()) == (
        True,
        {"why": "the disk is gone"},
        0,
    )
    assert [replace(line, at=OPENED.at) for line in lines()] == [
        replace(OPENED, accepted_by="admin", reason="the disk is gone")
    ]
    require_current()
    verifier = make_verifier()
    confirm(verifier, read_counter())
    assert LogBackfill().run(now()) == 1
    assert lines()[1].id == key.key_id


def test_loss_whose_audit_entry_cannot_be_written_is_not_accepted(
    scene: Scene, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No log without the record of who answers for it: with one the service would start."""
    issue(scene.sandbox)

    def fail(**_: object) -> None:
        raise OSError("the log is full")

    monkeypatch.setattr(transaction, "append_entry", fail)
    with pytest.raises(OSError, match="the log is full"):
        accept(scene.admin)
    assert not path.exists()


def test_loss_is_not_accepted_without_a_reason_or_a_person_who_is_there(scene: Scene, path: Path) -> None:
    issue(scene.sandbox)
    with pytest.raises(RequestInvalidError, match="requires a reason"):
        accept(scene.admin, " ")
    with pytest.raises(CommandError, match="There is no operator nobody"):
        command("--accept-loss", "--by", "nobody", "--reason", "x")
    for words in (("--accept-loss",), ("--accept-loss", "--by", "admin"), ("--by", "admin", "--reason", "x")):
        with pytest.raises(CommandError, match="--by NAME and --reason WHY go together") as usage:
            command(*words)
        assert usage.value.returncode == 2
    with pytest.raises(CommandError, match="cannot be combined with --dry-run"):
        command("--accept-loss", "--by", "admin", "--reason", "x", "--dry-run")
    assert not path.exists()
    assert not AuditEntry.objects.filter(event="journal.loss_accepted").exists()


def test_loss_of_what_is_not_lost_is_not_accepted(scene: Scene, path: Path) -> None:
    """Nobody throws the record of revocations away with it, not even a damaged one."""
    with pytest.raises(StateConflictError, match="nothing was issued"):
        accept(scene.admin)
    issue(scene.sandbox)
    for text in (line_bytes(OPENED), line_bytes(replace(OPENED, installation="another")), b"garbage\n"):
        path.write_bytes(text)
        with pytest.raises(StateConflictError, match="is not lost"):
            accept(scene.admin)
        assert path.read_bytes() == text
    assert not AuditEntry.objects.filter(event="journal.loss_accepted").exists()


def test_reason_of_a_loss_keeps_no_secret(scene: Scene, path: Path) -> None:
    """It is kept for good, in the log too."""
    _, text = issue(scene.sandbox)
    accept(scene.admin, f"lost {text.reveal()}")
    assert text.reveal() not in path.read_text()
    assert text.reveal() not in str(Notice.objects.get(kind=NoticeKind.REVOCATION_LOG_LOSS_ACCEPTED).payload)


def test_revocation_log_made_by_two_first_starts_at_once_has_one_beginning(path: Path) -> None:
    have_peppers()
    assert open_revocation_log(now())
    assert open_revocation_log(now())
    assert len(lines()) == 1

"""The newest checkpoint outside the database: nothing below it is signed, and verification fails."""

import logging
from pathlib import Path
from unittest import mock

import pytest
from django.conf import settings
from django.db.models import F

from keyvault.backends.base import EVIDENCE_VERSIONS, BackendUnavailableError, Mount
from keyvault.backends.local import LocalKeystore
from keyvault.domain.audit import GENESIS, entry_bytes, entry_hash
from keyvault.domain.checkpoints import UNSIGNED_FOR, Checkpoint, checkpoint_bytes
from keyvault.models import AuditChain, AuditCheckpoint, AuditEntry
from keyvault.services.audit import checkpoint_marks, checkpoints
from keyvault.services.audit.checkpoint_marks import LOGGED_EVERY, read_marks
from keyvault.services.audit.checkpoints import (
    ScopeReport,
    find_checkpoint,
    find_newest,
    gather_public_keys,
    list_checkpoint_status,
    read_heads,
    sign_due,
    verify_checkpoints,
)
from keyvault.services.recording.audit_chain import verify_audit
from keyvault.services.recording.revocation_log import read_lines
from keyvault.services.secrets.backend import secret_backend
from tests.backends.vault.installation import InstalledVault
from tests.factories import forget_evidence, make_merchant, now, renew_revocation_log
from tests.services.audit.test_checkpoints import CHAIN, STEP, tampering, write
from tests.starting_rows import start_with

pytestmark = [pytest.mark.database, pytest.mark.django_db]


@pytest.fixture
def signed(db: None) -> None:
    """Two sandbox checkpoints."""
    start_with(sign_twice)


def sign_twice() -> None:
    make_merchant("acme")
    for turn in range(2):
        write()
        sign_due(now() + turn * STEP)


def verify() -> ScopeReport:
    keys, unchecked = gather_public_keys({})
    return next(each for each in verify_checkpoints(keys, {}, unchecked, now()) if each.scope == "sandbox")


def numbers() -> list[int]:
    return list(AuditCheckpoint.objects.filter(scope="sandbox").order_by("number").values_list("number", flat=True))


def rewrite_everything() -> None:
    """Forge the entries, compute every hash again, and delete every checkpoint, with the database alone.

    The row of the chain says that no checkpoint has signed it, so that it agrees with the missing checkpoints.
    """
    with tampering():
        previous = GENESIS
        for entry in AuditEntry.objects.filter(chain_id=CHAIN).order_by("sequence"):
            body = entry_bytes(
                chain=CHAIN,
                sequence=entry.sequence,
                at=entry.at,
                event=entry.event,
                actor="system:nobody",
                channel="console",
                details={},
            )
            digest = entry_hash(previous, body)
            AuditEntry.objects.filter(pk=entry.pk).update(
                body=body, previous=previous, hash=digest, actor="system:nobody"
            )
            previous = digest
        AuditChain.objects.filter(name=CHAIN).update(
            head_hash=previous, signed_in=0, signed_sequence=0, unsigned_since=F("newest_at")
        )
        AuditCheckpoint.objects.all().delete()


def test_sign_due_of_a_log_rewritten_without_its_checkpoints_is_refused(
    signed: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A database writer cannot make the honest worker sign a rewritten log."""
    rewrite_everything()
    assert verify_audit().first_broken is None
    with caplog.at_level(logging.ERROR):
        assert sign_due(now() + 2 * STEP) == 0
    assert numbers() == []
    assert {record.getMessage() for record in caplog.records} == {"the audit log is damaged: no checkpoint is signed"}
    broken = verify().broken
    assert broken is not None
    assert "the log was rolled back" in broken.why
    status = next(each for each in list_checkpoint_status() if each.scope == "sandbox")
    assert "checkpoint 2 was recorded outside the database and is missing" in str(status.fault)


@pytest.mark.parametrize("lost", ["keystore", "log"])
def test_rewritten_log_is_refused_with_either_mark(signed: None, lost: str) -> None:
    """The secret backend and the revocation log each suffice. The log's mark is older."""
    if lost == "keystore":
        forget_evidence(Path(settings.DATA_DIR) / "keystore.sqlite3")
    else:
        renew_revocation_log(settings.REVOCATION_LOG)
    rewrite_everything()
    assert sign_due(now() + 2 * STEP) == 0
    assert verify().broken is not None


def test_cut_log_is_refused(signed: None) -> None:
    """The newest entries and the checkpoint that signs them were removed together."""
    with tampering():
        last = AuditEntry.objects.filter(chain_id=CHAIN).order_by("sequence").first()
        assert last is not None
        AuditEntry.objects.filter(chain_id=CHAIN, sequence__gt=1).delete()
        AuditChain.objects.filter(name=CHAIN).update(
            sequence=1, head_hash=last.hash, signed_in=1, signed_sequence=1, unsigned_since=None
        )
        AuditCheckpoint.objects.filter(scope="sandbox", number=2).delete()
    assert sign_due(now() + 2 * STEP) == 0
    assert numbers() == [1]
    assert verify().broken is not None


def test_marks_name_the_newest_checkpoint(signed: None) -> None:
    newest, marks = find_newest("sandbox"), read_marks("sandbox")
    assert newest is not None
    assert marks.stored is not None
    assert marks.logged is not None
    assert (marks.stored.number, marks.stored.digest) == (2, newest.digest.hex())
    assert marks.logged.number == 1
    assert verify().unmarked is None


def test_log_gets_a_mark_once_an_hour(signed: None) -> None:
    """The log is read whole at every start, so it does not grow with every checkpoint."""
    write()
    sign_due(now() + LOGGED_EVERY + STEP)
    lines = [line for _, line in read_lines() if getattr(line, "scope", "") == "sandbox"]
    assert [getattr(line, "number", 0) for line in lines] == [1, 3]


def test_damaged_last_mark_of_the_log_leaves_the_one_before(signed: None) -> None:
    write()
    sign_due(now() + LOGGED_EVERY + STEP)
    text = settings.REVOCATION_LOG.read_bytes()
    settings.REVOCATION_LOG.write_bytes(text[:-2] + b"?\n")
    logged = [read_marks(scope).logged for scope in ("sandbox", "service")]
    assert {mark.number for mark in logged if mark is not None} <= {1, 3}
    assert 1 in {mark.number for mark in logged if mark is not None}


def test_worker_killed_before_the_mark_writes_it_in_the_next_run(signed: None) -> None:
    write()
    with mock.patch("keyvault.services.audit.checkpoints.write_marks"):
        assert sign_due(now() + 2 * STEP) == 1
    assert verify().broken is None
    sign_due(now() + 3 * STEP)
    marks = read_marks("sandbox")
    assert marks.stored is not None
    assert marks.stored.number == 3


def forge_checkpoint() -> None:
    """Add checkpoint 3 for the present heads, in the name of a signer that this service does not know."""
    newest, at = find_newest("sandbox"), now()
    assert newest is not None
    body = checkpoint_bytes(Checkpoint("sandbox", 3, at, newest.digest, read_heads("sandbox")))
    AuditCheckpoint.objects.create(
        scope="sandbox",
        number=3,
        at=at,
        body=body,
        signature=bytes(64),
        signer="vault:elsewhere/audit",
        key_version=1,
    )


def test_checkpoint_forged_under_another_name_is_not_recorded(signed: None) -> None:
    """A database writer cannot have a checkpoint recorded that this service's signer has not signed."""
    write()
    forge_checkpoint()
    write()
    sign_due(now() + 2 * STEP)
    marks = read_marks("sandbox")
    own = find_newest("sandbox")
    assert own is not None
    assert {mark.digest for mark in marks} & {find_digest(3)} == set()
    assert (own.number, marks.stored and marks.stored.digest) == (4, own.digest.hex())


def find_digest(number: int) -> str:
    found = find_checkpoint("sandbox", number)
    assert found is not None
    return found.digest.hex()


def test_rewritten_log_below_a_forged_checkpoint_is_not_signed(signed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded checkpoint is kept, and a forged one after it and the row agree with the rewritten entries.

    It is not the turn of the recorded checkpoint to be compared, as in a log of many checkpoints.
    """
    monkeypatch.setitem(checkpoints._walked, "sandbox", 2)  # The first turn is random otherwise.
    kept = list(AuditCheckpoint.objects.values())
    rewrite_everything()
    AuditCheckpoint.objects.bulk_create(AuditCheckpoint(**row) for row in kept)
    forge_checkpoint()
    write()
    assert sign_due(now() + 2 * STEP) == 0
    assert numbers() == [1, 2, 3]
    marks = read_marks("sandbox")
    assert marks.stored is not None
    assert marks.stored.number == 2


def test_checkpoint_without_the_backend_is_kept_and_marked_later(
    signed: None, caplog: pytest.LogCaptureFixture
) -> None:
    write()
    unavailable = BackendUnavailableError("The secrets manager does not answer.", internal="sealed")
    with mock.patch.object(LocalKeystore, "put", side_effect=unavailable), caplog.at_level(logging.WARNING):
        assert sign_due(now() + 2 * STEP) == 1
    assert "the newest checkpoint is not recorded outside the database" in caplog.messages
    sign_due(now() + 3 * STEP)
    assert next(mark.number for mark in read_marks("sandbox")) == 3


def test_verify_without_the_backend_says_that_it_did_not_compare(signed: None) -> None:
    unavailable = BackendUnavailableError("The secrets manager does not answer.", internal="sealed")
    with mock.patch.object(checkpoint_marks, "secret_backend", side_effect=unavailable):
        assert verify().unmarked == "sealed"


def test_rewritten_log_is_detected_on_a_host_without_a_revocation_log(signed: None) -> None:
    """Guarantee: a new container compares with the secret backend's mark before its first start."""
    settings.REVOCATION_LOG.unlink()
    rewrite_everything()
    report = verify()
    assert report.unmarked is None
    assert report.broken is not None


def test_evidence_keeps_a_bounded_number_of_versions(signed: None) -> None:
    """The embedded keystore does not grow with the checkpoints."""
    for turn in range(2, EVIDENCE_VERSIONS + 4):
        write()
        sign_due(now() + turn * STEP)
    kept = [each.version for each in secret_backend().versions(Mount.EVIDENCE, "sandbox/checkpoint")]
    assert kept == list(range(5, EVIDENCE_VERSIONS + 5))[: len(kept)]
    assert len(kept) == EVIDENCE_VERSIONS


def test_late_checkpoint_is_reported(signed: None) -> None:
    """Until an entry is signed, a database writer can change it unnoticed."""
    assert verify().late == 0
    write()
    sign_due(now() + UNSIGNED_FOR + STEP)
    report = verify()
    assert (report.broken, report.late) == (None, 1)
    assert "checkpoint 3" in str(report.first_late)


# --- with the real Vault server ----------------------------------------------------------------------------------


def test_vault_keeps_the_mark_and_the_rewritten_log_is_refused(vault_service: InstalledVault) -> None:
    make_merchant("acme")
    for turn in range(2):
        write()
        sign_due(now() + turn * STEP)
    stored = read_marks("sandbox").stored
    assert stored is not None
    assert stored.number == 2
    rewrite_everything()
    assert sign_due(now() + 3 * STEP) == 0
    assert verify().broken is not None

"""Signed checkpoints of the audit log: signing, verification, and export."""

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.conf import settings
from django.core.management.base import CommandError
from django.db import connection, transaction
from django.db.models import F
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from keyvault_client.export_check import ExportCheck

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.backends import meters
from keyvault.backends.base import BackendUnavailableError, Mount
from keyvault.backends.local import KEYSTORE_NAME, LocalKeystore
from keyvault.backends.vault.layout import SecretsEngine
from keyvault.domain.audit import Break, entry_bytes, entry_hash
from keyvault.domain.audit_records import gather_kept, parse_record, record_line
from keyvault.domain.checkpoints import (
    FIRST,
    UNSIGNED_FOR,
    Checkpoint,
    Head,
    checkpoint_bytes,
    parse_checkpoint,
    scope_of,
)
from keyvault.domain.environments import Environment
from keyvault.management.json_command import call
from keyvault.models import Account, AuditChain, AuditCheckpoint, AuditEntry, WorkLease
from keyvault.models.triggers import ensure_triggers
from keyvault.services.audit import checkpoints
from keyvault.services.audit.checkpoints import (
    CHECKPOINT_EVERY,
    ScopeReport,
    gather_public_keys,
    list_checkpoint_status,
    list_checkpoints,
    read_public_keys,
    sign_due,
    signing_lease,
    verify_checkpoints,
)
from keyvault.services.audit.export import export_log, export_newest
from keyvault.services.audit.signers import LOCAL, LocalSigner
from keyvault.services.recording.audit_chain import verify_audit
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.backend import secret_backend, vault_backend
from keyvault.services.startup.system_health import find_system_health
from keyvault.services.work import leases
from tests.backends.vault.installation import InstalledVault, installed, serving_from
from tests.factories import (
    PRODUCTION,
    SANDBOX,
    account,
    forget_evidence,
    grant,
    make_merchant,
    now,
    own_keystore,
    renew_revocation_log,
)
from tests.servers.openbao import VaultOnDisk
from tests.services.racing import race
from tests.services.rows import disable_triggers
from tests.starting_rows import start_with

pytestmark = [pytest.mark.database, pytest.mark.django_db]

CHAIN = "account:acme/sandbox"
SCOPES = ["sandbox", "production", "service"]
STEP = CHECKPOINT_EVERY + timedelta(seconds=1)


def write(merchant_id: str = "acme", environment: Environment = SANDBOX) -> None:
    """Append one entry to the merchant's chain."""
    place = account(merchant_id, environment)
    with recorded(grant(HOST, P.MERCHANTS_WRITE, place), P.MERCHANTS_WRITE, "test.wrote", account=place):
        pass


@pytest.fixture
def moments() -> Iterator[datetime]:
    """Yield times that are one checkpoint interval apart."""
    return _intervals()


def _intervals() -> Iterator[datetime]:
    at = now()
    while True:
        yield at
        at += STEP


@pytest.fixture
def written(db: None, moments: Iterator[datetime]) -> Iterator[datetime]:
    """Three sandbox checkpoints, at entries 1, 3 and 5 of acme's chain, followed by a sixth entry."""
    start_with(_write_and_sign)
    for _ in range(3):
        next(moments)
    return moments


def _write_and_sign() -> None:
    moments = _intervals()
    make_merchant("acme")
    write("acme", PRODUCTION)
    write()
    sign_due(next(moments))
    for _ in range(2):
        write()
        write()
        sign_due(next(moments))
    write()
    assert AuditCheckpoint.objects.filter(scope="sandbox").count() == 3


@contextmanager
def tampering() -> Iterator[None]:
    """Drop the triggers for the block, as an attacker with database access does."""
    disable_triggers()
    yield
    disable_triggers()
    ensure_triggers(connection)


def lose_marks() -> None:
    """Lose the keystore's evidence and the revocation log."""
    forget_evidence(Path(settings.DATA_DIR) / "keystore.sqlite3")
    renew_revocation_log(settings.REVOCATION_LOG)


def verify(kept: Any = None) -> dict[str, ScopeReport]:
    keys, unchecked = gather_public_keys({})
    assert unchecked == {}
    return {report.scope: report for report in verify_checkpoints(keys, kept or {}, unchecked, now())}


def first_break() -> Break | None:
    return verify()["sandbox"].broken


# --- signing ---------------------------------------------------------------------------------------------------


def test_sign_due_signs_the_head_of_every_chain_of_each_scope(written: Iterator[datetime]) -> None:
    sign_due(next(written))
    for scope in SCOPES:
        assert {chain: (head.sequence, head.hash) for chain, head in signed_heads(scope).items()} == {
            chain.name: (chain.sequence, bytes(chain.head_hash))
            for chain in AuditChain.objects.filter(sequence__gt=0)
            if scope_of(chain.name) == scope
        }
    assert {scope: (report.broken, report.unsigned) for scope, report in verify().items()} == dict.fromkeys(
        SCOPES, (None, 0)
    )


def signed_heads(scope: str) -> dict[str, Head]:
    """Return the head of each chain in the checkpoint that signed it last."""
    found: dict[str, Head] = {}
    for signed in list_checkpoints(scope):
        found |= parse_checkpoint(signed.body).heads
    return found


def test_sign_due_signs_only_the_chains_that_have_changed(written: Iterator[datetime]) -> None:
    """Guarantee: the cost of a checkpoint does not grow with the number of chains."""
    make_merchant("globex")
    write("globex")
    sign_due(next(written))
    write("globex")
    sign_due(next(written))
    globex = "account:globex/sandbox"
    assert [set(parse_checkpoint(_checkpoint(number)).heads) for number in (3, 4, 5)] == [
        {CHAIN},
        {CHAIN, globex},
        {globex},
    ]
    assert {report.broken for report in verify().values()} == {None}


def _checkpoint(number: int) -> bytes:
    return bytes(_rows(number=number).get().body)


def test_sign_due_of_an_unchanged_log_reads_a_batch_of_chains(written: Iterator[datetime]) -> None:
    """With nothing to sign, each scope costs the same few look-ups, whatever the number of chains."""
    for name in ("globex", "initech"):
        make_merchant(name)
    sign_due(next(written))
    bounded = mock.patch.multiple(checkpoints, CHECKED_ACCOUNTS=1, WALKED_CHECKPOINTS=0)
    with bounded, CaptureQueriesContext(connection) as made:
        assert sign_due(next(written)) == 0
    reads = [query["sql"] for query in made.captured_queries if "keyvault_auditchain" in query["sql"]]
    assert len(reads) == 3 * len(SCOPES)
    assert all('"unsigned_since" IS NOT NULL' in sql or '"name" IN (' in sql for sql in reads)
    assert not any("globex" in sql or "initech" in sql for sql in reads)
    assert not any("keyvault_auditentry" in query["sql"] for query in made.captured_queries)


@pytest.mark.parametrize("chain", [CHAIN, "platform", "every"])
def test_sign_due_with_every_chain_recorded_as_signed_finds_it(
    written: Iterator[datetime], caplog: pytest.LogCaptureFixture, chain: str
) -> None:
    """Guarantee: a database writer cannot make the worker stop signing silently: with nothing to sign, it compares."""
    sign_due(next(written))
    make_merchant("globex")
    write()
    forged = AuditChain.objects.filter(**{} if chain == "every" else {"name": chain})
    with tampering():
        forged.update(unsigned_since=None)
    with caplog.at_level(logging.ERROR):
        sign_due(next(written))
    names = [CHAIN, "platform"] if chain == "every" else [chain]
    faults = [f"{scope_of(name)}: chain {name} has unsigned entries, but is recorded as signed" for name in names]
    assert sorted(list_errors(caplog)) == sorted(faults)


def test_sign_due_of_an_unchanged_log_compares_all_chains_in_turn(
    written: Iterator[datetime], caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee: the worker goes on comparing when there is nothing to sign."""
    for name in ("globex", "initech"):
        make_merchant(name)
        write(name)
    sign_due(next(written))
    with tampering():
        last = AuditChain.objects.filter(name="account:initech/sandbox")
        last.update(signed_sequence=F("sequence") + 1)
    with mock.patch.object(checkpoints, "CHECKED_ACCOUNTS", 1), caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert sign_due(next(written)) == 0
            assert list_errors(caplog) == []
        sign_due(next(written))
    assert len(list_errors(caplog)) == 1


def test_sign_due_measures_since_when_entries_are_unsigned(written: Iterator[datetime]) -> None:
    """Guarantee: an alarm can distinguish an idle log from one that is not signed."""
    with mock.patch.object(meters, "note_unsigned") as noted:
        sign_due(next(written))
        write()
        newest = AuditEntry.objects.filter(chain_id=CHAIN).latest("sequence")
        with mock.patch.object(
            LocalSigner, "sign", side_effect=BackendUnavailableError("No answer.", internal="sealed")
        ):
            sign_due(next(written))
    sandbox = [call.args[1] for call in noted.call_args_list if call.args[0] == "sandbox"]
    assert sandbox == [None, newest.at]


def test_sign_due_during_writes_ends(written: Iterator[datetime]) -> None:
    """A run ends, even if entries arrive faster than it signs them."""
    make_merchant("globex")
    signatures = 0
    real = LocalSigner.sign

    def write_and_sign(self: LocalSigner, scope: str, message: bytes) -> Any:
        nonlocal signatures
        signatures += 1
        write("acme" if signatures % 2 else "globex")
        return real(self, scope, message)

    bounded = mock.patch.multiple(checkpoints, MAX_HEADS=1, MAX_CHECKPOINTS=3)
    with bounded, mock.patch.object(LocalSigner, "sign", write_and_sign):
        assert sign_due(next(written)) == signatures <= 3 * 3
    assert first_break() is None


def test_sign_due_of_many_chains_signs_them_in_several_checkpoints(written: Iterator[datetime]) -> None:
    """A checkpoint is bounded. The next ones follow in the same run, and a killed run is continued."""
    for name in ("globex", "initech", "umbrella"):
        make_merchant(name)
        write(name)
    with mock.patch.object(checkpoints, "MAX_HEADS", 2):
        killed = mock.patch.object(checkpoints, "write_marks", side_effect=KeyboardInterrupt)
        with killed, pytest.raises(KeyboardInterrupt):
            sign_due(next(written))
        assert _rows().count() == 4
        sign_due(next(written))  # records the checkpoint outside the database
        sign_due(next(written))
    assert [len(parse_checkpoint(_checkpoint(number)).heads) for number in (4, 5)] == [2, 2]
    report = verify()["sandbox"]
    assert (report.broken, report.unsigned, report.late) == (None, 0, 0)


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_sign_due_during_writes_waits_for_no_writer_and_signs_everything_later() -> None:
    """A writer that holds a chain delays neither the checkpoint nor the next entry."""
    make_merchant("acme")
    write()
    at = now()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            with transaction.atomic():
                AuditChain.objects.select_for_update().get(name=CHAIN)
                held.set()
                done.wait(30)
        finally:
            connection.close()

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30)
    assert sign_due(at) == 2
    assert AuditChain.objects.get(name=CHAIN).signed_in == 0
    done.set()
    holder.join()
    write()
    assert sign_due(at + STEP) == 1
    assert AuditChain.objects.get(name=CHAIN).unsigned_since is None
    assert (first_break(), verify()["sandbox"].unsigned) == (None, 0)


def test_sign_due_entry_written_meanwhile_stays_recorded_as_unsigned(written: Iterator[datetime]) -> None:
    """An entry that arrives between reading the heads and storing the checkpoint is signed by the next one."""
    real = LocalSigner.sign

    def write_and_sign(self: LocalSigner, scope: str, message: bytes) -> Any:
        write()
        return real(self, scope, message)

    with mock.patch.object(LocalSigner, "sign", write_and_sign):
        assert sign_due(next(written)) == 1
    chain = AuditChain.objects.get(name=CHAIN)
    newest = AuditEntry.objects.get(chain_id=CHAIN, sequence=chain.sequence)
    assert (chain.sequence - chain.signed_sequence, chain.unsigned_since) == (1, newest.at)
    assert sign_due(next(written)) == 1
    assert verify()["sandbox"].unsigned == 0


def test_sign_due_of_an_unchanged_log_signs_nothing(written: Iterator[datetime]) -> None:
    """Signing adds no audit entry, so an idle log gets no further checkpoint."""
    sign_due(next(written))
    entries, rows = AuditEntry.objects.count(), AuditCheckpoint.objects.count()
    assert sign_due(next(written)) == 0
    assert (AuditEntry.objects.count(), AuditCheckpoint.objects.count()) == (entries, rows)


def test_sign_due_again_within_the_interval_signs_nothing(db: None, moments: Iterator[datetime]) -> None:
    make_merchant("acme")
    write()
    at = next(moments)
    assert sign_due(at) == 2
    write()
    assert sign_due(at + CHECKPOINT_EVERY - timedelta(seconds=1)) == 0
    assert sign_due(at + CHECKPOINT_EVERY) == 1


def test_sign_due_after_the_clock_was_set_back_signs(written: Iterator[datetime]) -> None:
    """A checkpoint dated in the future blocks nothing."""
    assert sign_due(now() - timedelta(days=1)) == 1
    assert first_break() is None


def test_sign_due_of_an_empty_log_signs_nothing(db: None) -> None:
    assert sign_due(now()) == 0


@override_settings(ENVIRONMENTS=("sandbox",))
def test_sign_due_in_a_process_of_some_environments_signs_for_those_only(db: None) -> None:
    """A process of the sandbox never requests a signature with the production key."""
    make_merchant("acme")
    write()
    write("acme", PRODUCTION)
    sign_due(now())
    assert set(AuditCheckpoint.objects.values_list("scope", flat=True)) == {"sandbox", "service"}
    assert set(read_public_keys()[1]) == {"production"}


@pytest.mark.sqlite
def test_sign_due_with_the_signer_unavailable_is_delayed(
    written: Iterator[datetime], caplog: pytest.LogCaptureFixture
) -> None:
    """The log continues unsigned, a warning is logged, and the next run signs all of it."""
    rows = AuditCheckpoint.objects.count()
    unavailable = BackendUnavailableError("The secrets manager does not answer.", internal="sealed")
    with mock.patch.object(LocalSigner, "sign", side_effect=unavailable), caplog.at_level(logging.WARNING):
        assert sign_due(next(written)) == 0
    assert {record.getMessage() for record in caplog.records} == {"a checkpoint of the audit log is delayed"}
    assert AuditCheckpoint.objects.count() == rows
    write()
    assert sign_due(next(written)) == 1
    assert verify()["sandbox"].unsigned == 0


def test_sign_due_killed_between_signing_and_storing_signs_again(written: Iterator[datetime]) -> None:
    """A signature that was not stored is dropped; the next run uses its number."""
    at = next(written)
    with mock.patch.object(checkpoints, "_store", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        sign_due(at)
    assert AuditCheckpoint.objects.filter(scope="sandbox").count() == 3
    assert sign_due(at) == 1
    assert verify()["sandbox"].newest == checkpoints.find_newest("sandbox")
    assert first_break() is None


@pytest.mark.django_db(transaction=True)
def test_sign_due_by_concurrent_workers_stores_each_number_once() -> None:
    """Several workers may sign; one stores, and the others return without an error."""
    make_merchant("acme")
    for turn in range(4):
        write()
        signed = race(*[partial(sign_due, now() + turn * STEP)] * 3)
        assert sum(signed) == (1 if turn else 2), signed
        numbers = AuditCheckpoint.objects.filter(scope="sandbox").order_by("number").values_list("number", flat=True)
        assert list(numbers) == list(range(1, turn + 2))
    assert first_break() is None
    assert len(secret_backend().versions(Mount.AUDIT, "audit-sandbox")) == 1


def test_sign_due_after_another_worker_stored_the_number_stores_nothing(written: Iterator[datetime]) -> None:
    """Another worker that took over the lease stores the number after this one has read the newest checkpoint."""
    at = next(written)
    expired = mock.patch.object(leases, "LEASE", timedelta(0))
    real = LocalSigner.sign

    def after_another(self: LocalSigner, scope: str, message: bytes) -> Any:
        with mock.patch.object(LocalSigner, "sign", real):
            assert sign_due(now() + STEP) == 1
        return real(self, scope, message)

    with expired, mock.patch.object(LocalSigner, "sign", after_another):
        assert sign_due(at) == 0
    assert AuditCheckpoint.objects.filter(scope="sandbox").count() == 4
    assert first_break() is None


def test_sign_due_killed_before_the_rows_were_updated_signs_once_more(written: Iterator[datetime]) -> None:
    """The rows are updated after the checkpoint, so that no writer waits for all of them."""
    at = next(written)
    noted = mock.patch.object(checkpoints, "_note_chains", side_effect=KeyboardInterrupt)
    with noted, pytest.raises(KeyboardInterrupt):
        sign_due(at)
    assert _rows().count() == 4
    sign_due(next(written))  # records the checkpoint outside the database
    sign_due(next(written))
    assert [set(parse_checkpoint(_checkpoint(number)).heads) for number in (4, 5)] == [{CHAIN}, {CHAIN}]
    assert (first_break(), verify()["sandbox"].unsigned) == (None, 0)
    assert not AuditChain.objects.filter(scope="sandbox", unsigned_since__isnull=False).exists()


def test_sign_due_updates_a_bounded_number_of_rows_together(written: Iterator[datetime]) -> None:
    for name in ("globex", "initech"):
        make_merchant(name)
        write(name)
    real, sizes = checkpoints._note_chains, list[int]()

    def note(number: int, heads: Mapping[str, Head]) -> None:
        sizes.append(len(heads))
        real(number, heads)

    together = mock.patch.object(checkpoints, "NOTED_TOGETHER", 2)
    with together, mock.patch.object(checkpoints, "_note_chains", note):
        sign_due(next(written))
    assert max(sizes) == 2
    assert not AuditChain.objects.filter(unsigned_since__isnull=False).exists()


def test_sign_due_while_another_worker_signs_does_nothing(written: Iterator[datetime]) -> None:
    """Only one worker compares the whole log after a change of the signer, however long it takes."""
    _rename_signer()
    real, nested = checkpoints.find_entry_hash, list[int]()

    def sign_meanwhile(chain: str, sequence: int) -> bytes | None:
        nested.append(sign_due(now()))
        return real(chain, sequence)

    with mock.patch.object(checkpoints, "find_entry_hash", sign_meanwhile):
        assert sign_due(now()) == 1
    assert set(nested) == {0}
    assert not WorkLease.objects.exists()


def _rename_signer() -> None:
    """Give the checkpoints another signer, as if the service had changed to this one."""
    with tampering():
        AuditCheckpoint.objects.filter(scope="sandbox").update(signer="vault:former/audit")
    lose_marks()


def test_sign_due_that_lost_its_lease_stops_comparing(written: Iterator[datetime]) -> None:
    _rename_signer()
    real = checkpoints.find_entry_hash

    def take_over(chain: str, sequence: int) -> bytes | None:
        WorkLease.objects.update(token="of another worker")
        return real(chain, sequence)

    with mock.patch.object(checkpoints, "find_entry_hash", side_effect=take_over) as compared:
        assert sign_due(next(written)) == 0
    assert compared.call_count == 1


def test_sign_due_of_a_log_that_contradicts_its_checkpoint_is_refused(
    written: Iterator[datetime], caplog: pytest.LogCaptureFixture
) -> None:
    """A rewritten log is never signed; each run logs the error again, and the console shows it until it is repaired."""
    digest = AuditEntry.objects.values_list("hash", flat=True).get(chain_id=CHAIN, sequence=5)
    with tampering():
        AuditEntry.objects.filter(chain_id=CHAIN, sequence=5).update(hash=bytes(32))
    with caplog.at_level(logging.ERROR):
        assert sign_due(next(written)) == 0
    assert [record.getMessage() for record in caplog.records] == ["the audit log is damaged: no checkpoint is signed"]
    assert find_system_health(now()).broken == {"sandbox"}
    with tampering():
        AuditEntry.objects.filter(chain_id=CHAIN, sequence=5).update(hash=digest)
    assert sign_due(next(written)) == 1
    assert find_system_health(now()).broken == set()


@pytest.mark.sqlite
def test_sign_due_without_the_local_key_is_refused_and_creates_no_key(
    written: Iterator[datetime], tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A lost keystore must be restored: a new key would make the old checkpoints look forged."""
    with own_keystore(tmp_path), caplog.at_level(logging.ERROR):
        assert sign_due(next(written)) == 0
        assert secret_backend().versions(Mount.AUDIT, "audit-sandbox") == []
    assert {record.getMessage() for record in caplog.records} == {"the audit log is damaged: no checkpoint is signed"}


@pytest.mark.sqlite
def test_local_signer_keys_of_the_scopes_differ_and_stay(written: Iterator[datetime]) -> None:
    """The environments share no signing key."""
    first, _ = read_public_keys()
    sign_due(next(written))
    assert read_public_keys() == (first, {})
    assert sorted(first) == [(scope, LOCAL, 1) for scope in sorted(SCOPES)]
    assert len(set(first.values())) == 3


@pytest.mark.sqlite
@pytest.mark.parametrize("between", [None, "other", LOCAL])
def test_rotated_local_keys_verify_earlier_checkpoints_and_sign_no_later_ones(
    db: None, moments: Iterator[datetime], tmp_path: Any, between: str | None
) -> None:
    """Guarantee: after a leak of the signing key, a checkpoint that it signs is detected.

    `between`: the signer that a forged checkpoint before it names; LOCAL: the leaked key has signed both.
    """
    with own_keystore(tmp_path):
        make_merchant("acme")
        for versions in ([], [1, 1]):
            assert [version for _, _, version in read_public_keys()[0]] == versions
            write()
            sign_due(next(moments))
        leaked = LocalSigner(secret_backend())._read("sandbox")[1]
        assert call("rotate_audit_keys")["versions"] == {"sandbox": 2, "production": 1, "service": 2}
        assert AuditEntry.objects.filter(event="audit_keys.rotated").count() == 1
        write()
        sign_due(next(moments))
        assert list(_rows().order_by("number").values_list("key_version", flat=True)) == [1, 1, 2]
        assert {version for _, _, version in read_public_keys()[0]} == {1, 2}
        assert (first_break(), off_host().first_broken) == (None, None)

        write()
        if between:
            _forge(leaked, signer=between)
        _forge(leaked)
        assert sign_due(next(moments)) == 0
        number, why = 5 if between == "other" else 4, "version 1 of the key signs it, after version 2"
        error = WorkLease.objects.get(subject=signing_lease("sandbox")).last_error
        assert f"sandbox checkpoint {number}: {why}" in error
        for found in (verify()["sandbox"].broken, off_host().first_broken):
            foreign = "there is no public key of other (version 1) to check its signature with"
            fault = foreign if between == "other" else why
            assert found == Break("checkpoints:sandbox", 4, fault)
        status = next(status for status in list_checkpoint_status() if status.scope == "sandbox")
        assert status.fault == why, "the newest checkpoint is refused, whatever is before it"

        with closing(sqlite3.connect(settings.DATA_DIR / KEYSTORE_NAME, isolation_level=None)) as keystore:
            keystore.execute("DELETE FROM records WHERE mount = 'audit' AND version = 2")  # as in an older backup
        with pytest.raises(CommandError, match="signs the audit log is gone"):
            call("rotate_audit_keys")
        with override_settings(IS_VAULT=True), pytest.raises(CommandError, match="the Vault, which rotates them"):
            call("rotate_audit_keys")


@pytest.mark.sqlite
def test_second_of_two_rotations_of_the_local_keys_says_what_to_do(
    db: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_keystore(tmp_path):
        call("rotate_audit_keys")
        list_versions = LocalKeystore.versions

        def list_before_another_run(*arguments: Any) -> Any:
            found = list_versions(*arguments)
            monkeypatch.undo()
            call("rotate_audit_keys")
            return found

        monkeypatch.setattr(LocalKeystore, "versions", list_before_another_run)
        with pytest.raises(CommandError, match=r"show_audit_keys; run this again if a scope kept its version"):
            call("rotate_audit_keys")


# --- verification ----------------------------------------------------------------------------------------------


def _entries(**where: Any) -> Any:
    return AuditEntry.objects.filter(chain_id=CHAIN, **where)


def _rows(**where: Any) -> Any:
    return AuditCheckpoint.objects.filter(scope="sandbox", **where)


def _cut_tail(length: int = 4) -> None:
    """Truncate entries and head together; the chain alone cannot reveal that."""
    last = _entries(sequence=length).get()
    _entries(sequence__gt=length).delete()
    # The row names the checkpoint before, as in an older copy of the database.
    signed = {"signed_in": 2, "signed_sequence": 3, "unsigned_since": last.at}
    AuditChain.objects.filter(name=CHAIN).update(sequence=length, head_hash=last.hash, **signed)


def _rewrite() -> None:
    """Forge entry 3 and compute the hashes of all later entries and of the head again."""
    previous = bytes(_entries(sequence=2).get().hash)
    for entry in _entries(sequence__gte=3).order_by("sequence"):
        body = entry_bytes(
            chain=CHAIN,
            sequence=entry.sequence,
            at=entry.at,
            event=entry.event,
            actor=entry.actor,
            channel="console",
            details={"forged": True},
        )
        digest = entry_hash(previous, body)
        _entries(sequence=entry.sequence).update(body=body, previous=previous, hash=digest)
        previous = digest
    AuditChain.objects.filter(name=CHAIN).update(head_hash=previous)


def _forge(key: Ed25519PrivateKey | None = None, signer: str = LOCAL) -> None:
    """Add a well-formed next checkpoint, signed with another key."""
    newest = checkpoints.find_newest("sandbox")
    assert newest is not None
    number = newest.number + 1
    body = checkpoint_bytes(Checkpoint("sandbox", number, now(), newest.digest, checkpoints.read_heads("sandbox")))
    AuditCheckpoint.objects.create(
        scope="sandbox",
        number=number,
        at=parse_checkpoint(body).at,
        body=body,
        signature=(key or Ed25519PrivateKey.generate()).sign(body),
        signer=signer,
        key_version=1,
    )


TAMPERINGS: dict[str, tuple[Callable[[], object], int, str]] = {
    "tail and head truncated": (_cut_tail, 3, "entry 5 of chain account:acme/sandbox, which it signs, is missing"),
    "rewritten": (_rewrite, 2, "entry 3 of chain account:acme/sandbox differs from the one that it signs"),
    "first checkpoint deleted": (lambda: _rows(number=1).delete(), 2, "checkpoint 1 is missing; 2 follows"),
    "middle checkpoint deleted": (lambda: _rows(number=2).delete(), 3, "checkpoint 2 is missing; 3 follows"),
    "body made invalid": (lambda: _rows(number=2).update(body=b"\xff"), 2, "its bytes are not a checkpoint"),
    "signature altered": (lambda: _rows(number=2).update(signature=bytes(64)), 2, "its signature is not the signer's"),
    "time column edited": (lambda: _rows(number=2).update(at=now()), 2, "its columns differ from its bytes"),
    "signer column edited": (
        lambda: _rows(number=2).update(signer="x"),
        2,
        "there is no public key of x (version 1) to check its signature with",
    ),
    "forged": (_forge, 4, "its signature is not the signer's"),
    "chain deleted": (
        lambda: (_entries().delete(), AuditChain.objects.filter(name=CHAIN).delete()),
        1,
        "entry 1 of chain account:acme/sandbox, which it signs, is missing",
    ),
}


@pytest.mark.postgres_once
@pytest.mark.parametrize("name", TAMPERINGS)
def test_verify_checkpoints_of_a_tampered_log_names_the_first_broken_checkpoint(
    written: Iterator[datetime], name: str
) -> None:
    """Every change that a database owner can make without the signing key is found, on this host and on another."""
    tamper, number, why = TAMPERINGS[name]
    with tampering():
        tamper()
    assert first_break() == Break("checkpoints:sandbox", number, why)
    assert verify()["service"].broken is None
    # The time column is a search copy; only the signed bytes leave the host.
    assert (off_host().first_broken is None) == (name == "time column edited")


def list_errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return why the worker refused to sign."""
    return [vars(record)["why"] for record in caplog.records if record.levelno == logging.ERROR]


FORGED_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "signed up to an entry to come": (
        {"signed_sequence": 1_000, "unsigned_since": None},
        f"chain {CHAIN} is recorded as signed up to entry 1000, which no checkpoint signs",
    ),
    "signed by a checkpoint to come": (
        {"signed_sequence": 6, "signed_in": 9, "unsigned_since": None},
        f"chain {CHAIN} is recorded as signed up to entry 6, which no checkpoint signs",
    ),
    "nothing unsigned": ({"unsigned_since": None}, f"chain {CHAIN} has unsigned entries, but is recorded as signed"),
    "another scope": ({"scope": "production"}, f"chain {CHAIN} is recorded in the scope production"),
}


@pytest.mark.parametrize("name", FORGED_ROWS)
def test_chain_whose_row_is_forged_so_that_it_is_not_signed_any_more_is_found(
    written: Iterator[datetime], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Guarantee: a database writer cannot keep entries open to change; the command and the worker notice it."""
    forged, why = FORGED_ROWS[name]
    with tampering():
        AuditChain.objects.filter(name=CHAIN).update(**forged)
    broken = first_break()
    assert broken is not None
    assert (broken.chain, broken.why) == (CHAIN, why)
    make_merchant("globex")
    write("globex")
    with caplog.at_level(logging.ERROR):
        sign_due(next(written))
    assert f"sandbox: {why}" in list_errors(caplog)


def test_chain_whose_row_names_an_older_checkpoint_is_signed_once_more(written: Iterator[datetime]) -> None:
    """Such a row hides nothing, and a log that was rewritten under it contradicts the checkpoint in between."""
    with tampering():
        AuditChain.objects.filter(name=CHAIN).update(signed_in=1, signed_sequence=1)
    assert first_break() is None
    with tampering():
        _rewrite()
    sign_due(next(written))
    assert first_break() == Break(
        "checkpoints:sandbox", 2, f"entry 3 of chain {CHAIN} differs from the one that it signs"
    )


def test_sign_due_compares_all_chains_in_turn(written: Iterator[datetime], caplog: pytest.LogCaptureFixture) -> None:
    """Guarantee: the worker finds a chain that was rewritten after its last signature, although it never changes.

    The row must name the checkpoint that signed it; `verify_checkpoints` needs no row.
    """
    for name in ("globex", "initech"):
        make_merchant(name)
    bounded = mock.patch.multiple(checkpoints, CHECKED_ACCOUNTS=1, WALKED_CHECKPOINTS=0)
    with bounded, caplog.at_level(logging.ERROR):
        sign_due(next(written))  # compares acme's chains, then globex's, initech's, none, and acme's again
        with tampering():
            _rewrite()
        for _ in range(4):
            assert list_errors(caplog) == []
            write("globex")
            sign_due(next(written))
    assert list_errors(caplog) == [f"sandbox: entry 6 of chain {CHAIN} differs from the one that it signs"]


def test_sign_due_reads_a_bounded_number_of_checkpoints_for_the_chains_in_turn(written: Iterator[datetime]) -> None:
    """The chains of adjacent accounts may all have been signed by different checkpoints."""
    for name in ("globex", "initech"):
        make_merchant(name)
        write(name)
    sign_due(next(written))
    with mock.patch.object(checkpoints, "READ_CHECKPOINTS", 1):
        for number, name in ((5, "acme"), (6, "globex"), (7, "initech")):
            write()
            sign_due(next(written))
            account_id = Account.objects.get(merchant=name, environment="sandbox").pk
            assert parse_checkpoint(_checkpoint(number)).checked_through == account_id
        write()
        sign_due(next(written))
        assert parse_checkpoint(_checkpoint(8)).checked_through == 0


def test_sign_due_compares_all_checkpoints_in_turn(
    written: Iterator[datetime], caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee: the worker finds a chain that was rewritten together with its row, and then signs nothing."""
    make_merchant("globex")
    with tampering():
        _rewrite()
        AuditChain.objects.filter(name=CHAIN).update(signed_in=1, signed_sequence=1)
    one = mock.patch.object(checkpoints, "WALKED_CHECKPOINTS", 1)
    first = mock.patch("secrets.randbelow", return_value=0)
    with one, first, caplog.at_level(logging.ERROR):
        for _ in range(6):
            write("globex")
            sign_due(next(written))
        newest = _rows().count()
        write("globex")
        sign_due(next(written))
    assert _rows().count() == newest
    (why,) = set(list_errors(caplog))
    assert why.endswith(f"of chain {CHAIN} differs from the one that it signs")


def test_sign_due_compares_a_bounded_number_of_heads(written: Iterator[datetime]) -> None:
    """A run continues after the checkpoint at which the run before stopped, however many chains each signs."""
    first = mock.patch.dict(checkpoints._walked, {"sandbox": 0})
    with first, mock.patch.object(checkpoints, "MAX_HEADS", 1):
        for number in (1, 2, 3):
            sign_due(next(written))
            assert checkpoints._walked["sandbox"] == number


def test_sign_due_finds_a_missing_chain(written: Iterator[datetime], caplog: pytest.LogCaptureFixture) -> None:
    """Guarantee: a chain that disappears with all its entries is found by the worker and by the command."""
    make_merchant("globex")
    write("globex")
    sign_due(next(written))
    with tampering():
        _entries().delete()
        AuditChain.objects.filter(name=CHAIN).delete()
    write("globex")
    with mock.patch.object(checkpoints, "WALKED_CHECKPOINTS", 0), caplog.at_level(logging.ERROR):
        assert sign_due(next(written)) == 0
    assert list_errors(caplog) == [f"chain {CHAIN} is missing"]
    assert "is missing" in str(first_break())


@pytest.mark.postgres_once
@pytest.mark.parametrize("change", ["body", "number", "signer"])
def test_sign_due_over_an_altered_checkpoint_is_refused(
    written: Iterator[datetime], caplog: pytest.LogCaptureFixture, change: str
) -> None:
    """A rewritten chain is not compared with a checkpoint that was rewritten with it."""
    first, third = _rows(number=1).get(), _rows(number=3).get()
    make_merchant("globex")
    write("globex")
    with mock.patch.object(checkpoints, "_list_unsigned", _only("account:globex/sandbox")):
        sign_due(next(written))
    with tampering():
        altered = parse_checkpoint(bytes(third.body))
        heads = {CHAIN: Head(5, bytes(32))}
        if change == "body":
            _rows(number=3).update(body=checkpoint_bytes(replace(altered, heads=heads)))
        elif change == "signer":
            _rewrite()
            heads = {CHAIN: Head(5, bytes(_entries(sequence=5).get().hash))}
            body = checkpoint_bytes(replace(altered, heads=heads))
            _rows(number=3).update(body=body, signer="vault:elsewhere/audit")
        else:
            _rows(number=3).update(body=first.body, signature=first.signature)
    with caplog.at_level(logging.ERROR):
        sign_due(next(written))
    why = {
        "body": "its signature is not the signer's",
        "number": "its columns differ from its bytes",
        "signer": "it names another signer, but this service's signer has signed an earlier one",
    }
    assert list_errors(caplog) == [f"sandbox checkpoint 3: {why[change]}"]


def _only(name: str) -> Any:
    return lambda scope: AuditChain.objects.filter(scope=scope, name=name)


def test_sign_due_after_a_change_of_the_signer_accepts_the_former_ones_checkpoints(
    written: Iterator[datetime], caplog: pytest.LogCaptureFixture
) -> None:
    _rename_signer()
    with caplog.at_level(logging.ERROR):
        assert [sign_due(next(written)) for _ in range(2)] == [1, 0]
        make_merchant("globex")
        write("globex")
        with tampering():
            AuditChain.objects.filter(name=CHAIN).update(signed_in=3, signed_sequence=5, unsigned_since=now())
        assert sign_due(next(written)) > 0
    assert list_errors(caplog) == []
    assert list(_rows().order_by("number").values_list("signer", flat=True)) == ["vault:former/audit"] * 3 + [LOCAL] * 2


def test_verify_audit_of_a_truncated_or_rewritten_chain_finds_nothing(written: Iterator[datetime]) -> None:
    """The chains alone reveal neither; this is why checkpoints exist."""
    for tamper in (_rewrite, _cut_tail):
        with tampering():
            tamper()
        assert verify_audit().first_broken is None


def test_verify_checkpoints_of_a_rolled_back_database_needs_the_kept_ones(written: Iterator[datetime]) -> None:
    """Entries and checkpoints removed together leave a consistent log; the auditor's own checkpoint reveals the gap."""
    kept = gather_kept([record_line(record).encode() for record in export_newest(SCOPES)], read_public_keys()[0])
    with tampering():
        _rows(number__gt=2).delete()
        _cut_tail()
    lose_marks()
    assert first_break() is None
    broken = verify(kept)["sandbox"].broken
    assert broken == Break(
        "checkpoints:sandbox",
        3,
        "it was recorded outside the database, but the checkpoints here end at 2: the log was rolled back",
    )
    write()
    sign_due(next(written))
    sign_due(next(written))
    broken = verify(kept)["sandbox"].broken
    assert broken == Break(
        "checkpoints:sandbox",
        3,
        "it differs from the one that was recorded outside the database: the log was rewritten",
    )


@pytest.mark.sqlite
def test_verify_checkpoints_without_the_signer_checks_everything_else(written: Iterator[datetime]) -> None:
    """A signature without its public key counts as unchecked; keys from a file check it."""
    known, _ = read_public_keys()
    unavailable = BackendUnavailableError("The secrets manager does not answer.", internal="sealed")
    with mock.patch.object(LocalSigner, "read_public_keys", side_effect=unavailable):
        keys, unchecked = gather_public_keys({})
        assert unchecked == dict.fromkeys(SCOPES, "sealed")
        reports = verify_checkpoints(keys, {}, unchecked, now())
        assert [(report.broken, report.unchecked) for report in reports] == [(None, "sealed")] * 3
        assert gather_public_keys(known) == (known, {})


def test_verify_checkpoints_reports_entries_unsigned_for_too_long(written: Iterator[datetime]) -> None:
    """This finds both deleted checkpoints and a signer that has been refused for hours."""
    keys, unchecked = gather_public_keys({})
    soon, late = now() + UNSIGNED_FOR - STEP, now() + UNSIGNED_FOR + STEP
    assert {report.overdue for report in verify_checkpoints(keys, {}, unchecked, soon)} == {None}
    overdue = {report.scope: report.overdue for report in verify_checkpoints(keys, {}, unchecked, late)}
    assert "has been unsigned since" in str(overdue["sandbox"])
    assert overdue["service"] is None
    with tampering():
        AuditCheckpoint.objects.all().delete()
        AuditChain.objects.update(signed_in=0, signed_sequence=0, unsigned_since=F("newest_at"))
    lose_marks()
    reports = verify_checkpoints(keys, {}, unchecked, late)
    assert {report.broken for report in reports} == {None}
    assert all("checkpoints were deleted" in str(report.overdue) for report in reports if report.unsigned)


@pytest.mark.sqlite
def test_sign_due_logs_each_checkpoint(written: Iterator[datetime], caplog: pytest.LogCaptureFixture) -> None:
    """Shipped logs keep a copy of each checkpoint outside the database."""
    with caplog.at_level(logging.INFO, logger="keyvault.services.audit.checkpoints"):
        sign_due(next(written))
    newest = checkpoints.find_newest("sandbox")
    assert newest is not None
    logged = {getattr(record, "scope", ""): vars(record) for record in caplog.records}["sandbox"]
    assert (logged["number"], logged["digest"]) == (newest.number, newest.digest.hex())


def test_verify_checkpoints_during_writes_and_signing_raises_no_false_alarm(written: Iterator[datetime]) -> None:
    """An entry and a checkpoint arrive between any two queries of the check."""
    real = checkpoints.find_entry_hash

    def write_and_sign(chain: str, sequence: int) -> bytes | None:
        write()
        with mock.patch.object(checkpoints, "find_entry_hash", real):
            sign_due(next(written))
        return real(chain, sequence)

    with mock.patch.object(checkpoints, "find_entry_hash", write_and_sign):
        assert {report.broken for report in verify().values()} == {None}


def test_checkpoint_status_shows_the_newest_and_whether_it_is_valid(written: Iterator[datetime]) -> None:
    statuses = {status.scope: status for status in list_checkpoint_status()}
    sandbox = statuses["sandbox"]
    assert sandbox.newest is not None
    assert (sandbox.newest.number, sandbox.unsigned, sandbox.fault) == (3, 1, None)
    with tampering():
        _rewrite()
    sandbox = next(status for status in list_checkpoint_status() if status.scope == "sandbox")
    assert sandbox.fault == f"sandbox checkpoint 3: entry 5 of chain {CHAIN} differs from the one that it signs"


def test_checkpoint_status_of_a_forged_newest_is_invalid(written: Iterator[datetime]) -> None:
    with tampering():
        _forge()
    assert (
        next(status.fault for status in list_checkpoint_status() if status.scope == "sandbox")
        == "its signature is not the signer's"
    )


# --- exporting -------------------------------------------------------------------------------------------------


def off_host(*, since: datetime | None = None, scopes: list[str] | None = None) -> ExportCheck:
    """Run the export through the checker that an auditor runs."""
    check = ExportCheck(read_public_keys()[0], {})
    for record in export_log(scopes or SCOPES, since, now()):
        check.take(parse_record(record_line(record).encode()))
    check.finish()
    return check


def test_export_of_an_intact_log_verifies_off_host(written: Iterator[datetime]) -> None:
    check = off_host()
    assert check.first_broken is None
    assert sum(scope.entries for scope in check.scopes.values()) == AuditEntry.objects.count()
    assert check.scopes["sandbox"].unsigned == 1
    assert check.scopes["sandbox"].walk.newest_signed == replace(_newest(), at=None)


def _newest() -> Any:
    newest = checkpoints.find_newest("sandbox")
    assert newest is not None
    return newest


def test_export_since_a_time_begins_with_the_newest_older_checkpoint(written: Iterator[datetime]) -> None:
    """A partial export starts after a signed checkpoint and names it."""
    second = _rows(number=2).get()
    check = off_host(since=second.at + timedelta(seconds=1), scopes=["sandbox"])
    assert check.first_broken is None
    sandbox = check.scopes["sandbox"]
    assert (sandbox.begins_with, sandbox.walk.count, sandbox.entries) == (2, 3, 3)
    assert off_host(since=second.at - timedelta(days=1), scopes=["sandbox"]).scopes["sandbox"].entries == 6


def test_export_since_a_time_with_the_clock_set_back_verifies_off_host(written: Iterator[datetime]) -> None:
    """A checkpoint that is dated before an earlier one moves the begin of the export no further."""
    sign_due(now() - timedelta(days=1))
    first = _rows(number=1).get()
    check = off_host(since=first.at, scopes=["sandbox"])
    assert check.first_broken is None
    assert check.scopes["sandbox"].begins_with == 1


def test_export_during_writes_and_signing_verifies_off_host(written: Iterator[datetime]) -> None:
    """An entry that arrives during the export is included or not; either way the export verifies."""
    check = ExportCheck(read_public_keys()[0], {})
    before = AuditEntry.objects.count()
    for record in export_log(SCOPES, None, now()):
        check.take(record)
        if AuditEntry.objects.count() < before + 20:
            write()
            sign_due(next(written))
    check.finish()
    assert check.first_broken is None
    assert before < sum(scope.entries for scope in check.scopes.values()) <= before + 20


# --- with the real Vault server ----------------------------------------------------------------------------------


def test_vault_after_a_key_rotation_verifies_old_and_new_checkpoints(vault_service: InstalledVault) -> None:
    """Transit keeps the public key of every version, so a new signing key invalidates no old signature."""
    make_merchant("acme")
    write()
    at = now()
    assert sign_due(at) == 2
    mount = vault_service.layout.mount(SecretsEngine.SIGNING, "sandbox")
    vault_service.admin.adapter.post(f"/v1/{mount}/keys/audit/rotate")
    write()
    assert sign_due(at + STEP) == 1
    assert list(_rows().order_by("number").values_list("signer", "key_version")) == [
        (f"vault:{mount}/audit", 1),
        (f"vault:{mount}/audit", 2),
    ]
    assert {scope: report.broken for scope, report in verify().items()} == dict.fromkeys(SCOPES)
    assert off_host().first_broken is None
    with tampering():
        _overwrite_first_hash()
    assert off_host().first_broken is not None


def _overwrite_first_hash() -> None:
    AuditEntry.objects.filter(chain_id=CHAIN, sequence=1).update(hash=FIRST)


def test_sealed_vault_delays_the_checkpoint_but_not_the_log(
    db: None, vault_on_disk: VaultOnDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Entries are written while Vault is sealed; once it is unsealed, the next run signs them all."""
    with installed(vault_on_disk, tmp_path) as installation, serving_from(installation):
        make_merchant("acme")
        write()
        assert sign_due(now()) == 2
        vault_on_disk.seal()
        write()
        with caplog.at_level(logging.WARNING, logger="keyvault.services.audit.checkpoints"):
            assert sign_due(now() + STEP) == 0
        warned = {record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING}
        assert warned == {"a checkpoint of the audit log is delayed"}
        assert set(gather_public_keys({})[1]) == set(SCOPES)
        assert verify_audit().first_broken is None
        vault_on_disk.unseal()
        # A new process would start with a closed circuit breaker; this one would have to wait for it.
        secret_backend.cache_clear()
        vault_backend.cache_clear()
        assert sign_due(now() + STEP) == 1
        assert (first_break(), verify()["sandbox"].unsigned) == (None, 0)

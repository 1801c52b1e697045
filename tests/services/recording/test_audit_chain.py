"""The audit chains: intact under concurrent writes, and broken by each way of tampering."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection, connections

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.domain.audit import GENESIS, Break, entry_bytes, entry_hash
from keyvault.models import AuditChain, AuditEntry
from keyvault.models.triggers import ensure_triggers
from keyvault.services.keys.lifecycle import resume_key, suspend_key
from keyvault.services.merchants.merchants import create_merchant
from keyvault.services.recording.audit_chain import AuditReport, verify_audit
from keyvault.services.recording.transaction import recorded
from tests.factories import account, grant, issue, make_merchant, now
from tests.services.conftest import Scene, make_scene
from tests.services.racing import TIMEOUT_SECONDS, held_open, start, wait_until_blocked
from tests.services.rows import disable_triggers

pytestmark = [pytest.mark.database, pytest.mark.django_db]

CHAIN = "account:acme/sandbox"


@contextmanager
def tampering() -> Iterator[None]:
    """Drop the triggers for the block, as an attacker with database access does."""
    disable_triggers()
    yield
    disable_triggers()
    ensure_triggers(connection)


def _execute(sql: str, *values: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)


def _rows(sequence: int) -> Any:
    return AuditEntry.objects.filter(chain_id=CHAIN, sequence=sequence)


def _edit_body(sequence: int = 3, **changes: object) -> None:
    entry = _rows(sequence).get()
    body = json.loads(bytes(entry.body)) | changes
    _rows(sequence).update(body=json.dumps(body).encode())


def _swap() -> None:
    """Swap entries 3 and 4."""
    third, fourth = _rows(3).get(), _rows(4).get()
    _rows(3).update(sequence=1_000)
    _rows(4).update(sequence=3)
    AuditEntry.objects.filter(pk=third.pk).update(sequence=4)
    assert _rows(3).get().pk == fourth.pk


def _append_forged_entry() -> None:
    """Add a well-formed entry without moving the head."""
    head = AuditChain.objects.get(name=CHAIN)
    sequence, previous, at = head.sequence + 1, bytes(head.head_hash), now()
    body = entry_bytes(
        chain=CHAIN, sequence=sequence, at=at, event="x", actor="operator:x", channel="console", details={}
    )
    AuditEntry.objects.create(
        chain_id=CHAIN,
        scope=head.scope,
        sequence=sequence,
        at=at,
        event="x",
        actor="operator:x",
        body=body,
        previous=previous,
        hash=entry_hash(previous, body),
    )


def _rehash() -> None:
    """Give the edited entry its matching hash; the next entry still contains the old one."""
    _edit_body(3, actor="operator:other")
    entry = _rows(3).get()
    _rows(3).update(hash=entry_hash(bytes(entry.previous), bytes(entry.body)), actor="operator:other")


TAMPERINGS: dict[str, tuple[Callable[[], object], int, str]] = {
    "body edited": (lambda: _edit_body(3, actor="operator:other"), 3, "its bytes do not match its hash"),
    "body made invalid": (lambda: _rows(3).update(body=b"\xff garbage"), 3, "its bytes do not match its hash"),
    "body made other JSON": (lambda: _rows(3).update(body=b"[1]"), 3, "its bytes do not match its hash"),
    "body edited and rehashed": (_rehash, 4, "does not contain the hash of the entry before it"),
    "event column edited": (lambda: _rows(3).update(event="key.resumed"), 3, "its columns differ from its bytes"),
    "actor column edited": (lambda: _rows(3).update(actor="operator:x"), 3, "its columns differ from its bytes"),
    "scope column edited": (lambda: _rows(3).update(scope="service"), 3, "its columns differ from its bytes"),
    "time column edited": (lambda: _rows(3).update(at=now()), 3, "its columns differ from its bytes"),
    "hash edited": (lambda: _rows(3).update(hash=bytes(32)), 3, "its bytes do not match its hash"),
    "previous edited": (
        lambda: _rows(3).update(previous=bytes(32)),
        3,
        "does not contain the hash of the entry before it",
    ),
    "first deleted": (lambda: _rows(1).delete(), 1, "entry 1 is missing; 2 follows"),
    "middle deleted": (lambda: _rows(3).delete(), 3, "entry 3 is missing; 4 follows"),
    "two swapped": (_swap, 3, "does not contain the hash of the entry before it"),
    "tail cut": (lambda: AuditEntry.objects.filter(chain_id=CHAIN, sequence__gt=5).delete(), 6, "the chain ends at 5"),
    "all deleted": (lambda: AuditEntry.objects.filter(chain_id=CHAIN).delete(), 1, "the chain ends at 0"),
    "entry behind the head": (_append_forged_entry, 9, "an entry has a higher sequence than the head of the chain"),
    "head set back": (
        lambda: AuditChain.objects.filter(name=CHAIN).update(sequence=5, head_hash=_rows(5).get().hash),
        8,
        "an entry has a higher sequence than the head of the chain",
    ),
    "head hash edited": (lambda: AuditChain.objects.filter(name=CHAIN).update(head_hash=GENESIS), 8, "another hash"),
}


@pytest.fixture
def written(scene: Scene) -> Scene:
    """A chain of eight entries in acme's sandbox, beside other chains."""
    key, _ = issue(scene.sandbox)
    issue(scene.production)
    suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), key)
    resume_key(grant(scene.admin, P.KEYS_RESUME, scene.sandbox), key)
    assert AuditChain.objects.get(name=CHAIN).sequence == 8
    return scene


def test_audit_of_untouched_chains_is_intact(written: Scene) -> None:
    report = verify_audit()
    assert (report.first_broken, report.entries) == (None, AuditEntry.objects.count())


def test_audit_of_an_empty_database_is_intact(db: None) -> None:
    assert verify_audit().first_broken is None


@pytest.mark.postgres_once
@pytest.mark.parametrize("name", TAMPERINGS)
def test_audit_of_a_tampered_chain_names_the_first_broken_entry(written: Scene, name: str) -> None:
    """Edits, deletions, reorderings, truncations and additions without triggers are found where they begin."""
    tamper, sequence, why = TAMPERINGS[name]
    with tampering():
        tamper()
    broken = verify_audit().first_broken
    assert broken is not None
    assert (broken.chain, broken.sequence) == (CHAIN, sequence)
    assert why in broken.why


def test_audit_of_a_body_stored_as_text_names_the_entry(written: Scene) -> None:
    """SQLite stores any type in any column; text in place of bytes must not abort the check."""
    with tampering():
        _execute("UPDATE keyvault_auditentry SET body = 'text' WHERE chain_id = %s AND sequence = 3", CHAIN)
    assert verify_audit().first_broken == Break(CHAIN, 3, "its bytes do not match its hash")


def test_audit_of_an_entry_moved_to_another_chain_names_a_chain(written: Scene) -> None:
    """An entry of one account cannot pass as another account's."""
    with tampering():
        _rows(8).update(chain_id="account:acme/production", sequence=1_000)
    broken = verify_audit().first_broken
    assert broken is not None
    assert broken.chain in {CHAIN, "account:acme/production"}


@pytest.mark.parametrize("name", ["platform", CHAIN])
def test_audit_of_a_missing_chain_names_the_chain(written: Scene, name: str) -> None:
    with tampering():
        AuditEntry.objects.filter(chain_id=name).delete()
        AuditChain.objects.filter(name=name).delete()
    assert verify_audit().first_broken == Break(name, 0, "the chain is missing")


def test_audit_without_any_chain_names_the_platform_chain(written: Scene) -> None:
    """An emptied log is broken while there is anything that it must record."""
    with tampering():
        AuditEntry.objects.all().delete()
        AuditChain.objects.all().delete()
    assert verify_audit().first_broken == Break("platform", 0, "the chain is missing")


def test_audit_checks_the_platform_chain_first(written: Scene) -> None:
    """The order is fixed, so every caller gets the same first broken entry: the platform, then accounts by name."""
    with tampering():
        _edit_body(3, actor="operator:x")
        AuditEntry.objects.filter(chain_id="platform", sequence=2).update(actor="operator:x")
    broken = verify_audit().first_broken
    assert broken is not None
    assert (broken.chain, broken.sequence) == ("platform", 2)


def test_audit_hash_covers_the_stored_bytes(written: Scene) -> None:
    """The formula in full, as a reader without this code applies it."""
    previous = bytes(32)
    for entry in AuditEntry.objects.filter(chain_id=CHAIN).order_by("sequence"):
        digest = hashlib.sha256(b"keyvault/audit/v1\0" + previous + bytes(entry.body)).digest()
        assert (bytes(entry.previous), bytes(entry.hash)) == (previous, digest)
        previous = digest
    assert bytes(AuditChain.objects.get(name=CHAIN).head_hash) == previous


def test_audit_time_of_a_chain_never_runs_backwards(db: None) -> None:
    """A writer whose clock is behind, or that waited for the lock, gets the time of the entry before it."""
    make_merchant("acme")
    begun = now()
    for seconds in (0, 5, -60, 3, 6):
        allowed = grant(HOST, P.MERCHANTS_WRITE, at=begun + timedelta(seconds=seconds))
        with recorded(allowed, P.MERCHANTS_WRITE, "test.wrote"):
            pass
    entries = AuditEntry.objects.filter(event="test.wrote").order_by("sequence")
    assert [(entry.at - begun).total_seconds() for entry in entries] == [0, 5, 5, 5, 6]
    assert verify_audit().first_broken is None


def test_audit_time_of_a_chain_is_not_moved_ahead_by_a_fast_clock(db: None) -> None:
    """A host whose clock is an hour ahead gets the database's time, and so do the entries of other hosts after it."""
    make_merchant("acme")
    begun = now()
    for ahead in (timedelta(hours=1), timedelta(0)):
        allowed = grant(HOST, P.MERCHANTS_WRITE, at=now() + ahead)
        with recorded(allowed, P.MERCHANTS_WRITE, "test.wrote"):
            pass
    times = list(AuditEntry.objects.filter(event="test.wrote").order_by("sequence").values_list("at", flat=True))
    assert begun - timedelta(milliseconds=1) <= times[0] <= times[1] <= now()
    assert verify_audit().first_broken is None


# ------------------------------------------------------------------------------------------ concurrent writes


@pytest.mark.django_db(transaction=True)
def test_audit_during_writes_raises_no_false_alarm() -> None:
    make_scene()
    keys = [issue(account("acme"))[0], issue(account("acme"))[0]]
    enough = threading.Event()

    def write(key: Any) -> int:
        written = 0
        try:
            while not enough.is_set():
                allowed = grant(HOST, P.MERCHANTS_WRITE)
                with recorded(allowed, P.MERCHANTS_WRITE, "test.wrote", key_id=key.key_id):
                    written += 1
        finally:
            connections.close_all()
        return written

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, key) for key in keys]
        try:
            reports: list[AuditReport] = []
            while len(reports) < 25 or AuditEntry.objects.filter(event="test.wrote").count() < 50:
                reports.append(verify_audit())
        finally:
            enough.set()
        written = sum(writer.result(TIMEOUT_SECONDS) for writer in writers)
    assert [report.first_broken for report in reports if report.first_broken is not None] == []
    assert reports[-1].entries > reports[0].entries
    assert AuditEntry.objects.filter(event="test.wrote").count() == written
    assert verify_audit().first_broken is None


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_audit_first_entries_of_concurrent_processes_share_the_platform_chain() -> None:
    first = partial(create_merchant, merchant_id="acme", name="Acme")
    with held_open(lambda: first(grant(HOST, P.MERCHANTS_WRITE))):
        second = start(lambda: make_merchant("globex"))
        wait_until_blocked(second)
    second.result(TIMEOUT_SECONDS)
    assert verify_audit().first_broken is None
    assert AuditChain.objects.get(name="platform").sequence == 2

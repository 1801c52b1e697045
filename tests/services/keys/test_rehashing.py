"""Progressive re-hash: a used key moves to the newest pepper outside the request path, and nothing else changes."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from django.db import IntegrityError as DatabaseIntegrityError
from django.db import connection, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST, WORKER
from keyvault.backends.base import BackendUnavailableError
from keyvault.backends.local import LocalKeystore
from keyvault.domain.digests import Peppers, PepperSet
from keyvault.domain.errors import ErrorCode, NotFoundError, StateConflictError
from keyvault.domain.keys import KeyRecord, KeyState
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason
from keyvault.models import AuditEntry, Credential, Key, PepperVersion, ServiceToken, UsageReporter
from keyvault.models.recording import UnrecordedWriteError
from keyvault.services.keys import rehashing
from keyvault.services.keys.lifecycle import revoke_key, suspend_key
from keyvault.services.keys.records import find_key_record, prove_service_token
from keyvault.services.keys.rehashing import PendingRehashes, pending_rehashes
from keyvault.services.maintenance import renew_peppers
from keyvault.services.pepper_rotation.rotation import retire_pepper
from keyvault.services.peppers import ring
from keyvault.services.peppers.ring import PepperRing, load_peppers, read_checked, take_pepper
from keyvault.services.recording.signals import keys_changed
from keyvault.services.recording.transaction import recorded
from keyvault.services.tokens.service_tokens import revoke_service_token
from keyvault.services.usage import recorder
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.verification import judging
from tests.factories import grant, issue, make_token, now, own_keystore
from tests.services.conftest import Scene, make_scene
from tests.services.keys.test_lifecycle import by_admin, verdict
from tests.services.peppering import destroy, isolated_peppers, rehash, retire, rotate
from tests.services.racing import TIMEOUT_SECONDS, held_open, race, start, wait_until_blocked
from tests.services.rows import last_body, last_ids, written_since

pytestmark = [pytest.mark.database, pytest.mark.django_db]

SANDBOX, SERVICE = PepperSet.SANDBOX, PepperSet.SERVICE


@pytest.fixture(autouse=True)
def isolated_keystore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with isolated_peppers(tmp_path, monkeypatch):
        yield


@pytest.fixture
def scene(isolated_keystore: None, db: None) -> Scene:
    return make_scene()


def fresh(key: Key) -> Key:
    row: Key = Key.objects.select_related("credential__account__merchant").get(pk=key.pk)
    return row


def columns_without_digest(key: Key) -> dict[str, object]:
    """Return every column of the row except the digest and its version."""
    row = fresh(key)
    return {field.attname: getattr(row, field.attname) for field in Key._meta.fields} | {
        "digest": None,
        "pepper_version": None,
    }


# ----------------------------------------------------------------------------------------------------------- keys


def test_rehash_of_a_used_key_moves_it_to_the_newest_pepper(scene: Scene) -> None:
    """The change feed and the audit log get one entry each, and no other column is written."""
    key, text = issue(scene.sandbox)
    rotate()
    before = columns_without_digest(key)
    assert verdict(text) is None
    assert fresh(key).pepper_version == 1, "nothing is written on the request path"
    ids = last_ids()
    rehash()
    row = fresh(key)
    assert (bytes(row.digest), row.pepper_version) == load_peppers(SANDBOX).digest(text)
    assert row.pepper_version == 2
    assert columns_without_digest(key) == before
    assert written_since(ids) == (["key.rehashed"], [("key", key.pk)])
    assert last_body("key.rehashed")["details"] == {"pepper_versions": {key.pk: 2}}
    assert last_body("key.rehashed")["actor"] == "system:worker"
    assert verdict(text) is None


def test_rehash_of_keys_of_one_account_writes_one_entry(scene: Scene) -> None:
    """An account's keys move in one transaction with one entry in that account's chain."""
    texts = [issue(scene.sandbox, label=str(number))[1] for number in range(3)]
    rotate()
    assert [verdict(text) for text in texts * 2] == [None] * 6
    ids = last_ids()
    rehash()
    events, changes = written_since(ids)
    assert events == ["key.rehashed"]
    assert len(changes) == 3
    rehash()
    assert written_since(ids)[0] == events, "a second run has nothing to do"


def test_rehash_is_no_event_for_other_applications(scene: Scene) -> None:
    """A new digest changes no state, and every key in use gets one after a new pepper."""
    key, text = issue(scene.sandbox)
    rotate()
    assert verdict(text) is None
    received: list[object] = []

    def receive(**event: object) -> None:
        received.append(event["key_ids"])

    keys_changed.connect(receive)
    try:
        rehash()
        assert (fresh(key).pepper_version, received) == (2, [])
        suspend_key(by_admin(scene, P.KEYS_SUSPEND), fresh(key))
        assert received == [[key.pk]]
    finally:
        keys_changed.disconnect(receive)


def test_rehash_of_a_suspended_key_keeps_it_suspended(scene: Scene) -> None:
    key, text = issue(scene.sandbox)
    suspend_key(by_admin(scene, P.KEYS_SUSPEND), key)
    rotate()
    assert verdict(text) is ErrorCode.KEY_NOT_ACTIVE
    rehash()
    assert (fresh(key).state, fresh(key).pepper_version) == (KeyState.SUSPENDED, 2)


def test_rehash_of_a_revoked_key_or_one_of_another_environment_writes_nothing(scene: Scene) -> None:
    revoked, revoked_text = issue(scene.sandbox)
    revoke_key(by_admin(scene, P.KEYS_REVOKE), revoked, RevocationReason.SUPERSEDED)
    issue(scene.sandbox)
    _, other = issue(scene.production)
    rotate()
    assert verdict(revoked_text) is ErrorCode.KEY_REVOKED
    assert verdict(other) is not None
    rehash()
    assert {row.pepper_version for row in Key.objects.all()} == {1}


def test_rehash_of_a_key_revoked_since_its_use_is_dropped(scene: Scene) -> None:
    """A revoked key keeps its digest, and no audit entry is written."""
    key, text = issue(scene.sandbox)
    rotate()
    assert verdict(text) is None
    revoke_key(by_admin(scene, P.KEYS_REVOKE), fresh(key), RevocationReason.KEY_COMPROMISE)
    entries = AuditEntry.objects.count()
    rehash()
    assert (fresh(key).state, fresh(key).pepper_version) == (KeyState.COMPROMISED, 1)
    assert AuditEntry.objects.count() == entries
    assert verdict(text) is ErrorCode.KEY_REVOKED


def test_rehash_before_a_suspension_does_not_make_the_copy_stale(scene: Scene) -> None:
    """A re-hash does not count as a new version of the row, so an operator's copy stays valid."""
    key, text = issue(scene.sandbox)
    rotate()
    seen = fresh(key)
    assert verdict(text) is None
    rehash()
    assert fresh(key).pepper_version == 2
    suspend_key(by_admin(scene, P.KEYS_SUSPEND), seen)
    assert verdict(text) is ErrorCode.KEY_NOT_ACTIVE
    assert fresh(key).pepper_version == 2


def test_rehash_in_two_processes_is_written_once(scene: Scene) -> None:
    """The compare-and-swap of the second process finds another digest and writes no entry."""
    key, text = issue(scene.sandbox)
    rotate()
    proved = (bytes(key.digest), 1)
    first, second = PendingRehashes(), PendingRehashes()
    for process in (first, second):
        process.note_proof(Key, key.pk, text, proved, load_peppers(SANDBOX))
    first.write(now())
    ids = last_ids()
    second.write(now())
    assert written_since(ids) == ([], [])
    assert verdict(text) is None


def test_rehash_queue_when_full_drops_further_keys(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehashing, "_MAX_PENDING", 2)
    texts = [issue(scene.sandbox, label=str(number))[1] for number in range(3)]
    rotate()
    for _ in range(2):
        assert [verdict(text) for text in texts] == [None] * 3
        assert len(pending_rehashes._pending) <= 2
        rehash()
    assert {row.pepper_version for row in Key.objects.all()} == {2}, "the next verification queued the dropped key"


def test_rehash_queue_repr_contains_no_digest(scene: Scene) -> None:
    key, text = issue(scene.sandbox)
    rotate()
    assert verdict(text) is None
    shown = repr(pending_rehashes._pending)
    assert bytes(key.digest).hex() not in shown
    assert repr(bytes(key.digest)) not in shown


def test_rehash_outside_a_recorded_block_is_refused(scene: Scene) -> None:
    """The write that skips the row version still requires an audit entry and a change row."""
    key, _ = issue(scene.sandbox)
    with pytest.raises(UnrecordedWriteError):
        key.swap_beside({"pepper_version": 1}, pepper_version=2)


def test_rehash_is_written_by_the_usage_reporting_thread(scene: Scene) -> None:
    key, text = issue(scene.sandbox)
    rotate()
    assert verdict(text) is None
    UsageLog()._work()
    assert fresh(key).pepper_version == 2


def test_rehash_that_fails_does_not_stop_the_check_for_new_peppers(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose rehashes fail in every round still loads a new pepper."""
    other = PepperRing()
    monkeypatch.setattr(recorder, "load_peppers", other)
    monkeypatch.setattr(other, "schedule_refresh", other.refresh)
    assert other(SANDBOX).current_version == 1
    rotate()
    with mock.patch.object(pending_rehashes, "write", side_effect=ValueError) as write:
        UsageLog()._work()
    write.assert_called_once()
    assert other(SANDBOX).current_version == 2


# ------------------------------------------------------------------------------------------------- service tokens


def test_rehash_of_a_used_service_token_moves_it(scene: Scene) -> None:
    token, text = make_token()
    rotate(SERVICE)
    assert prove_service_token(text.reveal(), now()) is not None
    ids = last_ids()
    rehash()
    assert ServiceToken.objects.get(pk=token.pk).pepper_version == 2
    assert written_since(ids) == (["service_token.rehashed"], [("service_token", token.pk)])
    assert prove_service_token(text.reveal(), now()) is not None
    retire(SERVICE, 1)
    assert prove_service_token(text.reveal(), now()) is not None


def test_rehash_of_a_revoked_service_token_is_dropped(scene: Scene) -> None:
    token, text = make_token()
    rotate(SERVICE)
    assert prove_service_token(text.reveal(), now()) is not None
    revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), token)
    ids = last_ids()
    rehash()
    assert written_since(ids) == ([], [])
    assert prove_service_token(text.reveal(), now()) is None


# ------------------------------------------------------------------------------------------------------ property


class ProcessFleet:
    """Model of several processes.

    One process issues and verifies. `late` loads new pepper versions only when it polls, sometimes without the backend,
    and reports what it has loaded. One request is in flight.
    """

    def __init__(self) -> None:
        self.scene = make_scene()
        self.late = PepperRing()
        self.late(SANDBOX)
        self.report()
        self.valid: list[tuple[Key, Plaintext]] = []
        self.peppers = load_peppers(SANDBOX)
        self.record: tuple[KeyRecord, Plaintext] | None = None

    def issue(self, _: int) -> None:
        self.valid.append(issue(self.scene.sandbox, label=str(len(self.valid))))

    def report(self) -> None:
        row = {"started_at": now(), "flushed_through_at": now(), "peppers": self.late.newest_versions()}
        UsageReporter.objects.update_or_create(reporter_id="late", defaults=row)

    def rotate(self, _: int) -> None:
        with suppress(StateConflictError):
            rotate()

    def advance_worker(self, _: int) -> None:
        """Run the worker's step that puts a new version into use."""
        renew_peppers()
        load_peppers.refresh()

    def rehash(self, _: int) -> None:
        rehash()

    def poll_late(self, _: int) -> None:
        self.late.refresh()
        self.report()

    def poll_late_without_backend(self, _: int) -> None:
        """Poll while the backend is unavailable to this process alone."""
        with mock.patch.object(LocalKeystore, "read", side_effect=BackendUnavailableError("It is sealed.")):
            self.late.refresh()
        self.report()

    def retire(self, which: int) -> None:
        """Retire and destroy one of the first versions, if allowed."""
        with suppress(StateConflictError, NotFoundError):
            retire(SANDBOX, which + 1)
            destroy(SANDBOX, which + 1)

    def verify(self, which: int) -> None:
        for _, text in self.valid[which : which + 1]:
            assert verdict(text) is None

    def verify_late(self, which: int) -> None:
        """No key is hashed with a version that `late` has not loaded."""
        with (
            mock.patch.object(judging, "load_peppers", self.late),
            mock.patch.object(ring, "load_peppers", self.late),
        ):
            for _, text in self.valid[which : which + 1]:
                assert verdict(text) is None

    def start_request(self, _: int) -> None:
        self.peppers = load_peppers(SANDBOX)

    def read(self, which: int) -> None:
        for key, text in self.valid[which : which + 1]:
            record = find_key_record(key.pk)
            assert record is not None
            self.peppers, self.record = take_pepper(self.peppers, record.pepper_version), (record, text)

    def finish_request(self, _: int) -> None:
        if self.record is not None:
            record, text = self.record
            assert self.peppers.matches(text, record.digest, record.pepper_version)
            self.record = None

    def revoke(self, which: int) -> None:
        for key, _ in self.valid[which : which + 1]:
            revoke_key(by_admin(self.scene, P.KEYS_REVOKE), fresh(key), RevocationReason.SUPERSEDED)
        del self.valid[which : which + 1]

    def check(self) -> None:
        """Check that the pepper of every active key exists in the database and in the backend."""
        for key, text in self.valid:
            row = fresh(key)
            version = PepperVersion.objects.get(pepper_set=SANDBOX, number=row.pepper_version)
            assert version.retired_at is None
            held = Peppers(SANDBOX, {version.number: read_checked(version)})
            assert held.matches(text, bytes(row.digest), row.pepper_version)


STEPS = st.sampled_from(
    [
        *(
            ProcessFleet.rotate,
            ProcessFleet.issue,
            ProcessFleet.verify,
            ProcessFleet.verify_late,
            ProcessFleet.rehash,
            ProcessFleet.retire,
            ProcessFleet.poll_late,
        ),
        *(
            ProcessFleet.start_request,
            ProcessFleet.read,
            ProcessFleet.finish_request,
            ProcessFleet.revoke,
            ProcessFleet.advance_worker,
            ProcessFleet.poll_late_without_backend,
        ),
    ]
)


@pytest.mark.long
@given(steps=st.lists(st.tuples(STEPS, st.integers(0, 2)), max_size=30))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_peppers_in_any_order_of_actions_never_refuse_a_valid_key(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Callable[[ProcessFleet, int], None], int]]
) -> None:
    """No process refuses a valid key, and every active key has its pepper, in any order of actions."""
    with transaction.atomic(), own_keystore(tmp_path_factory.mktemp("keystore")):
        pending_rehashes.forget()
        fleet = ProcessFleet()
        for step, which in [
            (ProcessFleet.issue, 0),
            *steps,
            (ProcessFleet.poll_late, 0),
            *[(ProcessFleet.verify, each) for each in range(5)],
        ]:
            step(fleet, which)
            fleet.check()
        transaction.set_rollback(True)


def test_peppers_through_a_complete_rotation_never_refuse_a_valid_key(tmp_path: Path) -> None:
    """The regular order of a rotation, which the property test may not draw: used, moved, retired."""
    fleet = ProcessFleet()
    first = (
        ProcessFleet.issue,
        ProcessFleet.start_request,
        ProcessFleet.read,
        ProcessFleet.rotate,
        ProcessFleet.poll_late_without_backend,
        ProcessFleet.advance_worker,
    )
    moved = (
        ProcessFleet.verify,
        ProcessFleet.verify_late,
        ProcessFleet.poll_late,
        ProcessFleet.advance_worker,
        ProcessFleet.verify,
        ProcessFleet.rehash,
    )
    for step in (*first, *moved, ProcessFleet.verify_late, ProcessFleet.retire):
        step(fleet, 0)
        fleet.check()
    assert PepperVersion.objects.get(pepper_set=SANDBOX, number=1).destroyed_at is not None
    fleet.finish_request(0)
    fleet.verify(0)


# --------------------------------------------------------------------------------------------------------- races


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("end", ["revoke", "suspend"])
def test_race_of_rehash_with_revocation_or_suspension_ends_the_key(end: str) -> None:
    """The revocation or suspension takes precedence and never fails because of the re-hash."""
    busy = make_scene()
    for number in range(20):
        key, text = issue(busy.sandbox, label=str(number))
        proved = (bytes(key.digest), key.pepper_version)
        rotate()
        process = PendingRehashes()
        process.note_proof(Key, key.pk, text, proved, load_peppers(SANDBOX))
        seen = fresh(key)
        if end == "revoke":
            end_key = partial(revoke_key, by_admin(busy, P.KEYS_REVOKE), seen, RevocationReason.KEY_COMPROMISE)
        else:
            end_key = partial(suspend_key, by_admin(busy, P.KEYS_SUSPEND), seen)
        outcomes = race(partial(process.write, now()), end_key)
        assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        row = fresh(key)
        assert row.state == (KeyState.COMPROMISED if end == "revoke" else KeyState.SUSPENDED)
        assert row.pepper_version in {proved[1], proved[1] + 1}
        assert load_peppers(SANDBOX).matches(text, bytes(row.digest), row.pepper_version)
        pending_rehashes.forget()


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_race_of_rehash_with_an_open_revocation_does_not_block() -> None:
    """A locked row is skipped, so the usage reporting thread never waits for a lock."""
    busy = make_scene()
    key, text = issue(busy.sandbox)
    rotate()
    assert verdict(text) is None
    allowed = by_admin(busy, P.KEYS_REVOKE)
    with held_open(lambda: revoke_key(allowed, fresh(key), RevocationReason.KEY_COMPROMISE)):
        rehash()
        assert fresh(key).pepper_version == 1
    assert (fresh(key).state, fresh(key).pepper_version) == (KeyState.COMPROMISED, 1)


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_race_of_retirement_with_issuance_leaves_no_key_without_its_pepper() -> None:
    """A key is either counted by the retirement or refused by the database."""
    busy = make_scene()
    credential = issue(busy.sandbox)[0].credential
    pending_rehashes.forget()
    for _ in range(8):
        number = rotate().number
        rotate()
        allowed = grant(HOST, P.PEPPERS_WRITE)
        retirement, *inserts = race(
            partial(retire_pepper, allowed, SANDBOX, number), *[partial(_insert_key, credential, number)] * 3
        )
        keys = Key.objects.filter(pepper_version=number).count()
        assert keys == inserts.count(None)
        if isinstance(retirement, Exception):
            assert isinstance(retirement, StateConflictError)
        else:
            assert keys == 0
            assert {type(outcome) for outcome in inserts} == {DatabaseIntegrityError}


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_race_of_retirement_with_vacuum_waits_without_blocking_writers() -> None:
    """PostgreSQL cancels an autovacuum that blocks a lock only after a second; a vacuum is no reason to fail."""
    busy = make_scene()
    credential = issue(busy.sandbox)[0].credential
    pending_rehashes.forget()
    number, newest = rotate().number, rotate().number
    with held_open(partial(_lock_like_vacuum, "keyvault_key")):
        retirement = start(partial(retire_pepper, grant(HOST, P.PEPPERS_WRITE), SANDBOX, number))
        wait_until_blocked(retirement, seconds=0.7)
        _insert_key(credential, newest)
    assert retirement.result(TIMEOUT_SECONDS).retired_at is not None


def _lock_like_vacuum(table: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {table} IN SHARE UPDATE EXCLUSIVE MODE")


def _insert_key(credential: Credential, number: int) -> None:
    """Insert a key as a process does that has not loaded the newer version."""
    place = credential.account
    with recorded(grant(WORKER, P.ISSUANCE_EXECUTE, place), P.ISSUANCE_EXECUTE, "test.staged", account=place):
        Key(
            key_id=secrets.token_hex(8),
            credential=credential,
            account_environment=credential.account_environment,
            digest=secrets.token_bytes(32),
            pepper_version=number,
            created_at=now(),
        ).save()

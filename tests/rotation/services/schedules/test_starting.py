"""The time of each credential's next request: kept current in bounded steps, and never lost."""

import random
from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from django.db import transaction
from django.db.models import QuerySet

from keyvault.access.permissions import Permission as P
from keyvault.domain.environments import Environment
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyState
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Credential, Key, Notice
from keyvault.services.keys.lifecycle import resume_key, revoke_key, suspend_key
from keyvault.services.merchants.merchants import resume_account, suspend_account
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.states import CLOSED
from rotation.domain.windows import Window
from rotation.models import BlackoutCalendar, Rotation, RotationSchedule, ScheduledCredential, ScheduleSweep
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.interventions import abort_rotation
from rotation.services.rotations.requests import begin_rotation
from rotation.services.schedules import starting
from rotation.services.schedules.candidates import find_candidates
from rotation.services.schedules.date_marks import mark_credentials
from rotation.services.schedules.schedules import disable_schedule, enable_schedule, place_of
from rotation.services.schedules.starting import begin_due
from tests.clocks import Clock
from tests.plans import copy_row, explain
from tests.rotation import scene
from tests.rotation.services.schedules.test_schedules import NIGHTS, calendar, damage, save
from tests.services.racing import TIMEOUT_SECONDS, start
from tests.services.rows import disable_triggers

pytestmark = [pytest.mark.database, pytest.mark.django_db]

SANDBOX, PRODUCTION = Environment.SANDBOX, Environment.PRODUCTION
DAY = timedelta(days=1)
TICK = timedelta(seconds=30)


def crowd(key: Key, count: int) -> None:
    """Copy the key and its credential `count` times, without the services."""
    credential = key.credential
    credentials: QuerySet[Credential] = QuerySet(Credential)
    credentials.bulk_create(
        Credential(
            credential_id=f"crd_copy{number}",
            account=credential.account,
            account_environment=credential.account_environment,
            kind=credential.kind,
            label=f"copy{number}",
            delivery=credential.delivery,
            created_at=credential.created_at,
        )
        for number in range(count)
    )
    keys: QuerySet[Key] = QuerySet(Key)
    keys.bulk_create(
        Key(
            key_id=f"copy{number}",
            credential_id=f"crd_copy{number}",
            account_environment=credential.account_environment,
            state=KeyState.ACTIVE,
            digest=key.digest,
            pepper_version=key.pepper_version,
            created_at=key.created_at,
            activated_at=key.activated_at,
        )
        for number in range(count)
    )


def refuse_copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Refuse each rotation of a copy; return the list of their labels, in the order in which they were tried."""
    tried: list[str] = []

    def refusing(grant: Any, credential: Credential, *args: Any, **options: Any) -> Rotation:
        if credential.label.startswith("copy"):
            tried.append(credential.label)
            raise StateConflictError("It cannot be rotated.")
        return begin_rotation(grant, credential, *args, **options)

    monkeypatch.setattr(starting, "begin_rotation", refusing)
    return tried


def row_of(key: Key) -> ScheduledCredential:
    return ScheduledCredential.objects.get(pk=key.credential_id)


def test_refused_credentials_starve_none_behind_them(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: those that are refused again and again leave each tick room for one that is due after them."""
    monkeypatch.setattr(starting, "MAX_TRIED", 20)
    first, _ = scene.issue(scene.account(), clock(), label="copy")
    crowd(first, 40)  # The first two ticks try no others.
    good, _ = scene.issue(scene.account(), clock() + TICK, label="good")
    save(SANDBOX, clock())
    tried = refuse_copies(monkeypatch)
    due_at = clock() + 90 * DAY + TICK
    begun = [begin_due(due_at + number * TICK) for number in range(3)]
    assert [len(each) for each in begun] == [0, 0, 1]
    assert Rotation.objects.get().credential_id == good.credential_id
    assert sorted(tried[:41]) == sorted(["copy", *(f"copy{number}" for number in range(40))])
    late, _ = scene.issue(scene.account(), clock(), label="late")
    later = due_at + timedelta(minutes=5)  # Every refused one is due again.
    assert sum(len(begin_due(later + number * TICK)) for number in range(3)) == 1
    assert row_of(late).ask_at is None


def test_replacement_of_a_schedule_is_sealed_to_the_recipient_key(clock: Clock, verifier: UsageLog) -> None:
    """Guarantee: a schedule's replacement reaches a merchant with a recipient key without an operator."""
    key, _ = scene.issue(scene.account(), clock(), delivery=Delivery.SHOW_ONCE)
    scene.set_recipient(key, clock())
    save(SANDBOX, clock())
    clock.now += 90 * DAY + TICK
    (rotation_id,) = begin_due(clock())
    advance_rotation(rotation_id, clock)
    sealed = Rotation.objects.get(pk=rotation_id)
    assert sealed.handover is not None
    assert sealed.handover["key_id"] == sealed.replacement_id
    assert sealed.awaits_requester is False


def test_schedule_saved_is_applied_in_bounded_batches_that_continue(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: no request computes the dates of many credentials, and no tick computes all of them."""
    monkeypatch.setattr(starting, "BATCH", 4)
    monkeypatch.setattr(starting, "MAX_SWEPT", 8)
    first, _ = scene.first_key(clock())
    crowd(first, 20)
    begin_due(clock())
    save(SANDBOX, clock(), cryptoperiod_days=30)
    dated = ScheduledCredential.objects.filter(ask_at=clock() + 30 * DAY)
    assert not dated.exists()
    counts = []
    for _ in range(4):
        begin_due(clock())
        counts.append(dated.count())
    assert counts == [8, 16, 21, 21]
    assert not ScheduleSweep.objects.exists()


def test_small_sweep_is_done_beside_a_large_one(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "BATCH", 4)
    monkeypatch.setattr(starting, "MAX_SWEPT", 5)
    first, _ = scene.first_key(clock())
    crowd(first, 20)
    other, _ = scene.first_key(clock(), "globex")
    save(SANDBOX, clock())
    save(scene.account("globex"), clock(), cryptoperiod_days=30)
    begin_due(clock())
    assert row_of(other).ask_at == clock() + 30 * DAY
    assert ScheduleSweep.objects.count() == 1


def test_sweep_includes_those_that_have_not_begun(clock: Clock) -> None:
    """A schedule that is saved again and again is not applied as often."""
    scene.first_key(clock())
    for days in (30, 60, 90):
        save(SANDBOX, clock(), cryptoperiod_days=days)
    sweeps = ScheduleSweep.objects.order_by("pk")
    assert sweeps.count() == 3
    starting._sweep_batch(sweeps[0], clock())
    assert not sweeps.exists()


def test_change_while_dates_are_computed_is_not_overwritten(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: a worker that has read a credential before its change does not undo the change's mark."""
    key, _ = scene.first_key(clock())
    save(SANDBOX, clock())

    def outdated(ids: list[str]) -> Any:
        found = find_candidates(ids)
        grant = authorize(scene.admin(), P.KEYS_SUSPEND, key.credential.account, now=clock())
        fresh = Key.objects.select_related("credential__account__merchant").get(pk=key.pk)
        if fresh.state == KeyState.ACTIVE:
            suspend_key(grant, fresh)
        return found

    monkeypatch.setattr(starting, "find_candidates", outdated)
    starting._claim_due([row_of(key)], clock(), 0)
    assert row_of(key).ask_at == clock()
    monkeypatch.undo()
    begin_due(clock())
    assert row_of(key).ask_at is None


def test_credential_claimed_by_another_worker_is_not_tried(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    key, _ = scene.first_key(clock())
    save(SANDBOX, clock())
    begin_due(clock())
    due_at = clock() + 90 * DAY
    stale = row_of(key)
    assert len(starting._claim_due([row_of(key)], due_at, 1)) == 1
    assert starting._claim_due([stale], due_at, 1) == []


def test_schedule_disabled_during_a_batch_begins_no_further_rotation(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: after a request to disable a schedule has returned, a worker that read it before begins nothing."""
    for label in ("first", "second"):
        scene.issue(scene.account(), clock(), label=label)
    schedule, settle = save(SANDBOX, clock()), starting._settle

    def settle_and_disable(row: ScheduledCredential, **changes: Any) -> None:
        settle(row, **changes)
        fresh = RotationSchedule.objects.get(pk=schedule.pk)
        if fresh.is_enabled:
            disable_schedule(authorize(scene.tam(), P.SCHEDULES_WRITE, place_of(fresh), now=clock()), fresh)

    monkeypatch.setattr(starting, "_settle", settle_and_disable)
    clock.now += 90 * DAY
    assert len(begin_due(clock())) == 1
    assert begin_due(clock()) == []
    assert Rotation.objects.count() == 1


# --- sweeps beside other writers ------------------------------------------------------------------------------


@pytest.fixture
def scheduled(clock: Clock) -> Key:
    """Return a key whose date follows from a schedule of 30 days."""
    key, _ = scene.first_key(clock())
    save(SANDBOX, clock(), cryptoperiod_days=30)
    begin_due(clock())
    assert row_of(key).ask_at == clock() + 30 * DAY
    return key


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_sweep_computes_the_date_of_a_credential_whose_own_change_is_rolled_back(
    clock: Clock, scheduled: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a sweep passes over no locked row, since the lock's holder may leave nothing behind."""
    store, is_locked, is_stored = starting._store, Event(), Event()

    def change_and_fail() -> None:
        with suppress(RuntimeError), transaction.atomic():
            mark_credentials([scheduled.credential_id], clock())
            is_locked.set()
            assert is_stored.wait(TIMEOUT_SECONDS)
            raise RuntimeError("rolled back")

    def store_and_tell(rows: list[ScheduledCredential]) -> set[str]:
        stored = store(rows)
        is_stored.set()
        return stored

    save(SANDBOX, clock(), cryptoperiod_days=60)
    change = start(change_and_fail)
    assert is_locked.wait(TIMEOUT_SECONDS)
    monkeypatch.setattr(starting, "_store", store_and_tell)
    begin_due(clock())
    change.result(TIMEOUT_SECONDS)
    assert row_of(scheduled).ask_at == clock() + 60 * DAY


@pytest.mark.parametrize("is_first", [True, False])
def test_sweep_is_not_undone_by_a_worker_with_older_facts(
    clock: Clock, scheduled: Key, monkeypatch: pytest.MonkeyPatch, *, is_first: bool
) -> None:
    """The older date is stored before the sweep stores its own one, or after it; the sweep's is the one before."""
    older = row_of(scheduled)
    older.ask_at = clock() + 90 * DAY  # by a schedule that was saved and changed back since

    def meanwhile(ids: list[str]) -> Any:
        found = find_candidates(ids)
        monkeypatch.undo()
        assert starting._store([older]) == {older.pk}
        return found

    save(SANDBOX, clock(), cryptoperiod_days=30)
    if is_first:
        monkeypatch.setattr(starting, "find_candidates", meanwhile)
    begin_due(clock())
    if not is_first:
        assert starting._store([older]) == set()
    assert row_of(scheduled).ask_at == clock() + 30 * DAY


def test_worker_that_dies_while_it_begins_leaves_a_claim_that_ends(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a credential that kills its worker is tried again later, and not by each tick."""
    key, _ = scene.first_key(clock())
    save(SANDBOX, clock())

    def dying(*_: object, **__: object) -> Rotation:
        raise SystemExit

    due_at = clock() + 90 * DAY
    with monkeypatch.context() as fault:
        fault.setattr(starting, "begin_rotation", dying)
        with pytest.raises(SystemExit):
            begin_due(due_at)
        assert begin_due(due_at) == []
    assert row_of(key).refusals == 1
    assert len(begin_due(due_at + timedelta(minutes=1))) == 1


def test_alarm_of_an_unreadable_schedule_that_fails_delays_no_other_and_is_raised_later(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: no credential waits for a schedule whose fault raised no alarm."""
    broken, _ = scene.first_key(clock())
    sound, _ = scene.first_key(clock(), "globex")
    row = save(scene.account(), clock())
    save(SANDBOX, clock())
    begin_due(clock())
    damage(row, window={"time_zone": "Mars/Olympus"})
    due_at = clock() + 90 * DAY
    with monkeypatch.context() as fault:
        fault.setattr(starting, "announce", lambda *_, **__: 1 / 0)
        assert len(begin_due(due_at)) == 1
    assert row_of(sound).ask_at is None
    assert row_of(broken).ask_at == due_at + timedelta(minutes=1)
    begin_due(due_at + timedelta(minutes=1))
    assert Notice.objects.filter(kind=NoticeKind.SCHEDULE_STALLED).count() == 1
    assert row_of(broken).ask_at is None


def test_change_that_is_rolled_back_leaves_no_mark(clock: Clock) -> None:
    key, _ = scene.first_key(clock())
    save(SANDBOX, clock())
    begin_due(clock())
    before = row_of(key)
    grant = authorize(scene.admin(), P.KEYS_REVOKE, key.credential.account, now=clock())
    with transaction.atomic():
        revoke_key(grant, Key.objects.get(pk=key.pk), RevocationReason.SUPERSEDED)
        assert row_of(key).revision > before.revision
        transaction.set_rollback(True)
    assert row_of(key).revision == before.revision


# --- incremental and from scratch -----------------------------------------------------------------------------


class AccountFleet:
    """A few accounts with credentials, and random changes of keys, accounts, schedules and calendars."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.random, self.clock = random.Random(seed), clock  # noqa: S311  reproducible changes, no secrets
        self.accounts = [scene.account("acme"), scene.account("globex"), scene.account("acme", PRODUCTION)]
        for number in range(5):
            scene.issue(self.random.choice(self.accounts), clock(), label=f"n{number}")
        save(SANDBOX, clock(), cryptoperiod_days=60)

    def change(self) -> None:
        keys = [self.issue, self.issue, self.end_key, self.pause_key]
        schedules = [self.save, self.save, self.toggle, self.freeze]
        act = self.random.choice([*keys, *schedules, self.pause_account, self.rotate, self.abort, self.abort])
        with suppress(RequestInvalidError, StateConflictError, IndexError):  # Not every change is possible now.
            act()

    def issue(self) -> None:
        scene.issue(self.random.choice(self.accounts), self.clock(), label=f"n{self.random.random()}")

    def end_key(self) -> None:
        key = self._key(KeyState.ACTIVE)
        revoke_key(self._grant(P.KEYS_REVOKE, key), key, RevocationReason.SUPERSEDED)

    def pause_key(self) -> None:
        key = self._key(KeyState.ACTIVE, KeyState.SUSPENDED)
        if key.state == KeyState.ACTIVE:
            suspend_key(self._grant(P.KEYS_SUSPEND, key), key)
        else:
            resume_key(self._grant(P.KEYS_RESUME, key), key)

    def pause_account(self) -> None:
        account = self.random.choice(self.accounts)
        account.refresh_from_db()
        grant = authorize(scene.admin(), P.MERCHANTS_WRITE, account, now=self.clock())
        (suspend_account if account.status == "active" else resume_account)(grant, account)

    def save(self) -> None:
        credential = self.random.choice(list(Credential.objects.select_related("account__merchant")))
        scope: Any = self.random.choice([SANDBOX, PRODUCTION, self.random.choice(self.accounts), credential])
        days = self.random.choice([20, 30, 90])
        window: Window | None = self.random.choice([None, NIGHTS])
        terms: dict[str, Any] = {"cryptoperiod_days": days, "jitter_days": self.random.choice([0, 9]), "window": window}
        terms |= {"lead_days": self.random.choice([0, 3]), "calendar": BlackoutCalendar.objects.first()}
        save(scope, self.clock(), **terms)

    def toggle(self) -> None:
        row = self.random.choice([*RotationSchedule.objects.select_related("account", "credential", "calendar")])
        grant = authorize(scene.admin(), P.SCHEDULES_WRITE, place_of(row), now=self.clock())
        (disable_schedule if row.is_enabled else enable_schedule)(grant, row)

    def freeze(self) -> None:
        begins_at = self.clock() + self.random.randrange(40) * DAY
        calendar("freeze", self.clock(), (begins_at, begins_at + self.random.randrange(1, 5) * DAY))

    def rotate(self) -> None:
        scene.rotate(self._key(KeyState.ACTIVE).credential, self.clock())

    def abort(self) -> None:
        row = self.random.choice(list(Rotation.objects.exclude(state__in=CLOSED).select_related("credential__account")))
        grant = authorize(scene.admin(), P.ROTATIONS_WRITE, row.credential.account, now=self.clock())
        abort_rotation(grant, row, "another time")

    def _key(self, *states: KeyState) -> Key:
        rows = Key.objects.filter(state__in=states).select_related("credential__account__merchant")
        key: Key = self.random.choice(list(rows))
        return key

    def _grant(self, permission: P, key: Key) -> Any:
        return authorize(scene.admin(), permission, key.credential.account, now=self.clock())


@pytest.mark.postgres_once
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 3))])
def test_dates_after_random_changes_equal_those_from_scratch(clock: Clock, seed: int) -> None:
    """Guarantee: no change of a key, an account, a rotation, a schedule or a calendar leaves an outdated date."""
    fleet = AccountFleet(seed, clock)
    seen = set()
    for _ in range(10):
        for _ in range(3):
            fleet.change()
        clock.tick(fleet.random.choice([0, 3_600, 5 * 86_400, 20 * 86_400]))
        begin_due(clock())
        begin_due(clock())
        ids = list(Credential.objects.values_list("pk", flat=True))
        expected = {pk: candidate.ask_at for pk, candidate in find_candidates(ids).items()}
        for row in ScheduledCredential.objects.all():
            if row.refusals:
                at = expected[row.pk]
                assert at is not None
                assert at <= clock() < (row.ask_at or clock())
            else:
                assert row.ask_at == expected.get(row.pk), row
                seen.add(row.ask_at)
        assert not ScheduleSweep.objects.exists()
        assert ScheduledCredential.objects.count() == Credential.objects.count()
    assert seen > {None}


# --- query plans ----------------------------------------------------------------------------------------------


@pytest.mark.postgres
def test_begin_due_with_nothing_due_reads_no_more_than_its_index(clock: Clock) -> None:
    """Guarantee: a tick's cost does not grow with the credentials, keys, schedules or rotations that are not due."""
    scene.first_key(clock())
    save(SANDBOX, clock(), cryptoperiod_days=30)
    begin_due(clock())
    disable_triggers()
    copy_row(Credential, credential_id="'crd_' || n")
    copy_row(ScheduledCredential, credential="'crd_' || n")
    found: list[str] = []
    plans = explain(lambda: found.extend(begin_due(clock())))
    assert found == []
    due = [plan for plan in plans if "scheduled_by_ask_at" in plan]
    assert len(due) == len(Environment)
    for plan in due:
        assert "Index Cond: (((environment)::text = " in plan
        assert "(ask_at <= " in plan
        assert "Sort" not in plan
    expiries = [plan for plan in plans if "rotation_standingapproval" in plan]
    assert len(plans) == len(Environment) + 2 + len(expiries)
    assert len(expiries) == 1
    for plan in set(plans) - set(expiries):
        assert "Seq Scan on rotation_scheduledcredential" not in plan
        assert "keyvault_key" not in plan
        assert "keyvault_credential" not in plan or "rotation_schedulecheck" in plan

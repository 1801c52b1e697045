"""Silence by source: a client that calls every day must not hide one that calls once a month."""

import dataclasses
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, OperatorPrincipal
from keyvault.domain.environments import Environment
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import AuditEntry, Key, UsageReporter
from keyvault.models.usage import UseOutcome
from keyvault.services.keys.lifecycle import get_key, resume_key, suspend_key
from keyvault.services.merchants.merchants import (
    resume_account,
    resume_merchant,
    suspend_account,
    suspend_merchant,
)
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage import recorder, reports, retention
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.usage.reports import SourceUse
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import PlanOverrides
from rotation.domain.policy import Plan
from rotation.models import EvidenceKind, Rotation
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.facts import find_gap, list_waived
from rotation.services.rotations.interventions import resume_rotation, waive_source
from rotation.services.rotations.planning import plan_rotation
from rotation.services.rotations.reports import describe, find_waits, get_rotation
from rotation.services.rotations.requests import approve_rotation, request_rotation
from tests.clocks import Clock
from tests.rotation import scene
from tests.rotation.steps import run_due

pytestmark = pytest.mark.django_db

DAY = 86_400
SHOP, MONTH_END = ("192.0.2.1", "198.51.100.1"), "203.0.113.7"
"""Addresses of the shop's two sites, which call every day, and of the job that calls every 30 days."""

JOB = "203.0.113.0/24 month-end"


@dataclass
class ClientFleet:
    """A production key with daily clients and a monthly one, on the test's clock."""

    clock: Clock
    verifier: UsageLog
    old: str = ""
    new: str = ""
    day: int = 0
    rotation_id: str = ""
    shop_key: str = ""
    job_key: str = ""
    refused: list[str] = field(default_factory=list)
    _states: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        key, _ = scene.first_key(self.clock(), environment=Environment.PRODUCTION)
        self.credential = key.credential
        self.old = self.shop_key = self.job_key = key.key_id

    def call(self, key_id: str, source: str, user_agent: str, count: int = 1) -> None:
        is_active = self.state_of(key_id) == "active"
        if not is_active:
            self.refused.append(f"day {self.day}: {user_agent}")
        outcome = UseOutcome.ALLOWED if is_active else UseOutcome.REFUSED
        for _ in range(count):
            self.verifier.note(key_id, source=source, user_agent=user_agent, endpoint="orders.create", outcome=outcome)

    def live(self, days: int, job_every: int = 30) -> Rotation | None:
        """Let days pass: each begins with the calls of that day, and the engine takes a turn after them."""
        for _ in range(days):
            for source in SHOP:
                self.call(self.shop_key, source, "shop/1.2")
            if self.day % job_every == 0:
                self.call(self.job_key, MONTH_END, "month-end/3")
            self.turn()
            self.day += 1
            self.clock.tick(DAY)
        self.turn()
        return get_rotation(self.rotation_id) if self.rotation_id else None

    def state_of(self, key_id: str) -> str:
        """Return the key's state, which only a turn changes."""
        if key_id not in self._states:
            key = get_key(key_id)
            assert key is not None
            self._states[key_id] = key.state
        return self._states[key_id]

    def turn(self) -> None:
        self.verifier.flush()
        if self.rotation_id:
            advance_rotation(self.rotation_id, self.clock)
            self._states.clear()

    def begin(self, **fields: object) -> Rotation:
        """Request the rotation, have it approved, and deliver the replacement."""
        place, now = self.credential.account, self.clock()
        overrides = PlanOverrides(**fields)  # type: ignore[arg-type]  # the test's own values
        rotation = request_rotation(
            authorize(scene.tam(), P.ROTATIONS_WRITE, place, now=now), self.credential, overrides
        )
        self.rotation_id = rotation.rotation_id
        grant = authorize(
            scene.approver(), P.ROTATIONS_APPROVE, place, now=now, requester_person=rotation.requester_person
        )
        approve_rotation(grant, rotation, rotation.plan_digest)
        self.turn()
        rotation = get_rotation(self.rotation_id)
        assert rotation.state == S.AWAITING_PROOF
        self.new = rotation.replacement_id or ""
        return rotation

    def switch_shop(self) -> Rotation:
        """Move the daily clients to the replacement, with traffic that proves it."""
        self.shop_key = self.new
        for _ in range(20):
            for source in SHOP:
                self.call(self.new, source, "shop/1.2", 5)
            self.clock.tick(60)
            self.turn()
        rotation = get_rotation(self.rotation_id)
        assert rotation.state == S.OVERLAP
        return rotation

    def waive(
        self, source: str, why: str = "the job has ended, says Ada of Acme", who: OperatorPrincipal | None = None
    ) -> None:
        grant = authorize(who or scene.tam(), P.ROTATIONS_WRITE, self.credential.account, now=self.clock())
        waive_source(grant, get_rotation(self.rotation_id), source, why)


@pytest.fixture
def fleet(clock: Clock, verifier: UsageLog) -> ClientFleet:
    return ClientFleet(clock, verifier)


def test_silence_of_a_daily_client_does_not_hide_a_monthly_one(fleet: ClientFleet) -> None:
    """With the defaults of production, the month-end job still finds its key 30 days after its last call."""
    fleet.live(91)
    fleet.begin()
    fleet.switch_shop()
    rotation = fleet.live(30)
    assert fleet.refused == []
    assert rotation is not None
    assert rotation.state == S.OVERLAP


@pytest.mark.database
def test_silence_of_a_monthly_client_ends_after_two_of_its_gaps(fleet: ClientFleet) -> None:
    """A job that has stopped delays the rotation by its own habit, which the default deadline leaves time for."""
    fleet.live(91)
    fleet.begin()
    fleet.switch_shop()
    rotation = fleet.live(58, job_every=1000)
    assert rotation is not None
    assert rotation.state == S.OVERLAP
    rotation = fleet.live(3, job_every=1000)
    assert rotation is not None
    assert rotation.state == S.COMPLETED
    silent = rotation.evidence.get(kind="silent").seen
    assert silent["has_more_sources"] is False
    assert {each["source"]: each["longest_gap_seconds"] for each in silent["sources"]} == {
        "203.0.113.0/24 month-end": 30 * DAY,
        "198.51.100.0/24 shop": DAY,
        "192.0.2.0/24 shop": DAY,
    }


def test_silence_of_a_monthly_client_that_never_moves_stalls_at_the_deadline(fleet: ClientFleet) -> None:
    """It is never refused: the deadline keeps both keys."""
    fleet.live(31)
    fleet.begin()
    fleet.switch_shop()
    rotation = fleet.live(100)
    assert fleet.refused == []
    assert rotation is not None
    assert (rotation.state, rotation.stalled_from) == (S.STALLED, S.OVERLAP)


def test_silence_of_a_monthly_client_that_moved_is_one_gap_and_the_quiet_period(fleet: ClientFleet) -> None:
    """Another host of that source may call once more with the old key, within its gap."""
    fleet.live(31)
    fleet.begin()
    fleet.switch_shop()
    fleet.job_key = fleet.new
    fleet.live(30)
    rotation = fleet.live(5)
    assert rotation is not None
    assert rotation.state == S.OVERLAP
    rotation = fleet.live(3)
    assert rotation is not None
    assert (rotation.state, fleet.refused) == (S.COMPLETED, [])


def test_attempt_of_a_known_source_in_quarantine_restarts_its_silence(fleet: ClientFleet) -> None:
    """A month-end job that missed a month is refused once, and finds its key at its next call."""
    fleet.live(91)
    fleet.begin(deadline=scene.later(fleet.clock(), 300 * DAY))
    fleet.switch_shop()
    while get_rotation(fleet.rotation_id).state == S.OVERLAP:
        fleet.live(1, job_every=1000)
    assert get_rotation(fleet.rotation_id).state == S.QUARANTINE
    fleet.call(fleet.old, MONTH_END, "month-end/3")
    fleet.turn()
    assert get_rotation(fleet.rotation_id).state == S.OVERLAP
    refused = list(fleet.refused)
    fleet.live(119, job_every=1000)
    assert get_rotation(fleet.rotation_id).state == S.OVERLAP, "expected twice the 60 days up to the attempt"
    fleet.call(fleet.old, MONTH_END, "month-end/3")
    assert fleet.refused == refused
    assert len(refused) == 1


def test_attempt_of_a_source_that_moved_restarts_its_silence(fleet: ClientFleet) -> None:
    """Its other hosts use the replacement, but one has yet to be switched."""
    fleet.live(31)
    fleet.begin(deadline=scene.later(fleet.clock(), 300 * DAY))
    fleet.switch_shop()
    fleet.job_key = fleet.new
    while get_rotation(fleet.rotation_id).state == S.OVERLAP:
        fleet.live(1)
    fleet.call(fleet.old, MONTH_END, "month-end/3")
    fleet.turn()
    rotation = fleet.live(31)
    assert rotation is not None
    assert (rotation.state, len(fleet.refused)) == (S.OVERLAP, 1)
    fleet.call(fleet.old, MONTH_END, "month-end/3")
    assert len(fleet.refused) == 1


@pytest.mark.parametrize("is_account", [False, True], ids=["merchant", "account"])
def test_client_of_a_suspended_merchant_finds_its_key_when_it_is_resumed(
    fleet: ClientFleet, *, is_account: bool
) -> None:
    """A client that has not switched stops with all others. Its silence counts from the resumption on."""
    fleet.live(31, job_every=2)
    fleet.begin(deadline=scene.later(fleet.clock(), 300 * DAY))
    fleet.switch_shop()
    account = fleet.credential.account

    def write_merchant() -> Grant:
        return authorize(scene.admin(), P.MERCHANTS_WRITE, account if is_account else None, now=fleet.clock())

    if is_account:
        suspend_account(write_merchant(), account)
    else:
        suspend_merchant(write_merchant(), account.merchant)
    for _ in range(60):
        fleet.clock.tick(DAY)
        fleet.turn()
    rotation = get_rotation(fleet.rotation_id)
    waits = find_waits(rotation, fleet.clock())
    assert (rotation.state, waits.waiting_for) == (S.OVERLAP, "the merchant or the account to be resumed")

    resumed_at = fleet.clock()
    if is_account:
        resume_account(write_merchant(), account)
    else:
        resume_merchant(write_merchant(), account.merchant)
    assert run_due(fleet.clock) == 1, "expected the resumption to make its turn due"
    fleet.live(3, job_every=1000)
    rotation = get_rotation(fleet.rotation_id)
    assert rotation.state == S.OVERLAP, "expected twice the two days of the client, from the resumption on"
    fleet.live(9, job_every=1000)
    evidence = get_rotation(fleet.rotation_id).evidence.get(kind=EvidenceKind.SILENT)
    assert evidence.seen["since"] == format_timestamp(resumed_at)


def test_client_of_a_suspended_key_finds_it_when_it_is_resumed(fleet: ClientFleet) -> None:
    """An operator suspends the key, which stalls the rotation, and resumes both later. Two gaps of the job: 20 days."""
    fleet.live(31, job_every=10)
    fleet.begin(deadline=scene.later(fleet.clock(), 300 * DAY))
    fleet.switch_shop()
    place = fleet.credential.account
    suspend_key(authorize(scene.admin(), P.KEYS_SUSPEND, place, now=fleet.clock()), Key.objects.get(pk=fleet.old))
    fleet.turn()
    assert get_rotation(fleet.rotation_id).state == S.STALLED
    fleet.clock.tick(60 * DAY)
    resumed_at = fleet.clock()
    resume_key(authorize(scene.admin(), P.KEYS_RESUME, place, now=resumed_at), Key.objects.get(pk=fleet.old))
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, place, now=resumed_at)
    resume_rotation(grant, get_rotation(fleet.rotation_id))
    fleet.live(19, job_every=1000)
    assert get_rotation(fleet.rotation_id).state == S.OVERLAP
    fleet.live(3, job_every=1000)
    evidence = get_rotation(fleet.rotation_id).evidence.get(kind=EvidenceKind.SILENT)
    assert datetime.fromisoformat(evidence.seen["since"]) >= resumed_at


def test_evidence_of_silence_names_the_last_attempt_as_last_seen(fleet: ClientFleet) -> None:
    """The key was reinstated by an attempt that was refused; the evidence names it for the key and for its source."""
    fleet.live(31, job_every=2)
    fleet.begin(deadline=scene.later(fleet.clock(), 300 * DAY))
    fleet.switch_shop()
    while get_rotation(fleet.rotation_id).state == S.OVERLAP:
        fleet.live(1, job_every=1000)
    tried_at = fleet.clock()
    fleet.call(fleet.old, MONTH_END, "month-end/3")
    fleet.live(90, job_every=1000)
    evidence = get_rotation(fleet.rotation_id).evidence.filter(kind=EvidenceKind.SILENT).latest("created_at")
    last_at = format_timestamp(tried_at)
    sources = {each["source"]: each["last_used_at"] for each in evidence.seen["sources"]}
    assert (evidence.seen["last_seen_at"], sources[JOB]) == (last_at, last_at)


def test_gap_that_is_open_at_delivery_counts_as_long_as_it_is_then(fleet: ClientFleet) -> None:
    """A daily job that stopped 20 days before has a gap of 20 days, which does not grow while the rotation waits."""
    fleet.live(10, job_every=1)
    fleet.live(20, job_every=1000)
    fleet.begin()
    fleet.switch_shop()
    rotation = fleet.live(19, job_every=1000)
    assert rotation is not None
    assert rotation.state == S.OVERLAP
    rotation = fleet.live(4, job_every=1000)
    assert rotation is not None
    assert rotation.state == S.COMPLETED


def test_monthly_job_that_ran_once_shortly_before_the_delivery_finds_its_key_a_month_later(fleet: ClientFleet) -> None:
    """The minutes of its one run, and of a second attempt on that day, are no habit."""
    fleet.day = 1
    fleet.live(29, job_every=1000)
    for seconds in (60, 60, DAY - 120):
        fleet.call(fleet.old, MONTH_END, "month-end/3")
        fleet.turn()
        fleet.clock.tick(seconds)
    fleet.call(fleet.old, MONTH_END, "month-end/3")
    assert late_sources(fleet.begin()) == {JOB: None}
    fleet.switch_shop()
    fleet.day = 1
    rotation = fleet.live(30)
    assert rotation is not None
    assert (rotation.state, fleet.refused) == (S.OVERLAP, [])
    fleet.call(fleet.old, MONTH_END, "month-end/3")
    assert fleet.refused == []


def test_client_in_use_for_more_than_a_day_was_seen_more_than_once(fleet: ClientFleet) -> None:
    """A client that called for more than a day has a habit: once it stops, it is silent after the quiet period."""
    fleet.day = 1
    fleet.live(3, job_every=1000)
    for _ in range(26):
        fleet.call(fleet.old, MONTH_END, "worker/3")
        fleet.turn()
        fleet.clock.tick(3600)
    assert late_sources(fleet.begin()) is None
    fleet.switch_shop()
    rotation = fleet.live(10, job_every=1000)
    assert rotation is not None
    assert (rotation.state, fleet.refused) == (S.COMPLETED, [])


def test_source_seen_once_is_awaited_until_the_deadline(fleet: ClientFleet) -> None:
    """One call gives no evidence of when the next one comes."""
    fleet.live(1)
    fleet.live(20, job_every=1000)
    fleet.begin()
    fleet.switch_shop()
    rotation = fleet.live(46, job_every=1000)
    assert rotation is not None
    assert (rotation.state, rotation.stalled_from) == (S.STALLED, S.OVERLAP)


def test_clients_that_were_not_kept_apart_must_be_waived(fleet: ClientFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of clients hides a rare one, on the old key and on the replacement."""
    fleet.live(3)
    with monkeypatch.context() as flooded:
        flooded.setattr(recorder, "_MAX_BUCKETS", 1)
        fleet.live(1, job_every=1)
    fleet.begin()
    fleet.switch_shop()
    fleet.job_key = fleet.new
    with monkeypatch.context() as flooded:
        flooded.setattr(recorder, "_MAX_BUCKETS", 1)
        fleet.live(1, job_every=1)
    fleet.live(14, job_every=1)
    assert get_rotation(fleet.rotation_id).state == S.OVERLAP
    described = describe(get_rotation(fleet.rotation_id), fleet.clock())
    assert "others, clients beyond the limit on distinct sources, to be waived" in str(described["waiting_for"])
    fleet.waive("others")
    rotation = fleet.live(10, job_every=1)
    assert rotation is not None
    assert (rotation.state, fleet.refused) == (S.COMPLETED, [])


@pytest.mark.parametrize("environment", Environment)
def test_clients_that_were_not_kept_apart_have_no_gap_in_any_environment(environment: Environment) -> None:
    at = datetime(2026, 11, 21, tzinfo=UTC)
    others = SourceUse("others", first_at=at, last_at=at, denied_at=None, longest_gap_seconds=60)
    assert find_gap(others, environment, at) is None


def test_sources_of_a_key_beyond_the_bound_must_be_waived_together(
    fleet: ClientFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn reads a bounded number of sources, and takes none that it has not read as silent."""
    fleet.live(3, job_every=1)
    fleet.begin()
    fleet.switch_shop()
    fleet.job_key = fleet.new
    monkeypatch.setattr(reports, "MAX_SOURCES", 2)
    rotation = fleet.live(14, job_every=1)
    assert rotation is not None
    assert rotation.state == S.OVERLAP
    awaited = describe(rotation, fleet.clock())["waiting_sources"]
    assert isinstance(awaited, list)
    assert [(each["source"], each["until"]) for each in awaited] == [("others", None)]
    fleet.waive("others")
    rotation = fleet.live(10, job_every=1)
    assert rotation is not None
    assert (rotation.state, fleet.refused) == (S.COMPLETED, [])


def test_proof_by_traffic_counts_the_minutes_that_have_rolled_up(fleet: ClientFleet) -> None:
    """A merchant that deploys slowly proves the replacement over days, of which only hours are kept."""
    fleet.live(2)
    fleet.begin()
    fleet.shop_key = fleet.new
    for days in (3, 0):
        for _ in range(5):
            for source in SHOP:
                fleet.call(fleet.new, source, "shop/1.2", 10)
            fleet.clock.tick(60)
            fleet.turn()
        moved = retention.roll_up(fleet.clock.tick(days * DAY))
        assert bool(moved) == bool(days)
    fleet.turn()
    assert get_rotation(fleet.rotation_id).state == S.OVERLAP


# --- the plan -----------------------------------------------------------------------------------------------


def late_sources(rotation: Rotation) -> object:
    return rotation.approved_plan.late_sources


def test_plan_lists_the_sources_that_cannot_be_silent_by_the_deadline(fleet: ClientFleet) -> None:
    """The approver sees them before a key is made, with a deadline that would fit, under the digest."""
    fleet.live(31)
    now = fleet.clock()
    early = now + timedelta(days=20)
    plan = plan_rotation(fleet.credential, PlanOverrides(deadline=early), now)
    fitting = now + timedelta(seconds=600, days=61)
    assert plan.late_sources == {JOB: format_timestamp(fitting)}
    assert plan.digest() != dataclasses.replace(plan, late_sources=None).digest()
    assert plan_rotation(fleet.credential, PlanOverrides(deadline=fitting), now).late_sources is None
    rotation = fleet.begin(deadline=early)
    shown = describe(rotation, now)["plan"]
    assert isinstance(shown, dict)
    assert shown["late_sources"] == plan.late_sources
    assert Plan.from_json(rotation.plan).digest() == rotation.plan_digest


def test_plan_with_the_fitting_deadline_completes(fleet: ClientFleet) -> None:
    fleet.live(31)
    now = fleet.clock()
    late = plan_rotation(fleet.credential, PlanOverrides(deadline=now + timedelta(days=20)), now).late_sources
    assert late is not None
    fleet.begin(deadline=datetime.fromisoformat(late[JOB] or ""))
    fleet.switch_shop()
    rotation = fleet.live(62, job_every=1000)
    assert rotation is not None
    assert (rotation.state, fleet.refused) == (S.COMPLETED, [])


def test_plan_with_the_default_deadline_fits_the_longest_gap(fleet: ClientFleet) -> None:
    fleet.live(31)
    assert late_sources(fleet.begin()) is None


def test_plan_lists_a_source_seen_once_without_a_deadline(fleet: ClientFleet) -> None:
    """No deadline fits it: it must be seen on the replacement, or be waived."""
    fleet.live(10, job_every=1000)
    assert late_sources(fleet.begin()) == {JOB: None}


def test_plan_lists_a_source_that_has_long_been_gone(fleet: ClientFleet) -> None:
    fleet.live(2, job_every=1)
    fleet.live(60, job_every=1000)
    listed = late_sources(fleet.begin())
    assert isinstance(listed, dict)
    assert list(listed) == [JOB]


def test_plan_with_a_waived_source_awaits_the_others_only(fleet: ClientFleet) -> None:
    """The waiver is part of the digest, and evidence in the name of the operator who approved it."""
    fleet.live(31)
    now = fleet.clock()
    early = now + timedelta(days=20)
    plan = plan_rotation(fleet.credential, PlanOverrides(deadline=early, waived_sources=(JOB,)), now)
    assert plan.late_sources is None
    assert plan.digest() != dataclasses.replace(plan, waived_sources=()).digest()
    rotation = fleet.begin(deadline=early, waived_sources=(JOB,))
    [waiver] = rotation.evidence.filter(kind=EvidenceKind.SOURCE_WAIVED)
    assert waiver.seen["source"] == JOB
    assert waiver.seen["by"] == "operator:approver"
    fleet.switch_shop()
    ended = fleet.live(12, job_every=1000)
    assert ended is not None
    assert ended.state == S.COMPLETED


def test_plan_with_a_waived_source_has_an_earlier_default_deadline(fleet: ClientFleet) -> None:
    fleet.live(31)
    now = fleet.clock()
    awaiting = plan_rotation(fleet.credential, PlanOverrides(), now).deadline
    waiving = plan_rotation(fleet.credential, PlanOverrides(waived_sources=(JOB,)), now).deadline
    assert awaiting is not None
    assert waiving is not None
    assert waiving < awaiting


def test_plan_of_the_sandbox_measures_by_no_gaps(clock: Clock, verifier: UsageLog) -> None:
    key, _ = scene.first_key(clock())
    scene.use(verifier, key.key_id)
    assert plan_rotation(key.credential, PlanOverrides(), clock()).late_sources is None


def test_rotation_completes_although_a_verifier_is_lost_every_week(fleet: ClientFleet) -> None:
    """Its sources have moved, so a lost use of the old key is none of theirs."""
    fleet.live(20, job_every=1)
    fleet.begin()
    fleet.switch_shop()
    fleet.job_key = fleet.new
    for week in range(2):
        row = {"started_at": fleet.clock(), "flushed_through_at": fleet.clock(), "peppers": {}}
        UsageReporter.objects.create(reporter_id=f"lost {week}", **row)
        rotation = fleet.live(5, job_every=1)
        assert UsageReporter.objects.filter(lost_at__isnull=False).count() == week + 1
    assert rotation is not None
    assert (rotation.state, fleet.refused) == (S.COMPLETED, [])


# --- what it says, and what an operator can do --------------------------------------------------------------


def test_rotation_says_which_sources_it_waits_for_and_until_when(fleet: ClientFleet) -> None:
    """Also while it is stalled at its deadline."""
    fleet.live(31)
    fleet.begin()
    fleet.switch_shop()
    fleet.live(1)
    described = describe(get_rotation(fleet.rotation_id), fleet.clock())
    last_at = fleet.clock.now.replace(minute=0) - timedelta(days=2)
    expected = [
        {
            "source": JOB,
            "last_used_at": format_timestamp(last_at),
            "until": format_timestamp(last_at + timedelta(days=60)),
        }
    ]
    awaited = described["waiting_sources"]
    assert isinstance(awaited, list)
    assert described["has_more_waiting_sources"] is False
    assert [each for each in awaited if each["source"] == JOB] == expected
    assert f"{JOB} until {last_at + timedelta(days=60):%Y-%m-%d}" in str(described["waiting_for"])
    rotation = fleet.live(100)
    assert rotation is not None
    assert rotation.state == S.STALLED
    awaited = describe(rotation, fleet.clock())["waiting_sources"]
    assert isinstance(awaited, list)
    assert [each["source"] for each in awaited] == [JOB]


def test_source_that_is_waived_is_no_longer_waited_for(fleet: ClientFleet) -> None:
    """The waiver names the operator, in the audit log and in the evidence that the revocation cites."""
    fleet.live(31)
    fleet.begin()
    fleet.switch_shop()
    fleet.waive(JOB)
    waiting = get_rotation(fleet.rotation_id)
    assert waiting.replacement is not None
    assert list_waived(waiting, waiting.predecessor) == {JOB}
    assert list_waived(waiting, waiting.replacement) == set(), "a rollback would retire a key that the job may use"
    rotation = fleet.live(10, job_every=1)
    assert rotation is not None
    assert rotation.state == S.COMPLETED
    assert any("month-end" in refused for refused in fleet.refused), "its attempts neither reinstate nor delay"
    waiver = rotation.evidence.get(kind="source_waived")
    why = "the job has ended, says Ada of Acme"
    assert waiver.seen == {"source": JOB, "key_id": rotation.predecessor_id, "by": "operator:tam", "why": why}
    entry = AuditEntry.objects.get(event="rotation.source_waived")
    assert entry.actor == "operator:tam"
    assert waiver.evidence_id.encode() in bytes(AuditEntry.objects.get(event="key.revoked").body)
    assert {each["source"] for each in rotation.evidence.get(kind="silent").seen["sources"] if each["is_waived"]} == {
        JOB
    }


def test_source_that_is_not_waived_reinstates_the_key_beside_a_waived_one(fleet: ClientFleet) -> None:
    """A waiver covers its own source only."""
    fleet.live(10, job_every=1)
    fleet.begin()
    fleet.switch_shop()
    fleet.waive(JOB)
    while get_rotation(fleet.rotation_id).state == S.OVERLAP:
        fleet.live(1, job_every=1)
    assert get_rotation(fleet.rotation_id).state == S.QUARANTINE
    fleet.shop_key = fleet.old
    rotation = fleet.live(1, job_every=1)
    assert rotation is not None
    assert (rotation.state, rotation.reinstated_at is not None) == (S.OVERLAP, True)


@pytest.mark.parametrize(
    ("source", "why", "error"),
    [
        ("203.0.113.0/24 month-end", " ", "reason"),
        ("203.0.113.0/24 other", "it has ended", "a source of the key"),
        ("203.0.113.7", "it has ended", "a source of the key"),
    ],
)
def test_waiver_without_a_reason_or_of_an_unknown_source_is_refused(
    fleet: ClientFleet, source: str, why: str, error: str
) -> None:
    fleet.live(31)
    fleet.begin()
    with pytest.raises(RequestInvalidError) as refused:
        fleet.waive(source, why)
    assert error in refused.value.faults[0].detail
    assert not AuditEntry.objects.filter(event="rotation.source_waived").exists()


def test_waiver_is_given_once_and_by_an_operator(fleet: ClientFleet) -> None:
    fleet.live(31)
    rotation = fleet.begin()
    fleet.waive(JOB)
    with pytest.raises(StateConflictError, match="already"):
        fleet.waive(JOB)
    service = authorize(WORKER, P.ROTATIONS_ADVANCE, fleet.credential.account, now=fleet.clock())
    with pytest.raises(TypeError):
        waive_source(service, rotation, JOB, "it has ended")


def test_waiver_whose_audit_entry_cannot_be_written_does_not_happen(
    fleet: ClientFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.live(31)
    rotation = fleet.begin()

    def refuse(**_: object) -> None:
        raise StateConflictError("no audit")

    with monkeypatch.context() as patch:
        patch.setattr("keyvault.services.recording.transaction.append_entries", refuse)
        with pytest.raises(StateConflictError, match="no audit"):
            fleet.waive(JOB)
    assert not rotation.evidence.filter(kind="source_waived").exists()

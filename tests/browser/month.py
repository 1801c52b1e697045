"""Demo data of a month, made through the real services with a clock that runs from the past to now.

    python manage.py shell --no-imports -c "from tests.browser.month import fill_month; fill_month()"

It fills the data folder of `make screenshots`. Run it before the service starts, on an empty folder.
"""

import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any

from django.core.management import call_command

from keyvault.access.endpoints import EndpointDraft
from keyvault.access.limits import Limit
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST, OperatorPrincipal, Principal
from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import IssuanceRequest, Key, Operator, Refusal, UsageReporter, UsageTotal
from keyvault.models.usage import UseOutcome
from keyvault.services.audit.checkpoints import sign_due
from keyvault.services.catalog.endpoints import add_endpoint as add_catalog_endpoint
from keyvault.services.issuance.requests import collect_key
from keyvault.services.keys.recipient_keys import set_recipient_key
from keyvault.services.limits.overrides import set_account_limit, set_endpoint_limit
from keyvault.services.merchants.merchants import create_merchant
from keyvault.services.operator_changes import request_factor_reset
from keyvault.services.secrets.provider_connections import set_connection
from keyvault.services.usage.recorder import UsageLog, Uses
from keyvault.services.usage.totals import KEPT_FOR, start_of_slot
from keyvault.services.webhooks.endpoints import add_endpoint
from keyvault.wire.problems import PROBLEM_TYPES
from rotation.domain.pacing import Pace
from rotation.domain.plan_fields import PlanOverrides
from rotation.domain.states import CLOSED
from rotation.domain.windows import Window
from rotation.models import Campaign, Rotation, RotationSchedule
from rotation.services.campaigns.campaigns import request_campaign
from rotation.services.campaigns.runner import tick
from rotation.services.rotations.emergency import respond_to_leak
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.interventions import request_retirement
from rotation.services.rotations.requests import approve_rotation, request_rotation
from rotation.services.schedules.schedules import ScheduleDraft, ScheduleScope, save_calendar, save_schedule
from rotation.services.schedules.standing_approvals import request_standing_approval
from rotation.services.schedules.starting import begin_due
from tests.clocks import Clock
from tests.factories import account, approve, grant, issue, issue_request, make_token, request_key, the_operator
from tests.rotation.scene import RECIPIENT, holder_of

SANDBOX, PRODUCTION = Environment.SANDBOX, Environment.PRODUCTION
MINUTE, STEP, HOUR, DAY = timedelta(minutes=1), timedelta(minutes=5), timedelta(hours=1), timedelta(days=1)

MERCHANTS = {
    "acme": "Acme Stores",
    "globex": "Globex Travel",
    "initech": "Initech Billing",
    "northwind": "Northwind Foods",
    "soylent": "Soylent Groceries",
    "umbrella": "Umbrella Rides",
}

CREDENTIALS = (
    # merchant, environment, label, kind, age of the first key in days, uses per minute
    ("acme", PRODUCTION, "orders-worker", KeyKind.PRIVATE, 84, 120),
    ("acme", PRODUCTION, "storefront", KeyKind.PUBLIC, 210, 310),
    ("acme", PRODUCTION, "back-office", KeyKind.PRIVATE, 61, 18),
    ("acme", SANDBOX, "integration-tests", KeyKind.PRIVATE, 47, 9),
    ("globex", PRODUCTION, "booking-api", KeyKind.PRIVATE, 402, 240),
    ("globex", SANDBOX, "billing", KeyKind.PRIVATE, 33, 14),
    ("initech", PRODUCTION, "mobile-api", KeyKind.PRIVATE, 90, 75),
    ("initech", SANDBOX, "nightly-report", KeyKind.PRIVATE, 75, 4),
    ("northwind", PRODUCTION, "checkout", KeyKind.PRIVATE, 118, 160),
    ("northwind", PRODUCTION, "warehouse", KeyKind.PRIVATE, 118, 22),
    ("soylent", PRODUCTION, "subscriptions", KeyKind.PRIVATE, 55, 64),
    ("soylent", SANDBOX, "staging", KeyKind.PRIVATE, 40, 6),
    ("umbrella", PRODUCTION, "dispatch", KeyKind.PRIVATE, 12, 41),
    ("umbrella", SANDBOX, "simulator", KeyKind.PRIVATE, 12, 11),
)

CODES = {
    ErrorCode.KEY_NOT_ACTIVE: 410,
    ErrorCode.RATE_LIMITED: 338,
    ErrorCode.CREDENTIAL_INVALID: 290,
    ErrorCode.IP_NOT_ALLOWED: 61,
    ErrorCode.METHOD_NOT_SUPPORTED: 40,
    ErrorCode.CUSTOMER_TOKEN_MISSING: 12,
}
"""Refusals of the last day by error code."""


@dataclass
class Stream:
    """Uses of one key by one client. `rate`: uses per minute at a moment of the day's average."""

    key: Key
    source: str
    agent: str
    endpoint: str
    rate: Callable[[datetime], float]
    outcome: UseOutcome = UseOutcome.ALLOWED
    origin: str = ""

    def of(self, outcome: UseOutcome, origin: str = "") -> "Stream":
        return replace(self, outcome=outcome, origin=origin)


@dataclass(frozen=True)
class MerchantProgram:
    """One of a merchant's programs. `share`: of the uses of its key."""

    agent: str
    address: str
    endpoint: str
    share: float


CLIENTS = (
    MerchantProgram("order-service/4.1", "198.51.100.10", "orders.create", 0.6),
    MerchantProgram("checkout-worker/2.0", "203.0.113.24", "orders.retrieve", 0.3),
    MerchantProgram("billing-cron/1.3", "192.0.2.61", "payments.list", 0.1),
)

STORES = range(101, 141)
"""Numbers of credentials that nothing uses yet."""


@dataclass
class Month:
    """The data, at the time that its clock shows.

    `keys`: the first key of each credential, by merchant and label. `totals`: uses by slot, environment and outcome.
    """

    end: datetime
    clock: Clock = field(init=False)
    log: UsageLog = field(init=False)
    streams: list[Stream] = field(default_factory=list)
    keys: dict[str, Key] = field(default_factory=dict)
    totals: Counter[tuple[datetime, str, str]] = field(default_factory=Counter)
    _counted: datetime = field(init=False)
    _random: random.Random = field(default_factory=lambda: random.Random(21))  # noqa: S311  no secret

    def __post_init__(self) -> None:
        self.clock = Clock(self.end - 450 * DAY)
        self._counted = self.end - 20 * DAY
        self.log = UsageLog(now=self.clock)
        self.log.add_counter(lambda: list(self._count()))

    # --- who acts ------------------------------------------------------------------------------------------------

    def operator(self, name: str, role: Role) -> OperatorPrincipal:
        return the_operator(name, role)

    @property
    def tam(self) -> OperatorPrincipal:
        return self.operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)

    def grant(self, principal: Principal, permission: P, place: Any = None, person: str | None = None) -> Any:
        return grant(principal, permission, place, person, at=self.clock())

    def ago(self, **spans: float) -> datetime:
        """Return the time so long before the end."""
        return self.end - timedelta(**spans)

    def issue_keys(self) -> None:
        """Issue the first key of each credential at its time, and let its clients use it. Then the month begins."""
        stores = [("soylent", PRODUCTION, f"store-{number}", KeyKind.PRIVATE, 38 + number % 46, 0) for number in STORES]
        for merchant_id, environment, label, kind, days, mean in sorted(
            [*CREDENTIALS, *stores], key=lambda row: -row[4]
        ):
            self.clock.now = self.ago(days=days)
            key, _ = issue(account(merchant_id, environment), kind=kind, label=label, at=self.clock())
            self.keys[f"{merchant_id}/{label}"] = key
            for client in CLIENTS if mean else ():
                stream = Stream(key, client.address, client.agent, client.endpoint, _of_day(mean * client.share))
                self.streams.append(stream)
            if mean > 50:
                denied = Stream(key, "192.0.2.99", "curl/8.9", "refunds.create", _denied)
                self.streams.append(denied.of(UseOutcome.DENIED))
        self.clock.now = self.ago(days=30)

    # --- time and traffic ----------------------------------------------------------------------------------------

    def go(self, until: datetime) -> None:
        """Advance the clock in steps; after each, report the uses and let the worker advance the open rotations."""
        while self.clock() < until:
            step = STEP if self.clock() >= self.ago(hours=5) else 3 * HOUR
            self.clock.now = min(self.clock() + step, until)
            self.log.flush()
            for rotation_id in Rotation.objects.exclude(state__in=CLOSED).values_list("pk", flat=True):
                advance_rotation(rotation_id, self.clock)

    def _count(self) -> Iterator[Uses]:
        """Yield the uses since the last report, every five minutes of the last day and every hour before."""
        while self._counted < self.clock():
            at = self._counted
            step = STEP if at >= self.ago(hours=27) else HOUR
            self._counted += step
            for each in self.streams:
                mean = each.rate(at) * (step / MINUTE)
                count = max(0, round(mean * self._random.gauss(1, 0.08)))
                if count:
                    self.totals[start_of_slot(at), each.key.account_environment, each.outcome] += count
                    last = at.timestamp() + 30
                    context = (each.key.key_id, each.endpoint, each.source, each.agent, each.origin, each.outcome.value)
                    yield (*context, count, last - 20, last)


def _of_day(mean: float) -> Callable[[datetime], float]:
    """Return uses per minute that are highest in the afternoon."""
    return lambda at: mean * (1 - 0.45 * math.cos((at.hour + at.minute / 60 - 3) / 24 * 2 * math.pi))


def _until(rate: Callable[[datetime], float], fades_at: datetime, ends_at: datetime) -> Callable[[datetime], float]:
    """Return the rate of a client that moves to another key between the two times."""

    def faded(at: datetime) -> float:
        share = min(1, max(0, (ends_at - at) / (ends_at - fades_at)))
        return max(rate(at) * share, 1) if at < ends_at else 0

    return faded


def _after(rate: Callable[[datetime], float], begins_at: datetime, full_at: datetime) -> Callable[[datetime], float]:
    return lambda at: rate(at) * min(1, max(0, (at - begins_at) / (full_at - begins_at)))


def _denied(at: datetime) -> float:
    """Return denied uses per minute, with a peak of two hours."""
    return 9 if at.hour in {14, 15} else 1.2


Event = tuple[datetime, Callable[[], object]]


class Story:
    """A rotation: requested, approved, and the clients that move to its replacement."""

    def __init__(self, month: Month, name: str, at: datetime, **overrides: Any) -> None:
        self.month, self.key, self.at, self.overrides = month, month.keys[name], at, overrides
        self.is_approved = True
        self._moves: list[Event] = []
        self._rotation: Rotation | None = None

    @property
    def events(self) -> Iterator[Event]:
        yield self.at, self._request
        if self.is_approved:
            yield self.at + 7 * MINUTE, self._approve
        yield from self._moves

    @property
    def rotation(self) -> Rotation:
        assert self._rotation is not None
        return self._rotation

    @property
    def path(self) -> str:
        return f"/admin/rotation/rotation/{self.rotation.rotation_id}/"

    def moves_at(self, begins_at: datetime, lasts: timedelta = 12 * HOUR, clients: int = len(CLIENTS)) -> "Story":
        """Let so many clients move to the replacement in this time, one after the other."""
        self._moves.append((begins_at, lambda: self._move(lasts, clients)))
        return self

    def _request(self) -> None:
        month, place = self.month, self.key.credential.account
        allowed = month.grant(month.tam, P.ROTATIONS_WRITE, place)
        self._rotation = request_rotation(allowed, self.key.credential, PlanOverrides(**self.overrides))

    def _approve(self) -> None:
        month, place = self.month, self.key.credential.account
        approver = month.operator("approver", Role.APPROVER)
        allowed = month.grant(approver, P.ROTATIONS_APPROVE, place, self.rotation.requester_person)
        approve_rotation(allowed, self.rotation, self.rotation.plan_digest)

    def _move(self, lasts: timedelta, clients: int) -> None:
        self.rotation.refresh_from_db()
        replacement, now = self.rotation.replacement, self.month.clock()
        assert replacement is not None, self.rotation.state
        mine = [each for each in self.month.streams if each.key == self.key]
        for number, each in enumerate(mine[:clients]):
            begins = now + lasts * (number / clients)
            ends = begins + lasts / clients
            self.month.streams.append(replace(each, key=replacement, rate=_after(each.rate, begins, ends)))
            each.rate = _until(each.rate, begins, ends)
        for each in mine[clients:]:
            if each.outcome is not UseOutcome.ALLOWED:
                each.rate = _until(each.rate, now, now + lasts)


def fill_month() -> None:
    """Fill the empty data folder. Print the pages that show the data, as JSON: paths by name."""
    call_command("setup", stdout=StringIO())
    month = Month(datetime.now(UTC))
    for merchant_id, name in MERCHANTS.items():
        create_merchant(grant(HOST, P.MERCHANTS_WRITE, at=month.clock()), merchant_id=merchant_id, name=name)
    call_command("seed_demo", stdout=StringIO())
    month.issue_keys()
    UsageReporter.objects.create(
        reporter_id=month.log.reporter_id, started_at=month.clock(), flushed_through_at=month.clock(), peppers={}
    )
    stories = plan_rotations(month)
    events = [*list_others(month), *(event for story in stories.values() for event in story.events)]
    events.append((month.ago(minutes=50), lambda: request_rest(month, stories["public"])))
    for at, act in sorted(events, key=lambda event: event[0]):
        month.go(at)
        act()
    month.go(month.end)
    begin_due(month.end)
    month.log.flush(is_final=True)
    write_day(month)
    sign_due(month.end)
    json.dump(list_shown(month, stories), sys.stdout)


def list_shown(month: Month, stories: "dict[str, Story]") -> dict[str, str]:
    """Return the paths of the pages that show the data best, by name."""
    rows = {
        "credential-rotating": stories["overlap"].key.credential,
        "key-active": month.keys["northwind/warehouse"],
        "key-public": month.keys["acme/storefront"],
        "key-compromised": month.keys["soylent/staging"],
        "operator": Operator.objects.get(username="tam"),
        "request-pending": IssuanceRequest.objects.get(label="loyalty-service"),
        "request-issued": IssuanceRequest.objects.get(label="test-runner"),
        "campaign-running": Campaign.objects.get(environment=SANDBOX),
        "schedule": RotationSchedule.objects.get(environment=PRODUCTION),
    }
    pages = {name: f"/admin/{row._meta.app_label}/{row._meta.model_name}/{row.pk}/" for name, row in rows.items()}
    return pages | {f"rotation-{name}": story.path for name, story in stories.items()}


def plan_rotations(month: Month) -> dict[str, Story]:
    """Return the rotations by the state that they end in."""
    short = {"quiet_seconds": 3_600, "quarantine_seconds": 3_600}
    completed = [
        Story(month, name, month.ago(days=days), reason="quarterly rotation", **short).moves_at(
            month.ago(days=days - 1)
        )
        for name, days in (("umbrella/dispatch", 6), ("soylent/subscriptions", 17), ("acme/back-office", 5))
    ]
    overlap = Story(month, "acme/orders-worker", month.ago(hours=4), reason="quarterly rotation", **short)
    quarantine = Story(month, "initech/mobile-api", month.ago(days=2), reason="a developer left", quiet_seconds=3_600)
    late = month.ago(minutes=41)
    stalled = Story(month, "northwind/checkout", month.ago(days=3), reason="yearly", deadline=late, **short)
    pending = Story(month, "globex/booking-api", month.ago(hours=3), reason="older than its cryptoperiod", **short)
    pending.is_approved = False
    public = Story(month, "acme/storefront", month.ago(hours=5), reason="yearly")
    return {
        "completed": completed[0],
        "completed-earlier": completed[1],
        "completed-first": completed[2],
        "overlap": overlap.moves_at(month.ago(hours=3), timedelta(minutes=142)),
        "quarantine": quarantine.moves_at(month.ago(hours=20), 8 * HOUR),
        "stalled": stalled.moves_at(month.ago(hours=30), 6 * HOUR, clients=2),
        "pending": pending,
        "public": public,
    }


def list_others(month: Month) -> Iterator[Event]:
    """Yield what else operators did in the month."""
    tam, admin = month.tam, month.operator("admin", Role.KEY_ADMINISTRATOR)
    responder = month.operator("responder", Role.INCIDENT_RESPONDER)

    def set_up() -> None:
        periods = [
            (month.end + days * DAY, month.end + (days + length) * DAY, why)
            for days, length, why in ((3, 4, "holiday sales"), (27, 12, "year-end freeze"))
        ]
        calendar = save_calendar(
            month.grant(tam, P.SCHEDULES_WRITE),
            "peak-season",
            [{"begins_at": begin.isoformat(), "ends_at": end.isoformat(), "why": why} for begin, end, why in periods],
        )
        window = Window("Europe/Berlin", (0, 1, 2, 3), 9 * 60, 16 * 60)
        draft = ScheduleDraft(90, jitter_days=10, lead_days=7, window=window, calendar=calendar)
        save_schedule(month.grant(tam, P.SCHEDULES_WRITE), ScheduleScope(PRODUCTION), draft)
        save_schedule(month.grant(tam, P.SCHEDULES_WRITE), ScheduleScope(SANDBOX), ScheduleDraft(180))
        place = account("globex", PRODUCTION)
        set_account_limit(month.grant(admin, P.LIMITS_WRITE, place), place, Limit(600, 1))
        for merchant_id in ("acme", "globex"):
            place = account(merchant_id, PRODUCTION)
            add_endpoint(month.grant(tam, P.WEBHOOKS_WRITE, place), place, f"https://hooks.{merchant_id}.example/keys")
            set_connection(
                month.grant(tam, P.CONNECTIONS_WRITE, place), place, "stripe", Plaintext("sk_live_placeholder")
            )
        endpoint = add_catalog_endpoint(
            month.grant(admin, P.CATALOG_WRITE),
            EndpointDraft(
                "refunds.preview", method="POST", path="/refunds/preview", credentials=frozenset({KeyKind.PRIVATE})
            ),
        )
        set_endpoint_limit(month.grant(admin, P.LIMITS_WRITE), PRODUCTION, endpoint.name, Limit(50, 1))
        for name in ("edge-gateway", "payments-api", "ledger"):
            make_token(name=name, at=month.clock())

    def expose() -> None:
        key = month.keys["acme/integration-tests"]
        browser = Stream(key, "203.0.113.88", "Mozilla/5.0", "orders.create", lambda at: 0.05)
        month.streams.append(browser.of(UseOutcome.EXPOSED_IN_BROWSER, "https://shop.acme.example"))

    def leak() -> None:
        keys = [month.keys[name].key_id for name in ("soylent/staging", "umbrella/simulator")]
        respond_to_leak(responder, keys, reason="found in a public repository", replace=True, now=month.clock())

    def request_keys() -> None:
        request_key(account("globex", PRODUCTION), label="loyalty-service", at=month.clock())
        request_key(account("northwind", PRODUCTION), label="returns", expires_in_days=365, at=month.clock())

    def request_campaigns() -> None:
        for environment, reason in ((SANDBOX, "new key format in sandbox"), (PRODUCTION, "keys older than 60 days")):
            request_campaign(
                month.grant(tam, P.ROTATIONS_WRITE),
                environment=environment,
                merchants=None,
                older_than_days=30 if environment is SANDBOX else 60,
                overrides=PlanOverrides(),
                pace=Pace(per_minute=2, concurrency=4),
                reason=reason,
            )

    def reset() -> None:
        operator = Operator.objects.get(username="auditor")
        request_factor_reset(month.grant(admin, P.OPERATORS_WRITE), operator, "lost the phone")

    yield month.ago(days=28), set_up
    yield month.ago(hours=30), expose
    yield month.ago(hours=5), leak
    yield month.ago(hours=2), request_keys
    yield month.ago(minutes=75), request_campaigns
    yield month.ago(minutes=70), lambda: tick(month.clock)
    yield month.ago(minutes=65), lambda: tick(month.clock)
    yield month.ago(minutes=52), reset


def request_rest(month: Month, public: "Story") -> None:
    """Request what a page of its own shows, and read a production key in the console."""
    tam, at = month.tam, month.clock()
    scheduling = month.grant(tam, P.SCHEDULES_WRITE)
    request_standing_approval(scheduling, RotationSchedule.objects.get(environment=PRODUCTION), 90)
    place = account("acme", PRODUCTION)
    request_retirement(month.grant(tam, P.ROTATIONS_WRITE, place), public.rotation, month.end + 9 * DAY)
    key = month.keys["globex/booking-api"]
    place = account("globex", PRODUCTION)
    set_recipient_key(month.grant(holder_of(key), P.RECIPIENTS_WRITE, place), key, RECIPIENT)
    shown = request_key(place, label="audit-report", delivery=Delivery.SHOW_ONCE, at=at)
    issue_request(approve(shown, at=at), at=at)
    shown.refresh_from_db()
    collect_key(month.grant(tam, P.ISSUANCE_COLLECT, place), shown)
    waiting = request_key(account("globex", SANDBOX), label="test-runner", delivery=Delivery.SHOW_ONCE, at=at)
    issue_request(waiting, at=at)


def write_day(month: Month) -> None:
    """Write the totals of the last days, and the refusals of the last day."""
    UsageTotal.objects.bulk_create(
        UsageTotal(at=at, environment=environment, outcome=outcome, count=count)
        for (at, environment, outcome), count in month.totals.items()
        if at >= month.end - KEPT_FOR
    )
    chosen = random.Random(7)  # noqa: S311  no secret
    Refusal.objects.bulk_create(
        Refusal(
            request_id=f"{chosen.getrandbits(120):022x}"[:22],
            at=month.end - timedelta(seconds=chosen.uniform(0, 86_000)),
            entry_point="verify",
            environment=PRODUCTION,
            endpoint="orders.create",
            code=code,
            detail=PROBLEM_TYPES[code].cause,
            source="198.51.100.10",
            trace=[[code.value, False]],
        )
        for code, count in CODES.items()
        for _ in range(count)
    )

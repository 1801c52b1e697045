"""Queries of the pages of a rotation, credential and key whose every section has rows."""

from datetime import timedelta
from itertools import product
from typing import Any

import pytest
from django.db import connection
from django.db.models import QuerySet
from django.test import Client
from django.test.utils import CaptureQueriesContext

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.admin.framework.attention import menu_counts
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind, KeyState, RetirementReason
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Key, Material, Operator, WorkLease
from keyvault.models.recording import collect_subjects
from keyvault.models.usage import UseOutcome
from keyvault.services.keys.lifecycle import report_compromise
from keyvault.services.keys.recipient_keys import set_recipient_key
from keyvault.services.operator_changes import request_factor_reset
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.usage.totals import write_totals
from keyvault.services.webhooks.endpoints import add_endpoint
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import DeliveryChannel, PlanOverrides, Proof
from rotation.domain.states import CLOSED
from rotation.models import EvidenceKind, Rotation
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.facts import note_evidence
from rotation.services.rotations.interventions import request_retirement
from rotation.services.rotations.reports import get_rotation, subject_of
from rotation.services.rotations.requests import bypass_rotation, request_rotation
from rotation.services.schedules.schedules import ScheduleDraft, ScheduleScope, save_schedule
from rotation.services.schedules.standing_approvals import request_standing_approval
from tests.admin.desk import Desk, address, browser, make_refusal, set_up_desk, text_of
from tests.admin.framework.test_enforcement import RECIPIENT
from tests.admin.framework.test_queries import KINDS_OF_APPROVALS
from tests.clocks import Clock
from tests.factories import PRODUCTION, SANDBOX, grant, issue, make_operator, now, request_key
from tests.rotation.campaigning import asked as request_campaign
from tests.rotation.scene import holder_of
from tests.services.rows import disable_triggers

pytestmark = pytest.mark.database

MAX_QUERIES = 12


@pytest.fixture
def desk(db: None) -> Desk:
    return set_up_desk()


def count_queries(client: Client, url: str, *, is_first: bool = True) -> list[str]:
    """Return the queries of a page; with the fixture `menu_counts` including those of the menu's counts."""
    if is_first:
        client.get(url)  # writes what is written once a day
    menu_counts.forget_all()
    with CaptureQueriesContext(connection) as made:
        answer = client.get(url)
    assert answer.status_code == 200, text_of(answer)
    return [each["sql"] for each in made.captured_queries if "SAVEPOINT" not in each["sql"]]


def use(key: Key, outcome: UseOutcome, source: str, user_agent: str = "shop/1") -> None:
    log = UsageLog()
    log.note(key.key_id, source=source, user_agent=user_agent, endpoint="orders.create", outcome=outcome)
    log.flush()


def make_full_rotation(desk: Desk, kind: KeyKind) -> Rotation:
    """Return a delivered rotation whose approval was bypassed, with uses, attempts, waivers and retirement dates."""
    place = desk.production
    add_endpoint(grant(desk.tam, P.WEBHOOKS_WRITE, place), place, "https://acme.example/")
    draft = ScheduleDraft(365, overrides=PlanOverrides(channels=tuple(DeliveryChannel)))
    schedule = save_schedule(grant(desk.tam, P.SCHEDULES_WRITE), ScheduleScope(PRODUCTION), draft)
    delivery = Delivery.SHOW_ONCE if kind is KeyKind.PRIVATE else Delivery.SECRET_BACKEND
    key, _ = issue(place, kind=kind, delivery=delivery, by=desk.tam)
    for number in range(3):
        use(key, UseOutcome.ALLOWED, f"192.0.2.{number}")
        use(key, UseOutcome.DENIED, f"192.0.2.{number}")
    proof = Proof.BOTH if kind is KeyKind.PRIVATE else None
    asking = grant(desk.tam, P.ROTATIONS_WRITE, place)
    chosen = PlanOverrides(reason="yearly", channels=tuple(DeliveryChannel), proof=proof)
    row = request_rotation(asking, key.credential, chosen)
    bypass_rotation(grant(desk.admin, P.ROTATIONS_BYPASS, place), row, row.plan_digest, "leaked in a ticket")
    advance_rotation(row.pk)
    row = get_rotation(row.pk)
    assert row.replacement is not None
    assert row.delivered_at is not None
    use(row.replacement, UseOutcome.ALLOWED, "192.0.2.1")
    use(row.predecessor, UseOutcome.REFUSED, "192.0.2.2")
    use(row.replacement, UseOutcome.REFUSED, "192.0.2.1")
    with collect_subjects():
        for key_id in (row.predecessor_id, row.replacement_id):
            seen: dict[str, Any] = {"source": "198.51.100.0/24 curl", "key_id": key_id, "by": "tam", "why": "moved"}
            note_evidence(row, EvidenceKind.SOURCE_WAIVED, seen, now())
    if kind is KeyKind.PUBLIC:
        request_retirement(asking, row, now() + timedelta(days=9))
    disable_triggers()
    change(row, schedule=schedule)
    return row


def change(row: Rotation, **columns: Any) -> None:
    rows: QuerySet[Rotation] = QuerySet(Rotation)
    rows.filter(pk=row.pk).update(**columns)


UNDELIVERED = {S.REQUESTED, S.AWAITING_APPROVAL, S.SCHEDULED, S.EMERGENCY, S.STAGED}


def put_in(row: Rotation, state: S, stalled_from: S | None = None, *, is_confirmed: bool = False) -> None:
    """Write the rotation in a state, with the times of all earlier ones."""
    stage, at = stalled_from or state, now() - timedelta(minutes=5)
    is_quarantined = stage in {S.QUARANTINE, S.REVOKING, S.ROLLING_BACK}
    change(
        row,
        state=state,
        stalled_from=stalled_from,
        why="the deadline passed" if stalled_from else "",
        accepted_at=None if stage in UNDELIVERED else at,
        confirmed_at=at if is_confirmed else None,
        used_at=at,
        silent_at=at if is_confirmed or stage not in {S.AWAITING_PROOF, S.OVERLAP} else None,
        quarantined_at=at if is_quarantined else None,
        written_back_at=at if stage is S.ROLLING_BACK else None,
        delivered_at=None if stage in UNDELIVERED else at,
        notified_at=None if stage in {*UNDELIVERED, S.PUBLISHING} else at,
        closed_at=at if state in CLOSED else None,
    )


STATES = [
    *((state, None) for state in (S.STAGED, S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.REVOKING)),
    (S.ROLLING_BACK, None),
    *((state, None) for state in (S.REQUESTED, S.AWAITING_APPROVAL, S.SCHEDULED, S.EMERGENCY, *sorted(CLOSED))),
    *(
        (S.STALLED, stage)
        for stage in (S.STAGED, S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.REVOKING, S.ROLLING_BACK)
    ),
]


@pytest.mark.usefixtures("menu_counts")
@pytest.mark.parametrize("kind", KeyKind)
def test_page_of_a_full_rotation_makes_few_queries(desk: Desk, kind: KeyKind) -> None:
    """Guarantee: the page of a rotation with every section filled makes at most MAX_QUERIES, in each state.

    Its bypass is not reviewed, its last step failed, the operator may collect the replacement, and the counts of the
    menu are among them. `is_confirmed`: an operator has confirmed it, or else its old key is not silent either.
    """
    row = make_full_rotation(desk, kind)
    WorkLease.objects.update_or_create(subject=subject_of(row.pk), defaults={"attempts": 3, "last_error": "sealed"})
    assert {state for state, _ in STATES} == set(S)
    client, url = browser(make_operator("viewer", *Role)), address("rotation_rotation_change", row.pk)
    found: dict[tuple[S, S | None, bool], int] = {}
    for (state, stalled_from), is_confirmed in product(STATES, (False, True)):
        put_in(row, state, stalled_from, is_confirmed=is_confirmed)
        found[(state, stalled_from, is_confirmed)] = len(count_queries(client, url, is_first=not found))
    assert {place: count for place, count in found.items() if count > MAX_QUERIES} == {}


@pytest.mark.usefixtures("menu_counts")
@pytest.mark.parametrize("is_open", [True, False], ids=["open-rotation", "overdue"])
def test_page_of_a_full_credential_makes_few_queries(desk: Desk, is_open: bool) -> None:
    """Guarantee: so does that of a credential with many used keys, rotations and a schedule, and the menu's counts.

    It shows who uses which of the keys, and that a rotation is open.
    """
    row = make_full_rotation(desk, KeyKind.PRIVATE)
    disable_triggers()
    for number in range(30):
        add_old_key(row.predecessor, f"{number:016}")
    if not is_open:
        put_in(row, S.CANCELLED)
        change(row, schedule=None)  # after a scheduled one the next is requested a week later
        at = now() - timedelta(days=500)
        keys: QuerySet[Key] = QuerySet(Key)
        keys.filter(pk=row.predecessor_id).update(created_at=at, activated_at=at)
        keys.filter(pk=row.replacement_id).update(
            state=KeyState.DEACTIVATED,
            deactivated_at=now(),
            retirement=RetirementReason.REVOKED,
            reason=RevocationReason.SUPERSEDED,
        )
    client, url = browser(make_operator("viewer", *Role)), address("keyvault_credential_change", row.credential_id)
    # The obstacle of an overdue rotation is found by a dry run.
    assert len(count_queries(client, url)) <= MAX_QUERIES
    shown = text_of(client.get(url))
    assert ('class="badge badge-rotating' in shown) == is_open
    assert row.replacement_id is not None
    *_, users = shown.partition("Who uses it")
    moved = users.partition("192.0.2.1<")[2].partition("</tr>")[0]
    assert address("keyvault_key_change", row.replacement_id) in moved
    assert address("keyvault_key_change", row.predecessor_id) in moved
    unmoved = users.partition("192.0.2.0<")[2].partition("</tr>")[0]
    assert address("keyvault_key_change", row.replacement_id) not in unmoved
    assert address("keyvault_key_change", row.predecessor_id) in unmoved


@pytest.mark.usefixtures("menu_counts")
def test_page_of_a_full_merchant_makes_few_queries(desk: Desk) -> None:
    """Guarantee: so does that of a merchant with keys in both environments, traffic, rotations and a schedule.

    The counts of the menu are among the queries.
    """
    row = make_full_rotation(desk, KeyKind.PRIVATE)
    key, _ = issue(desk.sandbox, label="nightly")
    use(key, UseOutcome.ALLOWED, "192.0.2.9")
    for environment in (SANDBOX, PRODUCTION):
        make_refusal(f"{environment:R<22}", merchant_id="acme", environment=environment, code="ip_not_allowed")
    client, url = browser(make_operator("viewer", *Role)), address("keyvault_merchant_change", "acme")
    assert len(count_queries(client, url)) <= MAX_QUERIES
    shown = text_of(client.get(url))
    for text in (
        f'{address("rotation_rotation_change", row.pk)}"><span class="badge badge-{row.state}',
        "of the cryptoperiod",
        "nightly</a>",
        ">acme.example</a>",
        "Provider connections",
        "Limits of endpoints",
        address("keyvault_refusal_change", f"{PRODUCTION:R<22}"),
        "q=acme&amp;environment__exact=sandbox",
        'of-sandbox"',
    ):
        assert text in shown
    client.post(address("environment"), {"environment": "production"})
    shown = text_of(client.get(url))
    assert "of-production" in shown
    assert "of-sandbox" not in shown
    assert "nightly</a>" not in shown


@pytest.mark.usefixtures("menu_counts")
@pytest.mark.parametrize("is_dead", [False, True], ids=["active", "compromised"])
@pytest.mark.parametrize("kind", KeyKind)
def test_page_of_a_full_key_makes_few_queries(desk: Desk, kind: KeyKind, is_dead: bool) -> None:
    """Guarantee: so does that of a key with uses, denials, suspected exposures and, once it ended, a receipt."""
    row = make_full_rotation(desk, kind)
    for outcome in UseOutcome:
        use(row.predecessor, outcome, "198.51.100.1")
    change(row, state=S.CANCELLED, closed_at=now())
    if is_dead:
        report_compromise(grant(desk.responder, P.KEYS_REPORT_COMPROMISE, desk.production), row.predecessor)
    url = address("keyvault_key_change", row.predecessor_id)
    client = browser(make_operator("viewer", *Role))
    # The receipt of an ended key takes two queries.
    assert len(count_queries(client, url)) <= MAX_QUERIES


def add_old_key(key: Key, key_id: str) -> None:
    """Add a deactivated key to the credential of a key."""
    at = now() - timedelta(days=100)
    old = Key.objects.get(pk=key.pk)
    old.key_id, old.state, old.created_at, old.activated_at, old.deactivated_at = key_id, "deactivated", at, at, at
    old.material, old.retirement, old.reason = Material.DESTROYED, RetirementReason.REVOKED, RevocationReason.SUPERSEDED
    rows: QuerySet[Key] = QuerySet(Key)
    rows.bulk_create([old])


@pytest.mark.usefixtures("menu_counts")
def test_full_overview_makes_few_queries(desk: Desk) -> None:
    """Guarantee: so does the overview with alarms of three kinds, numbers, rotations in progress and denials."""
    row = make_full_rotation(desk, KeyKind.PRIVATE)
    put_in(row, S.STALLED, S.OVERLAP)
    for number in range(3):
        key, _ = issue(desk.sandbox, label=f"leaked-{number}")
        use(key, UseOutcome.EXPOSED_IN_URL, "198.51.100.1")
        request_key(desk.production, label=f"wanted-{number}", by=desk.tam)
    waiting = request_rotation(
        grant(desk.tam, P.ROTATIONS_WRITE, desk.sandbox), key.credential, PlanOverrides(reason="yearly")
    )
    put_in(waiting, S.QUARANTINE)
    make_refusal()
    write_totals(now())
    client = browser(make_operator("viewer", *Role))
    shown = text_of(client.get("/admin/"))
    for text in ("Rotation stalled", "sandbox · leaked-2", "exposed in url", "Key requests to approve", "quarantine"):
        assert text in shown
    assert len(count_queries(client, "/admin/")) <= MAX_QUERIES


def request_some_of_each_kind(desk: Desk) -> list[Any]:
    """Return rows of each kind that wait for approval, several of each."""
    place, rows = desk.production, list[Any]()
    asking = grant(desk.tam, P.ROTATIONS_WRITE, place)
    key, _ = issue(place, label="sealed", by=desk.tam)
    for scope in (ScheduleScope(PRODUCTION, place), ScheduleScope(PRODUCTION, credential=key.credential)):
        scheduling = grant(desk.tam, P.SCHEDULES_WRITE, place)
        rows.append(request_standing_approval(scheduling, save_schedule(scheduling, scope, ScheduleDraft(365)), 90))
    for number in range(5):
        rows.append(request_key(place, label=f"wanted-{number}", by=desk.tam))
        key, _ = issue(place, label=f"sealed-{number}", by=desk.tam)
        rows.append(set_recipient_key(grant(holder_of(key), P.RECIPIENTS_WRITE, place), key, RECIPIENT))
        rows.append(request_rotation(asking, key.credential, PlanOverrides(reason="yearly")))
        public, _ = issue(place, label=f"shop-{number}", kind=KeyKind.PUBLIC, by=desk.tam)
        use(public, UseOutcome.ALLOWED, "192.0.2.1")
        rotation = request_rotation(asking, public.credential, PlanOverrides())
        rows += [rotation, request_retirement(asking, rotation, now() + timedelta(days=9))]
        make_operator(f"changed-{number}", Role.AUDITOR)
        changed = Operator.objects.get(username=f"changed-{number}")
        rows.append(request_factor_reset(grant(desk.admin, P.OPERATORS_WRITE), changed, "lost"))
        issue(place, label=f"campaign-{number}", by=desk.tam)
        rows.append(request_campaign(Clock(now()), environment=PRODUCTION, reason=f"campaign {number}"))
    return rows


@pytest.mark.usefixtures("menu_counts")
def test_approvals_of_many_rows_make_few_queries(desk: Desk) -> None:
    """Guarantee: neither the list nor the page that approves several makes a query for each row of any kind."""
    rows = request_some_of_each_kind(desk)
    assert len({row._meta.label for row in rows}) == KINDS_OF_APPROVALS
    client, url = browser(make_operator("viewer", *Role)), address("approvals")
    assert text_of(client.get(url)).count('name="item"') == len(rows)
    assert len(count_queries(client, url)) <= MAX_QUERIES
    chosen = "&".join(f"item={row._meta.label_lower}:{row.pk}" for row in rows)
    assert len(count_queries(client, f"{address('approvals_review')}?{chosen}")) <= MAX_QUERIES

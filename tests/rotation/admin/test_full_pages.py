"""Queries of the pages of a rotation, credential and key whose every section has rows."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import QuerySet
from django.test import Client
from django.test.utils import CaptureQueriesContext

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from keyvault.models import Key
from keyvault.models.recording import collect_subjects
from keyvault.models.usage import UseOutcome
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.webhooks.endpoints import add_endpoint
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import DeliveryChannel, PlanOverrides, Proof
from rotation.models import EvidenceKind, Rotation
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.facts import note_evidence
from rotation.services.rotations.interventions import request_retirement
from rotation.services.rotations.reports import get_rotation
from rotation.services.rotations.requests import bypass_rotation, request_rotation
from rotation.services.schedules.schedules import ScheduleDraft, Scope, save_schedule
from tests.admin.desk import Desk, address, browser, set_up_desk, text_of
from tests.factories import PRODUCTION, grant, issue, make_operator, now
from tests.rotation import scene
from tests.services.rows import disable_triggers

pytestmark = pytest.mark.database

MAX_QUERIES = 12


@pytest.fixture
def desk(db: None) -> Desk:
    return set_up_desk()


def count_queries(client: Client, url: str) -> list[str]:
    client.get(url)  # writes what is written once a day, and reads the menu's counts, which are kept for seconds
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
    schedule = save_schedule(grant(desk.tam, P.SCHEDULES_WRITE), Scope(PRODUCTION), ScheduleDraft(365))
    delivery = Delivery.SHOW_ONCE if kind is KeyKind.PRIVATE else Delivery.SECRET_BACKEND
    key, _ = issue(place, kind=kind, delivery=delivery, by=desk.tam)
    for number in range(3):
        use(key, UseOutcome.ALLOWED, f"192.0.2.{number}")
        use(key, UseOutcome.DENIED, f"192.0.2.{number}")
    proof = {"proof": Proof.BOTH} if kind is KeyKind.PRIVATE else {}
    asking = grant(desk.tam, P.ROTATIONS_WRITE, place)
    chosen = PlanOverrides(reason="yearly", channels=tuple(DeliveryChannel), **proof)
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


def put_in(row: Rotation, state: S, stalled_from: S | None = None) -> None:
    """Write the rotation in a state, with the times of all earlier ones."""
    stage, at = stalled_from or state, now() - timedelta(minutes=5)
    is_quarantined = stage in {S.QUARANTINE, S.REVOKING, S.ROLLING_BACK}
    change(
        row,
        state=state,
        stalled_from=stalled_from,
        why="the deadline passed" if stalled_from else "",
        accepted_at=at,
        used_at=at,
        silent_at=at,
        quarantined_at=at if is_quarantined else None,
        written_back_at=at if stage is S.ROLLING_BACK else None,
        notified_at=None if stage in {S.STAGED, S.PUBLISHING} else at,
        closed_at=at if state in {S.COMPLETED, S.CANCELLED} else None,
    )


STATES = [
    *((state, None) for state in (S.STAGED, S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.REVOKING)),
    *((S.ROLLING_BACK, None), (S.COMPLETED, None)),
    *((S.STALLED, stage) for stage in (S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.ROLLING_BACK)),
]


@pytest.mark.parametrize("kind", KeyKind)
def test_page_of_a_full_rotation_makes_few_queries(desk: Desk, kind: KeyKind) -> None:
    """Guarantee: the page of a rotation with every section filled makes at most MAX_QUERIES, in each state."""
    row = make_full_rotation(desk, kind)
    client, url = browser(make_operator("somebody", *Role)), address("rotation_rotation_change", row.pk)
    found = {}
    for state, stalled_from in STATES:
        put_in(row, state, stalled_from)
        queries = count_queries(client, url)
        found[(state, stalled_from)] = len(queries)
        import os
        if os.environ.get("SHOW") == f"{kind}:{state}:{stalled_from or ''}":
            import re
            for q in queries: print("   ", re.sub(r'SELECT .*? FROM', 'SELECT … FROM', q, count=1)[:260])
    print(kind, {f"{s}:{f or ''}":n for (s,f),n in found.items()})
    assert {place: count for place, count in found.items() if count > MAX_QUERIES} == {}

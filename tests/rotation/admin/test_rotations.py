"""Rotations in the console: requested, approved as shown, collected once, aborted."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from keyvault.access.permissions import Permission as P
from keyvault.domain.errors import StateConflictError
from keyvault.domain.issuance import Delivery
from keyvault.domain.revocation import RevocationReason
from keyvault.models import BreakGlass, Key
from keyvault.services.keys.lifecycle import revoke_key, suspend_key
from keyvault.services.webhooks.endpoints import add_endpoint
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import AtDeadline, DeliveryChannel, PlanOverrides, Proof, Reinstatement
from rotation.domain.windows import Window
from rotation.models import Rotation
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.interventions import collect_replacement
from rotation.services.rotations.reports import get_rotation
from rotation.services.rotations.requests import approve_rotation, request_rotation
from tests.admin.desk import SHAPED, Desk, address, browser, dump, hidden, set_up_desk, text_of
from tests.factories import grant, issue, now
from tests.rotation import scene

UNTOUCHED = {"at_deadline": "stall", "reinstatement": "once", "time_zone": "UTC"}
"""The form data when only the required fields were filled in."""


@pytest.fixture
def desk(db: None) -> Desk:
    return set_up_desk()


def asked(desk: Desk, key: Key, **overrides: Any) -> Rotation:
    """Request a rotation as `tam`."""
    place = key.credential.account
    return request_rotation(
        grant(desk.tam, P.ROTATIONS_WRITE, place), key.credential, PlanOverrides(reason="yearly", **overrides)
    )


def approved(desk: Desk, row: Rotation) -> Rotation:
    allowed = grant(desk.approver, P.ROTATIONS_APPROVE, row.credential.account, row.requester_person)
    return approve_rotation(allowed, row, row.plan_digest)


def fresh(row: Rotation) -> Rotation:
    return Rotation.objects.get(pk=row.pk)


def test_rotation_requested_has_the_plan_of_the_form(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    client = browser(desk.tam)
    offer = f"{address('rotation_rotation_request')}?credential={key.credential_id}"
    assert offer in text_of(client.get(address("keyvault_key_change", key.pk)))
    assert f'name="credential_id" value="{key.credential_id}"' in text_of(client.get(offer))
    fields = {
        **UNTOUCHED,
        "credential_id": key.credential_id,
        "proof": "ack",
        "quiet_seconds": "2h",
        "quarantine_seconds": " 90 ",
        "expires_in_days": "365",
        "reason": "yearly",
    }
    answer = client.post(address("rotation_rotation_request"), fields)
    row = Rotation.objects.get()
    assert answer["Location"] == address("rotation_rotation_change", row.pk)
    plan = row.approved_plan
    assert (plan.proof, plan.quiet_seconds, plan.quarantine_seconds) == (Proof.ACK, 7_200, 90)
    assert (plan.expires_in_days, plan.reason, row.state) == (365, "yearly", S.SCHEDULED)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quiet_seconds", "soon"),
        ("quiet_seconds", "0"),
        ("quiet_seconds", "999d"),
        ("quarantine_seconds", "-5m"),
        ("reason", ""),
        ("proof", "hope"),
        ("credential_id", "crd_nothing"),
    ],
)
def test_rotation_requested_with_an_invalid_field_shows_the_error(desk: Desk, field: str, value: str) -> None:
    key, _ = issue(desk.sandbox)
    fields = {**UNTOUCHED, "credential_id": key.credential_id, "reason": "yearly", field: value}
    answer = browser(desk.tam).post(address("rotation_rotation_request"), fields)
    assert answer.status_code == 400
    assert 'class="errorlist"' in text_of(answer)
    assert not Rotation.objects.exists()


def test_credential_and_key_with_an_open_rotation_link_to_it(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    rotation, client = asked(desk, key), browser(desk.tam)
    for page in (address("keyvault_key_change", key.pk), address("keyvault_credential_change", key.credential_id)):
        shown = text_of(client.get(page))
        url = address("rotation_rotation_change", rotation.pk)
        assert f'<a class="button" href="{url}">Show rotation</a>' in shown
        assert address("rotation_rotation_request") not in shown


def test_rotation_requested_twice_is_a_conflict(desk: Desk) -> None:
    key, _ = issue(desk.production)
    asked(desk, key)
    fields = {**UNTOUCHED, "credential_id": key.credential_id, "reason": "again"}
    answer = browser(desk.tam).post(address("rotation_rotation_request"), fields)
    assert answer.status_code == 409
    assert "open rotation" in text_of(answer)


def test_rotation_approval_page_shows_the_whole_plan(desk: Desk) -> None:
    """Every value that the digest covers is on the page."""
    add_endpoint(grant(desk.tam, P.WEBHOOKS_WRITE, desk.production), desk.production, "https://acme.example/")
    key, _ = issue(desk.production)
    row = asked(
        desk, key, proof=Proof.TRAFFIC, proof_count=321, proof_sources=17, soak_seconds=61, quiet_seconds=7_322,
        quarantine_seconds=10_800, expires_in_days=222, predecessor_may_expire=True, at_deadline=AtDeadline.REVOKE,
        reinstatement=Reinstatement.NEVER, channels=tuple(DeliveryChannel),
        window=Window("Europe/Berlin", (1, 3), 22 * 60, 4 * 60),
    )  # fmt: skip
    plan = row.approved_plan
    text = text_of(browser(desk.approver).get(address("rotation_rotation_approve", row.pk)))
    for value in (
        plan.credential_id,
        plan.predecessor_key_id,
        "yearly",
        f"{plan.not_before:%Y-%m-%d %H:%M:%S}",
        f"{plan.deadline:%Y-%m-%d %H:%M:%S}",
        "traffic: real",
        "<dt>Authentications</dt><dd>321</dd>",
        "<dt>Sources</dt><dd>17</dd>",
        "<dt>Soak time</dt><dd>1 minute 1 second</dd>",
        "2 hours 2 minutes 2 seconds",
        "3 hours",
        "222",
        "<dd>yes</dd>",
        "the old key is quarantined and revoked",
        "never reinstated",
        "the merchant&#x27;s webhook endpoint",
        "Tuesday, Thursday, 22:00 to 04:00 (Europe/Berlin)",
        row.plan_digest,
    ):
        assert value in text


def test_rotation_is_on_the_front_page_of_its_possible_approvers(desk: Desk) -> None:
    key, _ = issue(desk.production, label="live-checkout")
    asked(desk, key)
    assert "Rotations to approve" in text_of(browser(desk.approver).get("/admin/"))
    assert "Rotations to approve" not in text_of(browser(desk.tam).get("/admin/"))


def test_rotation_page_shows_its_wait_and_the_users_of_the_old_key(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    row = asked(desk, key, proof=Proof.ACK)
    page = address("rotation_rotation_change", row.pk)
    advance_rotation(row.pk)
    text = text_of(browser(desk.auditor).get(page))
    assert "Waiting for the merchant to acknowledge with the replacement, or an operator" in text
    assert 'class="step-current" aria-current="step"' in text
    assert "Who still uses the old key" in text
    assert "stored as version" in text


@pytest.mark.parametrize("environment", ["sandbox", "production"])
def test_rotation_replacement_is_shown_once_to_the_requester(desk: Desk, environment: str) -> None:
    """The replacement is in the body of one POST answer, for one person, and in no row, session or cookie."""
    place = desk.production if environment == "production" else desk.sandbox
    key, _ = issue(place, delivery=Delivery.SHOW_ONCE)
    row = asked(desk, key)
    if row.approvals_needed:
        approved(desk, row)
    page = address("rotation_rotation_collect", row.pk)
    client = browser(desk.tam)
    assert client.post(page).status_code == 409
    advance_rotation(row.pk)
    assert browser(desk.approver).post(page).status_code == 403
    before = text_of(client.get(page))
    assert not SHAPED.search(before)
    assert ("break-glass" in before) == (environment == "production")
    answer = client.post(page)
    assert answer.status_code == 200
    assert "no-store" in answer["Cache-Control"]
    (secret,) = set(SHAPED.findall(text_of(answer)))
    assert secret not in dump()
    assert secret not in str(dict(client.session))
    assert secret not in client.cookies.output()
    for person in (desk.tam, desk.admin):
        again = browser(person).post(page)
        assert again.status_code == 409
        assert not SHAPED.search(text_of(again))
    assert BreakGlass.objects.count() == (environment == "production")


def test_rotation_replacement_sealed_to_a_recipient_key_is_collected_by_no_person(desk: Desk) -> None:
    """Guarantee: where the merchant has a recipient key, no operator sees the replacement or is asked to carry it."""
    key, _ = issue(desk.sandbox, delivery=Delivery.SHOW_ONCE)
    scene.set_recipient(key, now())
    row = asked(desk, key)
    advance_rotation(row.pk)
    assert fresh(row).delivered_at is not None
    client = browser(desk.tam)
    page = address("rotation_rotation_collect", row.pk)
    shown = text_of(client.get(address("rotation_rotation_change", row.pk)))
    assert page not in shown
    assert "You can collect the replacement" not in shown
    answer = client.post(page)
    assert answer.status_code == 409
    assert not SHAPED.search(text_of(answer))
    collecting = grant(desk.tam, P.ISSUANCE_COLLECT, desk.sandbox)
    with pytest.raises(StateConflictError, match="never shown to a person"):
        collect_replacement(collecting, get_rotation(row.pk))


def test_rotation_rejected_keeps_the_reason(desk: Desk) -> None:
    key, _ = issue(desk.production)
    row = asked(desk, key)
    answer = browser(desk.approver).post(address("rotation_rotation_reject", row.pk), {"why": "not this week"})
    assert answer.status_code == 302
    assert (fresh(row).state, fresh(row).why) == (S.REJECTED, "not this week")


def test_rotation_aborted_before_delivery_leaves_the_old_key_unchanged(desk: Desk) -> None:
    key, _ = issue(desk.production)
    row = asked(desk, key)
    client = browser(desk.tam)
    page = address("rotation_rotation_abort", row.pk)
    version = hidden(client.get(page), "version")
    assert client.post(page, {"version": version, "why": "changed our minds"}).status_code == 302
    assert fresh(row).state == S.CANCELLED
    assert Key.objects.get(pk=key.pk).state == "active"


def test_rotation_aborted_after_delivery_is_a_conflict(desk: Desk) -> None:
    """The merchant may already use the replacement, so it is rolled back instead of discarded."""
    key, _ = issue(desk.sandbox)
    row = asked(desk, key)
    advance_rotation(row.pk)
    page = address("rotation_rotation_abort", row.pk)
    client = browser(desk.tam)
    assert client.get(page).status_code == 409
    answer = client.post(page, {"version": fresh(row).version, "why": "too late"})
    assert answer.status_code == 409
    assert "Roll back instead" in text_of(answer)
    assert fresh(row).state == S.AWAITING_PROOF


def test_rotation_stalled_is_shown_and_resumed(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    row = asked(desk, key, deadline=now() + timedelta(days=1), quiet_seconds=5)
    suspend_key(
        grant(desk.responder, P.KEYS_SUSPEND, desk.sandbox),
        Key.objects.select_related("credential__account").get(pk=key.pk),
    )
    advance_rotation(row.pk)
    assert fresh(row).state == S.STALLED
    client = browser(desk.tam)
    assert "Stalled rotations" in text_of(client.get("/admin/"))
    shown = text_of(client.get(address("rotation_rotation_change", row.pk)))
    assert "suspended by an operator" in shown
    page = address("rotation_rotation_resume", row.pk)
    assert client.post(page, {"version": hidden(client.get(page), "version")}).status_code == 302
    assert fresh(row).state == S.SCHEDULED


def test_rotation_of_a_dead_key_is_not_offered(desk: Desk) -> None:
    dead, _ = issue(desk.sandbox, label="dead")
    revoke_key(grant(desk.responder, P.KEYS_REVOKE, desk.sandbox), dead, RevocationReason.SUPERSEDED)
    client = browser(desk.tam)
    offer = f"{address('rotation_rotation_request')}?credential={dead.credential_id}"
    assert offer not in text_of(client.get(address("keyvault_credential_change", dead.credential_id)))
    assert dead.credential_id not in text_of(client.get(address("rotation_rotation_request")))


def test_list_of_rotations_makes_no_query_for_each_row(desk: Desk) -> None:
    """Guarantee: the list costs the same for one rotation as for a page of them."""
    client, counts = browser(desk.admin), []
    client.get(address("rotation_rotation_changelist"))
    for number in range(3):
        key = scene.issue(scene.account(), now(), label=f"key {number}")[0]
        rotation = scene.rotate(key.credential, now())
        advance_rotation(rotation.rotation_id, now)
        with CaptureQueriesContext(connection) as made:
            assert f"key {number}" in text_of(client.get(address("rotation_rotation_changelist")))
        counts.append(len(made))
    assert counts[0] == counts[2], counts


def test_page_of_a_key_does_not_read_the_other_keys_of_its_credential(desk: Desk) -> None:
    """Guarantee: the page of a key costs the same however often its credential was rotated."""
    key, _ = issue(desk.sandbox)
    client = browser(desk.tam)
    with CaptureQueriesContext(connection) as made:
        assert "Rotate" in text_of(client.get(address("keyvault_key_change", key.pk)))
    of_credential = f'"keyvault_key"."credential_id" = \'{key.credential_id}\''
    reads = [each["sql"] for each in made.captured_queries if of_credential in each["sql"]]
    assert reads
    assert all('"keyvault_key"."state" = \'active\'' in sql for sql in reads)

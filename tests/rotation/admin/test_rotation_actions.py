"""Actions on a rotation in the console: who may do them, in which state, and with which result."""

import re
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import QuerySet

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, OperatorPrincipal
from keyvault.domain.environments import Environment
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from keyvault.domain.revocation import RevocationReason
from keyvault.models import AuditEntry, BreakGlass, Key, Notice
from keyvault.services.approvals.break_glass import review_break_glass
from keyvault.services.keys.lifecycle import revoke_key, suspend_key
from keyvault.services.recording.transaction import recorded
from keyvault.services.usage.recorder import UsageLog
from rotation.admin.rotation_actions import ROW_ACTIONS
from rotation.domain.events import RotationState as S
from rotation.domain.pacing import Pace
from rotation.domain.plan_fields import PlanOverrides, Proof
from rotation.models import Retirement, Rotation
from rotation.services.campaigns.campaigns import request_campaign
from rotation.services.campaigns.runner import tick
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.reports import get_rotation
from rotation.services.rotations.requests import approve_rotation, bypass_rotation, reissue_key, request_rotation
from tests.admin.desk import SHAPED, Desk, address, browser, hidden, set_up_desk, text_of
from tests.factories import grant, issue, now
from tests.rotation import scene
from tests.services.rows import disable_triggers

SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def desk(db: None) -> Desk:
    return set_up_desk()


def page(row: Rotation, act: str = "change") -> str:
    return address(f"rotation_rotation_{act}", row.pk)


def asked(desk: Desk, environment: Environment = Environment.PRODUCTION, kind: KeyKind = KeyKind.PRIVATE) -> Rotation:
    place = desk.production if environment is Environment.PRODUCTION else desk.sandbox
    key, _ = issue(place, kind=kind, label=f"{kind}-{environment}")
    return request_rotation(grant(desk.tam, P.ROTATIONS_WRITE, place), key.credential, PlanOverrides(reason="yearly"))


def emergency(desk: Desk) -> Rotation:
    key, _ = issue(desk.production, label="leaked")
    revoke_key(grant(desk.responder, P.KEYS_REVOKE, desk.production), key, RevocationReason.UNSPECIFIED)
    return reissue_key(grant(desk.tam, P.ROTATIONS_WRITE, desk.production), key.credential, "leaked")


def delivered(desk: Desk, kind: KeyKind = KeyKind.PRIVATE) -> Rotation:
    row = asked(desk, Environment.SANDBOX, kind)
    advance_rotation(row.pk)
    row = get_rotation(row.pk)
    assert row.state == S.AWAITING_PROOF
    return row


def send(row: Rotation, act: str, client: Any, **fields: Any) -> Any:
    """Submit the action's form as the page gave it, filled in."""
    shown = client.get(page(row, act))
    carried = {name: hidden(shown, name) for name in ("version", "plan_digest") if f'name="{name}"' in text_of(shown)}
    return client.post(page(row, act), {**carried, **fields})


def snapshot() -> list[Any]:
    tables = (Rotation, Retirement, BreakGlass, AuditEntry, Key)
    return [list(table._default_manager.order_by("pk").values()) for table in tables]


WAITING = {"approve": asked, "reject": asked, "bypass": asked, "abort": asked}
"""Actions on a newly requested rotation; the others apply to a delivered one."""

FAR = f"{now() + timedelta(days=400):%Y-%m-%dT%H:%M}"
FIELDS = {
    "why": "because",
    "source": "192.0.2.0/24 shop",
    "reason": "because",
    "deadline": FAR,
    "retire_at": FAR,
    "key_id": "A" * 16,
}


def fitting(desk: Desk, act: str) -> Rotation:
    if act in {"retire", "confirm"}:
        return delivered(desk, KeyKind.PUBLIC)
    return WAITING.get(act, delivered)(desk)


@pytest.mark.parametrize("act", ROW_ACTIONS, ids=lambda act: act.name)
def test_action_on_a_closed_rotation_is_a_conflict_and_changes_nothing(desk: Desk, act: Any) -> None:
    row = asked(desk)
    client = browser(desk.admin)
    assert send(row, "reject", client, why="no").status_code == 302
    row = get_rotation(row.pk)
    assert page(row, act.name) not in text_of(client.get(page(row)))
    before = snapshot()
    assert client.get(page(row, act.name)).status_code == 409
    sent = {**FIELDS, "version": row.version, "plan_digest": row.plan_digest}
    assert client.post(page(row, act.name), sent).status_code == 409
    assert snapshot() == before


@pytest.mark.parametrize("act", ["resume", "extend", "abort", "roll-back", "retire"])
def test_action_from_an_outdated_page_is_a_conflict(desk: Desk, act: str) -> None:
    """Actions that make something good again are bound to the version that was shown."""
    row = fitting(desk, act)
    answer = browser(desk.admin).post(page(row, act), {**FIELDS, "version": row.version - 1})
    assert answer.status_code == 409
    assert get_rotation(row.pk).version == row.version


# --- approval and its bypass ------------------------------------------------------------------------------------


def test_emergency_is_first_on_the_front_page_and_can_be_rejected(desk: Desk) -> None:
    row = emergency(desk)
    client = browser(desk.approver)
    assert "Emergency rotations to approve" in text_of(client.get("/admin/"))
    assert "Emergency rotations awaiting approval" in text_of(browser(desk.tam).get("/admin/"))
    shown = text_of(client.get(page(row)))
    assert 'aria-current="step">emergency' in shown
    assert send(row, "reject", client, why="wrong credential").status_code == 302
    assert get_rotation(row.pk).state == S.REJECTED
    assert "Emergency rotations" not in text_of(client.get("/admin/")).split("No items:")[0]


def test_emergency_with_enough_approvals_is_not_listed_for_approval(desk: Desk) -> None:
    row = emergency(desk)
    allowed = grant(desk.approver, P.ROTATIONS_APPROVE, desk.production, row.requester_person)
    approve_rotation(allowed, row, row.plan_digest)
    client = browser(desk.admin)
    assert "Emergency rotations" not in text_of(client.get("/admin/")).split("No items:")[0]
    assert client.get(page(row, "approve")).status_code == 409


def test_bypass_explains_itself_and_requires_a_reason(desk: Desk) -> None:
    row = asked(desk)
    client = browser(desk.responder)
    shown = text_of(client.get(page(row, "bypass")))
    assert "This is break-glass" in shown
    assert "button-danger" in shown
    assert row.plan_digest in shown
    assert send(row, "bypass", client, reason="").status_code == 400
    assert send(row, "bypass", client, reason="  \t").status_code == 400
    assert client.post(page(row, "bypass"), {"plan_digest": "0" * 64, "reason": "x"}).status_code == 409
    assert not BreakGlass.objects.exists()
    assert get_rotation(row.pk).state == S.AWAITING_APPROVAL


def test_bypass_is_shown_until_a_second_person_reviews_it(desk: Desk) -> None:
    """It is on the overview, in the list and on the rotation, whatever happens to the rotation meanwhile."""
    row = asked(desk)
    assert send(row, "bypass", browser(desk.responder), reason="leak on a laptop").status_code == 302
    row = get_rotation(row.pk)
    assert (row.state, row.approvals.count()) == (S.SCHEDULED, 0)
    assert Notice.objects.filter(kind="rotation.bypassed", is_alarm=True).exists()
    advance_rotation(row.pk)
    act = BreakGlass.objects.get()
    review = address("keyvault_breakglass_change", act.pk)
    client = browser(desk.approver)
    assert review in text_of(client.get(page(row)))
    assert review not in text_of(browser(desk.tam).get(page(row)))
    assert "Bypass not reviewed yet: responder" in text_of(browser(desk.tam).get(page(row)))
    assert "Bypassed approvals not reviewed yet" in text_of(browser(desk.tam).get("/admin/"))
    listed = address("rotation_rotation_changelist")
    assert "badge-bypass_not_reviewed" in text_of(client.get(listed))
    assert row.pk in text_of(client.get(f"{listed}?bypass=open"))
    review_break_glass(grant(desk.approver, P.BREAK_GLASS_REVIEW, requester_person=act.person), act)
    assert "not reviewed" not in text_of(client.get(page(row)))
    assert row.pk not in text_of(client.get(f"{listed}?bypass=open"))
    assert row.pk in text_of(client.get(f"{listed}?bypass=all"))
    assert "Approval bypassed" in text_of(client.get(page(row)))


# --- in progress -----------------------------------------------------------------------------------------------


def test_extension_moves_the_deadline_and_shows_the_planned_one(desk: Desk) -> None:
    row = delivered(desk)
    client = browser(desk.tam)
    answer = send(row, "extend", client, deadline="2020-01-01T00:00")
    assert answer.status_code == 400
    assert "later than now" in text_of(answer)
    later = (now() + timedelta(days=90)).replace(second=0, microsecond=0)
    assert send(row, "extend", client, deadline=f"{later:%Y-%m-%dT%H:%M}").status_code == 302
    assert get_rotation(row.pk).deadline_at == later
    assert "extended from" in text_of(client.get(page(row)))


def test_roll_back_after_delivery_redelivers_the_old_key(desk: Desk) -> None:
    row = delivered(desk)
    client = browser(desk.tam)
    shown = text_of(client.get(page(row)))
    assert page(row, "roll-back") in shown
    assert page(row, "abort") not in shown
    assert "same quiet period and quarantine" in text_of(client.get(page(row, "roll-back")))
    assert send(row, "roll-back", client, why="cannot switch").status_code == 302
    advance_rotation(row.pk)
    row = get_rotation(row.pk)
    assert (row.state, row.predecessor.state, row.replacement and row.replacement.state) == (
        S.ROLLING_BACK,
        "active",
        "active",
    )
    shown = text_of(client.get(page(row)))
    assert 'aria-current="step">rolling back' in shown
    assert ">rolled back<" in shown
    assert "Who still uses the replacement" in shown
    assert "Old key written back" in shown


def test_roll_back_before_delivery_is_a_conflict(desk: Desk) -> None:
    row = asked(desk)
    answer = browser(desk.tam).post(page(row, "roll-back"), {"version": row.version, "why": "x"})
    assert answer.status_code == 409
    assert "Abort the rotation instead" in text_of(answer)
    assert get_rotation(row.pk).state == S.AWAITING_APPROVAL


def test_confirmation_records_its_source_and_proves_a_public_key(desk: Desk) -> None:
    row = delivered(desk, KeyKind.PUBLIC)
    client = browser(desk.tam)
    assert "Rotations awaiting an operator&#x27;s confirmation" in text_of(client.get("/admin/"))
    assert send(row, "confirm", client, why="").status_code == 400
    assert send(row, "confirm", client, why="Ada of Acme, by telephone").status_code == 302
    advance_rotation(row.pk)
    shown = text_of(client.get(page(row)))
    assert get_rotation(row.pk).state == S.OVERLAP
    assert "Confirmed by an operator" in shown
    assert "Ada of Acme, by telephone" in shown
    assert "an operator&#x27;s confirmation" not in text_of(client.get("/admin/")).split("No items:")[0]


def test_source_is_waived_by_name_and_with_a_reason(desk: Desk) -> None:
    row = delivered(desk)
    scene.use(UsageLog(), row.predecessor_id, source="192.0.2.7")
    client = browser(desk.tam)
    assert send(row, "waive", client, source="192.0.2.0/24 test", why="").status_code == 400
    answer = send(row, "waive", client, source="192.0.2.7", why="it has ended")
    assert "a source of the key that is being retired" in text_of(answer)
    assert send(row, "waive", client, source="192.0.2.0/24 test", why="it has ended, says Ada").status_code == 302
    assert "it has ended, says Ada" in text_of(client.get(page(row)))
    assert browser(desk.auditor).get(page(row, "waive")).status_code == 403


def test_key_in_quarantine_is_held_and_released(desk: Desk) -> None:
    """An operator who may suspend keys holds it; an operator who may resume keys releases it."""
    row = delivered(desk)
    assert browser(desk.tam).get(page(row, "hold")).status_code == 409
    _quarantine(row)
    tam, admin = browser(desk.tam), browser(desk.admin)
    assert send(row, "hold", tam, why="").status_code == 400
    assert send(row, "hold", tam, why="the merchant investigates").status_code == 302
    advance_rotation(row.pk)
    shown = text_of(tam.get(page(row)))
    assert "Held suspended by an operator since" in shown
    assert "an operator to release the held key" in shown
    assert "Roll back" not in shown
    assert tam.get(page(row, "release")).status_code == 403
    assert send(row, "release", admin).status_code == 302
    assert get_rotation(row.pk).held_at is None


def _quarantine(row: Rotation) -> None:
    """Quarantine the predecessor as the engine does, without its waits."""
    at = now()
    account, permission = row.credential.account, P.ROTATIONS_ADVANCE
    allowed = grant(WORKER, permission, account)
    with recorded(allowed, permission, "rotation.quarantine", account=account):
        suspend_key(allowed, row.predecessor)
        get_rotation(row.pk).compare_and_swap(
            state=S.QUARANTINE, entered_at=at, used_at=at, silent_at=at, quarantined_at=at
        )


def test_page_shows_which_sources_the_rotation_waits_for(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    allowed = grant(desk.tam, P.ROTATIONS_WRITE, desk.sandbox)
    row = request_rotation(allowed, key.credential, PlanOverrides(proof=Proof.ACK))
    advance_rotation(row.pk)
    scene.use(UsageLog(), row.predecessor_id, source="192.0.2.7")
    assert "may still need the old key" not in text_of(browser(desk.tam).get(page(row)))
    scene.acknowledge_replacement(row.pk, now())
    advance_rotation(row.pk)
    assert get_rotation(row.pk).state == S.OVERLAP
    shown = text_of(browser(desk.tam).get(page(row)))
    assert "1 source may still need the old key" in shown
    users = shown.partition("Who still uses the old key")[2].partition("</section>")[0]
    assert re.search(r"192\.0\.2\.7.*silence is proved <time", users, re.DOTALL)


def test_confirmation_of_a_rotation_proved_by_traffic_is_not_offered(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    allowed = grant(desk.tam, P.ROTATIONS_WRITE, desk.sandbox)
    row = request_rotation(allowed, key.credential, PlanOverrides(proof=Proof.ACK))
    assert browser(desk.tam).get(page(row, "confirm")).status_code == 409


def test_key_of_a_reissued_credential_is_collected_after_it_completed(desk: Desk) -> None:
    """The only key was never shown, so a closed rotation must not keep it from its owner."""
    key, _ = issue(desk.sandbox, delivery=Delivery.SHOW_ONCE)
    revoke_key(grant(desk.responder, P.KEYS_REVOKE, desk.sandbox), key, RevocationReason.UNSPECIFIED)
    row = reissue_key(grant(desk.tam, P.ROTATIONS_WRITE, desk.sandbox), key.credential, "lost")
    advance_rotation(row.pk)
    assert get_rotation(row.pk).state == S.COMPLETED
    client = browser(desk.tam)
    assert "Replacements to collect" in text_of(client.get("/admin/"))
    assert SHAPED.search(text_of(send(row, "collect", client))) is not None


def test_replacement_is_listed_for_its_requester_until_it_is_collected(desk: Desk) -> None:
    """The list that the overview links to shows each replacement that waits, and no other."""
    rows = []
    for label in ("collected", "revoked", "waiting"):
        key, _ = issue(desk.sandbox, delivery=Delivery.SHOW_ONCE, label=label)
        row = request_rotation(grant(desk.tam, P.ROTATIONS_WRITE, desk.sandbox), key.credential, PlanOverrides())
        advance_rotation(row.pk)
        rows.append(get_rotation(row.pk))
    stored, _ = issue(desk.sandbox, delivery=Delivery.SECRET_BACKEND, label="stored")
    row = request_rotation(grant(desk.tam, P.ROTATIONS_WRITE, desk.sandbox), stored.credential, PlanOverrides())
    advance_rotation(row.pk)
    client = browser(desk.tam)
    listed = f"{address('rotation_rotation_changelist')}?collection=open"

    def waiting() -> set[str]:
        return {row.credential.label for row in client.get(listed).context["cl"].result_list}

    assert waiting() == {"collected", "revoked", "waiting"}
    assert SHAPED.search(text_of(send(rows[0], "collect", client))) is not None
    assert rows[1].replacement is not None
    allowed = grant(desk.responder, P.KEYS_REVOKE, desk.sandbox)
    revoke_key(allowed, rows[1].replacement, RevocationReason.UNSPECIFIED)
    assert waiting() == {"waiting"}
    front = client.get("/admin/")
    (item,) = [each for each in front.context["attention_items"] if each.title == "Replacements to collect"]
    assert (item.url, item.count, [line.label for line in item.lines]) == (listed, 1, ["acme/sandbox · waiting"])


def test_replacement_of_a_campaign_is_listed_for_others_who_may_collect_it(desk: Desk) -> None:
    """The author of the campaign may be absent when the key is available. Approvers and readers are not notified."""
    key, _ = issue(desk.sandbox, delivery=Delivery.SHOW_ONCE, label="waiting")
    request_campaign(
        grant(desk.tam, P.ROTATIONS_WRITE),
        environment=Environment.SANDBOX,
        merchants=None,
        older_than_days=None,
        overrides=PlanOverrides(),
        pace=Pace(),
        reason="yearly",
    )
    tick()
    row = Rotation.objects.get(credential=key.credential)
    advance_rotation(row.pk)

    def listed(operator: OperatorPrincipal) -> list[tuple[str, int]]:
        items = browser(operator).get("/admin/").context["attention_items"]
        return [(item.title, item.count) for item in items if item.title.startswith("Replacements to collect")]

    own, others = "Replacements to collect", "Replacements to collect for others"
    assert [(title, count) for title, count in listed(desk.tam) if count] == [(own, 1)]
    assert [(title, count) for title, count in listed(desk.admin) if count] == [(others, 1)]
    assert listed(desk.approver) == listed(desk.auditor) == []
    assert SHAPED.search(text_of(send(get_rotation(row.pk), "collect", browser(desk.admin)))) is not None
    assert not any(count for _, count in [*listed(desk.tam), *listed(desk.admin)])


def test_stored_replacement_is_not_offered_after_it_was_proved(desk: Desk) -> None:
    """Guarantee: a completed rotation asks for nothing. Until then the banner does not offer to collect it."""
    row, client = delivered(desk), browser(desk.tam)
    button = f'<a class="button" href="{page(row, "collect")}">'
    shown = text_of(client.get(page(row)))
    (banner,) = re.findall(r'<section class="banner.*?</section>', shown, re.DOTALL)
    assert button in shown
    assert button not in banner
    disable_triggers()
    rows: QuerySet[Rotation] = QuerySet(Rotation)
    rows.update(state=S.COMPLETED, used_at=now(), closed_at=now())
    assert page(row, "collect") not in text_of(client.get(page(row)))


def test_public_replacement_is_shown_on_its_own_page_and_not_collectable(desk: Desk) -> None:
    row = delivered(desk, KeyKind.PUBLIC)
    client = browser(desk.tam)
    assert client.get(page(row, "collect")).status_code == 409
    assert SHAPED.search(text_of(client.get(address("keyvault_key_show", row.replacement_id)))) is not None


# --- user-supplied text ----------------------------------------------------------------------------------------


def test_text_of_users_is_escaped(desk: Desk) -> None:
    """Reasons and client names are escaped wherever they are shown."""
    key, _ = issue(desk.production, label="live")
    asking = grant(desk.tam, P.ROTATIONS_WRITE, desk.production)
    row = request_rotation(asking, key.credential, PlanOverrides(reason=SCRIPT))
    bypass_rotation(grant(desk.responder, P.ROTATIONS_BYPASS, desk.production), row, row.plan_digest, SCRIPT)
    other = asked(desk, kind=KeyKind.PUBLIC)
    assert send(other, "reject", browser(desk.approver), why=SCRIPT).status_code == 302
    client = browser(desk.admin)
    act = BreakGlass.objects.get()
    pages = [page(row), page(row, "abort"), page(other), "/admin/", address("keyvault_breakglass_change", act.pk)]
    for url in pages:
        assert SCRIPT not in text_of(client.get(url)), url
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text_of(client.get(page(row)))
    assert "Rejected.</strong> &lt;script&gt;" in text_of(client.get(page(other)))

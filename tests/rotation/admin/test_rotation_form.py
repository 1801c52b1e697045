"""The console form for a rotation: every field of the plan, defaults for empty fields, errors at their field."""

import html
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.keys import KeyKind
from keyvault.models import Key
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.webhooks.endpoints import add_endpoint
from rotation.admin.rotation_forms import RotationForm
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import FIELDS, AtDeadline, DeliveryChannel, Proof, Reinstatement, default_of
from rotation.domain.policy import Plan
from rotation.domain.windows import Window
from rotation.models import Rotation
from tests.admin.desk import Desk, address, browser, set_up_desk, text_of
from tests.factories import SANDBOX, grant, issue, now
from tests.rotation.scene import use

UNTOUCHED = {"at_deadline": "stall", "reinstatement": "once", "time_zone": "UTC", "reason": "yearly"}
"""The form data when only the required fields were filled in."""


@pytest.fixture
def desk(db: None) -> Desk:
    return set_up_desk()


def ask(desk: Desk, key: Key, **fields: Any) -> Any:
    sent = {**UNTOUCHED, "credential_id": key.credential_id, **fields}
    return browser(desk.tam).post(address("rotation_rotation_request"), sent)


def plan_of(desk: Desk, key: Key, **fields: Any) -> Plan:
    answer = ask(desk, key, **fields)
    assert answer.status_code == 302, text_of(answer)
    return Rotation.objects.get().approved_plan


def in_days(days: int) -> datetime:
    return (now() + timedelta(days=days)).replace(second=0, microsecond=0)


def as_sent(at: datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M}"


def fault_at(answer: Any, name: str) -> str:
    """Return the error shown at a field."""
    assert answer.status_code == 400
    rows = re.findall(r'<div class="form-row errors">.*?<div class="input">.*?name="(\w+)"', text_of(answer), re.DOTALL)
    beside = re.findall(
        r'<div class="form-row errors">.*?<ul class="errorlist"[^>]*><li>(.*?)</li>', text_of(answer), re.DOTALL
    )
    assert name in rows, (rows, beside)
    return html.unescape(beside[rows.index(name)])


def test_form_left_unchanged_requests_the_defaults(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    plan = plan_of(desk, key)
    usual = {name: default_of(name, SANDBOX) for name, each in FIELDS.items() if each.defaults}
    del usual["deadline"]
    assert plan.proof is Proof.TRAFFIC
    assert {name: getattr(plan, name) for name in usual} == usual
    assert (plan.at_deadline, plan.reinstatement) == (AtDeadline.STALL, Reinstatement.ONCE)
    assert (plan.window, plan.retire_at, plan.expires_in_days) == (None, None, None)
    assert plan.channels == (DeliveryChannel.SECRET_BACKEND,)


def test_form_filled_in_requests_those_values(desk: Desk) -> None:
    add_endpoint(grant(desk.tam, P.WEBHOOKS_WRITE, desk.sandbox), desk.sandbox, "https://acme.example/")
    key, _ = issue(desk.sandbox)
    begins_at, deadline = in_days(1), in_days(60)
    plan = plan_of(
        desk,
        key,
        proof="both",
        proof_count="321",
        proof_sources="3",
        soak_seconds="10m",
        quiet_seconds="2h",
        quarantine_seconds="90",
        reinstatement="never",
        not_before=as_sent(begins_at),
        deadline=as_sent(deadline),
        at_deadline="revoke",
        predecessor_may_expire="on",
        weekdays=["1", "3"],
        opens="22:00",
        closes="04:00",
        time_zone="Europe/Berlin",
        expires_in_days="365",
        webhook="on",
    )
    assert (plan.proof, plan.proof_count, plan.proof_sources, plan.soak_seconds) == (Proof.BOTH, 321, 3, 600)
    assert (plan.quiet_seconds, plan.quarantine_seconds, plan.expires_in_days) == (7_200, 90, 365)
    assert (plan.at_deadline, plan.reinstatement) == (AtDeadline.REVOKE, Reinstatement.NEVER)
    assert (plan.not_before, plan.deadline, plan.predecessor_may_expire) == (begins_at, deadline, True)
    assert plan.window == Window("Europe/Berlin", (1, 3), 22 * 60, 4 * 60)
    assert plan.channels == tuple(DeliveryChannel)


def test_form_for_a_public_key_uses_confirmation_without_deadline(desk: Desk) -> None:
    key, _ = issue(desk.production, kind=KeyKind.PUBLIC)
    client = browser(desk.tam)
    offer = f"{address('rotation_rotation_request')}?credential={key.credential_id}"
    assert offer in text_of(client.get(address("keyvault_credential_change", key.credential_id)))
    retire_at = in_days(90)
    plan = plan_of(desk, key, retire_at=as_sent(retire_at))
    assert (plan.proof, plan.deadline, plan.retire_at) == (Proof.CONFIRMATION, None, retire_at)
    page = text_of(client.get(address("rotation_rotation_change", Rotation.objects.get().pk)))
    assert "once, for a source that used it before · no effect for a public key" in page


@pytest.mark.parametrize(
    ("fields", "name", "message"),
    [
        ({"deadline": "2020-01-01T00:00"}, "deadline", "next 732 days"),
        ({"deadline": "2999-01-01T00:00"}, "deadline", "next 732 days"),
        ({"deadline": "9999-12-31T23:59:59-12:00"}, "deadline", "out of range"),
        ({"deadline": "soon"}, "deadline", "valid date"),
        ({"webhook": "on"}, "webhook", "no enabled webhook endpoint"),
        ({"retire_at": as_sent(in_days(30))}, "retire_at", "public keys only"),
        ({"weekdays": ["1"], "time_zone": "Atlantis/Capital"}, "time_zone", "IANA"),
        ({"weekdays": ["9"]}, "weekdays", "valid choice"),
        ({"opens": "22:00"}, "weekdays", "the weekdays on which"),
        ({"weekdays": ["1"], "opens": "25:00"}, "opens", "time of day"),
        ({"weekdays": ["1"], "opens": "09:00", "closes": "09:00"}, "closes", "a time other than opens"),
        ({"quiet_seconds": "300d", "deadline": f"{now() + timedelta(days=9):%Y-%m-%dT%H:%M}"}, "deadline", "past the"),
        ({"expires_in_days": "1"}, "expires_in_days", "before the deadline"),
        ({"quarantine_seconds": "0m"}, "quarantine_seconds", "0 seconds is out of range. Use 1 second to 366 days"),
        ({"proof_count": "0"}, "proof_count", "0 is out of range. Use 1 to 1000000 authentications."),
        ({"proof": "confirmation"}, "proof", "public keys"),
    ],
)
def test_form_with_an_error_shows_it_at_the_field(desk: Desk, fields: Any, name: str, message: str) -> None:
    key, _ = issue(desk.sandbox)
    use(UsageLog(), key.key_id)
    assert message in fault_at(ask(desk, key, **fields), name)
    assert not Rotation.objects.exists()


def test_form_opens_the_group_with_the_error_only(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    groups = re.findall(
        r'<details class="card group"( open)?>\s*<summary>(\w+)', text_of(ask(desk, key, quiet_seconds="soon"))
    )
    assert [title for is_open, title in groups if is_open] == ["Retiring"]
    assert len(groups) == 5


def test_form_shows_every_field_once(desk: Desk) -> None:
    text = text_of(browser(desk.tam).get(address("rotation_rotation_request")))
    names = re.findall(r'<(?:input|select|textarea)[^>]* name="(\w+)"', text)
    once = set(RotationForm().fields) - {"weekdays"}
    assert {name: names.count(name) for name in once} == dict.fromkeys(once, 1)
    assert names.count("weekdays") == 7
    assert re.findall("In production at least ([^.]*)", text) == ["1 hour", "10 minutes"]


def test_form_window_is_applied_by_the_engine(desk: Desk) -> None:
    """The form's window is the engine's window: the start time shown is an hour within it."""
    key, _ = issue(desk.sandbox)
    far = (datetime.now(UTC).weekday() + 3) % 7
    plan_of(desk, key, weekdays=[str(far)], opens="03:00", closes="04:00")
    row = Rotation.objects.get()
    assert row.state == S.SCHEDULED
    text = text_of(browser(desk.tam).get(address("rotation_rotation_change", row.pk)))
    assert re.search(r"Waiting for its start time, \d{4}-\d{2}-\d{2} 03:00:00 UTC", text)

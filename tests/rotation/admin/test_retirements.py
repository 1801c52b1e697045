"""The retirement date of an old public key in the console: requested, shown beside its users, approved."""

from datetime import datetime, timedelta

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.keys import KeyKind
from keyvault.models import Account
from keyvault.models.usage import UseOutcome
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import PlanOverrides
from rotation.models import Retirement, Rotation
from rotation.services.rotations.interventions import request_retirement
from rotation.services.rotations.reports import get_rotation
from rotation.services.rotations.requests import request_rotation
from tests.admin.desk import Desk, address, browser, hidden, set_up_desk, text_of
from tests.factories import grant, issue, now


@pytest.fixture
def desk(db: None) -> Desk:
    return set_up_desk()


def rotated(desk: Desk, place: Account) -> Rotation:
    key, _ = issue(place, kind=KeyKind.PUBLIC, label="web-shop")
    return request_rotation(grant(desk.tam, P.ROTATIONS_WRITE, place), key.credential, PlanOverrides(reason="yearly"))


def in_days(days: int) -> datetime:
    return (now() + timedelta(days=days)).replace(second=0, microsecond=0)


def dated(desk: Desk, row: Rotation, days: int = 90) -> Retirement:
    return request_retirement(grant(desk.tam, P.ROTATIONS_WRITE, row.credential.account), row, in_days(days))


def page(row: Retirement, act: str = "change") -> str:
    return address(f"rotation_retirement_{act}", row.pk)


def test_date_requested_takes_effect_after_a_second_persons_approval(desk: Desk) -> None:
    row = rotated(desk, desk.production)
    client, url = browser(desk.tam), address("rotation_rotation_retire", row.pk)
    sent = {"version": hidden(client.get(url), "version"), "retire_at": f"{in_days(90):%Y-%m-%dT%H:%M}"}
    assert client.post(url, sent).status_code == 302
    asked = Retirement.objects.get()
    assert get_rotation(row.pk).retire_at is None
    assert page(asked) in text_of(client.get(address("rotation_rotation_change", row.pk)))
    approver = browser(desk.approver)
    assert "Retirement dates to approve" in text_of(approver.get("/admin/"))
    version = hidden(approver.get(page(asked, "approve")), "version")
    assert approver.post(page(asked, "approve"), {"version": version}).status_code == 302
    assert f"{get_rotation(row.pk).retire_at:%Y-%m-%dT%H:%M}" == sent["retire_at"]
    shown = text_of(approver.get(address("rotation_rotation_change", row.pk)))
    assert "Old key retired at" in shown
    assert approver.get(page(asked, "approve")).status_code == 409


def test_date_in_sandbox_takes_effect_immediately(desk: Desk) -> None:
    row = rotated(desk, desk.sandbox)
    asked = dated(desk, row)
    assert get_rotation(row.pk).retire_at == asked.retire_at
    assert "approved" in text_of(browser(desk.tam).get(page(asked)))


@pytest.mark.parametrize("sent", ["2020-01-01T00:00", "2999-01-01T00:00", "soon", ""])
def test_date_invalid_shows_the_error_at_the_field(desk: Desk, sent: str) -> None:
    row = rotated(desk, desk.production)
    client, url = browser(desk.tam), address("rotation_rotation_retire", row.pk)
    answer = client.post(url, {"version": row.version, "retire_at": sent})
    assert answer.status_code == 400
    assert 'class="errorlist"' in text_of(answer)
    assert not Retirement.objects.exists()


def test_date_that_was_overtaken_by_a_later_one_cannot_be_approved(desk: Desk) -> None:
    row = rotated(desk, desk.production)
    first, second = dated(desk, row, 30), dated(desk, row, 90)
    client = browser(desk.approver)
    assert client.get(page(first, "approve")).status_code == 409
    assert client.post(page(first, "approve"), {"version": first.version}).status_code == 409
    assert "a later date was requested" in text_of(client.get(page(first)))
    assert client.post(page(second, "approve"), {"version": second.version}).status_code == 302


def test_date_of_a_key_in_quarantine_is_not_offered_for_approval(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dated(desk, rotated(desk, desk.production))
    monkeypatch.setattr(Rotation, "stage", RotationState.QUARANTINE)
    client = browser(desk.approver)
    assert "Retirement dates to approve" not in text_of(client.get("/admin/"))
    assert client.get(page(asked, "approve")).status_code == 409
    assert "no longer needs one" in text_of(client.get(page(asked)))


def test_date_page_shows_the_shops_and_versions_that_use_the_key(desk: Desk) -> None:
    row = rotated(desk, desk.production)
    log = UsageLog()
    log.note(
        row.predecessor_id,
        source="192.0.2.9",
        user_agent="ShopApp/4.1 <b>",
        endpoint="checkout.create",
        outcome=UseOutcome.ALLOWED,
        origin="https://shop.example",
    )
    log.flush()
    text = text_of(browser(desk.approver).get(page(dated(desk, row), "approve")))
    assert "https://shop.example · ShopApp/4.1 &lt;b&gt;: last on" in text
    assert "There are more." not in text


def test_date_page_states_that_more_versions_use_the_key(desk: Desk) -> None:
    row = rotated(desk, desk.production)
    log = UsageLog()
    for number in range(11):
        log.note(
            row.predecessor_id,
            source="192.0.2.9",
            user_agent=f"ShopApp/4.{number}",
            endpoint="checkout.create",
            outcome=UseOutcome.ALLOWED,
        )
    log.flush()
    assert "There are more." in text_of(browser(desk.approver).get(page(dated(desk, row), "approve")))


def test_date_form_is_not_offered_for_a_private_key(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    row = request_rotation(grant(desk.tam, P.ROTATIONS_WRITE, desk.sandbox), key.credential, PlanOverrides())
    client, url = browser(desk.tam), address("rotation_rotation_retire", row.pk)
    assert client.get(url).status_code == 409
    sent = {"version": row.version, "retire_at": f"{in_days(90):%Y-%m-%dT%H:%M}"}
    assert client.post(url, sent).status_code == 409
    assert "Requested retirement dates" not in text_of(client.get(address("rotation_rotation_change", row.pk)))


def test_date_list_page_opens(desk: Desk) -> None:
    asked = dated(desk, rotated(desk, desk.production))
    text = text_of(browser(desk.auditor).get(address("rotation_retirement_changelist")))
    assert page(asked) in text
    assert "awaiting approval" in text

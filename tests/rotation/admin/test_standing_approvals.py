"""Standing approvals in the console: requested on a schedule's page, decided in the inbox, cited by rotations."""

from datetime import timedelta

import pytest
from django.urls import reverse

from keyvault.domain.environments import Environment
from rotation.models import Rotation, RotationSchedule, StandingApproval
from rotation.services.schedules.starting import begin_due
from tests.admin.desk import Desk, address, browser, hidden, set_up_desk, text_of
from tests.factories import issue, now
from tests.rotation.services.schedules.test_schedules import save

DAY = timedelta(days=1)
REQUEST = "rotation_rotationschedule_request-standing-approval"


@pytest.fixture
def desk(db: None) -> Desk:
    return set_up_desk()


@pytest.fixture
def schedule(desk: Desk) -> RotationSchedule:
    return save(desk.production, now(), by=desk.tam, cryptoperiod_days=30)


def request(desk: Desk, schedule: RotationSchedule) -> StandingApproval:
    client, url = browser(desk.tam), address(REQUEST, schedule.pk)
    answer = client.post(url, {"days": 60, "version": hidden(client.get(url), "version")})
    row = StandingApproval.objects.get(state="awaiting_approval")
    assert answer["Location"] == address("rotation_standingapproval_change", row.pk)
    return row


def test_standing_approval_is_requested_approved_and_cited(desk: Desk, schedule: RotationSchedule) -> None:
    page = address("rotation_rotationschedule_change", schedule.pk)
    assert "No standing approval" in text_of(browser(desk.approver).get(page))
    row = request(desk, schedule)
    inbox = "Standing approvals to approve"
    assert inbox in text_of(browser(desk.approver).get(reverse("admin:index")))
    assert inbox not in text_of(browser(desk.tam).get(reverse("admin:index")))
    approving, url = browser(desk.approver), address("rotation_standingapproval_approve", row.pk)
    shown = text_of(approving.get(address("rotation_standingapproval_change", row.pk)))
    for text in ("30 days", row.plan_digest, "all of acme/production", "Awaiting approval until"):
        assert text in shown
    assert approving.post(url, {"plan_digest": hidden(approving.get(url), "plan_digest")}).status_code == 302
    assert inbox not in text_of(approving.get(reverse("admin:index")))
    assert row.pk in text_of(approving.get(page))
    issue(desk.production)
    begin_due(now())
    (rotation_id,) = begin_due(now() + 31 * DAY)
    assert Rotation.objects.get(pk=rotation_id).state == "scheduled"
    shown = text_of(approving.get(address("rotation_rotation_change", rotation_id)))
    assert "Under the standing approval" in shown
    assert row.pk in shown
    assert rotation_id in text_of(approving.get(address("rotation_standingapproval_change", row.pk)))


def test_standing_approval_withdrawn_or_void_says_why(desk: Desk, schedule: RotationSchedule) -> None:
    first = request(desk, schedule)
    withdrawn = browser(desk.tam).post(address("rotation_standingapproval_withdraw", first.pk), {"why": "a mistake"})
    assert withdrawn.status_code == 302
    second = request(desk, schedule)
    save(desk.production, now(), by=desk.tam, cryptoperiod_days=31)
    client = browser(desk.approver)
    for row, why in ((first, "a mistake"), (second, "the schedule was changed")):
        shown = text_of(client.get(address("rotation_standingapproval_change", row.pk)))
        assert f"Ended: {why}" in shown
        assert client.get(address("rotation_standingapproval_approve", row.pk)).status_code == 409


def test_request_by_another_than_the_author_or_in_sandbox_is_not_offered(
    desk: Desk, schedule: RotationSchedule
) -> None:
    sandbox = save(Environment.SANDBOX, now(), by=desk.admin)
    for row in (schedule, sandbox):
        url = address(REQUEST, row.pk)
        client = browser(desk.admin)
        assert url not in text_of(client.get(address("rotation_rotationschedule_change", row.pk)))
        assert client.post(url, {"days": 60, "version": row.version}).status_code == 409
    assert not StandingApproval.objects.exists()

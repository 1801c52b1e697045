"""The page of approvals: what waits for the operator, approved together and each for itself."""

import html
import re
from typing import Any
from unittest import mock

import pytest
from django.test import Client

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.access.scopes import AccessScope
from keyvault.admin.framework import attention, step_up
from keyvault.admin.keys.issuance import IssuanceRequestAdmin
from keyvault.admin.oversight import approvals
from keyvault.domain.errors import StateConflictError
from keyvault.domain.issuance import Delivery, IssuanceState
from keyvault.models import AuditEntry, IssuanceRequest
from keyvault.services.approvals.batch_approval import combine_digests
from keyvault.services.issuance.requests import reject_issuance
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import PlanOverrides
from rotation.models import Rotation
from rotation.services.rotations.requests import request_rotation
from tests.admin.desk import Desk, address, browser, text_of
from tests.admin.framework.test_enforcement import every_row
from tests.admin.framework.test_queries import KINDS_OF_APPROVALS
from tests.factories import grant, issue, make_merchant, make_operator, request_key

_HIDDEN = re.compile(r'<input type="hidden" name="([^"]+)" value="([^"]*)"')


def ask_rotation(desk: Desk, overrides: PlanOverrides = PlanOverrides()) -> Rotation:  # noqa: B008  it is frozen
    key, _ = issue(desk.production, label="till")
    return request_rotation(grant(desk.tam, P.ROTATIONS_WRITE, desk.production), key.credential, overrides)


def choice(row: Any) -> str:
    return f"{row._meta.label_lower}:{row.pk}"


def review(client: Client, *rows: Any) -> Any:
    return client.get(address("approvals_review"), {"item": [choice(row) for row in rows]})


def submit(client: Client, shown: Any) -> Any:
    """Send the form of the review as it was shown."""
    fields: dict[str, list[str]] = {}
    for name, value in _HIDDEN.findall(text_of(shown)):
        if name not in {"csrfmiddlewaretoken", "next"}:
            fields.setdefault(html.unescape(name), []).append(html.unescape(value))
    return client.post(address("approvals_review"), fields)


def state_of(row: Any) -> str:
    row.refresh_from_db()
    return str(row.state)


def test_approvals_lists_what_the_operator_may_approve_and_what_it_changes(desk: Desk) -> None:
    """Guarantee: requests of others are listed with what they change and what is unusual; own ones are not."""
    request_key(desk.production, label="backend", delivery=Delivery.SHOW_ONCE, by=desk.tam)
    request_key(desk.production, label="mine", by=desk.admin)
    ask_rotation(desk, PlanOverrides(reason="yearly", quarantine_seconds=172_800))
    client = browser(desk.admin)
    page = text_of(client.get(address("approvals")))
    assert "Key requests to approve" in page
    assert "acme/production · backend" in page
    assert "acme/production · till" in page
    assert "mine" not in page
    assert page.count("not the default</span>") == 2
    assert "Nothing awaits your approval" not in page
    assert 'value="keyvault.issuancerequest:' in page
    assert page.count("checked") == 0
    select = client.get(address("approvals"), {"select": "key-requests-to-approve"})
    assert text_of(select).count(" checked") == 1


def test_approvals_together_are_each_recorded_under_one_digest(desk: Desk) -> None:
    """Guarantee: one form approves several requests under one digest; each has an approval by its own digest, and an
    audit entry that names the combined one."""
    first, second = (request_key(desk.production, label=label, by=desk.tam) for label in ("first", "second"))
    rotation = ask_rotation(desk)
    client = browser(desk.approver)
    shown = review(client, rotation, second, first)
    assert "Approve 3 requests" in text_of(shown)
    combined = combine_digests({choice(row): {"plan_digest": row.plan_digest} for row in (first, second, rotation)})
    assert text_of(shown).count(combined) == 2
    for _ in range(2):  # A double click, or the form sent again from the browser's history, leads to the same outcome.
        answer = submit(client, shown)
        place = f"{address('approvals_outcome')}?digest={combined}"
        assert (answer.status_code, answer.get("Location")) == (302, place)
        outcome = text_of(client.get(place))
        assert "3 requests approved" in outcome
        assert combined in outcome
        assert f'<a href="{address("rotation_rotation_change", rotation.pk)}">' in outcome
    elsewhere = text_of(browser(desk.approver).get(place))
    assert "Approved together" in elsewhere
    assert "0 requests" not in elsewhere, "a form that is sent again in another session does not deny the approval"
    assert {state_of(first), state_of(second)} == {IssuanceState.APPROVED}
    assert state_of(rotation) == RotationState.SCHEDULED
    for row in (first, second, rotation):
        assert [each.plan_digest for each in row.approvals.all()] == [row.plan_digest]
    entries = AuditEntry.objects.filter(event__in=["issuance.approved", "rotation.approved"])
    bodies = [bytes(entry.body) for entry in entries]
    for row in (first, second, rotation):
        assert sum(str(row.pk).encode() in body and combined.encode() in body for body in bodies) == 1


def altered(text: str, row: Any) -> str:
    """Return the page with another digest of the row, as if the row had been changed since."""
    own = f'name="{choice(row)}-plan_digest" value="'
    return text.replace(f"{own}{row.plan_digest}", f"{own}{'0' * 64}")


def test_approvals_together_approve_nothing_if_one_was_changed(desk: Desk) -> None:
    """Guarantee: if a request was decided or changed after the page was shown, none is approved, and it is named."""
    kept, rejected, changed = (request_key(desk.production, label=label, by=desk.tam) for label in ("a1", "b2", "c3"))
    client = browser(desk.approver)
    shown = review(client, kept, rejected, changed)
    reject_issuance(grant(desk.admin, P.ISSUANCE_REJECT, desk.production), rejected, "no")
    with mock.patch(f"{__name__}.text_of", side_effect=[altered(text_of(shown), changed)]):
        answer = submit(client, shown)
    assert answer.status_code == 409
    error = re.search(r'role="alert">([^<]*)', text_of(answer))
    assert error is not None
    assert "Nothing is approved" in error[1]
    assert ["a1" in error[1], "b2" in error[1], "c3" in error[1]] == [False, True, True]
    assert [state_of(row) for row in (kept, rejected, changed)] == ["pending", "rejected", "pending"]


def test_approvals_review_names_the_requester_and_the_age(desk: Desk) -> None:
    row = request_key(desk.production, label="backend", by=desk.tam)
    shown = text_of(review(browser(desk.approver), row))
    assert re.search(r"Requested by tam <time [^>]*>just now</time>", shown), shown


def find_facts(text: str) -> set[str]:
    """Return the explanations and facts of a page, without relative times, which change while the test runs."""
    text = re.sub(r"(<time[^>]*>)[^<]*", r"\1", text)
    return {*re.findall(r'<p class="explain">.*?</p>', text), *re.findall(r"<div><dt>.*?</dd></div>", text, re.DOTALL)}


def test_approvals_review_shows_all_that_each_digest_covers(desk: Desk) -> None:
    """Guarantee: the page that approves several requests shows of each what its own page shows of the request.

    A digest covers more than what changes: the reason, every value of a plan, the merchants of a campaign, the public
    key that replacements are sealed to.
    """
    every_row(desk)
    client = browser(make_operator("viewer", *Role))
    waiting = re.findall(r'name="item" value="([^"]+)"', text_of(client.get(address("approvals"))))
    assert len({each.partition(":")[0] for each in waiting}) == KINDS_OF_APPROVALS
    together = text_of(client.get(address("approvals_review"), {"item": waiting})).split('<section class="card">')
    for each in waiting:
        label, _, pk = each.partition(":")
        (section,) = (part for part in together if f'name="item" value="{each}"' in part)
        alone = text_of(client.get(address(f"{label.replace('.', '_')}_approve", pk)))
        facts = find_facts(alone.partition("<h2>Decide</h2>")[0])
        assert len(facts) > 4
        assert facts - find_facts(section) == set(), each


@pytest.mark.parametrize("combined", ["", "0" * 64, None])
def test_approvals_together_need_the_combined_digest(desk: Desk, combined: str | None) -> None:
    """Guarantee: without the digest over exactly these requests nothing is approved."""
    row = request_key(desk.production, by=desk.tam)
    fields = {"item": choice(row), f"{choice(row)}-plan_digest": row.plan_digest}
    if combined is not None:
        fields["combined_digest"] = combined
    answer = browser(desk.approver).post(address("approvals_review"), fields)
    assert answer.status_code == 409
    assert "Nothing is approved" in text_of(answer)
    assert state_of(row) == IssuanceState.PENDING


def test_approvals_together_approve_nothing_if_one_is_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: if a service refuses one request at the last moment, none is approved, and the log has no entry."""
    rows = [request_key(desk.production, label=label, by=desk.tam) for label in ("a1", "b2")]
    refused = max(rows, key=choice)
    client = browser(desk.approver)
    shown = review(client, *rows)
    approve = IssuanceRequestAdmin.approve

    def approve_all_but_one(self: Any, request: Any, row: Any, cleaned: Any) -> Any:
        if row.pk == refused.pk:
            raise StateConflictError("This was changed by another operator.")
        return approve(self, request, row, cleaned)

    monkeypatch.setattr(IssuanceRequestAdmin, "approve", approve_all_but_one)
    answer = submit(client, shown)
    assert answer.status_code == 409
    assert f"Nothing is approved. acme/production · {refused.label}: This was changed" in text_of(answer)
    assert [state_of(row) for row in rows] == ["pending", "pending"]
    assert not any(row.approvals.exists() for row in rows)
    assert not AuditEntry.objects.filter(event="issuance.approved").exists()


def test_approvals_of_own_requests_are_refused_with_a_sentence(desk: Desk) -> None:
    """Guarantee: the requester cannot approve, neither by the page nor by a forged form."""
    mine = request_key(desk.production, label="mine", by=desk.admin)
    client = browser(desk.admin)
    shown = text_of(review(client, mine))
    assert "You requested this. A second person must approve it." in shown
    assert '<button type="submit" class="button button-good"' not in shown
    answer = client.post(
        address("approvals_review"), {"item": choice(mine), f"{choice(mine)}-plan_digest": mine.plan_digest}
    )
    assert answer.status_code == 409
    assert "Nothing is approved" in text_of(answer)
    assert state_of(mine) == IssuanceState.PENDING


def test_approvals_need_one_recent_second_factor(desk: Desk) -> None:
    """Guarantee: without a second factor of the last five minutes nothing is approved, and the review stays."""
    row = request_key(desk.production, by=desk.tam)
    client = browser(desk.approver)
    shown = review(client, row)
    with mock.patch.object(step_up, "is_step_up_due", return_value=True):
        answer = submit(client, shown)
    assert answer.status_code == 403
    assert "Confirm with your second factor" in text_of(answer)
    assert state_of(row) == IssuanceState.PENDING


@pytest.mark.parametrize(
    ("items", "status"),
    [
        (["x"], 404),
        (["keyvault.issuancerequest:req_absent"], 404),
        (["keyvault.merchant:acme"], 404),
        (["rotation.retirement:x"], 404),
        ([f"rotation.retirement:{2**63}"], 404),
        ([f"keyvault.issuancerequest:req_{number}" for number in range(approvals.MAX_TOGETHER + 1)], 400),
    ],
)
def test_approvals_of_unknown_or_too_many_rows_are_refused(desk: Desk, items: list[str], status: int) -> None:
    for method in ("get", "post"):
        answer = getattr(browser(desk.approver), method)(address("approvals_review"), {"item": items})
        assert answer.status_code == status


def test_approvals_without_a_choice_show_the_list_again(desk: Desk) -> None:
    request_key(desk.production, label="backend", by=desk.tam)
    client = browser(desk.approver)
    for answer, status in (
        (client.get(address("approvals_review")), 200),
        (client.post(address("approvals_review")), 400),
    ):
        assert answer.status_code == status
        assert "Choose at least one request" in text_of(answer)
        assert "backend" in text_of(answer)


def test_approvals_outside_the_scope_are_unknown(desk: Desk) -> None:
    """Guarantee: an operator of another merchant sees and approves nothing of this one."""
    row = request_key(desk.production, label="backend", by=desk.tam)
    make_merchant("globex")
    limited = make_operator("limited", Role.APPROVER, scope=AccessScope(frozenset({"globex"})))
    client = browser(limited)
    assert "backend" not in text_of(client.get(address("approvals")))
    answer = client.post(
        address("approvals_review"), {"item": choice(row), f"{choice(row)}-plan_digest": row.plan_digest}
    )
    assert answer.status_code == 404
    assert state_of(row) == IssuanceState.PENDING


def test_approvals_are_counted_exactly_or_as_more(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, approvals):
        monkeypatch.setattr(module, "MAX_ROWS", 3)
        monkeypatch.setattr(module, "MAX_DECIDABLE", 2)
    for number in range(2):
        request_key(desk.production, label=f"label-{number}", by=desk.tam)
    client = browser(desk.approver)
    assert '<span class="count">2</span></h2>' in text_of(client.get(address("approvals")))
    for number in range(2):
        request_key(desk.production, label=f"more-{number}", by=desk.tam)
    assert '<span class="count">3+</span></h2>' in text_of(client.get(address("approvals")))
    assert IssuanceRequest.objects.count() == 4

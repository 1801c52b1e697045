"""Shared parts of the pages that require approval by a second person."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Model, Prefetch, prefetch_related_objects
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.admin.framework.actions import (
    ActionForm,
    ActionResult,
    Cleaned,
    ReasonForm,
    RowAction,
    Text,
    Tone,
)
from keyvault.admin.framework.enforcement import operator_of
from keyvault.admin.framework.widgets import Difference, Table, badge, moment, mono
from keyvault.domain.environments import Environment
from keyvault.models import Account


class ApproveForm(ActionForm):
    """Form with the digest of the plan that the page showed; the approval covers exactly that plan.

    The digest is computed from the same plan as the page. The service compares it with the stored digest.
    """

    plan_digest = forms.CharField(max_length=64, widget=forms.HiddenInput)

    @classmethod
    def plan_of(cls, row: Any) -> Any:
        return row.plan()

    @classmethod
    def initial_for(cls, row: Any) -> dict[str, Any]:
        return {"plan_digest": cls.plan_of(row).digest()}


class ApproveStoredForm(ApproveForm):
    """Form with the stored digest; the service recomputes the digest from the stored terms and compares."""

    @classmethod
    def initial_for(cls, row: Any) -> dict[str, Any]:
        return {"plan_digest": row.plan_digest}


def approve_action(
    permission: Permission,
    approve: Callable[[Grant, Any, str], object],
    explain: Text,
    *,
    approved: str,
    is_undecided: Callable[[Any], bool],
    is_available: Callable[[Any], bool] | None = None,
    form: type[ApproveForm] = ApproveForm,
) -> RowAction:
    """Return the action that approves the plan on its page as one person.

    Args:
        approve: service; called with the grant, the row and the digest that the page showed.
        approved: message when the row has enough approvals.
        is_undecided: whether the row still needs an approval.
        is_available: whether the page can be opened; by default `is_undecided`.
    """

    def run(grant: Grant, row: Any, cleaned: Cleaned) -> ActionResult:
        approve(grant, row, cleaned["plan_digest"])
        return ActionResult("Approval recorded. Another person must approve too." if is_undecided(row) else approved)

    return RowAction(
        "approve",
        "Approve",
        permission,
        run,
        explain,
        form=form,
        is_available=is_available or is_undecided,
        tone=Tone.GOOD,
        step_up=True,
    )


reject_action = partial(RowAction, "reject", "Reject", form=ReasonForm, tone=Tone.DANGER)
"""Rejects a request with a reason."""


def submitted(row: Model, *, is_undecided: bool, next_step: str, request: str = "Request") -> ActionResult:
    """Return the result of a request. `next_step`: what happens if no approval is required."""
    if is_undecided:
        return ActionResult(f"{request} submitted. A second person must approve it.", row=row)
    return ActionResult(f"{request} submitted. No approval is required in this environment; {next_step}", row=row)


OWN_REQUEST_NOTE = "You requested this. A second person must approve it."


def is_requester(request: HttpRequest, row: Any) -> bool:
    """Whether the operator is the person who requested the row."""
    return bool(row.requester_person == operator_of(request).person)


def undecided_notes(request: HttpRequest, row: Any) -> Iterable[str]:
    """Yield until when the row can be approved, and why the operator who requested it cannot approve it."""
    yield f"Awaiting approval until {row.approval_expires_at:%Y-%m-%d %H:%M} UTC."
    if is_requester(request, row):
        yield OWN_REQUEST_NOTE


def fetch_approvals(row: Any) -> None:
    """Read the row's approvals and their approvers once, the oldest first, for `row.approvals.all()`."""
    found = row.approvals.model.objects.select_related("approver").order_by("created_at")
    prefetch_related_objects([row], Prefetch("approvals", found))


def changes_table(changes: Iterable[Difference], title: str = "What changes") -> Table:
    """List what an approval changes, what is not the default first."""
    listed = sorted(changes, key=lambda change: not change.is_unusual)
    return Table(
        title,
        ["what", "now", "after the approval"],
        [[change.label, change.before, _mark_unusual(change)] for change in listed],
    )


def _mark_unusual(change: Difference) -> SafeString | str:
    return format_html("{} {}", change.after, UNUSUAL) if change.is_unusual else change.after


UNUSUAL = badge("not the default", "wait")
"""Mark of a value that the requester chose instead of the default."""


def approvals_table(row: Any) -> Table:
    """List the approvers with the digest that each approved."""
    fetch_approvals(row)
    return Table(
        f"Approvals ({row.approvals_needed} required)",
        ["approver", "approved", "digest"],
        [[item.approver.username, moment(item.created_at), mono(item.plan_digest)] for item in row.approvals.all()],
        empty="No approvals yet." if row.approvals_needed else "No approval is required in this environment.",
    )


def requester_name(row: Any) -> str:
    """Name the requester of a row: a person, who may be disabled, or a service. A command line only claims one."""
    token = getattr(row, "requested_via", None)
    operator = "none" if row.requester is None else row.requester.username
    name = operator if token is None else f"service {token}"
    is_disabled = token is None and row.requester is not None and not row.requester.is_active
    notes = [*(["claimed"] if row.is_requester_claimed else []), *(["disabled"] if is_disabled else [])]
    return f"{name} ({', '.join(notes)})" if notes else name


@admin.display(description="requested by", ordering="requester__username")
def requester_column(model_admin: Any, row: Any) -> str:
    """Column of the requesters' names."""
    return requester_name(row)


def break_glass_warning(account: Account) -> str:
    """Warn before a production key is shown to a person; empty in sandbox."""
    if account.environment != Environment.PRODUCTION:
        return ""
    return (
        "This is break-glass access. People should not see production keys: the access is recorded under your name "
        "and stays on the overview until a second person has reviewed it."
    )

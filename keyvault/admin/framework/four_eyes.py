"""Shared parts of the pages that require approval by a second person."""

from typing import Any

from django import forms

from keyvault.admin.framework.actions import ActionForm
from keyvault.admin.framework.widgets import Table, mono, short_moment
from keyvault.domain.environments import Environment
from keyvault.models import Account, ServiceToken
from keyvault.models import Operator as OperatorRow


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


def approvals_table(row: Any) -> Table:
    """List the approvers with the digest that each approved."""
    approvals = row.approvals.select_related("approver").order_by("created_at")
    return Table(
        f"Approvals ({row.approvals_needed} required)",
        ["approver", "approved (UTC)", "digest"],
        [[item.approver.username, short_moment(item.created_at), mono(item.plan_digest)] for item in approvals],
        empty="No approvals yet." if row.approvals_needed else "No approval is required in this environment.",
    )


def requester_name(requester: OperatorRow | None, token: ServiceToken | None) -> str:
    """Name the requester: a person, or a service and its token."""
    if token is not None:
        return f"service {token}"
    return "none" if requester is None else requester.username


def break_glass_warning(account: Account) -> str:
    """Warn before a production key is shown to a person; empty in sandbox."""
    if account.environment != Environment.PRODUCTION:
        return ""
    return (
        "This is break-glass access. People should not see production keys: the access is recorded under your name "
        "and stays on the front page until a second person has reviewed it."
    )

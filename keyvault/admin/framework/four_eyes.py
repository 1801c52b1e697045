"""What the pages of everything that takes a second person have in common."""

from typing import Any

from django import forms

from keyvault.admin.framework.actions import ActForm
from keyvault.admin.framework.widgets import Table, mono, short_moment
from keyvault.domain.environments import Environment
from keyvault.models import Account, ServiceToken
from keyvault.models import Operator as OperatorRow


class ApproveForm(ActForm):
    """Carries the digest of the plan as the page showed it: the approval is for that, and for nothing else.

    The page is made from the plan, and so is the digest here; the stored digest is the service's to compare.
    """

    plan_digest = forms.CharField(max_length=64, widget=forms.HiddenInput)

    @classmethod
    def plan_of(cls, row: Any) -> Any:
        return row.plan()

    @classmethod
    def initial_for(cls, row: Any) -> dict[str, Any]:
        return {"plan_digest": cls.plan_of(row).digest()}


def approvals_table(row: Any) -> Table:
    """Who said yes to which digest."""
    approvals = row.approvals.select_related("approver").order_by("created_at")
    return Table(
        f"Approvals ({row.approvals_needed} needed)",
        ["who", "when (UTC)", "digest approved"],
        [[item.approver.username, short_moment(item.created_at), mono(item.plan_digest)] for item in approvals],
        empty="None." if row.approvals_needed else "This environment wants none.",
    )


def requester_name(requester: OperatorRow | None, token: ServiceToken | None) -> str:
    """Who asked: a person, or a service with the token that it asked with."""
    if token is not None:
        return f"service {token}"
    return "nobody" if requester is None else requester.username


def break_glass_warning(account: Account) -> str:
    """What is to be said before a key is shown to a person; nothing in sandbox."""
    if account.environment != Environment.PRODUCTION:
        return ""
    return (
        "This is break-glass. A production key is not meant to be seen by a person: showing it to you is recorded "
        "under your name and stays in sight until a second person has reviewed it."
    )

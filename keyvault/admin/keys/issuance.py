"""Key issuance in the console: requested, approved by a second person, collected once."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from django import forms
from django.db.models import Model, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.accounts import (
    AccountForm,
    account_crumbs,
    account_from,
    account_link,
    account_query,
    accounts_in_scope,
)
from keyvault.admin.framework.actions import (
    ActionResult,
    Cleaned,
    CreateAction,
    RowAction,
    from_query,
    run_service,
)
from keyvault.admin.framework.attention import Attention
from keyvault.admin.framework.columns import badge_column, moment_column
from keyvault.admin.framework.components import Banner, Columns
from keyvault.admin.framework.enforcement import may, operator_of
from keyvault.admin.framework.four_eyes import (
    OWN_REQUEST_NOTE,
    approvals_table,
    approve_action,
    break_glass_warning,
    is_requester,
    reject_action,
    requester_column,
    requester_name,
    submitted,
)
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.widgets import (
    NOTHING,
    Detail,
    Difference,
    Extras,
    FactTable,
    Line,
    Link,
    Step,
    badge,
    counted,
    identifier,
    link,
    moment,
    mono,
)
from keyvault.admin.keys.keys import key_link
from keyvault.domain.environments import Environment
from keyvault.domain.issuance import (
    COLLECT_WITHIN,
    COLLECTED_DELIVERIES,
    MAX_EXPIRES_IN_DAYS,
    Delivery,
    IssuanceState,
    can_transition_issuance,
)
from keyvault.domain.keys import KeyKind
from keyvault.models import Account, IssuanceRequest, Merchant
from keyvault.services.issuance.requests import (
    approve_issuance,
    collect_key,
    reject_issuance,
    request_issuance,
    withdraw_issuance,
)

S = IssuanceState

_PENDING = f"?state__exact={S.PENDING}"
"""Query of the list of requests that await approval."""

DELIVERIES = {
    Delivery.SECRET_BACKEND: "secret backend: the merchant's services read it there",
    Delivery.SHOW_ONCE: "show once: in this console, to the requester",
    Delivery.SEALED: "sealed: encrypted to the recipient's public key, for the requesting service",
}
KINDS = {
    KeyKind.PRIVATE: "private: for a trusted backend, in X-Api-Key",
    KeyKind.PUBLIC: "public: for browsers and mobile apps",
}


def _delivery_choices() -> list[tuple[str, str]]:
    """Return the deliveries that a person may request; only a service can request a sealed key, over REST."""
    return [(delivery.value, label) for delivery, label in DELIVERIES.items() if delivery is not Delivery.SEALED]


class RequestForm(AccountForm):
    kind = forms.ChoiceField(choices=[(kind.value, label) for kind, label in KINDS.items()])
    label = forms.CharField(max_length=100, help_text="Purpose of the key, such as checkout-backend.")
    delivery = forms.ChoiceField(
        choices=_delivery_choices,
        help_text="Showing a production key to a person is break-glass access: it is recorded and must be reviewed.",
    )
    expires_in_days = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=MAX_EXPIRES_IN_DAYS,
        label="Expires in days",
        help_text="Empty: the key does not expire.",
    )


def _request(grant: Grant, cleaned: Cleaned) -> ActionResult:
    request = request_issuance(
        grant,
        account_from(cleaned),
        kind=KeyKind(cleaned["kind"]),
        label=cleaned["label"],
        delivery=Delivery(cleaned["delivery"]),
        expires_in_days=cleaned["expires_in_days"],
    )
    return submitted(request, is_undecided=_is_pending(request), next_step="the worker issues the key now.")


def _collect(grant: Grant, request: IssuanceRequest, cleaned: Cleaned) -> ActionResult:
    return ActionResult("The new key", secret=collect_key(grant, request))


def _is_pending(request: IssuanceRequest) -> bool:
    return bool(request.state == S.PENDING)


def _explain_collection(request: IssuanceRequest) -> str:
    if request.delivery == Delivery.SHOW_ONCE and request.kind == KeyKind.PRIVATE:
        return (
            "The next page shows the key once, and the copy stored here is then destroyed. "
            "Prepare the place where you will store it."
        )
    return "The next page shows the key once. The secret backend keeps its copy for the merchant."


def _may_be_collected(request: IssuanceRequest) -> bool:
    """Whether the console offers to collect the key. The page of a public key shows it at any time."""
    return request.state == S.ISSUED and request.requested_via is None and request.kind == KeyKind.PRIVATE


def _must_be_collected(request: IssuanceRequest) -> bool:
    """Whether the merchant gets the key only once it is collected. Others read it in the secret backend or its page."""
    return request.delivery in COLLECTED_DELIVERIES and request.kind == KeyKind.PRIVATE


def _is_in_banner(action: RowAction, request: IssuanceRequest) -> bool:
    """Whether the banner offers the action."""
    decisions = {"approve", "reject", "withdraw"} if request.state == S.PENDING else set()
    return action.name in decisions or (action.name == "collect" and _must_be_collected(request))


_TONES = {S.PENDING: "wait", S.ISSUED: "good", S.COLLECTED: "good", S.BURNED: "bad"}
"""Tone of the banner by state."""


def _steps(row: IssuanceRequest) -> list[Step]:
    """Return the steps from the request to the key, up to an early end."""
    state = IssuanceState(row.state)
    if state in {S.REJECTED, S.EXPIRED, S.WITHDRAWN}:
        return [Step("requested", "done", row.created_at), Step(state.value, "stopped", row.decided_at)]
    times = [("requested", row.created_at), ("approval", row.decided_at), ("issued", row.issued_at)]
    if _must_be_collected(row):
        times.append(("collected", row.collected_at))
    steps = [Step(label, "ahead" if at is None else "done", at) for label, at in times]
    waits = next((index for index, step in enumerate(steps) if step.place == "ahead"), None)
    if waits is not None:
        steps[waits] = replace(steps[waits], place="stopped" if state is S.BURNED else "current")
    return steps


class IssuanceRequestAdmin(ConsoleModelAdmin):
    view_permissions = (P.ISSUANCE_READ,)
    menu, singular, plural = "Approvals", "Key request", "Key requests"
    id_pattern = r"req_[0-9A-Za-z]{20}"
    account_lookup = "account"
    environment_lookup = "account_environment"
    create_actions = (
        CreateAction(
            "request",
            "Request a key",
            P.ISSUANCE_REQUEST,
            RequestForm,
            _request,
            "Creates a credential with its first key. In production a second person must approve the request first.",
            "Submit request",
            account_of=account_from,
            preset=from_query("merchant", "environment"),
            is_once=True,
        ),
    )
    row_actions = (
        approve_action(
            P.ISSUANCE_APPROVE,
            approve_issuance,
            explain="You approve exactly the request below. The worker creates the key; you will not see it.",
            approved="Approved. The worker issues the key now.",
            is_undecided=_is_pending,
        ),
        reject_action(
            P.ISSUANCE_REJECT,
            run_service(reject_issuance, "Request rejected."),
            "No key is issued. The requester sees the reason.",
            is_available=lambda request: can_transition_issuance(S(request.state), S.REJECTED),
        ),
        RowAction(
            "withdraw",
            "Withdraw",
            P.ISSUANCE_WITHDRAW,
            run_service(withdraw_issuance, "Request withdrawn."),
            "No key is issued. Only the requester can withdraw a request.",
            is_available=lambda request: can_transition_issuance(S(request.state), S.WITHDRAWN),
            for_requester=True,
        ),
        RowAction(
            "collect",
            "Collect key",
            P.ISSUANCE_COLLECT,
            _collect,
            _explain_collection,
            is_available=_may_be_collected,
            for_requester=True,
            warn=lambda request: break_glass_warning(request.account),
            step_up=True,
        ),
    )

    list_display = ("label", "state_badge", "account", "kind", "issuance_request_id", "requested_by", "created")
    list_filter = ("state", "account_environment", "kind", "delivery")
    search_fields = (
        "=issuance_request_id",
        "=key__key_id",
        "=credential__credential_id",
        "=account__merchant__merchant_id",
        "^label",
    )
    search_help_text = "By request id, key id, credential id, merchant id or the beginning of a label."
    sortable_by = ()
    ordering = ("-created_at",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("account", "requester", "requested_via")

    def rows_to_open(self, request: HttpRequest) -> QuerySet[Any]:
        return (
            super()
            .rows_to_open(request)
            .select_related("account__merchant", "credential__account__merchant", "key__credential__account__merchant")
        )

    state_badge = badge_column("state", "state")
    requested_by = requester_column
    created = moment_column("requested", "created_at")

    def name_of(self, row: IssuanceRequest) -> str:
        return f"{row.account} · {row.label}"

    def account_of(self, row: IssuanceRequest) -> Account:
        return row.account

    def requester_person_of(self, row: IssuanceRequest) -> str:
        return row.requester_person

    def summary(self, row: IssuanceRequest) -> FactTable:
        """Return every field that the digest of the request covers."""
        plan = row.plan()
        recipient = [("Recipient's public key (X25519)", mono(plan.recipient_public_key))]
        return FactTable(
            "Request",
            [
                ("Merchant", f"{row.account.merchant.name} ({plan.merchant_id})"),
                ("Environment", badge(plan.environment)),
                ("Kind", KINDS[plan.kind]),
                ("Label", plan.label),
                ("Delivery", DELIVERIES[plan.delivery]),
                *(recipient if plan.recipient_public_key else []),
                ("Expires in days", plan.expires_in_days or "does not expire"),
                ("Digest of the request (SHA-256)", mono(plan.digest())),
                ("Requested by", requester_name(row)),
            ],
        )

    def detail(self, request: HttpRequest, row: IssuanceRequest) -> Detail:
        uncollected = "never" if row.state == S.BURNED else "not yet" if _must_be_collected(row) else "not required"
        outcome: list[tuple[str, Any]] = [
            ("Account", account_link(row.account)),
            ("Requested", moment(row.created_at)),
            ("Decided", moment(row.decided_at, missing="not yet")),
            ("Issued", moment(row.issued_at, missing="not yet")),
            ("Collected", moment(row.collected_at, missing=uncollected)),
        ]
        if row.state == S.PENDING:
            outcome.append(("Expires if not approved", moment(row.expires_at)))
        if row.state == S.ISSUED and row.issued_at is not None and _must_be_collected(row):
            outcome.append(("Discarded if not collected", moment(row.issued_at + COLLECT_WITHIN)))
        if row.credential is not None:
            url = reverse("admin:keyvault_credential_change", args=[row.credential_id])
            outcome.append(("Credential", link(url, row.credential)))
        if row.key is not None:
            outcome.append(("Key", key_link(row.key)))
        offered, notes = self.offered_actions(request, row), list(self._notes(request, row))
        decisions = [
            Link(action.label, self.url_of(row, action.name)) for action in offered if _is_in_banner(action, row)
        ]
        progress, approvals = FactTable("Progress", outcome), approvals_table(row)
        return Detail(
            title=f"New key: {row.label}",
            state=row.state,
            lead=format_html("{} · {}", KINDS[KeyKind(row.kind)], identifier(row)),
            crumbs=account_crumbs(row.account),
            offered=offered,
            banner=Banner(notes[0], "", _TONES.get(row.state, ""), decisions) if notes else None,
            steps=_steps(row),
            refresh_seconds=3 if row.state in {S.PENDING, S.APPROVED} else None,
            sections=[Columns([self.summary(row), progress]), approvals],
        )

    def offered_actions(self, request: HttpRequest, row: Any) -> list[RowAction]:
        """Return the actions. Another person rejects what the requester withdraws."""
        offered = super().offered_actions(request, row)
        is_own = any(action.name == "withdraw" for action in offered)
        return [action for action in offered if not (is_own and action.name == "reject")]

    def _notes(self, request: HttpRequest, row: IssuanceRequest) -> Iterable[str]:
        mine = is_requester(request, row)
        if row.state == S.PENDING and mine:
            yield OWN_REQUEST_NOTE
        elif row.state == S.PENDING:
            yield "This request awaits approval."
        elif row.state == S.APPROVED:
            yield "Approved. The worker issues the key; this page updates by itself."
        elif row.state == S.ISSUED and row.requested_via is not None:
            yield "Issued. Only the requesting service can collect the key."
        elif row.state == S.ISSUED and row.kind == KeyKind.PUBLIC:
            yield "Issued. Its page shows a public key at any time: it need not be collected."
        elif row.state == S.ISSUED:
            where = "The merchant's services read the key in the secret backend"
            lead = "Issued." if _must_be_collected(row) else f"Issued. {where}: it need not be collected."
            who = "You requested the key, so only you" if mine else "Only the requester"
            yield f"{lead} {who} can collect it, once."
        elif row.state == S.COLLECTED:
            yield "The key was collected. It cannot be shown again."
        elif row.state == S.BURNED:
            yield "The key was not collected in time. It was revoked and its copy destroyed; request another key."

    def changes(self, row: IssuanceRequest) -> Iterable[Difference]:
        is_shown = row.delivery == Delivery.SHOW_ONCE and row.account_environment == Environment.PRODUCTION
        days = row.expires_in_days
        lifetime = f"expires {counted(days, 'day')} after it is issued" if days else "does not expire"
        yield Difference(f"{row.kind} key".capitalize(), NOTHING, f"a new one, {lifetime}")
        yield Difference(
            "Credential", NOTHING, f"{row.label}, new in {row.account}" if row.credential_id is None else row.label
        )
        yield Difference("Delivery", NOTHING, DELIVERIES[Delivery(row.delivery)], is_unusual=is_shown)

    def _pending(self, request: HttpRequest) -> QuerySet[Any]:
        rows = self.get_queryset(request).order_by("created_at")
        return rows.filter(state=S.PENDING, expires_at__gt=Now())

    def approval_items(self, request: HttpRequest) -> Iterable[Attention]:
        if may(request, P.ISSUANCE_APPROVE):
            others = self._pending(request).exclude(approvals__person=operator_of(request).person)
            yield self.approval("Key requests to approve", others, _PENDING, one="Approve a new key")

    def attention_items(self, request: HttpRequest) -> Iterable[Attention]:
        rows, me = self.get_queryset(request).order_by("created_at"), operator_of(request).person
        if may(request, P.ISSUANCE_REQUEST):
            mine = self._pending(request).filter(requester_person=me)
            yield self.attention("Your key requests awaiting approval", mine, _PENDING)
        if may(request, P.ISSUANCE_COLLECT):
            mine = rows.filter(requester_person=me, requested_via=None)
            issued = mine.filter(state=S.ISSUED, delivery=Delivery.SHOW_ONCE, kind=KeyKind.PRIVATE)
            yield self.attention("Keys to collect", issued, f"?state__exact={S.ISSUED}", "action", button="Collect")
        approved = rows.filter(state=S.APPROVED)
        yield self.attention("Approved keys being issued", approved, f"?state__exact={S.APPROVED}")

    def line_of(self, row: IssuanceRequest) -> Line:
        detail = f"{row.kind}, requested by {requester_name(row)}"
        return Line(self.url_of(row), self.name_of(row), detail, row.created_at)

    def extras_for(self, request: HttpRequest, row: Model) -> Extras | None:
        """Add a link to request a key to the page of an account or a merchant."""
        if isinstance(row, Account):
            is_offered, query = may(request, P.ISSUANCE_REQUEST, row), account_query(row)
        elif isinstance(row, Merchant):
            accounts = accounts_in_scope(request, row)
            is_offered, query = any(may(request, P.ISSUANCE_REQUEST, each) for each in accounts), f"?merchant={row.pk}"
        else:
            return None
        url = reverse("admin:keyvault_issuancerequest_request") + query
        return Extras(links=[Link("Request a key", url)]) if is_offered else None

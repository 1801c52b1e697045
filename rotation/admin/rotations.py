"""Rotations in the console: requested, approved by a second person, monitored, controlled, collected once."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from django.contrib import admin
from django.db.models import (
    Count,
    Exists,
    F,
    Model,
    OuterRef,
    Prefetch,
    Q,
    QuerySet,
    Subquery,
    Value,
    prefetch_related_objects,
)
from django.db.models.functions import Concat, Now, Substr
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import SimpleLazyObject
from django.utils.html import format_html
from django.utils.safestring import SafeString

from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.accounts import account_crumbs
from keyvault.admin.framework.actions import RowAction
from keyvault.admin.framework.attention import Attention
from keyvault.admin.framework.columns import moment_column
from keyvault.admin.framework.components import Columns, Fold
from keyvault.admin.framework.enforcement import may, operator_of
from keyvault.admin.framework.filters import state_filter
from keyvault.admin.framework.four_eyes import (
    OWN_REQUEST_NOTE,
    approvals_table,
    fetch_approvals,
    is_requester,
    requester_column,
)
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.row_search import find_values
from keyvault.admin.framework.widgets import (
    NOTHING,
    Detail,
    Difference,
    Extras,
    FactTable,
    Line,
    Link,
    Table,
    badge,
    link,
    moment,
)
from keyvault.admin.keys.keys import format_usage
from keyvault.admin.keys.traffic import day_uses
from keyvault.domain.environments import Environment
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyState
from keyvault.models import Account, BreakGlass, Credential, Key, WebhookEndpoint, WorkLease
from keyvault.services.usage.reports import find_last
from rotation.admin.rotation_actions import REQUEST, ROW_ACTIONS, has_old_key, may_be_collected
from rotation.admin.rotation_progress import (
    banner_of,
    chart_card,
    evidence_card,
    lead_of,
    read_rotation_traffic,
    users_table,
)
from rotation.admin.rotation_sections import (
    awaited_table,
    deviating_changes,
    evidence_table,
    key_or_nothing,
    ledger_table,
    plan_card,
    plan_facts,
    remedies_of,
    retirements_table,
    runbook_facts,
    status_facts,
    steps_of,
)
from rotation.domain.events import RotationState
from rotation.domain.runbook import Advice, Case, find_stall, find_wait, fit_advice
from rotation.domain.states import CLOSED
from rotation.models import Evidence, Rotation
from rotation.models.rotations import AWAITS_CONFIRMATION
from rotation.services.rotations.interventions import (
    list_approval_actions,
    list_collectable,
    may_be_confirmed,
    may_collect,
)
from rotation.services.rotations.reports import find_waits, subject_of
from rotation.services.rotations.requests import BYPASSED, is_undecided

S = RotationState

_REFRESH_SECONDS = 3
"""Interval between two updates of the page of an open rotation, in seconds."""

_MAX_AWAITED_IN_USERS = 20
"""Maximum sources that the table of users shows, with what each still has to do. More have a table of their own."""

_MAX_LISTED = 1_000
"""Maximum number of rotations that a filter selects for each reason."""

_UNREVIEWED = BreakGlass.objects.filter(event=BYPASSED, reviewed_at__isnull=True)


_UNDELIVERED = Q(state=S.PUBLISHING, delivered_at__isnull=False)
"""Rotations whose notification the merchant's endpoint does not accept."""


def _failed() -> QuerySet[Any]:
    """Select the rotations whose last step failed, by the column `rotation`."""
    prefix = subject_of("")
    failed = WorkLease.objects.filter(subject__startswith=prefix).exclude(last_error="").order_by("subject")
    return failed.annotate(rotation=Substr("subject", len(prefix) + 1)).values("rotation")


def _is_blocked(ids: Any) -> Q:
    """Select those of the rotations that are blocked but not stalled."""
    return Q(pk__in=ids) & ~Q(state__in=[S.STALLED, *CLOSED])


def _find_blocking() -> list[str]:
    """Return the rotations that failed steps or their merchants' endpoints block."""
    undelivered = Rotation.objects.filter(_UNDELIVERED).order_by("created_at")
    failed, others = find_values([(_failed(), "rotation"), (undelivered, "pk")], _MAX_LISTED)
    return [*failed, *others]


def _unreviewed() -> QuerySet[Any]:
    """Select the rotations whose bypasses are unreviewed for the longest time."""
    return _UNREVIEWED.order_by("created_at").values("subject")[:_MAX_LISTED]


_TO_COLLECT = (
    Q(awaits_requester=True, delivered_at__isnull=False, replacement__state__in=set(KeyState) - DEAD_STATES)
    & ~Q(state=S.ROLLING_BACK)
    & ~Q(state=S.STALLED, stalled_from=S.ROLLING_BACK)
)
"""Rotations whose replacement the requester may collect, see `may_be_collected`."""


_ASKED, _IN_EMERGENCY = f"?state__exact={S.AWAITING_APPROVAL}", f"?state__exact={S.EMERGENCY}"
_TO_CONFIRM = f"?state__exact={S.AWAITING_PROOF}"


BYPASS_FILTER = state_filter(
    lambda: {
        "open": Q(pk__in=list(_unreviewed().values_list("subject", flat=True))),
        "all": Q(bypassed_at__isnull=False),
    },
    name="bypass",
    title="bypass",
    labels={"open": "not reviewed yet", "all": "every bypass"},
)


COLLECTION_FILTER = state_filter(
    {"open": _TO_COLLECT},
    name="collection",
    title="collection",
    labels={"open": "not collected yet"},
)


BLOCKED_FILTER = state_filter(
    lambda: {"up": _is_blocked(_find_blocking())},
    name="held",
    title="blocked",
    labels={"up": "by a failing step or an endpoint"},
)


@admin.register(Rotation)
class RotationAdmin(ConsoleModelAdmin):
    view_permissions = (P.ROTATIONS_READ,)
    menu, singular, plural = "Rotations", "Rotation", "Rotations"
    id_pattern = r"rot_[0-9A-Za-z]{20}"
    account_lookup = "account"
    environment_lookup = "account_environment"
    create_actions = (REQUEST,)
    row_actions = ROW_ACTIONS

    list_display = ("label", "state_badge", "account_name", "rotation_id", "requested_by", "created")
    list_filter = ("state", "account_environment", BYPASS_FILTER, BLOCKED_FILTER, COLLECTION_FILTER)
    search_fields = (
        "=rotation_id",
        "=credential__credential_id",
        "=predecessor__key_id",
        "=replacement__key_id",
        "=credential__account__merchant__merchant_id",
        "^credential__label",
    )
    search_help_text = "By rotation id, credential id, key id, merchant id or the beginning of a label."
    sortable_by = ()
    ordering = ("-created_at",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Annotate `is_unreviewed`: the rotation bypassed approval, and the bypass is not reviewed yet."""
        is_unreviewed = Exists(_UNREVIEWED.filter(subject=OuterRef("pk")))
        rows: QuerySet[Any] = super().get_queryset(request).annotate(is_unreviewed=is_unreviewed)
        return rows.select_related("credential__account", "requester", "requested_via")

    def rows_to_open(self, request: HttpRequest) -> QuerySet[Any]:
        """Annotate `last_error`, of the last attempt at its step if that failed, and `attempts` in a row.

        `has_endpoint`: the account has an enabled webhook endpoint. `bypass_id`, `bypassed_by`: the unreviewed bypass
        and who acted.
        """
        failed = WorkLease.objects.filter(subject=Concat(Value(subject_of("")), OuterRef("pk"))).exclude(last_error="")
        rows: QuerySet[Any] = (
            super()
            .rows_to_open(request)
            .select_related("credential__account__merchant", "predecessor__use", "replacement__use", "schedule")
        )
        last_error, attempts = (Subquery(failed.values(name)[:1]) for name in ("last_error", "attempts"))
        enabled = WebhookEndpoint.objects.filter(account=OuterRef("account"), disabled_at__isnull=True)
        bypass = _UNREVIEWED.filter(subject=OuterRef("pk"))
        bypass_id, bypassed_by = (Subquery(bypass.values(name)[:1]) for name in ("act_id", "operator__username"))
        found: QuerySet[Any] = rows.annotate(
            last_error=last_error,
            attempts=attempts,
            has_endpoint=Exists(enabled),
            bypass_id=bypass_id,
            bypassed_by=bypassed_by,
        )
        return found

    def fetch_changes(self, rows: list[Any]) -> None:
        prefetch_related_objects(rows, Prefetch("predecessor", Key.objects.select_related("use")))

    def find_row(self, request: HttpRequest, object_id: str) -> Any:
        """Load the rotation; its keys have its credential, which no list needs. Raises NotFoundError."""
        row = super().find_row(request, object_id)
        for key in filter(None, (row.predecessor, row.replacement)):
            key.credential = row.credential
        if row.schedule is not None and row.schedule.account_id == row.credential.account_id:
            row.schedule.account = row.credential.account
        row.approval_actions = SimpleLazyObject(lambda: list_approval_actions(row))
        row.find_last_use = find_last
        return row

    @admin.display(description="account")
    def account_name(self, row: Rotation) -> str:
        return str(row.credential.account)

    def label(self, row: Rotation) -> str:
        return row.credential.label or row.credential_id

    @admin.display(description="state")
    def state_badge(self, row: Any) -> SafeString:
        if row.is_unreviewed:
            return format_html("{} {}", badge(row.state), badge("bypass_not_reviewed"))
        return badge(row.state)

    requested_by = requester_column
    created = moment_column("requested", "created_at")

    def name_of(self, row: Rotation) -> str:
        return f"{row.credential.account} · {row.credential.label}"

    def account_of(self, row: Rotation) -> Account:
        return row.credential.account

    def requester_person_of(self, row: Rotation) -> str:
        return row.requester_person

    def summary(self, row: Rotation) -> FactTable:
        return plan_facts(row)

    # --- one rotation -------------------------------------------------------------------------------------

    def detail(self, request: HttpRequest, row: Any) -> Detail:
        now = datetime.now(UTC)
        fetch_approvals(row)
        prefetch_related_objects([row], Prefetch("evidence", Evidence.objects.order_by("created_at", "evidence_id")))
        waits = find_waits(row, now)
        row.find_last_use = waits.last_uses.get
        waiting_for, awaited, account = waits.waiting_for or "", waits.awaited, row.credential.account
        recorded = list(row.evidence.all())
        offered = self.offered_actions(request, row)
        advice = _advise(row, waiting_for, is_failing=row.last_error is not None)
        names = [action.name for action in offered]
        remedies = [] if advice is None else list(remedies_of(row, advice, names))
        retiring = row.replacement if row.stage is S.ROLLING_BACK else row.predecessor
        traffic = read_rotation_traffic(row, retiring, now)
        chart, evidence = chart_card(row, traffic, now), evidence_card(row, recorded, awaited)
        users = users_table(row, retiring, traffic, waits)
        plan = plan_card(row)
        steps = [runbook_facts(advice)] if advice is not None and advice.steps else []
        return Detail(
            title=f"Rotate {row.credential.label or row.credential_id}",
            state=row.state,
            lead=lead_of(row),
            crumbs=account_crumbs(account),
            banner=banner_of(row, waiting_for, awaited, waits.until, remedies, is_advised=advice is not None),
            alarms=[self._bypass_note(request, row)] if row.is_unreviewed else [],
            notes=list(self._notes(request, row)),
            steps=steps_of(row),
            offered=offered,
            refresh_seconds=None if row.current_state in CLOSED else _REFRESH_SECONDS,
            sections=[
                *(steps if row.state == S.STALLED else []),
                Columns([evidence] if chart is None else [chart, evidence]),
                *([] if row.state == S.STALLED else steps),
                Columns([users, plan]),
                *([retirements_table(row)] if row.credential.kind == KeyKind.PUBLIC else []),
                *([awaited_table(awaited)] if len(awaited) > _MAX_AWAITED_IN_USERS else []),
                approvals_table(row),
                Fold("Plan, as approved", [plan_facts(row)], "every value that the digest covers"),
                Fold("Times and events", [status_facts(row)]),
                Fold("Recorded evidence and side effects", [evidence_table(recorded), ledger_table(row)]),
            ],
        )

    def _notes(self, request: HttpRequest, row: Any) -> Iterable[str]:
        if is_undecided(row) and is_requester(request, row):
            yield OWN_REQUEST_NOTE
        is_waited_for = row.delivery is Delivery.SHOW_ONCE and may_be_collected(row)
        if is_waited_for and may(request, P.ISSUANCE_COLLECT) and self._may_collect(request, row):
            yield "You can collect the replacement, once."

    def _bypass_note(self, request: HttpRequest, row: Any) -> SafeString:
        text = format_html(
            "Bypass not reviewed yet: {} started this without a second person at {} UTC.",
            row.bypassed_by,
            f"{row.bypassed_at:%Y-%m-%d %H:%M}",
        )
        if not (may(request, P.BREAK_GLASS_REVIEW) or may(request, P.AUDIT_READ)):
            return text
        url = reverse("admin:keyvault_breakglass_change", args=[row.bypass_id])
        return format_html("{} {}", text, link(url, "Review the bypass"))

    def changes(self, row: Rotation) -> Iterable[Difference]:
        goes = "revoked once the replacement is proved in use" if has_old_key(row) else "ended already"
        yield Difference("Old key", format_usage(row.predecessor), goes)
        yield Difference("Replacement", NOTHING, f"a {row.credential.kind} key of {row.credential.label}")
        yield from deviating_changes(row)

    def decision_facts(self, row: Rotation) -> Iterable[tuple[str, Any]]:
        yield "Old key in the last 24 hours", day_uses(row.predecessor)

    # --- attention items ----------------------------------------------------------------------------------

    def _undecided(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = self.get_queryset(request).order_by("created_at")
        return rows.filter(approval_expires_at__gt=Now())

    def _asked(self, request: HttpRequest) -> QuerySet[Any]:
        return self._undecided(request).filter(state=S.AWAITING_APPROVAL)

    def _emergencies(self, request: HttpRequest) -> QuerySet[Any]:
        counted: QuerySet[Any] = self._undecided(request).annotate(approval_count=Count("approvals"))
        return counted.filter(state=S.EMERGENCY, bypassed_at__isnull=True, approval_count__lt=F("approvals_needed"))

    def approval_items(self, request: HttpRequest) -> Iterable[Attention]:
        if may(request, P.ROTATIONS_APPROVE):
            # Filtering by `approvals__person` here would add a join and multiply the count of the emergencies.
            me = operator_of(request).person
            urgent = self._emergencies(request).exclude(approvals__person=me)
            yield self.approval("Emergency rotations to approve", urgent, _IN_EMERGENCY, "alarm")
            others = self._asked(request).exclude(approvals__person=me)
            yield self.approval("Rotations to approve", others, _ASKED, one="Approve a rotation")

    def attention_items(self, request: HttpRequest) -> Iterable[Attention]:
        """Return stalled and urgent rotations first."""
        rows, me = self.get_queryset(request).order_by("created_at"), operator_of(request).person
        yield self.attention(
            "Stalled rotations",
            rows.filter(state=S.STALLED),
            f"?state__exact={S.STALLED}",
            "alarm",
            one="Rotation stalled",
        )
        if not may(request, P.ROTATIONS_APPROVE):
            emergencies = self._emergencies(request)
            yield self.attention("Emergency rotations awaiting approval", emergencies, _IN_EMERGENCY, "alarm")
        if may(request, P.ROTATIONS_WRITE):
            own = self._asked(request).filter(requester_person=me)
            yield self.attention("Your rotations awaiting approval", own, _ASKED)
            yield self.attention(
                "Rotations awaiting an operator's confirmation",
                rows,
                _TO_CONFIRM,
                "action",
                selections=_to_confirm(rows),
            )
        if may(request, P.ISSUANCE_COLLECT):
            mine = rows.filter(_TO_COLLECT, requester_person=me)
            yield self.attention("Replacements to collect", mine, "?collection=open", "action")
            # Their requester, the author of the schedule or the campaign, may be absent.
            begun = Q(schedule__isnull=False) | Q(campaign__isnull=False)
            yield self.attention(
                "Replacements to collect for others",
                rows.filter(_TO_COLLECT, begun).exclude(requester_person=me),
                "?collection=open",
                "action",
                decide=P.ISSUANCE_COLLECT,
                select=lambda rows: list_collectable(rows, me),
                button="Collect",
            )
        yield self.attention(
            "Rotations blocked by a failing step or an endpoint",
            rows,
            "?held=up",
            "alarm",
            selections=[rows.filter(_is_blocked(_failed()[:_MAX_LISTED])), rows.filter(_UNDELIVERED)],
        )
        bypassed = rows.filter(pk__in=_unreviewed())
        yield self.attention("Bypassed approvals not reviewed yet", bypassed, "?bypass=open", "alarm")

    def _is_available(self, request: HttpRequest, action: RowAction, row: Any) -> bool:
        if action.name == "confirm":
            return may_be_confirmed(row, row.find_last_use)
        # The state first: whether the person may collect takes queries.
        is_available = super()._is_available(request, action, row)
        return is_available and (action.name != "collect" or self._may_collect(request, row))

    def _may_collect(self, request: HttpRequest, row: Any) -> bool:
        return may_collect(row, operator_of(request).person, row.approval_actions)

    def line_of(self, row: Any) -> Line:
        summary = "approval bypassed" if row.is_unreviewed else f"requested by {self.requested_by(row)}"
        return Line(self.url_of(row), self.name_of(row), row.why or summary, row.entered_at)

    # --- on other pages -----------------------------------------------------------------------------------

    def extras_for(self, request: HttpRequest, row: Model) -> Extras | None:
        """Add the rotations of a credential or key to its page, and a link to the open one or to request one."""
        if not isinstance(row, Credential | Key) or not self.has_view_permission(request):
            return None
        credential = row if isinstance(row, Credential) else row.credential
        rows = self.get_queryset(request).filter(credential=credential).select_related(None)
        rotations = rows.order_by("-created_at")[:20]
        table = Table(
            "Rotations",
            ["rotation", "state", "old key", "replacement", "requested"],
            [
                [
                    link(self.url_of(item), item),
                    self.state_badge(item),
                    key_or_nothing(item.predecessor_id),
                    key_or_nothing(item.replacement_id),
                    moment(item.created_at),
                ]
                for item in rotations
            ],
            empty="No rotations yet. Request one to replace the key.",
        )
        current = next((item for item in rotations if S(item.state) not in CLOSED), None)
        if current is not None:
            url = self.url_of(current)
            is_its_key = isinstance(row, Credential) or row.pk in {current.predecessor_id, current.replacement_id}
            badges = [link(url, badge("rotating"))] if is_its_key else []
            return Extras(links=[Link("Show rotation", url)], sections=[table], badges=badges)
        if not may(request, P.ROTATIONS_WRITE, credential.account):
            return Extras(sections=[table])
        # The page of a credential has loaded its living keys; that of a key does not load all keys of its credential.
        keys = row.keys.all() if isinstance(row, Credential) else credential.keys.filter(state=KeyState.ACTIVE)
        if sum(key.state == KeyState.ACTIVE for key in keys) != 1:
            return Extras(sections=[table])
        url = reverse("admin:rotation_rotation_request")
        return Extras(links=[Link("Rotate", f"{url}?credential={credential.pk}")], sections=[table])


def _advise(row: Any, waiting_for: str, *, is_failing: bool) -> Advice | None:
    """Return the runbook's advice, if an operator can do something."""
    entry = find_stall(row.why) if row.state == S.STALLED else find_wait(waiting_for, is_failing=is_failing)
    if entry is None:
        return None
    return fit_advice(entry, Case(row.delivery, KeyKind(row.credential.kind), has_old_key(row), row.has_endpoint))


def _to_confirm(rows: QuerySet[Any]) -> list[QuerySet[Any]]:
    """Select the rotations of each environment that only an operator can confirm.

    One walk through the index for each environment; together they would sort all that wait.
    """
    return [rows.filter(AWAITS_CONFIRMATION, account_environment=environment) for environment in Environment]

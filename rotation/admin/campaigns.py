"""Campaigns in the console: requested, approved by a second person, monitored, paused, resumed and canceled."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils.html import format_html

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.admin.framework.accounts import MerchantsField, environment_field
from keyvault.admin.framework.actions import (
    ActionForm,
    ActionResult,
    Cleaned,
    CreateAction,
    RowAction,
    Tone,
    VersionedForm,
    from_query,
    pause_action,
    reason_field,
    resume_action,
    run_service,
)
from keyvault.admin.framework.attention import Attention
from keyvault.admin.framework.columns import badge_column, moment_column
from keyvault.admin.framework.components import Columns, Fold
from keyvault.admin.framework.enforcement import may, operator_of
from keyvault.admin.framework.four_eyes import (
    ApproveStoredForm,
    approvals_table,
    approve_action,
    is_requester,
    reject_action,
    requester_column,
    requester_name,
    submitted,
)
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.scoping import names_in_scope
from keyvault.admin.framework.widgets import (
    Detail,
    Difference,
    FactTable,
    Line,
    Link,
    badge,
    counted,
    identifier,
    mono,
)
from keyvault.domain.environments import Environment
from rotation.admin.campaign_sections import (
    DEFAULT_PACE,
    IN_BANNER,
    banner_of,
    count_members,
    format_left_out,
    format_pace,
    format_used_keys,
    members_table,
    plan_card,
    progress_card,
    progress_tiles,
    times_facts,
)
from rotation.admin.plan_fields import (
    SHARED_GROUP,
    PlanForm,
    chosen_changes,
    form_field,
    overrides_in,
    show_override,
)
from rotation.domain.events import RotationState
from rotation.domain.pacing import MAX_CONCURRENCY, MAX_PER_MINUTE, Pace
from rotation.domain.plan_fields import FIELDS, SHARED_FIELDS, PlanOverrides
from rotation.domain.states import CLOSED
from rotation.models import Campaign, CampaignState
from rotation.services.campaigns.campaigns import (
    approve_campaign,
    cancel_campaign,
    pause_campaign,
    reject_campaign,
    request_campaign,
    resume_campaign,
    scope_of,
)
from rotation.services.campaigns.reports import describe_campaign

C = CampaignState

_REFRESH_SECONDS = 10
"""Refresh interval of the page of a campaign that can change, in seconds."""


class CampaignForm(PlanForm):
    groups = (SHARED_GROUP,)

    environment = environment_field()
    merchants = MerchantsField(
        required=False, help_text="Merchant ids, one on each line. Empty: every merchant of the environment."
    )
    older_than_days = forms.IntegerField(
        required=False,
        min_value=0,
        label="Minimum key age in days",
        help_text="Counted from the activation of a key. Empty: keys of any age.",
    )
    per_minute = forms.IntegerField(
        min_value=1,
        max_value=MAX_PER_MINUTE,
        initial=DEFAULT_PACE.per_minute,
        label="Rotations started per minute",
        help_text="Maximum in any 60 seconds.",
    )
    concurrency = forms.IntegerField(
        min_value=1,
        max_value=MAX_CONCURRENCY,
        initial=DEFAULT_PACE.concurrency,
        label="Unproved at a time",
        help_text="A rotation counts from its start until its replacement is proved in use. The quiet period and the "
        "quarantine do not count.",
    )
    halt_on_stall = forms.BooleanField(
        required=False, initial=DEFAULT_PACE.halt_on_stall, label="Halt when a rotation stalls"
    )
    halt_at_failed_percent = forms.IntegerField(
        required=False,
        min_value=0,
        max_value=100,
        initial=DEFAULT_PACE.halt_at_failed_percent,
        label="Halt above this failure percentage",
        help_text="Share of failed and stalled rotations among those with a result. Empty: never halt.",
    )
    reason = form_field(FIELDS["reason"])


class OptionalReasonForm(ActionForm):
    why = reason_field(
        "Reason", required=False, help_text="Recorded in the audit log. Required to resume after a halt."
    )


class VersionedOptionalReasonForm(VersionedForm, OptionalReasonForm):
    """Form with the version of the row and an optional reason."""


def _request(grant: Grant, cleaned: Cleaned) -> ActionResult:
    campaign = request_campaign(
        grant,
        environment=Environment(cleaned["environment"]),
        merchants=cleaned["merchants"] or None,
        older_than_days=cleaned["older_than_days"],
        overrides=overrides_in(cleaned, SHARED_FIELDS),
        pace=Pace(
            per_minute=cleaned["per_minute"],
            concurrency=cleaned["concurrency"],
            halt_on_stall=cleaned["halt_on_stall"],
            halt_at_failed_percent=cleaned["halt_at_failed_percent"],
        ),
        reason=cleaned["reason"],
    )
    count = counted(count_members(campaign), "credential")
    return submitted(
        campaign,
        is_undecided=_is_undecided(campaign),
        next_step="the worker starts now.",
        request=f"Request for {count}",
    )


def _is_undecided(row: Campaign) -> bool:
    return bool(row.state == C.AWAITING_APPROVAL)


@admin.register(Campaign)
class CampaignAdmin(ConsoleModelAdmin):
    view_permissions = (P.ROTATIONS_READ,)
    menu, singular, plural = "Campaigns", "Campaign", "Campaigns"
    id_pattern = r"cmp_[0-9A-Za-z]{20}"
    create_actions = (
        CreateAction(
            "request",
            "Rotate many keys",
            P.ROTATIONS_WRITE,
            CampaignForm,
            _request,
            "Selects the matching private keys now; the selection is final. One approval covers all of them with this "
            "plan and pace; in production a second person must approve. Each key is then rotated individually.",
            "Submit request",
            preset=from_query("environment"),
            is_once=True,
        ),
    )
    row_actions = (
        approve_action(
            P.ROTATIONS_APPROVE,
            approve_campaign,
            explain=lambda row: (
                f"You approve exactly {counted(count_members(row), 'credential')}, listed on the page of the "
                "campaign, with the plan and pace below."
            ),
            approved="Approved. The worker starts at the approved pace.",
            is_undecided=_is_undecided,
            form=ApproveStoredForm,
        ),
        reject_action(
            P.ROTATIONS_APPROVE,
            run_service(reject_campaign, "Campaign rejected."),
            "No key is rotated. The requester sees the reason.",
            is_available=_is_undecided,
        ),
        pause_action(
            "pause",
            "Pause",
            P.ROTATIONS_WRITE,
            run_service(pause_campaign, "Campaign paused. No more rotations start; rotations in progress continue."),
            "No more rotations start until the campaign is resumed. Rotations in progress continue.",
            is_available=lambda row: row.state == C.RUNNING,
            form=OptionalReasonForm,
            tone=Tone.PLAIN,
        ),
        resume_action(
            "resume",
            "Resume",
            P.ROTATIONS_WRITE,
            run_service(resume_campaign, "Campaign resumed."),
            "Rotations start again at the approved pace. The failures that led to a halt are not counted again.",
            is_available=lambda row: row.state in {C.PAUSED, C.HALTED},
            form=VersionedOptionalReasonForm,
        ),
        RowAction(
            "cancel",
            "Cancel campaign",
            P.ROTATIONS_WRITE,
            run_service(cancel_campaign, "Campaign canceled. No more rotations start; rotations in progress continue."),
            "No more rotations start, permanently. Rotations in progress continue; abort them individually.",
            form=OptionalReasonForm,
            is_available=lambda row: row.closed_at is None,
            tone=Tone.DANGER,
        ),
    )

    list_display = ("campaign_id", "state_badge", "environment_badge", "credentials", "requested_by", "created")
    list_filter = ("state", "environment")
    search_fields = ("=campaign_id", "=members__credential__credential_id", "reason")
    search_help_text = "By campaign id, credential id or a word of the reason."
    ordering = ("-created_at",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("requester")

    state_badge = badge_column("state", "state")
    environment_badge = badge_column("environment", "environment")
    requested_by = requester_column
    created = moment_column("requested", "created_at")

    @admin.display(description="credentials")
    def credentials(self, row: Campaign) -> int:
        return count_members(row)

    def name_of(self, row: Campaign) -> str:
        return f"{row.environment} · {row.reason[:60]}"

    def rows_in_scope(self, rows: QuerySet[Any], scope: AccessScope) -> QuerySet[Any]:
        """Return the campaigns that select only from the scope's accounts."""
        if scope == EVERYWHERE:
            return rows
        return rows.filter(names_in_scope(scope, "selection__merchants"), environment__in=scope.environments)

    def scope_of(self, row: Campaign) -> AccessScope:
        return scope_of(row)

    def requester_person_of(self, row: Campaign) -> str:
        return row.requester_person

    def summary(self, row: Campaign) -> FactTable:
        """Return every field that the digest covers."""
        pace, merchants, days = Pace.from_json(row.pace), row.selection["merchants"], row.selection["older_than_days"]
        return FactTable(
            "Request",
            [
                ("Environment", badge(row.environment)),
                ("Credentials", count_members(row)),
                ("Merchants", "all" if merchants is None else ", ".join(merchants)),
                ("Minimum key age", "any age" if days is None else f"{days} days"),
                ("Excluded", format_left_out(row)),
                ("Reason", row.reason),
                *_plan(row),
                ("Pace", format_pace(pace)),
                ("Digest of the request and the credentials (SHA-256)", mono(row.plan_digest)),
                ("Requested by", requester_name(row)),
            ],
        )

    def detail(self, request: HttpRequest, row: Campaign) -> Detail:
        report: Any = describe_campaign(row, datetime.now(UTC))
        offered = self.offered_actions(request, row)
        buttons = [Link(each.label, self.url_of(row, each.name)) for each in offered if each.name in IN_BANNER]
        return Detail(
            title=row.reason,
            state=row.state,
            lead=format_html("Requested by {} · {}", requester_name(row), identifier(row)),
            offered=offered,
            banner=banner_of(row, report, is_own=is_requester(request, row), buttons=buttons),
            sections=[
                progress_card(row, report),
                *([progress_tiles(report)] if row.began_at is not None else []),
                members_table(row),
                Columns([plan_card(row), times_facts(row, report)], are_even=True),
                Fold("Request, as approved", [self.summary(row)], "every value that the digest covers"),
                approvals_table(row),
            ],
            refresh_seconds=_REFRESH_SECONDS if _may_change(row, report) else None,
        )

    def changes(self, row: Campaign) -> Iterable[Difference]:
        merchants, pace = row.selection["merchants"], Pace.from_json(row.pace)
        whose = "every merchant" if merchants is None else f"{counted(len(merchants), 'merchant')}"
        selected = f"{counted(count_members(row), 'private key')} of {whose} in {row.environment}"
        yield Difference("Keys", selected, "each replaced, and revoked once its replacement is proved in use")
        yield Difference("Pace", format_pace(DEFAULT_PACE), format_pace(pace), is_unusual=pace != DEFAULT_PACE)
        yield from chosen_changes(PlanOverrides.from_json(row.overrides), Environment(row.environment))

    def decision_facts(self, row: Campaign) -> Iterable[tuple[str, Any]]:
        yield "Keys in use", format_used_keys(row, datetime.now(UTC))

    def approval_items(self, request: HttpRequest) -> Iterable[Attention]:
        if may(request, P.ROTATIONS_APPROVE):
            asked = self.get_queryset(request).filter(state=C.AWAITING_APPROVAL, approval_expires_at__gt=Now())
            others = asked.exclude(approvals__person=operator_of(request).person).order_by("created_at")
            where = f"?state__exact={C.AWAITING_APPROVAL}"
            yield self.approval("Campaigns to approve", others, where, one="Approve a campaign")

    def attention_items(self, request: HttpRequest) -> Iterable[Attention]:
        rows = self.get_queryset(request).order_by("created_at")
        yield self.attention("Halted campaigns", rows.filter(state=C.HALTED), f"?state__exact={C.HALTED}", "alarm")
        yield self.attention("Campaigns in progress", rows.filter(state=C.RUNNING), f"?state__exact={C.RUNNING}")

    def line_of(self, row: Campaign) -> Line:
        detail = row.why or f"requested by {requester_name(row)}"
        return Line(self.url_of(row), self.name_of(row), detail, row.created_at)


def _may_change(row: Campaign, report: Any) -> bool:
    """Whether the campaign or one of its rotations is open: those continue without the campaign."""
    return row.closed_at is None or any(RotationState(state) not in CLOSED for state in report["rotations_by_state"])


def _plan(row: Campaign) -> Iterable[tuple[str, Any]]:
    """Yield the chosen values and the defaults."""
    overrides, environment = PlanOverrides.from_json(row.overrides), Environment(row.environment)
    for name, field in FIELDS.items():
        if name != "reason" and (field.is_shared or name in row.overrides):
            yield field.label, show_override(field, getattr(overrides, name), environment)

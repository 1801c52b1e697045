"""Campaigns in the console: requested, approved by a second person, monitored, paused, resumed and canceled."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

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
from keyvault.admin.framework.enforcement import may, operator_of
from keyvault.admin.framework.four_eyes import (
    ApproveStoredForm,
    approvals_table,
    approve_action,
    reject_action,
    requester_column,
    requester_name,
    submitted,
    undecided_notes,
)
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.scoping import names_in_scope
from keyvault.admin.framework.widgets import (
    NOTHING,
    Change,
    Detail,
    FactTable,
    Line,
    Table,
    badge,
    counted,
    link,
    moment,
    mono,
)
from keyvault.domain.environments import Environment
from rotation.admin.plan_fields import (
    SHARED_GROUP,
    PlanForm,
    chosen_changes,
    form_field,
    overrides_in,
    show_override,
)
from rotation.domain.pacing import MAX_CONCURRENCY, MAX_PER_MINUTE, START_WITHIN, Pace
from rotation.domain.plan_fields import FIELDS, SHARED_FIELDS, PlanOverrides
from rotation.models import Campaign, CampaignMember, CampaignState
from rotation.services.campaigns.campaigns import (
    approve_campaign,
    cancel_campaign,
    pause_campaign,
    reject_campaign,
    request_campaign,
    resume_campaign,
    scope_of,
)
from rotation.services.campaigns.reports import describe_campaign, list_failed_first

C = CampaignState

_MAX_MEMBERS = 200
_REFRESH_SECONDS = 10
"""Refresh interval of a running campaign's page, in seconds."""

_DEFAULT_PACE = Pace()


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
        initial=_DEFAULT_PACE.per_minute,
        label="Rotations started per minute",
        help_text="Maximum in any 60 seconds.",
    )
    concurrency = forms.IntegerField(
        min_value=1,
        max_value=MAX_CONCURRENCY,
        initial=_DEFAULT_PACE.concurrency,
        label="Unproved at a time",
        help_text="A rotation counts from its start until its replacement is proved in use. The quiet period and the "
        "quarantine do not count.",
    )
    halt_on_stall = forms.BooleanField(
        required=False, initial=_DEFAULT_PACE.halt_on_stall, label="Halt when a rotation stalls"
    )
    halt_at_failed_percent = forms.IntegerField(
        required=False,
        min_value=0,
        max_value=100,
        initial=_DEFAULT_PACE.halt_at_failed_percent,
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
    count = counted(_count_members(campaign), "credential")
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
        ),
    )
    row_actions = (
        approve_action(
            P.ROTATIONS_APPROVE,
            approve_campaign,
            explain=lambda row: (
                f"You approve exactly {counted(_count_members(row), 'credential')}, listed on the page of the "
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
    created = moment_column("requested (UTC)", "created_at")

    @admin.display(description="credentials")
    def credentials(self, row: Campaign) -> int:
        return _count_members(row)

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
                ("Credentials", _count_members(row)),
                ("Merchants", "all" if merchants is None else ", ".join(merchants)),
                ("Minimum key age", "any age" if days is None else f"{days} days"),
                ("Excluded", _left_out(row)),
                ("Reason", row.reason),
                *_plan(row),
                ("Pace", _format_pace(pace)),
                ("Digest of the request and the credentials (SHA-256)", mono(row.plan_digest)),
                ("Requested by", requester_name(row)),
            ],
        )

    def detail(self, request: HttpRequest, row: Campaign) -> Detail:
        report: Any = describe_campaign(row, datetime.now(UTC))
        return Detail(
            title=self.name_of(row),
            state=row.state,
            notes=list(_notes(request, row, report)),
            sections=[
                FactTable("Progress", list(_progress(row, report))),
                _members(row),
                self.summary(row),
                approvals_table(row),
            ],
            refresh_seconds=_REFRESH_SECONDS if row.state == C.RUNNING else None,
        )

    def changes(self, row: Campaign) -> Iterable[Change]:
        merchants, pace = row.selection["merchants"], Pace.from_json(row.pace)
        whose = "every merchant" if merchants is None else f"{counted(len(merchants), 'merchant')}"
        selected = f"{counted(_count_members(row), 'private key')} of {whose} in {row.environment}"
        yield Change("Keys", selected, "each replaced, and revoked once its replacement is proved in use")
        yield Change("Pace", _format_pace(_DEFAULT_PACE), _format_pace(pace), is_unusual=pace != _DEFAULT_PACE)
        yield from chosen_changes(PlanOverrides.from_json(row.overrides), Environment(row.environment))

    def approval_items(self, request: HttpRequest) -> Iterable[Attention]:
        if may(request, P.ROTATIONS_APPROVE):
            asked = self.get_queryset(request).filter(
                state=C.AWAITING_APPROVAL, approval_expires_at__gt=datetime.now(UTC)
            )
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


def _count_members(row: Campaign) -> int:
    """Return the stored number, so that a list counts no rows."""
    return int(row.selection["count"])


def _format_pace(pace: Pace) -> str:
    share = pace.halt_at_failed_percent
    halts = [
        *(["at the first stall"] if pace.halt_on_stall else []),
        *([] if share is None else [f"above {share} % failed"]),
    ]
    return (
        f"at most {pace.per_minute} per minute, {pace.concurrency} unproved at a time; "
        f"halts {' or '.join(halts) or 'never'}"
    )


def _left_out(row: Campaign) -> str:
    counts = row.selection["left_out"]
    return ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in counts.items()) or NOTHING


def _plan(row: Campaign) -> Iterable[tuple[str, Any]]:
    """Yield the chosen values and the defaults."""
    overrides, environment = PlanOverrides.from_json(row.overrides), Environment(row.environment)
    for name, field in FIELDS.items():
        if name != "reason" and (field.is_shared or name in row.overrides):
            yield field.label, show_override(field, getattr(overrides, name), environment)


def _notes(request: HttpRequest, row: Campaign, report: Any) -> Iterable[str]:
    """Yield the state of the campaign and what the operator can do."""
    waiting = report["progress"]["waiting"]
    if row.state == C.AWAITING_APPROVAL:
        yield from undecided_notes(request, row)
    elif row.state == C.HALTED:
        yield (
            f"Halted: {row.why}. No more rotations start; rotations in progress continue, and the old keys of stalled "
            "rotations still work. Check the rotations at the top of the list, then resume or cancel the campaign."
        )
    elif row.state == C.PAUSED:
        yield f"Paused{': ' + row.why if row.why else ''}. No more rotations start until an operator resumes it."
    elif row.state in {C.CANCELLED, C.EXPIRED, C.REJECTED}:
        why = f" ({row.why})" if row.why else ""
        yield f"Closed{why}. {counted(waiting, 'credential')} will not be rotated; rotations in progress continue."
    if row.state in {C.RUNNING, C.PAUSED, C.HALTED} and waiting and row.began_at is not None:
        yield f"Rotations not started by {row.began_at + START_WITHIN:%Y-%m-%d %H:%M} UTC are not started."


def _progress(row: Campaign, report: Any) -> Iterable[tuple[str, Any]]:
    count = report["progress"]
    yield "Replacement proved in use", _bar(count["proved"], count["members"])
    ended = count["completed"] + count["failed"] + count["stalled"] + count["skipped"]
    yield "Ended: completed, failed, stalled or skipped", _bar(ended, count["members"])
    yield "Not started", count["waiting"]
    yield "Started, not proved yet", count["unproved"]
    yield "Proved, old key not retired yet", count["proved"] - count["completed"]
    yield "Completed", count["completed"]
    yield "Stalled", count["stalled"]
    yield "Failed: canceled or rolled back", count["failed"]
    yield "Skipped: no longer matching when due", count["skipped"]
    if row.state == C.RUNNING:
        yield "Started in the last minute", report["begun_in_last_minute"]
    if report["all_begun_at"] is not None:
        yield "Earliest time when all have started", moment(datetime.fromisoformat(report["all_begun_at"]))
    requests = report["requests"]
    yield "Requests with the replacements", requests["allowed"]
    yield "Requests refused with suspended keys", requests["refused"]
    yield "Approved and started", moment(row.began_at, missing="not yet")
    if row.closed_at is not None:
        yield "Closed", moment(row.closed_at)


def _bar(done: int, total: int) -> SafeString:
    """Render a progress bar with the same information as text."""
    return format_html(
        '<progress class="bar" max="{}" value="{}"></progress> <span class="bar-text">{} of {} ({} %)</span>',
        max(total, 1),
        done,
        done,
        total,
        100 * done // max(total, 1),
    )


def _members(row: Campaign) -> Table:
    """Return the credentials, failed and stalled ones first."""
    total = _count_members(row)
    found = list_failed_first(row, _MAX_MEMBERS)
    more = "" if total <= len(found) else f", first {len(found)} of {total}"
    return Table(
        f"Credentials, failed and stalled first{more}",
        ["account", "credential", "state", "rotation", "reason", "since (UTC)"],
        [_member(row, member) for member in found],
    )


def _member(row: Campaign, member: CampaignMember) -> list[Any]:
    credential, rotation = member.credential, member.rotation
    shown = link(reverse("admin:keyvault_credential_change", args=[credential.pk]), credential.label)
    if rotation is None:
        state = member.outcome or ("waiting" if row.closed_at is None else "not_begun")
        return [str(credential.account), shown, badge(state), NOTHING, member.why or NOTHING, NOTHING]
    its_page = link(reverse("admin:rotation_rotation_change", args=[rotation.pk]), mono(rotation))
    why = rotation.why or NOTHING
    return [str(credential.account), shown, badge(rotation.state), its_page, why, moment(rotation.entered_at)]

"""Sections of the page of a rotation: plan, status, runbook, users and evidence."""

import json
from collections.abc import Collection, Container, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from keyvault.admin.framework.four_eyes import UNUSUAL, requester_name
from keyvault.admin.framework.widgets import (
    NOTHING,
    Difference,
    FactTable,
    Link,
    Step,
    Table,
    badge,
    duration,
    link,
    moment,
    mono,
)
from keyvault.admin.keys.keys import key_link
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.domain.notifications import NoticeKind
from keyvault.models import Key
from keyvault.services.webhooks.deliveries import find_delivery_report
from rotation.admin.plan_fields import is_deviation, show_default, show_plan_field, show_value
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import FIELDS, Condition, DeliveryChannel, Proof
from rotation.domain.policy import PLAN_UNREADABLE, Plan
from rotation.domain.runbook import REMEDY_LABELS, Advice, Remedy
from rotation.domain.silence import AwaitedSource, describe_need
from rotation.domain.states import CLOSED
from rotation.models import Evidence, Rotation
from rotation.services.rotations.interventions import predecessor_ended_at
from rotation.services.rotations.planning import MAX_LATE_SOURCES
from rotation.services.rotations.reports import MAX_AWAITED

S = RotationState

_FORWARD_STATES = (
    *(S.REQUESTED, S.AWAITING_APPROVAL, S.SCHEDULED, S.STAGED, S.PUBLISHING, S.AWAITING_PROOF),
    *(S.OVERLAP, S.QUARANTINE, S.REVOKING, S.COMPLETED),
)
"""States of a successful rotation, in the order of the timeline."""

_RETIRING = frozenset({S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.REVOKING})
"""States that retire an old key; they are skipped if the old key has already ended."""


# --- the plan -----------------------------------------------------------------------------------------------


def plan_facts(row: Rotation) -> FactTable:
    """Return every field that the digest covers."""
    plan, credential = row.readable_plan, row.credential
    if plan is None:
        return FactTable("Plan", [(PLAN_UNREADABLE, mono(json.dumps(row.plan, sort_keys=True)))])
    unmet = set(_unmet(row, plan))
    shown = {name: show_plan_field(field, getattr(plan, name), unmet) for name, field in FIELDS.items()}
    rows: list[tuple[str, Any]] = [
        ("Account", credential.account),
        ("Credential", link(reverse("admin:keyvault_credential_change", args=[credential]), mono(credential))),
        ("Kind", f"{credential.kind} API key"),
        ("Key to replace", key_or_nothing(row.predecessor)),
        *((FIELDS[name].label, value) for name, value in shown.items()),
        ("Old key unused at request", _format_dormancy(plan, unmet)),
        ("Sources that cannot be silent by the deadline", _format_late_sources(plan)),
        ("Digest of the plan (SHA-256)", mono(plan.digest())),
        ("Requested by", requester_name(row)),
    ]
    return FactTable("Plan", rows)


_IN_SHORT = ("proof", "quiet_seconds", "quarantine_seconds", "deadline", "at_deadline", "reinstatement", "window")
"""Fields of a plan that the card shows if they have their defaults. Others appear if they deviate."""


def plan_card(row: Rotation) -> FactTable:
    """Return the plan in short: what deviates from the defaults first, each marked."""
    plan, environment, kind = row.readable_plan, Environment(row.account_environment), KeyKind(row.credential.kind)
    if plan is None:
        return plan_facts(row)
    unmet = set(_unmet(row, plan))
    deviating, usual = [], []
    for name, field in FIELDS.items():
        value = getattr(plan, name)
        shown = show_plan_field(field, value, unmet)
        if is_deviation(field, value, environment, kind):
            deviating.append((field.label, format_html("{} {}", shown, UNUSUAL)))
        elif name in _IN_SHORT:
            usual.append((field.label, shown))
    digest = format_html("digest {}", mono(f"{plan.digest()[:8]}…{plan.digest()[-4:]}"))
    return FactTable("Plan", [*deviating, *usual, ("Requested by", requester_name(row))], aside=digest)


def deviating_changes(row: Rotation) -> Iterator[Difference]:
    """Yield what deviates from the defaults in the plan that waits for approval."""
    plan, environment, kind = row.readable_plan, Environment(row.account_environment), KeyKind(row.credential.kind)
    for name, field in () if plan is None else FIELDS.items():
        value = getattr(plan, name)
        if is_deviation(field, value, environment, kind):
            yield Difference(field.label, show_default(field, environment), show_value(field, value), is_unusual=True)


def _unmet(row: Rotation, plan: Plan) -> Iterator[Condition]:
    if has_lost_old_key(row):
        yield Condition.OLD_KEY
    if row.credential.kind == KeyKind.PUBLIC:
        yield Condition.PRIVATE_KEY
    if plan.proof not in {Proof.TRAFFIC, Proof.BOTH}:
        yield Condition.TRAFFIC


_WITHOUT_EFFECT = f" · {Condition.OLD_KEY.value}"


def has_lost_old_key(row: Rotation) -> bool:
    """Whether the old key ended before or during the rotation, but not by its own steps.

    Such a rotation is complete once delivered: no deadline, proof, silence or quarantine applies.
    """
    ended_at = predecessor_ended_at(row, datetime.now(UTC))
    return ended_at is not None and row.quarantined_at is None and (row.closed_at is None or ended_at <= row.closed_at)


def _format_late_sources(plan: Plan) -> SafeString | str:
    """Name each source with a deadline that would fit."""
    if not plan.late_sources:
        return "none"
    lines: list[tuple[SafeString | str, str]] = [
        (mono(name), describe_need(name))
        if fitting is None
        else (mono(name), f"a deadline of {fitting[:16].replace('T', ' ')} UTC fits")
        for name, fitting in plan.late_sources.items()
    ]
    if len(lines) == MAX_LATE_SOURCES:
        lines.append(("Others", f"the plan lists at most {MAX_LATE_SOURCES} sources, the latest"))
    return format_html_join(SafeString("<br>"), "{}: {}", lines)


def _format_dormancy(plan: Plan, unmet: Container[Condition]) -> str:
    if not plan.is_dormant:
        return "no"
    reason = next((each for each in (Condition.OLD_KEY, Condition.PRIVATE_KEY) if each in unmet), None)
    shown = "yes: an acknowledgement or a confirmation also proves use"
    return shown if reason is None else f"{shown} · {reason.value}"


# --- status -------------------------------------------------------------------------------------------------


def status_facts(row: Any) -> FactTable:
    """Return the four facts with their times, and the related events. `row`: of `RotationAdmin.find_row`."""
    return FactTable("Status", [*_ends(row), *_status_facts(row), *_events(row), *_work(row)])


def _ends(row: Rotation) -> Iterator[tuple[str, Any]]:
    is_lost = has_lost_old_key(row)
    yield "Rotation id", mono(row)
    yield "Old key", key_or_nothing(row.predecessor)
    yield "Replacement", key_or_nothing(row.replacement)
    yield "In this state since", moment(row.entered_at)
    if row.current_state in CLOSED:
        yield "Reason", row.why or NOTHING
    elif row.deadline_at is not None:
        plan = row.readable_plan
        planned = None if plan is None else plan.deadline
        is_extended = planned is not None and row.deadline_at != planned
        extension = format_html(" · extended from {}", f"{planned:%Y-%m-%d %H:%M}") if is_extended else ""
        yield "Deadline", format_html("{}{}{}", moment(row.deadline_at), extension, _WITHOUT_EFFECT if is_lost else "")
    if row.retire_at is not None and not is_lost:
        yield "Old key retired at", moment(row.retire_at)


def _status_facts(row: Rotation) -> Iterator[tuple[str, Any]]:
    not_asked = "not required: the old key has ended" if has_lost_old_key(row) else "not yet"
    silent = moment(row.silent_at, missing=not_asked)
    if row.silent_at is None and row.waived_at is not None:
        silent = format_html("waived by the approved plan or date, {}", moment(row.waived_at))
    yield "Accepted: every verifier accepts the replacement", moment(row.accepted_at, missing="not yet")
    yield "Delivered: the merchant can read the replacement", moment(row.delivered_at, missing="not yet")
    yield "Used: the replacement is proved in use", moment(row.used_at, missing=not_asked)
    yield "Silent: the old key was unused for the quiet period", silent


def _events(row: Rotation) -> Iterator[tuple[str, Any]]:
    for label, at in (
        ("Approval bypassed", row.bypassed_at),
        ("Acknowledged by the merchant", row.acknowledged_at),
        ("Confirmed by an operator", row.confirmed_at),
        ("Collected in the console", row.collected_at),
        ("In quarantine since", row.quarantined_at),
        ("Held suspended by an operator since", row.held_at),
        ("Reinstated: the old key was used in quarantine", row.reinstated_at),
        ("Old key written back", row.written_back_at),
        ("Closed", row.closed_at),
    ):
        if at is not None:
            yield label, moment(at)
    if row.schedule is not None:
        yield "Requested by the schedule", str(row.schedule)
    if row.standing_approval_id is not None:
        standing_url = reverse("admin:rotation_standingapproval_change", args=[row.standing_approval_id])
        yield "Under the standing approval", link(standing_url, mono(row.standing_approval_id))
    if row.campaign_id is not None:
        campaign_url = reverse("admin:rotation_campaign_change", args=[row.campaign_id])
        yield "Part of the campaign", link(campaign_url, row.campaign_id)


def _work(row: Any) -> Iterator[tuple[str, Any]]:
    """Yield what blocks the worker or the merchant's endpoint."""
    if row.current_state in CLOSED:
        return
    plan = row.readable_plan
    if plan is not None and DeliveryChannel.WEBHOOK in plan.channels and row.delivered_at is not None:
        yield "Notified: the merchant's webhook endpoint accepted the notification", _notified(row)
    if row.last_error is not None:
        tries = f"{row.attempts} in a row" if row.attempts else "paused, attempts not counted"
        yield "Last attempt failed", format_html("{} <span class='quiet'>({})</span>", row.last_error, tries)


def _notified(row: Rotation) -> SafeString:
    if row.notified_at is not None:
        return moment(row.notified_at)
    delivery = find_delivery_report(NoticeKind.REPLACEMENT_AVAILABLE, row.rotation_id)
    return moment(delivery.delivered_at, missing=f"not yet: {delivery.reason or 'pending'}")


# --- the timeline -------------------------------------------------------------------------------------------


def steps_of(row: Rotation) -> list[Step]:
    """Return the timeline of the rotation: forward, rolling back, or up to an early end."""
    stage, reached = row.stage, _reached(row)
    if stage is S.COMPLETED:
        states = [*reached, S.COMPLETED]
    elif stage in {S.ROLLING_BACK, S.ROLLED_BACK}:
        states = [*reached, S.ROLLING_BACK, S.ROLLED_BACK]
    elif stage in CLOSED:
        states = [*reached, stage]
    else:
        states = list(_forward(row, stage))
    current = states.index(stage)
    times = [_time_of(row, state) for state in states]
    return [
        Step(
            _label(row, state, index == current),
            _place(row, index - current),
            times[index],
            _took(*times[index : index + 2]) if index < current else "",
        )
        for index, state in enumerate(states)
    ]


def _took(entered_at: datetime | None, left_at: datetime | None) -> str:
    """Return how long a state lasted, if both times are known. After a roll back an earlier use may count again."""
    if entered_at is None or left_at is None or left_at < entered_at:
        return ""
    return f"took {duration(left_at - entered_at)}"


def _forward(row: Rotation, stage: RotationState) -> Iterator[RotationState]:
    is_lost = stage is S.EMERGENCY or has_lost_old_key(row)
    for state in _FORWARD_STATES:
        if is_lost and state in _RETIRING and state is not stage:
            continue
        if state is S.AWAITING_APPROVAL and (not row.approvals_needed or stage is S.EMERGENCY):
            continue
        yield S.EMERGENCY if state is S.SCHEDULED and stage is S.EMERGENCY else state


def _reached(row: Rotation) -> list[RotationState]:
    """Return the states that an ended or rolling back rotation is known to have passed."""
    passed = {
        S.REQUESTED: True,
        S.AWAITING_APPROVAL: bool(row.approvals_needed),
        S.SCHEDULED: row.replacement_id is not None,
        S.STAGED: row.replacement_id is not None,
        S.PUBLISHING: row.accepted_at is not None,
        S.AWAITING_PROOF: row.delivered_at is not None,
        S.OVERLAP: row.used_at is not None,
        S.QUARANTINE: row.silent_at is not None or row.waived_at is not None,
        S.REVOKING: row.state == S.COMPLETED and row.quarantined_at is not None,
    }
    return [state for state in _FORWARD_STATES if passed.get(state, False)]


def _label(row: Rotation, state: RotationState, is_current: bool) -> str:
    name = state.value.replace("_", " ")
    return f"{name}: stalled" if is_current and row.state == S.STALLED else name


def _place(row: Rotation, distance: int) -> str:
    if distance:
        return "done" if distance < 0 else "ahead"
    if row.state in {S.COMPLETED, S.ROLLED_BACK}:
        return "done"
    return "stopped" if row.state == S.STALLED or row.current_state in CLOSED else "current"


def _time_of(row: Rotation, state: RotationState) -> Any:
    """Return when the rotation entered the state, if a column records it."""
    if state == row.state:
        return row.entered_at
    return {
        S.REQUESTED: row.created_at,
        S.PUBLISHING: row.accepted_at,
        S.AWAITING_PROOF: row.delivered_at,
        S.OVERLAP: row.used_at,
        S.QUARANTINE: row.silent_at or row.waived_at,
    }.get(state)


# --- runbook ------------------------------------------------------------------------------------------------


def runbook_facts(advice: Advice) -> FactTable:
    """Return the runbook's explanation and steps. The page's banner has the actions."""
    steps = format_html_join("", "<li>{}</li>", ((step,) for step in advice.steps))
    rows = [("Why", advice.happened), ("Steps", format_html("<ol class='steps-to-take'>{}</ol>", steps))]
    return FactTable(f"What to do: {advice.title[0].lower()}{advice.title[1:]}", rows)


def remedies_of(row: Rotation, advice: Advice, offered: Collection[str]) -> Iterator[Link]:
    """Yield links to the actions and pages that the advice names. `offered`: actions that the operator may run."""
    pages = {
        Remedy.PREDECESSOR: reverse("admin:keyvault_key_change", args=[row.predecessor_id]),
        Remedy.ACCOUNT: reverse("admin:keyvault_account_change", args=[row.credential.account_id]),
        Remedy.REQUEST_AGAIN: f"{reverse('admin:rotation_rotation_request')}?credential={row.credential_id}",
    }
    if row.replacement_id is not None:
        pages[Remedy.REPLACEMENT] = reverse("admin:keyvault_key_change", args=[row.replacement_id])
    for remedy in advice.remedies:
        if remedy.value in offered:
            yield Link(REMEDY_LABELS[remedy], reverse(f"admin:rotation_rotation_{remedy.value}", args=[row.pk]))
        elif remedy in pages:
            yield Link(REMEDY_LABELS[remedy], pages[remedy])


# --- tables -------------------------------------------------------------------------------------------------


def key_or_nothing(key: Key | str | None) -> SafeString | str:
    return NOTHING if key is None else key_link(key)


def retirements_table(row: Rotation) -> Table:
    """Return the requested dates; the newest approved date applies."""
    return Table(
        "Requested retirement dates of the old public key",
        ["date", "requested by", "requested", "approved by", "approved"],
        [
            [
                link(reverse("admin:rotation_retirement_change", args=[each.pk]), f"{each.retire_at:%Y-%m-%d %H:%M}"),
                requester_name(each),
                moment(each.created_at),
                NOTHING if each.approver is None else each.approver.username,
                moment(each.approved_at, missing="not yet"),
            ]
            for each in row.retirements.select_related("requester", "approver").order_by("-created_at", "-pk")
        ],
        empty="No dates yet. Retirement dates requested for the old key appear here.",
    )


def awaited_table(awaited: Sequence[AwaitedSource]) -> Table:
    """Return the sources that the rotation waits for, and until when."""
    title = "Sources that the rotation waits for"
    if len(awaited) > MAX_AWAITED:
        title = f"{title}: latest {MAX_AWAITED} of {len(awaited)}"
    return Table(
        title,
        ["source", "last use", "until"],
        [
            [
                mono(source.name),
                moment(source.used_at),
                moment(source.until, missing=describe_need(source.name)),
            ]
            for source in awaited[:MAX_AWAITED]
        ],
    )


def evidence_table(recorded: Sequence[Evidence]) -> Table:
    return Table(
        "Evidence",
        ["kind", "when", "observation"],
        [[badge(item.kind), moment(item.created_at), mono(json.dumps(item.seen, sort_keys=True))] for item in recorded],
    )


def ledger_table(row: Rotation) -> Table:
    return Table(
        "Side effects",
        ["step", "key", "state", "started", "finished", "result"],
        [
            [
                badge(entry.step),
                mono(entry.key_id or NOTHING),
                badge(entry.state),
                moment(entry.started_at),
                moment(entry.finished_at),
                entry.detail or NOTHING,
            ]
            for entry in row.ledger.order_by("started_at", "pk")
        ],
    )

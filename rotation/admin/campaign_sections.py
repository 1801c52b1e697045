"""Sections of the page of a campaign: what it waits for, its progress, plan and credentials."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from django.urls import reverse
from django.utils.html import format_html

from keyvault.admin.framework.components import Banner, Card, Share, Shares, Tile, Tiles
from keyvault.admin.framework.four_eyes import OWN_REQUEST_NOTE, UNUSUAL
from keyvault.admin.framework.widgets import NOTHING, FactTable, Link, Table, badge, counted, link, moment, mono
from keyvault.domain.environments import Environment
from rotation.admin.plan_fields import chosen_changes, show_override
from rotation.domain.events import RotationState
from rotation.domain.pacing import PROVED, START_WITHIN, UNPROVED, Pace
from rotation.domain.plan_fields import FIELDS, PlanOverrides
from rotation.models import Campaign, CampaignMember, CampaignState
from rotation.services.campaigns.reports import MAX_USED, count_used_keys, list_failed_first

C = CampaignState

MAX_MEMBERS = 200
"""Maximum credentials that the page lists."""

DEFAULT_PACE = Pace()

IN_BANNER = ("approve", "reject", "resume", "pause")
"""Actions that the banner offers."""

_IN_SHORT = ("proof", "quiet_seconds", "quarantine_seconds", "reinstatement")
"""Fields of the plan that the card shows even if they have their defaults."""


def count_members(row: Campaign) -> int:
    """Return the stored number, so that a list counts no rows."""
    return int(row.selection["count"])


def format_pace(pace: Pace) -> str:
    share = pace.halt_at_failed_percent
    halts = [
        *(["at the first stall"] if pace.halt_on_stall else []),
        *([] if share is None else [f"above {share} % failed"]),
    ]
    return (
        f"at most {pace.per_minute} per minute, {pace.concurrency} unproved at a time; "
        f"halts {' or '.join(halts) or 'never'}"
    )


def format_left_out(row: Campaign) -> str:
    counts = row.selection["left_out"]
    return ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in counts.items()) or NOTHING


def format_used_keys(row: Campaign, now: datetime) -> str:
    """Describe how many of the keys are in use now."""
    used, cut = count_used_keys(row, now), count_members(row) > MAX_USED
    return (
        f"{used.used_today:,} of {counted(used.keys, 'key')} in the last 24 hours, {used.used_lately:,} in the last 30 "
        f"days, {used.never_used:,} never used" + (f"; of the first {MAX_USED:,} credentials" if cut else "")
    )


def banner_of(row: Campaign, report: Any, *, is_own: bool, buttons: Sequence[Link]) -> Banner:
    """Return the state of the campaign in one sentence, and what the operator can do."""
    progress = report["progress"]
    left = counted(progress["waiting"], "credential")
    if row.state == C.AWAITING_APPROVAL:
        until = format_html("It expires {}. {}", moment(row.approval_expires_at), OWN_REQUEST_NOTE if is_own else "")
        return Banner("Awaiting the approval of another person.", until, "wait", buttons)
    if row.state == C.RUNNING:
        lead = f"Running: {progress['proved']} of {counted(progress['members'], 'replacement')} are proved in use."
        return Banner(lead, _describe_pace(row, report), "", buttons)
    if row.state == C.HALTED:
        return Banner(
            f"Halted: {row.why}.",
            "No more rotations start; rotations in progress continue, and the old keys of stalled rotations still "
            "work. Check the rotations at the top of the list, then resume or cancel the campaign.",
            "bad",
            buttons,
        )
    if row.state == C.PAUSED:
        why = f": {row.why}" if row.why else ""
        return Banner(f"Paused{why}.", "No more rotations start until an operator resumes it.", "wait", buttons)
    if row.state == C.COMPLETED:
        return Banner("Completed.", "Every credential of the campaign has its result.", "good")
    why = f" ({row.why})" if row.why else ""
    return Banner(f"Closed{why}.", f"{left} will not be rotated; rotations in progress continue.")


def _describe_pace(row: Campaign, report: Any) -> str:
    if report["all_begun_at"] is None:
        return "All have started. Nothing is needed from you."
    begun_at = datetime.fromisoformat(report["all_begun_at"])
    return format_html(
        "{} started in the last minute; all have started {} at the earliest. Nothing is needed from you.",
        report["begun_in_last_minute"],
        moment(begun_at),
    )


def progress_card(row: Campaign, report: Any) -> Card:
    """Return the credentials by their progress, from completed to not started."""
    count, by_state = report["progress"], report["rotations_by_state"]
    retiring = sum(by_state.get(state, 0) for state in PROVED - {RotationState.COMPLETED})
    unproved = sum(by_state.get(state, 0) for state in UNPROVED)
    shares = Shares(
        "Credentials",
        [
            Share("completed", count["completed"], 5),
            Share("proved, old key not retired yet", retiring, 1),
            Share("started, not proved yet", unproved, 4),
            Share("stalled", count["stalled"], 2),
            Share("failed: canceled or rolled back", count["failed"], 2),
            Share("skipped: no longer matching", count["skipped"], 3),
            Share("not started", count["waiting"], 6),
        ],
    )
    return Card("Progress", shares, counted(count_members(row), "credential"))


def progress_tiles(report: Any) -> Tiles:
    count, requests = report["progress"], report["requests"]
    bad = count["stalled"] + count["failed"]
    return Tiles(
        [
            Tile("Proved in use", f"{report['percent_proved']} %", f"{count['proved']} of {count['members']}"),
            Tile("Ended", f"{report['percent_ended']} %", "completed, stalled, failed or skipped"),
            Tile("Stalled or failed", f"{bad:,}", "first in the list below" if bad else "none"),
            Tile("Refused requests", f"{requests['refused']:,}", f"{requests['allowed']:,} with the replacements"),
        ]
    )


def plan_card(row: Campaign) -> FactTable:
    """Return the plan and the pace in short: what deviates from the defaults first, each marked."""
    overrides, environment = PlanOverrides.from_json(row.overrides), Environment(row.environment)
    pace = Pace.from_json(row.pace)
    chosen = [
        (change.label, format_html("{} {}", change.after, UNUSUAL)) for change in chosen_changes(overrides, environment)
    ]
    labels = {label for label, _ in chosen}
    shown_pace = format_pace(pace) if pace == DEFAULT_PACE else format_html("{} {}", format_pace(pace), UNUSUAL)
    usual = [
        (field.label, show_override(field, getattr(overrides, name), environment))
        for name, field in FIELDS.items()
        if name in _IN_SHORT and field.label not in labels
    ]
    digest = format_html("digest {}", mono(f"{row.plan_digest[:8]}…{row.plan_digest[-4:]}"))
    return FactTable("Plan and pace", [*chosen, ("Pace", shown_pace), *usual], digest)


def times_facts(row: Campaign, report: Any) -> FactTable:
    return FactTable("Times", list(_times(row, report)))


def _times(row: Campaign, report: Any) -> Iterator[tuple[str, Any]]:
    yield "Requested", moment(row.created_at)
    yield "Approved and started", moment(row.began_at, missing="not yet")
    is_open = row.state in {C.RUNNING, C.PAUSED, C.HALTED}
    if is_open and report["progress"]["waiting"] and row.began_at is not None:
        yield "Not started by then: never started", moment(row.began_at + START_WITHIN)
    if row.resumed_at is not None:
        yield "Resumed after a halt", moment(row.resumed_at)
    if row.closed_at is not None:
        yield "Closed", moment(row.closed_at)


def members_table(row: Campaign) -> Table:
    """Return the credentials, failed and stalled ones first."""
    total = count_members(row)
    found = list_failed_first(row, MAX_MEMBERS)
    cut = "" if total <= len(found) else f"; {len(found)} of {total:,}"
    return Table(
        "Credentials",
        ["credential", "account", "state", "rotation", "reason", "since"],
        [_member(row, member) for member in found],
        aside=f"failed and stalled first{cut}",
    )


def _member(row: Campaign, member: CampaignMember) -> list[Any]:
    credential, rotation = member.credential, member.rotation
    shown = link(reverse("admin:keyvault_credential_change", args=[credential.pk]), credential.label)
    if rotation is None:
        state = member.outcome or ("waiting" if row.closed_at is None else "not_begun")
        return [shown, str(credential.account), badge(state), NOTHING, member.why or NOTHING, NOTHING]
    its_page = link(reverse("admin:rotation_rotation_change", args=[rotation.pk]), "rotation")
    why = rotation.why or NOTHING
    return [shown, str(credential.account), badge(rotation.state), its_page, why, moment(rotation.entered_at)]

"""What a rotation's page shows first: what it waits for, its evidence, and the traffic of both keys."""

import csv
import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from io import StringIO
from typing import Any

from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from keyvault.admin.framework.components import Banner, Card, Checks, EvidenceItem
from keyvault.admin.framework.widgets import Link, Table, badge, counted, identifier, link, moment, mono, noted, seconds
from keyvault.admin.keys.traffic import traffic_card
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from keyvault.domain.sources import name_source
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Key
from keyvault.models.usage import SIGNS_OF_LIFE, UseOutcome
from keyvault.services.usage.reports import KeyUser, find_last_of_sources, first_of_each_outcome
from keyvault.services.usage.series import Traffic, choose_step, read_traffic
from rotation.domain.events import RotationState
from rotation.domain.silence import AwaitedSource, describe_need
from rotation.domain.states import CLOSED, may_reinstate
from rotation.models import Evidence, EvidenceKind, Rotation
from rotation.services.rotations.facts import list_waived
from rotation.services.rotations.reports import Waits

S, K = RotationState, EvidenceKind

_MAX_USERS = 20

_BEFORE = timedelta(hours=1)
"""Time before the request of the rotation that the chart shows."""

_JUDGES_SILENCE = {S.OVERLAP, S.ROLLING_BACK}
"""Stages that judge the silence of each source that is known by its name."""

_AFTER_SILENCE = {S.QUARANTINE, S.REVOKING, S.COMPLETED}
"""Stages after the silence of the old key, unless it ended before."""

_GOOD_ENDS = {S.COMPLETED, S.ROLLED_BACK}


def lead_of(row: Rotation) -> SafeString:
    """Return the line below the title: account, kind, id and reason."""
    plan = row.readable_plan
    reason = "" if plan is None or not plan.reason else f" · reason: {plan.reason}"
    account = row.credential.account
    return format_html("{} · {} key · {}{}", account.merchant_id, row.credential.kind, identifier(row), reason)


def banner_of(
    row: Rotation,
    waiting_for: str,
    awaited: Sequence[AwaitedSource],
    until: datetime | None,
    buttons: Sequence[Link],
    *,
    is_advised: bool,
) -> Banner | None:
    """Return the sentence with what the rotation waits for, until when, and the next action.

    Args:
        buttons: the actions that the runbook names and the operator may run, the best first.
        is_advised: whether the page has the runbook's advice, because an operator can do something.
    """
    if row.state == S.STALLED:
        return Banner(f"Stalled in {row.get_stalled_from_display()}: {format_reason(row.why)}.", "", "bad", buttons)
    if row.current_state in CLOSED:
        reason = format_reason(row.why)
        why = f"{reason[0].upper()}{reason[1:]}." if reason else ""
        tone = "good" if row.current_state in _GOOD_ENDS else ""
        return Banner(f"{row.get_state_display().replace('_', ' ').capitalize()}.", why, tone)
    if not waiting_for:
        return None
    if len(awaited) > 1:
        # The table of the old key's users has each source and its time.
        waiting_for = re.sub(": .*", f": {counted(len(awaited), 'source')}, listed below", waiting_for)
    tone = "wait" if is_advised else ""
    if row.state == S.QUARANTINE and until is not None:
        end = format_html("The old key is suspended. It is revoked {}{}", moment(until), _after_attempt(row))
        return Banner("Waiting for the quarantine to end.", end, tone, buttons)
    text = "" if is_advised else "Nothing is needed from you."
    if until is not None:
        is_expiry = until == row.approval_expires_at
        then = "Without approval it expires {}." if is_expiry else "Next step {} at the earliest."
        text = format_html("{} {}", text, format_html(then, moment(until)))
    return Banner(f"Waiting for {format_reason(waiting_for)}.", text, tone, buttons)


def _after_attempt(row: Rotation) -> str:
    """Return the rest of the sentence about the revocation: what an attempt by a known source changes."""
    if _may_reinstate(row):
        return ", unless a known source tries it: then it is reinstated."
    if row.waived_at is not None or row.credential.kind == KeyKind.PUBLIC:
        return "."
    return ". An attempt by a known source begins the quarantine again."


def _may_reinstate(row: Rotation) -> bool:
    plan, was_reinstated, is_waived = row.readable_plan, row.reinstated_at is not None, row.waived_at is not None
    kind = KeyKind(row.credential.kind)
    return plan is not None and may_reinstate(plan, kind, was_reinstated=was_reinstated, silence_waived=is_waived)


def format_reason(reason: str) -> str:
    """Return a reason of the rotation with the console's name for the key that is being replaced."""
    return reason.replace("predecessor", "old key")


# --- evidence -----------------------------------------------------------------------------------------------


def evidence_card(row: Rotation, recorded: Sequence[Evidence], awaited: Sequence[AwaitedSource]) -> Card:
    """Return the facts that the revocation needs, each with what was observed.

    Args:
        recorded: the evidence of the rotation, the oldest first.
    """
    found = {item.kind: item for item in recorded}
    return Card("Evidence", Checks(list(_checks(row, found, awaited))), "all are required to revoke")


def _checks(row: Rotation, found: dict[str, Evidence], awaited: Sequence[AwaitedSource]) -> Iterator[EvidenceItem]:
    accepted, delivered, used = row.accepted_at, row.delivered_at, row.used_at
    yield _check(row, S.STAGED, "Accepted by every verifier", accepted)
    yield _check(row, S.PUBLISHING, "Delivered to the merchant", delivered, _delivery(row))
    yield _check(
        row, S.AWAITING_PROOF, "Replacement in use", used, _used(found[K.USED].seen if K.USED in found else {})
    )
    if row.credential.kind == KeyKind.PUBLIC:
        text = "" if row.retire_at is None else format_html("Retired on the approved date, {}", moment(row.retire_at))
        yield _check(row, S.OVERLAP, "Retirement date reached", row.silent_at or row.waived_at, text)
        return
    silent = "Waived by the approved plan" if row.waived_at and not row.silent_at else _silence(row, awaited)
    yield _check(row, S.OVERLAP, "Old key silent", row.silent_at or row.waived_at, silent)
    yield _check_quarantine(row, found)


def _check_quarantine(row: Rotation, found: dict[str, Evidence]) -> EvidenceItem:
    """Return what the quarantine has shown; attempts by unknown sources are refused, and do not delay its end."""
    tried = found.get(K.TRIED)
    if tried is not None and (row.quarantined_at is None or tried.created_at < row.quarantined_at):
        tried = None  # these attempts reinstated the key
    end = found.get(K.UNTRIED) or tried
    title = "Old key not tried in quarantine" if tried is None else "Old key not tried by a known source in quarantine"
    if tried is None:
        detail = _quarantine(row, is_untried=end is not None)
    else:
        detail = f"Refused: {', '.join(attempt['source'] for attempt in tried.seen['attempts'])}"
    return _check(row, S.QUARANTINE, title, None if end is None else end.created_at, detail)


def _quarantine(row: Rotation, *, is_untried: bool) -> str:
    plan = row.readable_plan
    period = "" if plan is None else f" for {seconds(plan.quarantine_seconds)}"
    if row.reinstated_at is None or is_untried:
        returns = _may_reinstate(row)
        return f"Suspended{period}" + ("; reinstated once if a known source tries it" if returns else "")
    was = "The old key was used in quarantine and reinstated"
    return was if row.quarantined_at is None else f"{was}. Now it is suspended again{period}, without another return"


def _check(row: Rotation, state: RotationState, title: str, at: datetime | None, detail: Any = "") -> EvidenceItem:
    if at is not None:
        return EvidenceItem(title, "done", detail, moment(at))
    if row.stage is state and row.current_state not in CLOSED:
        return EvidenceItem(title, "failed" if row.state == S.STALLED else "current", detail)
    return EvidenceItem(title, "ahead", detail)


def _used(seen: dict[str, Any]) -> str:
    if seen.get("authentications"):
        sources, minutes = counted(seen.get("sources", 0), "source"), counted(seen.get("minutes", 0), "minute")
        acknowledged = "; acknowledged by the merchant" if seen.get("acknowledged_at") else ""
        return f"{seen['authentications']:,} requests from {sources} in {minutes}{acknowledged}"
    if seen.get("acknowledged_at"):
        return "Acknowledged by the merchant with the replacement"
    return "Confirmed by an operator" if seen.get("confirmed_at") else ""


def _delivery(row: Rotation) -> str:
    if row.delivered_at is None:
        return ""
    is_read = row.delivery is Delivery.SECRET_BACKEND and row.credential.kind == KeyKind.PRIVATE
    if is_read:
        return "In the secret backend, where the merchant reads it"
    return f"By {row.credential.get_delivery_display().replace('_', ' ')}"


def _silence(row: Rotation, awaited: Sequence[AwaitedSource]) -> str:
    if row.silent_at is not None:
        return "Every source has moved, is silent, or is waived"
    plan = row.readable_plan
    if awaited:
        return f"{counted(len(awaited), 'source')} may still need the old key"
    return "" if plan is None else f"Quiet for {seconds(plan.quiet_seconds)}, and for twice each source's longest gap"


# --- traffic ------------------------------------------------------------------------------------------------


def read_rotation_traffic(row: Rotation, retiring: Key, now: datetime) -> Traffic:
    """Read the uses of both keys since an hour before the request, and who uses the key that is being retired.

    Once that key was quarantined, its users include those who were refused.
    """
    since, until = row.created_at - _BEFORE, now if row.closed_at is None else min(now, row.closed_at + _BEFORE)
    keys = [key.key_id for key in (row.predecessor, row.replacement) if key is not None]
    step = choose_step(since, until, now)
    outcomes = SIGNS_OF_LIFE if row.quarantined_at is None else (*SIGNS_OF_LIFE, UseOutcome.REFUSED)
    return read_traffic(keys, since, until, step, users_of=[retiring.key_id], outcomes=outcomes)


def chart_card(row: Rotation, traffic: Traffic, now: datetime) -> Card | None:
    """Return the chart of both keys' uses; None without any use."""
    lines = [(row.predecessor, "Old key", 4)]
    if row.replacement is not None:
        lines.append((row.replacement, "Replacement", 1))
    events = [(row.delivered_at, "delivered"), (row.quarantined_at, "quarantine")]
    return traffic_card(lines, traffic, events, is_now=traffic.until == now)


# --- who still uses the old key -------------------------------------------------------------------------------


def users_table(row: Rotation, key: Key, traffic: Traffic, waits: Waits) -> Table:
    """Return who uses the key that is being retired, with what each source still has to do, and the rows as CSV."""
    users = first_of_each_outcome(traffic.users[key.key_id], _MAX_USERS)
    names = [name_source(user.source, user.user_agent) for user in users]
    accepted = [user for user in users if user.outcome is not UseOutcome.REFUSED]
    is_old = key is row.predecessor
    other_id = row.replacement_id if is_old else row.predecessor_id
    moved = {each.name: each.moved_at for each in waits.sources if each.has_moved and each.moved_at is not None}
    if not waits.sources and other_id is not None and row.credential.kind == KeyKind.PRIVATE:
        moved = find_last_of_sources(other_id, set(names))
    until = {source.name: source.until for source in waits.awaited}
    judged, waived = {source.name for source in waits.sources}, list_waived(row, key)
    every_use = link(reverse("admin:keyvault_key_change", args=[key.pk]), "every use")
    title = f"Who still uses the {'old key' if is_old else 'replacement'}"
    if len(users) == _MAX_USERS or traffic.has_more_users:
        title = f"{title}: the latest {len(users)}"
    return Table(
        title,
        ["source and program", "endpoint", "requests", "last seen", "status"],
        [
            [
                noted(mono(user.source), user.user_agent or "no user agent"),
                mono(user.endpoint or "none"),
                f"{user.count:,}",
                moment(user.last_at),
                _status(row, name, user, moved, until, judged, waived),
            ]
            for name, user in zip(names, users, strict=True)
        ],
        empty="No use recorded yet. Sources that use the key appear here.",
        aside=format_html("{} {}", _csv_button(accepted) if accepted else "", every_use),
    )


def _status(
    row: Rotation,
    name: str,
    user: KeyUser,
    moved: dict[str, datetime],
    until: dict[str, datetime | None],
    judged: set[str],
    waived: set[str],
) -> SafeString:
    """Return whether the source still needs the key: a badge, and below it since or until when, or why.

    Args:
        judged: the sources whose silence the rotation judges in its stage.
        waived: the sources that operators have waived.
    """
    if user.outcome is UseOutcome.REFUSED:
        return badge("refused", "bad")
    moved_at = moved.get(name)
    has_moved = moved_at is not None and moved_at >= user.last_at
    if name in until:
        end = until[name]
        need = describe_need(name) if end is None else format_html("silence is proved {}", moment(end))
        return noted(badge("switched" if has_moved else "awaited", "wait"), need)
    if has_moved:
        return noted(badge("switched", "good"), format_html("other key used {}", moment(moved_at)))
    if row.credential.kind == KeyKind.PUBLIC:
        return noted(badge("unknown"), "not recorded for public keys")
    is_after = row.stage in _AFTER_SILENCE
    if (name in judged and name in waived) or (is_after and (name in waived or row.waived_at is not None)):
        return badge("waived", "good")
    # An operator can resume the key in quarantine: the source may have used it since.
    if name in judged or (is_after and row.silent_at is not None and user.last_at <= row.silent_at):
        return badge("silent")
    return badge("unknown" if row.stage in _JUDGES_SILENCE else "not_switched")


def _csv_button(users: Sequence[KeyUser]) -> SafeString:
    """Return a button that copies the table, for a message to the merchant."""
    text = StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["source", "network", "user_agent", "endpoint", "requests", "first_seen", "last_seen"])
    for user in users:
        cells = [user.source, user.network, user.user_agent, user.endpoint, user.count]
        times = [format_timestamp(user.first_at), format_timestamp(user.last_at)]
        rows.writerow([_quiet(cell) for cell in [*cells, *times]])
    return format_html('<button type="button" class="copy" data-copy="{}" hidden>copy as CSV</button>', text.getvalue())


def _quiet(cell: object) -> object:
    """Prefix text that a spreadsheet would run as a formula: clients choose their user agent."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in {"=", "+", "-", "@", "\t", "\r"} else cell

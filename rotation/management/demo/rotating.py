"""Rotate the key under the merchant's traffic, without a failed request."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from keyvault.domain.audit import account_chain
from keyvault.domain.environments import Environment
from keyvault.management.json_command import call
from keyvault.management.service import SERVER, WORKER
from keyvault.models import AuditEntry
from keyvault.services.secrets.stored_copies import find_stored
from rotation.domain.events import RotationState
from rotation.domain.states import CLOSED
from rotation.management.demo.context import DemoContext, DemoError
from rotation.management.demo.fleet import Fleet, MerchantServer
from rotation.management.demo.issuing import Issued
from rotation.management.demo.operators import MERCHANT
from rotation.management.demo.tally import failures_while_good

RATE = 50.0
SERVERS = (
    MerchantServer("storefront", "198.51.100.10", lag_seconds=0.0),
    MerchantServer("checkout", "198.51.100.11", lag_seconds=1.0),
    MerchantServer("billing", "198.51.100.20", lag_seconds=3.0),
)
PLAN = {"proof-count": 40, "proof-sources": 2, "quiet-seconds": 3, "quarantine-seconds": 2}
WARM_UP_REQUESTS = 60
TRAFFIC_SECONDS = 30
ROTATION_SECONDS = 90


@dataclass(frozen=True, slots=True)
class RotationEntry:
    """One entry of the rotation in the audit log: what happened, when, and why."""

    event: str
    at: datetime
    why: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """A completed rotation. `entries`: its audit entries, oldest first."""

    replacement: Issued
    entries: list[RotationEntry]


def plan_options(plan: Mapping[str, int]) -> Iterator[str]:
    """Yield the plan as command-line options of `rotate_key`."""
    return (text for name, value in plan.items() for text in (f"--{name}", str(value)))


def merchant_fleet(context: DemoContext, issued: Issued) -> Fleet:
    """Return the merchant's fleet; entering it starts the traffic."""
    return Fleet(SERVERS, context.connect, lambda: find_stored(issued.credential), RATE)


def watch_traffic(context: DemoContext, fleet: Fleet) -> None:
    report = context.report
    report.section("The merchant at work")
    for server in SERVERS:
        when = f"{server.lag_seconds:.0f} s after it sees it" if server.lag_seconds else "as soon as it sees it"
        report.step(f"{server.name} ({server.client_ip}) presents the key; it switches to a new one {when}")
    context.until(
        "the first requests",
        lambda: len(fleet.requests) if len(fleet.requests) >= WARM_UP_REQUESTS else None,
        seconds=TRAFFIC_SECONDS,
        program=SERVER,
    )
    failures = failures_while_good(fleet.requests)
    if failures:
        raise DemoError(f"The traffic has failures: {failures[0]}", SERVER)
    report.step(f"about {RATE:.0f} requests a second, over REST, until the end of the demo; {_so_far(fleet)}")


def rotate_under_traffic(context: DemoContext, fleet: Fleet, issued: Issued) -> Replaced:
    report = context.report
    report.section("Rotation under that traffic")
    made = call(
        "rotate_key",
        *("--credential", issued.credential.credential_id, "--requested-by", "tam", "--approved-by", "approver"),
        *("--reason", "demo", "--proof", "traffic"),
        *plan_options(PLAN),
    )
    rotation_id = made["rotation_id"]
    report.step(f"tam requests {rotation_id}, approver approves the plan:")
    report.aside(
        f"proof by {PLAN['proof-count']} authentications from {PLAN['proof-sources']} sources, "
        f"{PLAN['quiet-seconds']} s of silence on the old key, {PLAN['quarantine-seconds']} s of quarantine"
    )
    entries = _follow(context, fleet, issued, rotation_id)
    shown = call("show_rotation", rotation_id)
    if shown["state"] != RotationState.COMPLETED:
        raise DemoError(f"The rotation ended as {shown['state']}: {shown['why']}", WORKER)
    report.step(f"its evidence: {', '.join(evidence['kind'] for evidence in shown['evidence'])}")
    published = find_stored(issued.credential)
    if published is None or published.labels["key_id"] != shown["replacement_key_id"]:
        raise DemoError("The secret backend does not hold the replacement.", WORKER)
    context.secrets.append(published.secret)
    replacement = Issued(issued.credential, shown["replacement_key_id"], published.secret)
    context.expect(f"the old key {issued.key_id}", issued.text, "key_revoked")
    context.expect(f"the new key {replacement.key_id}", replacement.text, None)
    return Replaced(replacement, entries)


def _follow(context: DemoContext, fleet: Fleet, issued: Issued, rotation_id: str) -> list[RotationEntry]:
    """Report each transition and the servers still on the old key, until the rotation is closed."""
    report, reported = context.report, 0
    using = fleet.using()
    entries: list[RotationEntry] = []

    def poll() -> list[RotationEntry] | None:
        nonlocal reported, using, entries
        entries = list(entries_of(rotation_id))
        for entry in entries[reported:]:
            report.step(f"{entry.event:<15} {entry.why}".rstrip())
            if entry.event == RotationState.QUARANTINE:
                # A dry run does not count as an attempt; a real one would restart the quarantine, which may be over.
                context.expect("the old key, in a dry run", issued.text, "key_not_active", "key_revoked", dry_run=True)
        reported = len(entries)
        before, using = using, fleet.using()
        for name, key_id in using.items():
            if before[name] != key_id:
                report.step(f"{name} now presents the replacement, {key_id}")
        late = [name for name, key_id in using.items() if key_id == issued.key_id]
        report.now(f"{_so_far(fleet)}; on the old key: {', '.join(late) or 'none'}")
        return entries if entries and entries[-1].event in CLOSED | {RotationState.STALLED} else None

    return context.until("the rotation to be completed", poll, seconds=ROTATION_SECONDS)


def entries_of(rotation_id: str) -> Iterator[RotationEntry]:
    """Yield the rotation's audit entries, oldest first."""
    chain = account_chain(MERCHANT, Environment.SANDBOX)
    rows = AuditEntry.objects.filter(chain=chain, event__startswith="rotation.").order_by("sequence")
    for row in rows:
        details: dict[str, Any] = json.loads(bytes(row.body))["details"]
        if details["rotation_id"] == rotation_id:
            yield RotationEntry(row.event.removeprefix("rotation."), row.at, str(details.get("why", "")))


def _so_far(fleet: Fleet) -> str:
    requests = list(fleet.requests)
    return f"{len(requests)} requests so far, {len(failures_while_good(requests))} failures"

"""A second rotation with an overlooked client: the quarantine refuses it, then reinstates the old key once."""

import time
from dataclasses import dataclass, field
from typing import Any

from keyvault.management.json_command import call
from keyvault.management.service import WORKER
from keyvault.services.approvals.inbox import list_unseen
from keyvault.services.secrets.stored_copies import find_stored
from rotation.domain.events import RotationState
from rotation.domain.states import CLOSED
from rotation.management.demo.context import DemoContext, DemoError
from rotation.management.demo.fleet import Fleet
from rotation.management.demo.issuing import Issued
from rotation.management.demo.rotating import RotationEntry, entries_of, plan_options
from rotation.management.demo.tally import failures_while_good

NAME, CLIENT_IP = "nightly-report", "198.51.100.30"
PLAN = {"proof-count": 10, "proof-sources": 1, "quiet-seconds": 1, "quarantine-seconds": 2}
EXPECTED_STATES = ("overlap", "quarantine", "overlap", "quarantine", "revoking", "completed")
QUARANTINED = "key_not_active"
ROTATION_SECONDS = 60
REINSTATED_SECONDS = 20
PAUSE_SECONDS = 0.5


@dataclass(slots=True)
class OverlookedClient:
    """A merchant's job that does not know of the rotation. `refusals`: how often it was refused."""

    context: DemoContext
    key: Issued
    refusals: int = 0
    codes: set[str] = field(default_factory=set)
    called_at: float = 0.0

    def call(self) -> bool:
        """Send one request; return whether it was allowed."""
        self.called_at = time.monotonic()
        verifier = self.context.connect()
        try:
            decision = verifier.ask(self.key.text, client_ip=CLIENT_IP, user_agent=f"{NAME}/1.0", merchant="acme")
        finally:
            verifier.close()
        if decision["allowed"] is not True:
            self.refusals += 1
            self.codes.add(str(decision["code"]))
        return decision["allowed"] is True

    def call_in_time(self) -> bool | None:
        """Send one request if the last was PAUSE_SECONDS ago; True if it was allowed, else None."""
        return (time.monotonic() - self.called_at >= PAUSE_SECONDS and self.call()) or None


@dataclass(frozen=True, slots=True)
class Reinstated:
    """The replacement that every client uses in the end.

    `refusals`: how often the overlooked client was refused; `counted`: the attempts that the quarantine counted.
    """

    replacement: Issued
    refusals: int
    counted: int


def rotate_with_an_overlooked_client(context: DemoContext, fleet: Fleet, used: Issued) -> Reinstated:
    report = context.report
    report.section("An overlooked client")
    job = OverlookedClient(context, used)
    if not job.call():
        raise DemoError(f"{NAME} was refused before the rotation.")
    report.step(f"{NAME} ({CLIENT_IP}) calls occasionally with {used.key_id} and does not know of rotations")
    made = call(
        "rotate_key",
        *("--credential", used.credential.credential_id, "--requested-by", "tam", "--approved-by", "approver"),
        *("--reason", "demo: an overlooked client", "--proof", "traffic", *plan_options(PLAN)),
    )
    rotation_id = made["rotation_id"]
    report.step(f"the key is rotated again, {rotation_id}; the three servers switch to the replacement")
    context.until(
        "the quarantine of the old key",
        lambda: _reached(rotation_id, RotationState.QUARANTINE),
        seconds=ROTATION_SECONDS,
    )
    _trip(context, job, rotation_id)
    entries = context.until("the rotation to be completed", lambda: _closed(rotation_id), seconds=ROTATION_SECONDS)
    way = tuple(entry.event for entry in entries if entry.event in EXPECTED_STATES)
    if way != EXPECTED_STATES:
        raise DemoError(f"The rotation took other states: {', '.join(way)}.", WORKER)
    counted = _counted(call("show_rotation", rotation_id))
    _require_no_others(fleet, job, counted)
    report.step(f"{NAME} has switched, the old key is silent again, and is revoked")
    report.step(f"refused meanwhile: {job.refusals}, all of them {NAME}'s, and counted by the quarantine: {counted}")
    return Reinstated(job.key, job.refusals, counted)


def _trip(context: DemoContext, job: OverlookedClient, rotation_id: str) -> None:
    """Call once more in the quarantine, and again until the key is reinstated."""
    report, old = context.report, job.key
    if job.call():
        raise DemoError(f"{NAME} was allowed with a key in quarantine.")
    report.step(f"the old key is in quarantine, and {NAME} calls once more: 401 {QUARANTINED}")
    context.until("the tripwire", job.call_in_time, seconds=REINSTATED_SECONDS)
    report.step(f"it is a known source, so the old key is reinstated, once: {NAME} is allowed again")
    alarms = [notice for notice in list_unseen() if notice.subject == rotation_id]
    if [notice.payload.get("is_reinstated") for notice in alarms] != [True]:
        raise DemoError(f"The inbox should hold one alarm of it, and holds {len(alarms)}.", WORKER)
    report.step(f"in the operators' inbox: {alarms[0].kind}, an alarm, until an operator acknowledges it")
    published = find_stored(old.credential)
    if published is None or published.labels["key_id"] == old.key_id:
        raise DemoError("The secret backend does not hold the replacement.", WORKER)
    context.secrets.append(published.secret)
    job.key = Issued(old.credential, published.labels["key_id"], published.secret)
    if not job.call():
        raise DemoError(f"{NAME} was refused with the replacement.")


def _reached(rotation_id: str, state: RotationState) -> bool | None:
    return any(entry.event == state for entry in entries_of(rotation_id)) or None


def _closed(rotation_id: str) -> list[RotationEntry] | None:
    entries = list(entries_of(rotation_id))
    return entries if entries[-1].event in CLOSED | {RotationState.STALLED} else None


def _counted(shown: dict[str, Any]) -> int:
    """Return the number of attempts with the suspended key, from all sources."""
    return sum(user["count"] for user in shown["predecessor_users"] if user["outcome"] == "refused")


def _require_no_others(fleet: Fleet, job: OverlookedClient, counted: int) -> None:
    failures = failures_while_good(list(fleet.requests))
    if failures:
        raise DemoError(f"A server with a valid key was refused: {failures[0]}")
    if job.codes != {QUARANTINED}:
        raise DemoError(f"{NAME} was refused for another reason: {', '.join(sorted(job.codes))}.")
    if counted != job.refusals:
        raise DemoError(f"The quarantine counted {counted} attempts, and there were {job.refusals}.")

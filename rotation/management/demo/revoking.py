"""The new key leaks: the incident responder ends it alone and at once, and the merchant's traffic is refused."""

import time

from keyvault.management.calls import call
from keyvault.management.service import SERVER
from rotation.management.demo.fleet import Fleet
from rotation.management.demo.issuing import Issued
from rotation.management.demo.stage import Stage
from rotation.management.demo.tally import REVOKED, Revocation

REFUSALS_TO_SEE = 50
REFUSAL_SECONDS = 20


def revoke_at_once(stage: Stage, fleet: Fleet, leaked: Issued) -> Revocation:
    report = stage.report
    report.chapter("Emergency")
    asked_at = time.monotonic()
    revoked = call("revoke_key", leaked.key_id, "--reason", "key_compromise", "--by", "responder")
    revocation = Revocation(leaked.key_id, asked_at, time.monotonic())
    took = (revocation.answered_at - asked_at) * 1000
    report.step(
        f"responder reports key {leaked.key_id} as leaked: {revoked['state']}, change {revoked['sequence']}, "
        f"answered in {took:.0f} ms; nobody had to approve"
    )
    refused = stage.until(
        "the traffic to be refused", lambda: _refused_since(fleet, revocation), seconds=REFUSAL_SECONDS, program=SERVER
    )
    report.step(f"{refused} requests later, all of them refused: the traffic stops")
    return revocation


def _refused_since(fleet: Fleet, revocation: Revocation) -> int | None:
    """How many, once they are enough to tell that it was no accident."""
    refused = sum(
        request.code == REVOKED and request.sent_at >= revocation.answered_at for request in list(fleet.requests)
    )
    return refused if refused >= REFUSALS_TO_SEE else None

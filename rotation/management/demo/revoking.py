"""The new key leaks: the incident responder revokes it alone, and the merchant's traffic is refused."""

import time

from keyvault.management.json_command import call
from keyvault.management.service import SERVER
from keyvault.services.change_feed.receipts import (
    MAX_WAIT_SECONDS,
    Receipt,
    VerifierProgress,
    VerifierReceipt,
    wait_for_receipt,
)
from rotation.management.demo.context import DemoContext
from rotation.management.demo.fleet import Fleet
from rotation.management.demo.issuing import Issued
from rotation.management.demo.tally import REVOKED, Revocation

REFUSALS_TO_SEE = 50
REFUSAL_SECONDS = 20


def revoke_immediately(context: DemoContext, fleet: Fleet, leaked: Issued) -> tuple[Revocation, Receipt]:
    report = context.report
    report.section("Emergency")
    asked_at = time.monotonic()
    revoked = call("revoke_key", leaked.key_id, "--reason", "key_compromise", "--by", "responder")
    revocation = Revocation(leaked.key_id, asked_at, time.monotonic())
    took = (revocation.answered_at - asked_at) * 1000
    report.step(
        f"responder reports key {leaked.key_id} as leaked: {revoked['state']}, change {revoked['sequence']}, "
        f"answered in {took:.0f} ms; no approval is needed"
    )
    receipt, _ = wait_for_receipt(revoked["sequence"], MAX_WAIT_SECONDS)
    report.step(f"its receipt, {format_receipt(receipt)}")
    for verifier in receipt.of(VerifierProgress.CONFIRMED):
        report.aside(f"{verifier.entry_point} {verifier.verifier_id}: confirmed {_after(receipt, verifier)}")
    refused = context.until(
        "the traffic to be refused", lambda: _refused_since(fleet, revocation), seconds=REFUSAL_SECONDS, program=SERVER
    )
    report.step(f"{refused} requests later, all of them refused: the traffic stops")
    return revocation, receipt


def format_receipt(receipt: Receipt) -> str:
    """Format how many verifiers have confirmed the revocation, and when the last of them did."""
    confirmed = receipt.of(VerifierProgress.CONFIRMED)
    if not confirmed:
        return "not confirmed by any verifier"
    last = max(confirmed, key=lambda verifier: verifier.confirmed_at or verifier.seen_at)
    state = "complete" if receipt.is_complete else "not complete"
    whom = "1 verifier has" if len(confirmed) == 1 else f"{len(confirmed)} verifiers have"
    return f"{state}: {whom} confirmed, the last {_after(receipt, last)}"


def _after(receipt: Receipt, verifier: VerifierReceipt) -> str:
    seconds = receipt.seconds_until(verifier)
    return "at an unknown time" if seconds is None else f"{seconds * 1000:.0f} ms after the request"


def _refused_since(fleet: Fleet, revocation: Revocation) -> int | None:
    """Return the number of refused requests once there are REFUSALS_TO_SEE; None before."""
    refused = sum(
        request.code == REVOKED and request.sent_at >= revocation.answered_at for request in list(fleet.requests)
    )
    return refused if refused >= REFUSALS_TO_SEE else None

"""kill -9 around every statement and every commit of a create request; run as a separate process.

    python -m tests.faults.retry_matrix

For each crash point in turn, a forked child makes the first request and is killed by SIGKILL at its n-th event. It must
leave nothing, a claim, or the complete effect with its response. The retry, after the claim has expired, must end with
one effect and the response that belongs to it. The series ends with the first child that is not killed, and prints one
JSON object. The program works in the database and data folder that the environment names; both must be set up.
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import django

django.setup()

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.domain.environments import Environment
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Merchant
from keyvault.models.idempotency import IdempotentRequest
from keyvault.services.idempotency import HOLD_SECONDS, IdempotentResult, StoredResponse, run_once
from keyvault.services.merchants.merchants import create_merchant
from keyvault.services.recording.audit_chain import verify_audit
from tests.factories import grant, have_peppers
from tests.faults.crash_matrix import in_child
from tests.faults.crashing import CrashInjector


class EveryStatementInjector(CrashInjector):
    """Also counts statements inside a transaction."""

    def _around_statement(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        self.tick("statement:before")
        result = execute(sql, params, many, context)
        self.tick("statement:after")
        return result


def main() -> None:
    have_peppers()
    report: dict[str, Any] = {"crash_points": 0, "violations": []}
    found = dict.fromkeys(("nothing", "claimed", "done"), False)
    for point in range(1, 500):
        killed, left, violations = run_twice(point)
        report["violations"] += [f"point {point}: {violation}" for violation in violations]
        found[left] = found[left] or killed
        if not killed:
            break
        report["crash_points"] = point
    report["found"] = found
    report["audit_intact"] = verify_audit().first_broken is None
    json.dump(report, sys.stdout)


def run_twice(point: int) -> tuple[bool, str, list[str]]:
    """Make a request that is killed at the point, and its retry. Return what the first left, and the violations."""
    at = datetime.now(UTC)
    status = in_child(lambda: ask_with_injector(point, at))
    if not os.WIFSIGNALED(status) and status != 0:
        return False, "nothing", [f"the first request ended with status {status}"]
    row = IdempotentRequest.objects.filter(holder="crd_faults", endpoint=f"point.{point}").first()
    left = "nothing" if row is None else "claimed" if row.status is None else "done"
    made, violations = effects_of(point), []
    if made != (1 if left == "done" else 0):
        violations.append(f"{left}, with {made} effects")
    retried = ask(point, at + timedelta(seconds=HOLD_SECONDS))
    if retried.is_replay is not (left == "done"):
        violations.append(f"{left}, and the retry is_replay={retried.is_replay}")
    if effects_of(point) != 1:
        violations.append(f"{effects_of(point)} effects after the retry")
    if not Merchant.objects.filter(pk=retried.answer.body["merchant_id"]).exists():
        violations.append("the response names an object that does not exist")
    if retried.answer.secret is None:
        violations.append("the response lacks the secret")
    return os.WIFSIGNALED(status), left, violations


def ask_with_injector(point: int, at: datetime) -> None:
    EveryStatementInjector(point).install()
    ask(point, at)


def ask(point: int, at: datetime) -> IdempotentResult:
    def effect() -> StoredResponse:
        name = f"f{point}-{os.getpid()}"
        create_merchant(grant(HOST, P.MERCHANTS_WRITE, at=at), merchant_id=name, name=f"point {point}")
        return StoredResponse(201, {"merchant_id": name, "token": None}, "token", Plaintext(name), "0000000000000001")

    return run_once(
        holder="crd_faults",
        endpoint=f"point.{point}",
        environment=Environment.SANDBOX,
        key="k",
        body=b"{}",
        now=at,
        prepare=lambda: effect,
    )


def effects_of(point: int) -> int:
    return Merchant.objects.filter(name=f"point {point}").count()


if __name__ == "__main__":
    main()

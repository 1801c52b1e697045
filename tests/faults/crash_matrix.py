"""kill -9 at every commit and every call to the secret backend of a whole rotation; run as a process of its own.

    python -m tests.faults.crash_matrix

For each crash point, one after the other: a fresh credential is rotated by a forked child that is killed by
SIGKILL right before or right after its n-th commit or backend write; then another child, minutes later on
its clock, finishes the rotation. Between any two steps the merchant's side is checked: a key that was
delivered is good, and never more than two verify. Ends when a run was not killed any more, and prints one
JSON object. Works in the database and data folder that the environment names; both must be set up.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn

import django

django.setup()

from django.db import connections, transaction

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.backends.local import LocalKeystore
from keyvault.domain.keys import KeyState
from keyvault.models import Key, UsageReporter
from keyvault.services.audit import verify_audit
from keyvault.services.authorization import authorize
from keyvault.services.material import destroy_string, find_stored, list_to_destroy
from keyvault.services.usage import UsageLog
from rotation.models import Rotation
from rotation.services.engine import advance_rotation
from rotation.services.requests import get_rotation
from rotation.states import RotationState as S
from tests.rotation import scene

ROUNDS = 40
MERCHANT = "acme"


class Bomb:
    """Kills this process at the n-th event, counting from 1; 0 never. Events come in pairs: before and after."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def tick(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, call: Callable[..., Any], applies: Callable[..., bool]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not applies(*args):
                return call(*args, **kwargs)
            self.tick()
            result = call(*args, **kwargs)
            self.tick()
            return result

        return wrapped

    def plant(self) -> None:
        """Around the outermost commits, around writes that commit by themselves, around the backend's writes."""

        def is_outermost(atomic: Any, *_: object) -> bool:
            return len(connections["default"].atomic_blocks) == 1

        atomic: Any = transaction.Atomic
        atomic.__exit__ = self.around(atomic.__exit__, is_outermost)
        connections["default"].execute_wrappers.append(self._around_statement)
        for name in ("put", "destroy"):
            setattr(LocalKeystore, name, self.around(getattr(LocalKeystore, name), lambda *_: True))

    def _around_statement(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if context["connection"].in_atomic_block or not sql.startswith(("INSERT", "UPDATE", "DELETE")):
            return execute(sql, params, many, context)
        self.tick()
        result = execute(sql, params, many, context)
        self.tick()
        return result


def main() -> None:
    scene.account(MERCHANT)
    report: dict[str, Any] = {"crash_points": 0, "completed": 0, "violations": []}
    for point in range(1, 500):
        killed, violations = run_once(point)
        report["violations"] += violations
        report["completed"] += 1
        if not killed:
            break
        report["crash_points"] = point
    audit = verify_audit()
    report["audit_intact"] = audit.first_broken is None
    report["audit_entries"] = audit.entries
    json.dump(report, sys.stdout)


def run_once(point: int) -> tuple[bool, list[str]]:
    """One rotation, killed at the point and finished; whether it was killed, and what was not as it must be."""
    clock = scene.Clock(datetime.now(UTC))
    place = scene.account(MERCHANT)
    key, _ = scene.issue(place, clock())
    rotation = scene.rotate(key.credential, clock())
    reporter = UsageLog(now=clock)
    UsageReporter.objects.create(reporter_id=reporter.reporter_id, started_at=clock(), flushed_through_at=clock())
    status = in_child(lambda: drive(rotation.rotation_id, clock, reporter, Bomb(point)))
    killed = os.WIFSIGNALED(status)
    violations = check(rotation.rotation_id, point, "after the kill")
    # Long after: the dead one's lease has run out.
    clock.tick(300)
    status = in_child(lambda: drive(rotation.rotation_id, clock, reporter, Bomb(0)))
    if status != 0:
        violations.append(f"point {point}: the second worker ended with status {status}")
    violations += check(rotation.rotation_id, point, "at the end")
    final = get_rotation(rotation.rotation_id)
    if final.state != S.COMPLETED:
        violations.append(f"point {point}: ends {final.state}, {final.why}")
    elif (final.predecessor.state, final.replacement and final.replacement.state) != ("deactivated", "active"):
        violations.append(f"point {point}: ends with {final.predecessor.state} and {final.replacement!r}")
    UsageReporter.objects.filter(reporter_id=reporter.reporter_id).update(stopped_at=clock())
    return killed, violations


def drive(rotation_id: str, clock: scene.Clock, reporter: UsageLog, bomb: Bomb) -> None:
    """A worker and the merchant, by turns, until the rotation is closed."""
    bomb.plant()
    for _ in range(ROUNDS):
        rotation = get_rotation(rotation_id)
        if rotation.closed_at is not None:
            return
        if rotation.state == S.AWAITING_PROOF and rotation.acknowledged_at is None:
            scene.acknowledge_replacement(rotation_id, clock())
        clock.tick(3)
        reporter.flush()
        advance_rotation(rotation_id, clock)
    raise SystemExit(f"not finished after {ROUNDS} rounds: {get_rotation(rotation_id).state}")


def check(rotation_id: str, point: int, when: str) -> list[str]:
    """Invariant 1: what the merchant was given is good, and at most two keys verify."""
    rotation: Rotation = get_rotation(rotation_id)
    active = set(Key.objects.filter(credential=rotation.credential, state=KeyState.ACTIVE).values_list("pk", flat=True))
    violations = []
    if not 1 <= len(active) <= 2:
        violations.append(f"point {point}, {when}: {len(active)} keys verify")
    stored = find_stored(rotation.credential)
    if stored is None or stored.labels["key_id"] not in active:
        violations.append(f"point {point}, {when}: the key that the merchant reads does not verify")
    for key in list_to_destroy() if when == "at the end" else []:
        destroy_string(authorize(WORKER, P.ISSUANCE_EXECUTE, key.credential.account, now=datetime.now(UTC)), key)
    return violations


def in_child(act: Callable[[], None]) -> int:
    """Runs in a fork, which opens connections of its own; its wait status."""
    connections.close_all()
    pid = os.fork()
    if pid == 0:
        _exit_after(act)
    return os.waitpid(pid, 0)[1]


def _exit_after(act: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        act()
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()

"""kill -9 at every commit and every call to the secret backend of a whole rotation; run as a process of its own.

    python -m tests.faults.crash_matrix [SHARE]

For each crash point in turn, a forked child rotates a new credential and is killed by SIGKILL directly before or after
its n-th side effect. Then another child, whose clock is minutes later, finishes the rotation. Between any two steps the
merchant's side is checked: a delivered key is good, and at most two keys verify. The series ends with the first run
that is not killed. Two more series follow: the rollback, killed at each crash point that the rotation does not have,
and the reissue of a compromised key, killed wherever it makes or delivers the replacement. The output is one JSON
object. The program works in the database and data folder that the environment names; both must be set up.

`SHARE`, such as `1/2`: only this share of the crash points of the first series. The last share runs the others.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import django

django.setup()

from django.conf import settings
from django.db import connections

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.access.roles import Role
from keyvault.backends.base import Mount
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyState
from keyvault.models import Key, Material, UsageReporter, Verifier
from keyvault.services.keys.lifecycle import last_sequence, report_compromise
from keyvault.services.recording.audit_chain import verify_audit
from keyvault.services.recording.authorization import authorize
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.secrets.stored_copies import (
    copy_subject,
    destroy_string,
    find_stored,
    list_to_destroy,
    list_unsettled,
    settle_string,
)
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.work import leases
from rotation.domain.events import RotationState as S
from rotation.models import Rotation
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.interventions import abort_rotation
from rotation.services.rotations.reports import get_rotation
from rotation.services.rotations.requests import reissue_key
from rotation.services.rotations.side_effects import forget_due
from tests.clocks import Clock
from tests.factories import the_operator
from tests.faults.crashing import NOWHERE, CrashInjector
from tests.rotation import scene
from tests.verifiers import make_verifier

ROUNDS = 40
MERCHANT = "acme"
VERIFIER = "verifier-1"


@dataclass(frozen=True, slots=True)
class CrashJourney:
    """The course of a rotation: how it begins, whether it is aborted after delivery, and its expected end.

    `is_awaited`: a verifier accepts the replacement only after the turn that makes it.
    """

    begin: Callable[[Key, datetime], Rotation]
    ends: tuple[S, KeyState, KeyState]
    is_aborted: bool = False
    begins_keyless: bool = False
    is_awaited: bool = False


def _rotate(key: Key, now: datetime) -> Rotation:
    return scene.rotate(key.credential, now)


def _reissue(key: Key, now: datetime) -> Rotation:
    """Report the key as leaked. Its credential has no valid key until the replacement is delivered."""
    place, responder = key.credential.account, the_operator("responder", Role.INCIDENT_RESPONDER)
    report_compromise(authorize(responder, P.KEYS_REPORT_COMPROMISE, place, now=now), key, why="a gist")
    return reissue_key(authorize(scene.tam(), P.ROTATIONS_WRITE, place, now=now), key.credential, "a gist")


FORWARD = CrashJourney(_rotate, (S.COMPLETED, KeyState.DEACTIVATED, KeyState.ACTIVE))
AWAITED = CrashJourney(_rotate, FORWARD.ends, is_awaited=True)
BACK = CrashJourney(_rotate, (S.ROLLED_BACK, KeyState.ACTIVE, KeyState.DEACTIVATED), is_aborted=True)
REISSUE = CrashJourney(_reissue, (S.COMPLETED, KeyState.COMPROMISED, KeyState.ACTIVE), begins_keyless=True)


def main() -> None:
    share, shares = map(int, (sys.argv[1] if len(sys.argv) > 1 else "1/1").split("/"))
    scene.account(MERCHANT)
    notes = notes_of("forward")
    report: dict[str, Any] = {"crash_points": 0, "violations": []}
    for point in range(share, 500, shares):
        killed, violations = run_once(FORWARD, CrashInjector(point, notes))
        report["violations"] += [f"point {point}: {violation}" for violation in violations]
        if not killed:
            break
        report["crash_points"] = point
    report["names"] = met(notes)
    if share == shares:
        run_other_series(report)
    audit = verify_audit()
    report["audit_intact"] = audit.first_broken is None
    report["audit_entries"] = audit.entries
    json.dump(report, sys.stdout)


def run_other_series(report: dict[str, Any]) -> None:
    report["awaited"] = run_at(
        AWAITED, [edge for edge in learn(AWAITED, "awaited") if edge not in report["names"]], report
    )
    report["back"] = run_at(BACK, [edge for edge in learn(BACK, "back") if edge not in report["names"]], report)
    its_own = ("rotation.", "publishing:")
    report["reissue"] = run_at(
        REISSUE, [edge for edge in learn(REISSUE, "reissue") if edge.startswith(its_own)], report
    )


def run_at(journey: CrashJourney, edges: list[str], report: dict[str, Any]) -> list[str]:
    """Run once for each crash point. Return those at which the run was killed."""
    met_again = []
    for edge in edges:
        killed, violations = run_once(journey, CrashInjector(edge))
        report["violations"] += [f"{edge}: {violation}" for violation in violations]
        met_again += [edge] if killed else []
    return met_again


def learn(journey: CrashJourney, name: str) -> list[str]:
    """Return the crash points of a journey, from an undisturbed run."""
    killed, violations = run_once(journey, CrashInjector(NOWHERE, notes_of(name)))
    if killed or violations:
        raise SystemExit(f"undisturbed it fails: {violations}")
    return met(notes_of(name))


def notes_of(name: str) -> Path:
    return Path(settings.DATA_DIR) / f"edges-{name}"


def met(notes: Path) -> list[str]:
    return list(dict.fromkeys(notes.read_text().split("\n")[:-1]))


def run_once(journey: CrashJourney, injector: CrashInjector) -> tuple[bool, list[str]]:
    """Rotate once, killed by the injector, and finish. Return whether it was killed, and the violations."""
    clock = Clock(datetime.now(UTC))
    key, _ = scene.issue(scene.account(MERCHANT), clock())
    rotation = journey.begin(key, clock())
    reporter = UsageLog(now=clock)
    UsageReporter.objects.create(
        reporter_id=reporter.reporter_id, started_at=clock(), flushed_through_at=clock(), peppers={}
    )
    if journey.is_awaited:
        make_verifier(VERIFIER, staleness_ms=3_600_000)
    status = in_child(lambda: drive(journey, rotation.rotation_id, clock, reporter, injector))
    killed = os.WIFSIGNALED(status)
    violations = check(journey, rotation.rotation_id, "after the kill")
    # Much later: the lease of the killed worker has expired.
    clock.tick(300)
    status = in_child(lambda: drive(journey, rotation.rotation_id, clock, reporter, CrashInjector()))
    if status != 0:
        violations.append(f"the second worker ended with status {status}")
    violations += check(journey, rotation.rotation_id, "at the end")
    destroy_what_is_due()
    final = get_rotation(rotation.rotation_id)
    violations += find_odd_copies(final)
    ended = (final.state, final.predecessor.state, final.replacement and final.replacement.state)
    if ended != journey.ends:
        violations.append(f"it ends {ended}, {final.why}")
    UsageReporter.objects.filter(reporter_id=reporter.reporter_id).update(stopped_at=clock())
    Verifier.objects.all().delete()
    forget_due(clock())
    violations += [
        f"{path} remains" for path in secret_backend().list_paths(Mount.SANDBOX) if path.startswith("pending")
    ]
    return killed, violations


def drive(journey: CrashJourney, rotation_id: str, clock: Clock, reporter: UsageLog, injector: CrashInjector) -> None:
    """Act as worker, operator and merchant in turn, until the rotation is closed."""
    injector.install()
    for _ in range(ROUNDS):
        rotation = get_rotation(rotation_id)
        if rotation.closed_at is not None:
            return
        if rotation.state == S.AWAITING_PROOF and journey.is_aborted:
            grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
            abort_rotation(grant, rotation, "a bad day")
        elif rotation.state == S.STAGED and rotation.replacement is not None and journey.is_awaited:
            Verifier.objects.update(confirmed_sequence=last_sequence(rotation.replacement))
        elif rotation.state == S.AWAITING_PROOF and rotation.acknowledged_at is None:
            scene.acknowledge_replacement(rotation_id, clock())
        clock.tick(3)
        reporter.flush()
        advance_rotation(rotation_id, clock)
        settle_copies(rotation_id, clock())
    raise SystemExit(f"not finished after {ROUNDS} rounds: {get_rotation(rotation_id).state}")


def check(journey: CrashJourney, rotation_id: str, when: str) -> list[str]:
    """Check invariant 1: the key that the merchant reads is good, and at most two keys verify."""
    rotation: Rotation = get_rotation(rotation_id)
    active = set(Key.objects.filter(credential=rotation.credential, state=KeyState.ACTIVE).values_list("pk", flat=True))
    violations, is_keyless = [], journey.begins_keyless and rotation.delivered_at is None
    if not (0 if is_keyless else 1) <= len(active) <= 2:
        violations.append(f"{when}, {len(active)} keys verify")
    stored = find_stored(rotation.credential)
    if not is_keyless and (stored is None or stored.labels["key_id"] not in active):
        violations.append(f"{when}, the key that the merchant reads does not verify")
    return violations


def settle_copies(rotation_id: str, now: datetime) -> None:
    """Settle due copies as the maintenance task does, at a given time: hide or restore a quarantined key's copy."""
    grant = authorize(WORKER, P.ISSUANCE_EXECUTE, get_rotation(rotation_id).credential.account, now=now)
    for key in list_unsettled(Environment.SANDBOX):
        lease = leases.claim(copy_subject(key), now, ignore_due_at=True)
        if lease is not None:
            settle_string(grant, key, lease, lambda: now)
            leases.release(lease)


def find_odd_copies(rotation: Rotation) -> list[str]:
    """Return the copies that differ from what their rows state."""
    credential = rotation.credential
    versions = secret_backend().versions(Mount.SANDBOX, credential.backend_path)
    states = {each.version: each.state.value for each in versions}
    expected = {Material.HELD: "live", Material.DELETED: "deleted", Material.DESTROYED: "destroyed"}
    return [
        f"the copy of a key that is {key.material} is {states.get(key.backend_version or 0)}"
        for key in credential.keys.exclude(material=Material.NONE)
        if expected.get(Material(key.material)) != states.get(key.backend_version or 0)
    ]


def destroy_what_is_due() -> None:
    for key in list_to_destroy(Environment.SANDBOX):
        destroy_string(authorize(WORKER, P.ISSUANCE_EXECUTE, key.credential.account, now=datetime.now(UTC)), key)


def in_child(run: Callable[[], None]) -> int:
    """Run in a forked child, which opens its own connections. Return its wait status."""
    connections.close_all()
    pid = os.fork()
    if pid == 0:
        _exit_after(run)
    return os.waitpid(pid, 0)[1]


def _exit_after(run: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        run()
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()

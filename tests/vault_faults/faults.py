"""The faults that are injected into the server or into one of its requests."""

import shutil

from rotation.domain.events import RotationState as S

from .harness import SHORT_TIMEOUT_SECONDS, VaultHarness
from .journey import VaultFault
from .proxy import Injection

TOO_LATE_SECONDS = 1.5 * SHORT_TIMEOUT_SECONDS

SEALED = VaultFault(
    "sealed", lambda harness: Injection(before=harness.server.seal), lambda harness: harness.server.unseal()
)
KILLED = VaultFault("killed", lambda harness: Injection(before=harness.kill), VaultHarness.restart)
KILLED_AFTER = VaultFault(
    "killed before it answers", lambda harness: Injection(after=harness.kill, is_lost=True), VaultHarness.restart
)
REVOKED = VaultFault("tokens revoked", lambda harness: Injection(before=harness.revoke_tokens), lasts=False)
DELETED = VaultFault(
    "roles deleted", lambda harness: Injection(before=harness.delete_roles), VaultHarness.restore_roles, stalls=True
)
NARROWED = VaultFault(
    "policies narrowed",
    lambda harness: Injection(before=harness.narrow_policies),
    VaultHarness.restore_access,
    stalls=True,
)
LIMITED = VaultFault("rate limited", lambda harness: Injection(before=harness.limit_rate), VaultHarness.lift_limit)
FULL = VaultFault("audit disk full", lambda harness: Injection(before=harness.fill_disk), VaultHarness.empty_disk)
LOST = VaultFault("reply lost", lambda harness: Injection(is_lost=True), lasts=False)
SLOW = VaultFault(
    "reply too late", lambda harness: Injection(slow_seconds=TOO_LATE_SECONDS), lasts=False, needs_short_timeouts=True
)
LATE = VaultFault(
    "request too late", lambda harness: Injection(late_seconds=TOO_LATE_SECONDS), lasts=False, needs_short_timeouts=True
)
CRAWLING = VaultFault(
    "all replies too late",
    lambda harness: Injection(before=harness.slow_down),
    VaultHarness.restore_speed,
    needs_short_timeouts=True,
)

FAULTS = (SEALED, KILLED, KILLED_AFTER, REVOKED, DELETED, NARROWED, LIMITED, FULL, LOST, SLOW, LATE, CRAWLING)

SCENARIOS: dict[str, S | None] = {
    "forward": None,
    "aborted when delivered": S.AWAITING_PROOF,
    "aborted in quarantine": S.QUARANTINE,
}
"""The state in which a scenario aborts the rotation."""


def can_be_injected(fault: VaultFault) -> bool:
    """Return whether this machine can inject the fault."""
    return fault is not FULL or shutil.which("prlimit") is not None

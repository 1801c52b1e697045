"""What may befall the server, or a request to it."""

import shutil

from rotation.domain.events import RotationState as S

from .journey import Fault
from .proxy import Strike
from .stand import IMPATIENT_SECONDS, Stand

TOO_LATE_SECONDS = 1.5 * IMPATIENT_SECONDS

SEALED = Fault("sealed", lambda stand: Strike(before=stand.server.seal), lambda stand: stand.server.unseal())
KILLED = Fault("killed", lambda stand: Strike(before=stand.kill), Stand.start_again)
KILLED_AFTER = Fault(
    "killed before it answers", lambda stand: Strike(after=stand.kill, is_lost=True), Stand.start_again
)
REVOKED = Fault("tokens revoked", lambda stand: Strike(before=stand.revoke_tokens), lasts=False)
DELETED = Fault("roles deleted", lambda stand: Strike(before=stand.delete_roles), Stand.mend_roles, stalls=True)
NARROWED = Fault(
    "policies narrowed", lambda stand: Strike(before=stand.narrow_policies), Stand.mend_access, stalls=True
)
LIMITED = Fault("rate limited", lambda stand: Strike(before=stand.limit_rate), Stand.lift_limit)
FULL = Fault("audit disk full", lambda stand: Strike(before=stand.fill_disk), Stand.empty_disk)
LOST = Fault("reply lost", lambda stand: Strike(is_lost=True), lasts=False)
SLOW = Fault("reply too late", lambda stand: Strike(slow_seconds=TOO_LATE_SECONDS), lasts=False, is_impatient=True)
LATE = Fault("request too late", lambda stand: Strike(late_seconds=TOO_LATE_SECONDS), lasts=False, is_impatient=True)
CRAWLING = Fault(
    "all replies too late", lambda stand: Strike(before=stand.slow_down), Stand.speed_up, is_impatient=True
)

FAULTS = (SEALED, KILLED, KILLED_AFTER, REVOKED, DELETED, NARROWED, LIMITED, FULL, LOST, SLOW, LATE, CRAWLING)

WAYS: dict[str, S | None] = {
    "forward": None,
    "aborted when delivered": S.AWAITING_PROOF,
    "aborted in quarantine": S.QUARANTINE,
}
"""Of a rotation: in which state it is aborted."""


def can_be_staged(fault: Fault) -> bool:
    """Whether this machine has what it takes."""
    return fault is not FULL or shutil.which("prlimit") is not None

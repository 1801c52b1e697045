"""What happens to a rotation from outside, and what it does then: the table of states by events. PURE.

`OUTCOMES[event]` names, for each open state, the state to go to, or STAYS. A rotation that stalled is judged
by the state it stalled in. Every cell is tested, `tests/rotation/domain/test_events.py`.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class RotationState(StrEnum):
    REQUESTED = "requested"
    AWAITING_APPROVAL = "awaiting_approval"
    SCHEDULED = "scheduled"
    EMERGENCY = "emergency"
    STAGED = "staged"
    PUBLISHING = "publishing"
    AWAITING_PROOF = "awaiting_proof"
    OVERLAP = "overlap"
    QUARANTINE = "quarantine"
    REVOKING = "revoking"
    ROLLING_BACK = "rolling_back"
    COMPLETED = "completed"
    ROLLED_BACK = "rolled_back"
    REJECTED = "rejected"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    STALLED = "stalled"


S = RotationState


class Event(StrEnum):
    """In the order in which they are looked for: of several at once the first one counts."""

    REPLACEMENT_COMPROMISED = "replacement_compromised"
    REPLACEMENT_REVOKED = "replacement_revoked"
    REPLACEMENT_EXPIRED = "replacement_expired"
    PREDECESSOR_COMPROMISED = "predecessor_compromised"
    PREDECESSOR_REVOKED = "predecessor_revoked"
    PREDECESSOR_EXPIRED = "predecessor_expired"
    REPLACEMENT_SUSPENDED = "replacement_suspended"
    PREDECESSOR_SUSPENDED = "predecessor_suspended"
    QUARANTINE_LIFTED = "quarantine_lifted"
    TRIED_BY_KNOWN_SOURCE = "tried_by_known_source"
    TRIED_BY_UNKNOWN_SOURCE = "tried_by_unknown_source"
    DEADLINE = "deadline"
    ABORTED = "aborted"


class Stays(StrEnum):
    """What leaves the state as it is. `REFUSED`: a person asked for what cannot be, and is told so."""

    STAYS = "stays"
    REFUSED = "refused"


STAYS, REFUSED = Stays.STAYS, Stays.REFUSED

Outcome = RotationState | Stays

_ASKED = (S.REQUESTED, S.AWAITING_APPROVAL)
_UNDELIVERED = (S.STAGED, S.PUBLISHING)
_DELIVERED = (S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE)

OPEN = (*_ASKED, S.SCHEDULED, S.EMERGENCY, *_UNDELIVERED, *_DELIVERED, S.REVOKING, S.ROLLING_BACK)
"""Every state that is left again, but for `stalled`, which stands for the one that it stalled in."""


def _row(*cells: tuple[tuple[RotationState, ...], Outcome]) -> Mapping[RotationState, Outcome]:
    row: dict[RotationState, Outcome] = dict.fromkeys(OPEN, STAYS)
    for states, outcome in cells:
        row.update(dict.fromkeys(states, outcome))
    return MappingProxyType(row)


# The replacement is gone: the predecessor goes on. Once it is revoked there is nothing to go back to.
_REPLACEMENT_ENDED = _row((_UNDELIVERED, S.CANCELLED), (_DELIVERED, S.CANCELLED), ((S.ROLLING_BACK,), S.ROLLED_BACK))

# The predecessor is gone against everybody's plan: what was asked for is now all that the merchant can hope for.
_PREDECESSOR_LOST = _row(
    (_ASKED, S.EMERGENCY),
    ((S.SCHEDULED,), S.EMERGENCY),
    (_DELIVERED, S.COMPLETED),
    # The backend holds the predecessor by now: the replacement is written there again.
    ((S.ROLLING_BACK,), S.PUBLISHING),
)

OUTCOMES: Mapping[Event, Mapping[RotationState, Outcome]] = MappingProxyType(
    {
        Event.REPLACEMENT_COMPROMISED: _REPLACEMENT_ENDED,
        Event.REPLACEMENT_REVOKED: _REPLACEMENT_ENDED,
        Event.REPLACEMENT_EXPIRED: _REPLACEMENT_ENDED,
        Event.PREDECESSOR_COMPROMISED: _PREDECESSOR_LOST,
        Event.PREDECESSOR_EXPIRED: _PREDECESSOR_LOST,
        # Revoked on purpose, and there was no replacement yet: nobody wants the credential to go on.
        Event.PREDECESSOR_REVOKED: _row(
            (_ASKED, S.CANCELLED),
            ((S.SCHEDULED,), S.CANCELLED),
            (_DELIVERED, S.COMPLETED),
            ((S.ROLLING_BACK,), S.PUBLISHING),
        ),
        Event.REPLACEMENT_SUSPENDED: _row(
            (_UNDELIVERED, S.STALLED), (_DELIVERED, S.STALLED), ((S.ROLLING_BACK,), S.STALLED)
        ),
        Event.PREDECESSOR_SUSPENDED: _row(
            ((S.SCHEDULED,), S.STALLED),
            (_UNDELIVERED, S.STALLED),
            ((S.AWAITING_PROOF, S.OVERLAP), S.STALLED),
            ((S.ROLLING_BACK,), S.STALLED),
        ),
        # Somebody resumed by hand the key that we had suspended.
        Event.QUARANTINE_LIFTED: _row(((S.QUARANTINE,), S.STALLED), ((S.ROLLING_BACK,), S.STALLED)),
        # Only where the plan allows it, once, and never for a public key: see `states`.
        Event.TRIED_BY_KNOWN_SOURCE: _row(((S.QUARANTINE,), S.OVERLAP)),
        Event.TRIED_BY_UNKNOWN_SOURCE: _row(),
        # Both keys stay. The plan may say instead that a proved rotation goes on to the quarantine.
        Event.DEADLINE: _row(
            ((S.SCHEDULED,), S.STALLED),
            (_UNDELIVERED, S.STALLED),
            ((S.AWAITING_PROOF, S.OVERLAP), S.STALLED),
            ((S.ROLLING_BACK,), S.STALLED),
        ),
        Event.ABORTED: _row(
            (_ASKED, S.CANCELLED),
            ((S.SCHEDULED, S.EMERGENCY), S.CANCELLED),
            (_UNDELIVERED, S.CANCELLED),
            (_DELIVERED, S.ROLLING_BACK),
            ((S.REVOKING, S.ROLLING_BACK), REFUSED),
        ),
    }
)

"""The states and the external events of a rotation, and the outcome of each event in each state. PURE.

`OUTCOMES[event]` names, for each open state, the state to go to, or STAYS. For a stalled rotation the state that it
stalled in counts. `tests/rotation/domain/test_events.py` tests every cell.
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
    """External events, in order of precedence: when several occur at the same time, the first one counts."""

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
    """Outcomes that keep the state. `REFUSED`: a person's request that the state does not allow raises an error."""

    STAYS = "stays"
    REFUSED = "refused"


STAYS, REFUSED = Stays.STAYS, Stays.REFUSED

Outcome = RotationState | Stays

_REQUESTED = (S.REQUESTED, S.AWAITING_APPROVAL)
_UNDELIVERED = (S.STAGED, S.PUBLISHING)
_DELIVERED = (S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE)

OPEN = (*_REQUESTED, S.SCHEDULED, S.EMERGENCY, *_UNDELIVERED, *_DELIVERED, S.REVOKING, S.ROLLING_BACK)
"""Every state that is not final. `stalled` is absent: the state that the rotation stalled in stands for it."""


def _row(*cells: tuple[tuple[RotationState, ...], Outcome]) -> Mapping[RotationState, Outcome]:
    row: dict[RotationState, Outcome] = dict.fromkeys(OPEN, STAYS)
    for states, outcome in cells:
        row.update(dict.fromkeys(states, outcome))
    return MappingProxyType(row)


# The predecessor stays in use. Once it is revoked there is nothing to go back to.
_REPLACEMENT_ENDED = _row((_UNDELIVERED, S.CANCELLED), (_DELIVERED, S.CANCELLED), ((S.ROLLING_BACK,), S.ROLLED_BACK))

# The predecessor ended unplanned, so the requested replacement is the merchant's only key.
_PREDECESSOR_LOST = _row(
    (_REQUESTED, S.EMERGENCY),
    ((S.SCHEDULED,), S.EMERGENCY),
    (_DELIVERED, S.COMPLETED),
    # The backend already holds the predecessor, so the worker writes the replacement there again.
    ((S.ROLLING_BACK,), S.PUBLISHING),
)

OUTCOMES: Mapping[Event, Mapping[RotationState, Outcome]] = MappingProxyType(
    {
        Event.REPLACEMENT_COMPROMISED: _REPLACEMENT_ENDED,
        Event.REPLACEMENT_REVOKED: _REPLACEMENT_ENDED,
        Event.REPLACEMENT_EXPIRED: _REPLACEMENT_ENDED,
        Event.PREDECESSOR_COMPROMISED: _PREDECESSOR_LOST,
        Event.PREDECESSOR_EXPIRED: _PREDECESSOR_LOST,
        # Revoked on purpose before there was a replacement: the credential is no longer needed.
        Event.PREDECESSOR_REVOKED: _row(
            (_REQUESTED, S.CANCELLED),
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
        # An operator resumed the key that the rotation had suspended.
        Event.QUARANTINE_LIFTED: _row(((S.QUARANTINE,), S.STALLED), ((S.ROLLING_BACK,), S.STALLED)),
        # Only where the plan allows it, once, and never for a public key: see `states`.
        Event.TRIED_BY_KNOWN_SOURCE: _row(((S.QUARANTINE,), S.OVERLAP)),
        Event.TRIED_BY_UNKNOWN_SOURCE: _row(),
        # Both keys stay. The plan may instead send a proved rotation on to the quarantine.
        Event.DEADLINE: _row(
            ((S.SCHEDULED,), S.STALLED),
            (_UNDELIVERED, S.STALLED),
            ((S.AWAITING_PROOF, S.OVERLAP), S.STALLED),
            ((S.ROLLING_BACK,), S.STALLED),
        ),
        Event.ABORTED: _row(
            (_REQUESTED, S.CANCELLED),
            ((S.SCHEDULED, S.EMERGENCY), S.CANCELLED),
            (_UNDELIVERED, S.CANCELLED),
            (_DELIVERED, S.ROLLING_BACK),
            ((S.REVOKING, S.ROLLING_BACK), REFUSED),
        ),
    }
)

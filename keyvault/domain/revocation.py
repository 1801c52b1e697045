"""Revocation reasons: those of RFC 5280 section 5.3.1 that apply to an API key, and the resulting states.

Revocation is an operation with a reason, not a state: a compromise leads to `compromised`, every other reason to
`deactivated`. `certificateHold` corresponds to the state `suspended`, which has its own operation.
"""

from enum import StrEnum

from keyvault.domain.keys import KeyState


class RevocationReason(StrEnum):
    UNSPECIFIED = "unspecified"
    KEY_COMPROMISE = "key_compromise"
    AFFILIATION_CHANGED = "affiliation_changed"
    SUPERSEDED = "superseded"
    CESSATION_OF_OPERATION = "cessation_of_operation"
    PRIVILEGE_WITHDRAWN = "privilege_withdrawn"


def state_after(reason: RevocationReason) -> KeyState:
    if reason is RevocationReason.KEY_COMPROMISE:
        return KeyState.COMPROMISED
    return KeyState.DEACTIVATED

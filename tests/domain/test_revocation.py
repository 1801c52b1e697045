"""Reasons of a revocation, and the state that each leads to."""

import pytest

from keyvault.domain.keys import DEAD_STATES, KeyState
from keyvault.domain.revocation import RevocationReason, state_after

# RFC 5280, section 5.3.1, in its own spelling.
RFC_5280 = {
    "unspecified",
    "keyCompromise",
    "cACompromise",
    "affiliationChanged",
    "superseded",
    "cessationOfOperation",
    "certificateHold",
    "removeFromCRL",
    "privilegeWithdrawn",
    "aACompromise",
}


def camel(snake: str) -> str:
    first, *rest = snake.split("_")
    return first + "".join(word.capitalize() for word in rest)


def test_reasons_are_those_of_rfc_5280_that_fit_a_key() -> None:
    ours = {camel(reason) for reason in RevocationReason}
    assert ours <= RFC_5280
    assert RFC_5280 - ours == {"cACompromise", "aACompromise", "certificateHold", "removeFromCRL"}


@pytest.mark.parametrize("reason", RevocationReason)
def test_revocation_for_any_reason_leads_to_a_dead_state(reason: RevocationReason) -> None:
    """Every reason leads to a terminal state."""
    assert state_after(reason) in DEAD_STATES


@pytest.mark.parametrize("reason", RevocationReason)
def test_revocation_for_compromise_alone_leads_to_compromised(reason: RevocationReason) -> None:
    is_compromise = reason is RevocationReason.KEY_COMPROMISE
    assert (state_after(reason) is KeyState.COMPROMISED) == is_compromise

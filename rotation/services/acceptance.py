"""Who has to say that they would accept a new key before it is given to anybody, and who has.

Every verification reads the database today, so that nobody has to: a key is accepted everywhere as soon as its
activation is committed. A verifier that caches registers here, and its confirmation is waited for.
"""

from collections.abc import Callable
from datetime import datetime

from keyvault.domain.keys import KeyState
from keyvault.models import Key

Unconfirmed = Callable[[Key, datetime], list[str]]
"""Names the live verifiers that have not confirmed the key's activation, their staleness bound not yet past."""


def _nobody_caches(key: Key, now: datetime) -> list[str]:
    return []


list_unconfirmed: Unconfirmed = _nobody_caches


def is_accepted_everywhere(key: Key, now: datetime) -> bool:
    """Whether every verifier would accept the key now."""
    return KeyState(key.state) is KeyState.ACTIVE and not list_unconfirmed(key, now)

"""The participants: merchants with one key each, and a gateway's token."""

from datetime import UTC, datetime

from keyvault.access.permissions import Permission as P
from keyvault.domain.plaintext import Plaintext
from tests.factories import make_token
from tests.faults.traffic import Merchant
from tests.rotation import scene

ACCOUNTS = 8


def make_merchants(count: int) -> list[Merchant]:
    """Make `count` credentials in a few merchant accounts, each with an active key in the secret backend."""
    places = [scene.account(f"merchant{number}") for number in range(min(ACCOUNTS, count))]
    made = []
    for number in range(count):
        key, text = scene.issue(places[number % len(places)], datetime.now(UTC), label=f"credential {number}")
        made.append(Merchant(key.credential, {key.key_id: text}))
    return made


def gateway_token() -> Plaintext:
    return make_token(P.KEYS_VERIFY)[1]

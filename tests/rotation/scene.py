"""A credential with one good key and a rotation of it, for the engine's tests.

It uses the real services and no fixture, because the processes of the crash tests use it too.
"""

from datetime import datetime, timedelta
from typing import Any

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import KeyHolder, OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.backends.base import BackendUnavailableError
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Account, Credential, Key, Merchant
from keyvault.models.usage import UseOutcome
from keyvault.services.keys.recipient_keys import set_recipient_key
from keyvault.services.merchants.merchants import find_account
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.plan_fields import PlanOverrides, Proof
from rotation.models import Rotation
from rotation.services.rotations.interventions import acknowledge
from rotation.services.rotations.reports import get_rotation
from rotation.services.rotations.requests import request_rotation
from tests import factories
from tests.factories import have_peppers, make_merchant, the_operator
from tests.starting_rows import start_with


def later(now: datetime, seconds: float) -> datetime:
    return now + timedelta(seconds=seconds)


def tam() -> OperatorPrincipal:
    return the_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)


def approver() -> OperatorPrincipal:
    return the_operator("approver", Role.APPROVER)


def admin() -> OperatorPrincipal:
    return the_operator("admin", Role.KEY_ADMINISTRATOR)


def account(merchant_id: str = "acme", environment: Environment = Environment.SANDBOX) -> Account:
    """Return the merchant's account, created on first use."""
    if not Merchant.objects.filter(merchant_id=merchant_id).exists():
        start_with(_make_merchant, merchant_id)
    return find_account(merchant_id, environment)


def _make_merchant(merchant_id: str) -> None:
    """Create the merchant and, unless they exist, what its first key needs: the peppers and the requester."""
    have_peppers()
    make_merchant(merchant_id)
    tam()


def issue(place: Account, now: datetime, **chosen: Any) -> tuple[Key, Plaintext]:
    """Create a credential and return its first key and the key string."""
    key, text = factories.issue(place, at=now, **chosen)
    return Key.objects.select_related("credential__account__merchant").get(pk=key.pk), text


def first_key(
    now: datetime, merchant_id: str = "acme", environment: Environment = Environment.SANDBOX
) -> tuple[Key, Plaintext]:
    """Return the first key of an account and the key string, for tests that start with it.

    In production it is always issued: the database accepts no request that is approved before its approval.
    """
    if environment is Environment.PRODUCTION:
        return issue(account(merchant_id, environment), now)
    key, text = start_with(_first_key, now, merchant_id)
    return key, Plaintext(text)


def _first_key(now: datetime, merchant_id: str) -> tuple[Key, str]:
    key, text = issue(account(merchant_id), now)
    return key, text.reveal()


def rotate(credential: Credential, now: datetime, **overrides: object) -> Rotation:
    """Return an approved sandbox rotation, by acknowledgement and with short periods by default."""
    chosen = {"proof": Proof.ACK, "quiet_seconds": 5, "quarantine_seconds": 5, **overrides}
    grant = authorize(tam(), P.ROTATIONS_WRITE, credential.account, now=now)
    return request_rotation(grant, credential, PlanOverrides(**chosen))  # type: ignore[arg-type]  # the test's own values


RECIPIENT = "3p7bfXt9wbTTW2HC7OQ1Nz-DQ8hbeGdNrfx-FG-IK08"
"""A merchant's public key (X25519)."""


def set_recipient(key: Key, now: datetime) -> None:
    """Set the recipient key of the key's credential, with the key itself."""
    grant = authorize(holder_of(key), P.RECIPIENTS_WRITE, key.credential.account, now=now)
    set_recipient_key(grant, key, RECIPIENT)


def holder_of(key: Key) -> KeyHolder:
    """Return the holder that authenticated with the key."""
    place = key.credential.account
    return KeyHolder(
        key_id=key.key_id,
        credential_id=key.credential_id,
        kind=KeyKind(key.credential.kind),
        environment=Environment(place.environment),
        merchant_id=place.merchant_id,
    )


def acknowledge_replacement(rotation_id: str, now: datetime) -> None:
    rotation = get_rotation(rotation_id)
    assert rotation.replacement is not None
    place = rotation.credential.account
    grant = authorize(holder_of(rotation.replacement), P.ROTATIONS_ACKNOWLEDGE, place, now=now)
    acknowledge(grant, rotation)


def use(
    log: UsageLog, key_id: str, count: int = 1, source: str = "192.0.2.1", outcome: UseOutcome = UseOutcome.ALLOWED
) -> None:
    """Use the key and report the use."""
    for _ in range(count):
        log.note(key_id, source=source, user_agent="test", endpoint="orders.create", outcome=outcome)
    log.flush()


def unavailable(*args: object, **kwargs: object) -> int:
    """Stand in for a backend method during an outage."""
    raise BackendUnavailableError("The backend is sealed.")

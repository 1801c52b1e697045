"""Collect an issued key once, or discard it after the deadline."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import Principal, Service
from keyvault.backends.base import BackendMissingError
from keyvault.domain.environments import Environment
from keyvault.domain.errors import NotFoundError, StateConflictError
from keyvault.domain.issuance import COLLECT_WITHIN, COLLECTED_DELIVERIES, Delivery, IssuanceState
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyState
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.recipient_keys import Sealed, seal_to
from keyvault.models import IssuanceRequest, Key, KeyUse, Material
from keyvault.services.keys.lifecycle import discard_key
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.stored_copies import read_string, require_served


@dataclass(frozen=True, slots=True)
class Handover:
    """A key for the service that requested it: either its string, or the string sealed to the recipient."""

    key: Key
    text: Plaintext | None
    sealed: Sealed | None


def is_requested_by(request: IssuanceRequest, principal: Principal) -> bool:
    """Whether the principal is the requesting token, or a token of the same rotation lineage."""
    token = request.requested_via
    return isinstance(principal, Service) and token is not None and token.lineage == principal.lineage


def read_handover(grant: Grant, request: IssuanceRequest) -> Handover:
    """Read what `record_collection` hands over. Call it outside a transaction, because it reads the secret backend.

    Raises NotFoundError for any principal but the requesting service, and if this process does not serve the
    environment. Raises StateConflictError if there is nothing to collect, or nothing that may be sent unsealed. Raises
    BackendUnavailableError.
    """
    if not is_requested_by(request, grant.principal):
        raise NotFoundError(internal=f"{grant.principal.actor} did not request {request.issuance_request_id}")
    environment = Environment(request.account.environment)
    require_served(environment)
    key = require_collectable(request, grant.at)
    if request.plan_digest != request.plan().digest():
        raise StateConflictError(
            "The request differs from the approved plan. Make a new request.",
            internal=f"{request.issuance_request_id} digest",
        )
    is_sealed = request.delivery == Delivery.SEALED
    if environment == Environment.PRODUCTION and not is_sealed:
        raise StateConflictError("A production key is only sent sealed. Read it from the secret backend.")
    try:
        text = read_string(key)
    except BackendMissingError as error:
        raise StateConflictError("The key ended before it was collected. Make a new request.") from error
    return Handover(key, None, seal_to(request.recipient_public_key, text)) if is_sealed else Handover(key, text, None)


def require_collectable(request: IssuanceRequest, now: datetime) -> Key:
    """Return the key that is ready for collection. Raises StateConflictError if there is none."""
    if request.state == IssuanceState.COLLECTED:
        raise StateConflictError("The key was collected already. It cannot be collected twice.")
    if request.state == IssuanceState.BURNED or is_uncollected(request, now):
        raise StateConflictError("The key was not collected in time. Make a new request.")
    if request.state != IssuanceState.ISSUED or request.key is None:
        raise StateConflictError(f"There is no key to collect: the request is {request.state}.")
    return request.key


@contextmanager
def record_collection(grant: Grant, request: IssuanceRequest) -> Iterator[None]:
    """Record the only collection of a request together with the caller's effects.

    A private key that was handed over is then due for destruction in the secret backend. Raises StateConflictError if
    another collection came first.
    """
    key = request.key
    if key is None:
        raise TypeError("only an issued request can be collected")
    with recorded(
        grant,
        P.ISSUANCE_COLLECT,
        "issuance.collected",
        account=request.account,
        issuance_request_id=request.issuance_request_id,
        key_id=key.key_id,
    ):
        request.compare_and_swap(state=IssuanceState.COLLECTED, collected_at=grant.at)
        if request.delivery in COLLECTED_DELIVERIES and key.credential.kind == KeyKind.PRIVATE:
            key.compare_and_swap(material=Material.DESTROY_DUE)
        yield


def discard_uncollected(grant: Grant, request: IssuanceRequest) -> None:
    """Discard a key that was not collected before its deadline.

    The key was never handed over. The merchant was notified of its issue, and is therefore notified of its revocation.

    Raises StateConflictError if the deadline has not passed, the key was collected meanwhile, or it is in use.
    """
    key = request.key
    if key is None or not is_uncollected(request, grant.at):
        raise StateConflictError("The key was collected, or may still be collected.")
    is_alive = KeyState(key.state) not in DEAD_STATES
    if is_alive and KeyUse.objects.filter(key=key).exists():
        raise StateConflictError("The key is in use. An operator must decide whether to revoke it.")
    with recorded(
        grant,
        P.ISSUANCE_EXECUTE,
        "issuance.burned",
        account=request.account,
        issuance_request_id=request.issuance_request_id,
        key_id=key.key_id,
    ):
        request.compare_and_swap(state=IssuanceState.BURNED)
        if is_alive:
            discard_key(grant, key)
            announce(
                grant,
                NoticeKind.KEY_REVOKED,
                request.account,
                key.key_id,
                reason=str(key.reason),
                key_id=key.key_id,
                credential_id=key.credential_id,
            )


def is_uncollected(request: IssuanceRequest, now: datetime) -> bool:
    """Whether the key had to be collected and its deadline has passed, whether or not the sweep has run.

    A public key never counts as uncollected: it can be shown again, so its users need not have collected it.
    """
    return (
        request.state == IssuanceState.ISSUED
        and request.kind == KeyKind.PRIVATE
        and request.delivery in COLLECTED_DELIVERIES
        and request.issued_at is not None
        and now >= request.issued_at + COLLECT_WITHIN
    )

"""What becomes of an issued key: collected once by whoever asked for it, or burned when they do not come in time."""

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
from keyvault.domain.recipients import Sealed, seal_to
from keyvault.models import IssuanceRequest, Key, KeyUse, Material
from keyvault.services.keys.lifecycle import discard_key
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.stored_copies import read_string, require_served


@dataclass(frozen=True, slots=True)
class Handover:
    """A key for the service that asked: its string, or the string sealed to the recipient; one of the two."""

    key: Key
    text: Plaintext | None
    sealed: Sealed | None


def is_asked_by(request: IssuanceRequest, principal: Principal) -> bool:
    """By this very token, or one that it was rotated into or from."""
    token = request.requested_via
    return isinstance(principal, Service) and token is not None and token.lineage == principal.lineage


def read_handover(grant: Grant, request: IssuanceRequest) -> Handover:
    """What `record_collection` then hands over; outside any transaction, since the secret backend is asked.

    Raises NotFoundError to everybody but the service that asked, and where this process is not for the environment;
    StateConflictError when there is nothing to collect, or nothing that may be sent unsealed; BackendUnavailableError.
    """
    if not is_asked_by(request, grant.principal):
        raise NotFoundError(internal=f"{grant.principal.actor} did not ask for {request.request_id}")
    environment = Environment(request.account.environment)
    require_served(environment)
    key = require_collectable(request, grant.at)
    if request.plan_digest != request.plan().digest():
        raise StateConflictError("The request is not what was approved.", internal=f"{request.request_id} digest")
    is_sealed = request.delivery == Delivery.SEALED
    if environment == Environment.PRODUCTION and not is_sealed:
        raise StateConflictError("In production a key leaves here sealed only: read it from the secret backend.")
    try:
        text = read_string(key)
    except BackendMissingError as error:
        raise StateConflictError("The key is gone: it was ended before anybody collected it.") from error
    return Handover(key, None, seal_to(request.recipient_public_key, text)) if is_sealed else Handover(key, text, None)


def require_collectable(request: IssuanceRequest, now: datetime) -> Key:
    """The key that waits to be collected. Raises StateConflictError when none does, or none does any more."""
    if request.state == IssuanceState.COLLECTED:
        raise StateConflictError("The key was collected already.")
    if request.state == IssuanceState.BURNED or is_uncollected(request, now):
        raise StateConflictError("The key was not collected in time, and is given to nobody any more. Ask again.")
    if request.state != IssuanceState.ISSUED or request.key is None:
        raise StateConflictError(f"There is no key to collect: the request is {request.state}.")
    return request.key


@contextmanager
def record_collection(grant: Grant, request: IssuanceRequest) -> Iterator[None]:
    """The one collection of a request, with what belongs to it. Raises StateConflictError when somebody was faster.

    The backend's copy of a private key that was handed over is destroyed afterwards.
    """
    key = request.key
    if key is None:
        raise TypeError("only what was issued is collected")
    with recorded(
        grant,
        P.ISSUANCE_COLLECT,
        "issuance.collected",
        account=request.account,
        request_id=request.request_id,
        key_id=key.key_id,
    ):
        request.compare_and_swap(state=IssuanceState.COLLECTED, collected_at=grant.at)
        if request.delivery in COLLECTED_DELIVERIES and key.credential.kind == KeyKind.PRIVATE:
            key.compare_and_swap(material=Material.DESTROY_DUE)
        yield


def burn_uncollected(grant: Grant, request: IssuanceRequest) -> None:
    """Ends a key that was to be collected and was not in time: whoever uses it was not given it.

    The merchant was told that it was issued, so it is told of its end too.
    Raises StateConflictError when its time has not come, somebody collected it meanwhile, or it is in use.
    """
    key = request.key
    if key is None or not is_uncollected(request, grant.at):
        raise StateConflictError("The key may still be collected, or was.")
    is_alive = KeyState(key.state) not in DEAD_STATES
    if is_alive and KeyUse.objects.filter(key=key).exists():
        raise StateConflictError("The key is in use: a person decides whether to revoke it.")
    with recorded(
        grant,
        P.ISSUANCE_EXECUTE,
        "issuance.burned",
        account=request.account,
        request_id=request.request_id,
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
    """Whether it was to be collected and its time is over: the clock decides, not the sweep.

    A public key never is: it may be shown again, so that whoever uses it need not have collected it.
    """
    return (
        request.state == IssuanceState.ISSUED
        and request.kind == KeyKind.PRIVATE
        and request.delivery in COLLECTED_DELIVERIES
        and request.issued_at is not None
        and now >= request.issued_at + COLLECT_WITHIN
    )

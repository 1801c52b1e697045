"""Wrapping tokens and their rows: given, taken back unopened, confirmed, suspected. What follows is the caller's.

A token is minted outside any transaction and its row is written afterwards. A process that dies between leaves a token
whose text nobody knows: it expires by itself, and opens nothing for anybody.

A key is handed over once. That a token is unopened can be asked of the server, but not proved: it may be opened the
moment after. So a token is taken back together with its key, and another key is made.

That a key is in use does not say by whom. The request or the rotation goes on, but only a word of whoever collected it
confirms; until then they may still say that the token did not open for them.
"""

import logging
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import Q, QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import Operator
from keyvault.backends.base import BackendError, BackendMissingError, Wrapped
from keyvault.domain.canonical import JsonValue
from keyvault.domain.environments import Environment
from keyvault.domain.errors import StateConflictError
from keyvault.domain.issuance import MOST_SUSPICIONS
from keyvault.domain.keys import DEAD_STATES, KeyState
from keyvault.domain.notifications import NoticeKind
from keyvault.models import Key, KeyUse, Material, WrappedHandover
from keyvault.services.break_glass import note_break_glass
from keyvault.services.keys import burn_key
from keyvault.services.leases import Lease, hold
from keyvault.services.notifications import announce
from keyvault.services.recording import recorded
from keyvault.services.secret_backends import MOUNT, wrapping_backend

WRAP_SECONDS = 300
"""How long a token opens. The policy of the `courier` allows 900 at most."""

CONFIRM_WITHIN = timedelta(minutes=10)
"""After its token has ended: a key that nobody confirmed or used by then counts as intercepted."""

_log = logging.getLogger(__name__)

_PERMISSIONS = frozenset({P.ISSUANCE_COLLECT, P.ISSUANCE_EXECUTE, P.ROTATIONS_ADVANCE})


def wrap_key(key: Key) -> Wrapped:
    """A read of the key's own version, for whoever holds the token; no transaction, and no row yet.

    Raises StateConflictError when the key is dead, in use, no longer stored, or was handed over before;
    BackendUnavailableError.
    """
    if KeyState(key.state) in DEAD_STATES or key.material != Material.HELD or key.backend_version is None:
        raise StateConflictError("The key is gone: it was ended before anybody collected it.")
    if is_used(key):
        raise StateConflictError("The key is in use already. If that is nobody of yours, report it as compromised.")
    if WrappedHandover.objects.filter(key=key).exists():
        raise StateConflictError(
            "A wrapping token of this key was given before, and a key is handed over once. If nobody of yours has it, "
            "report it as compromised and reissue the credential."
        )
    credential = key.credential
    mount = MOUNT[credential.environment]
    try:
        return wrapping_backend().wrap(mount, credential.backend_path, key.backend_version, seconds=WRAP_SECONDS)
    except BackendMissingError as error:
        raise StateConflictError("The key is gone: it was ended before anybody collected it.") from error


def note_wrapped(
    grant: Grant, subject: str, requester_person: str, key: Key, wrapped: Wrapped, lease: Lease
) -> WrappedHandover:
    """The row of a token, which holds no token. Raises StateConflictError when the lease is lost.

    Whoever has the token can open it: in production a person's is break-glass, as a key that is shown to one.
    """
    handover = WrappedHandover(
        subject=subject,
        key=key,
        accessor=wrapped.accessor,
        creation_path=wrapped.creation_path,
        created_at=grant.at,
        expires_at=wrapped.expires_at,
    )
    with recorded(
        grant,
        _PERMISSIONS,
        "handover.wrapped",
        account=key.credential.account,
        **_about(handover),
        creation_path=wrapped.creation_path,
        expires_at=wrapped.expires_at.isoformat(),
    ):
        hold(lease)
        handover.save()
        if isinstance(grant.principal, Operator) and key.credential.environment == Environment.PRODUCTION:
            note_break_glass(
                grant,
                event="handover.wrapped",
                subject=subject,
                requester_person=requester_person,
                why="a production key was given to a person inside a wrapping token",
            )
    return handover


def take_back(grant: Grant, worker: Grant, handover: WrappedHandover) -> None:
    """Inside a `recorded` block: the end of a token that nobody has opened, and of its key. No alarm."""
    handover.compare_and_swap(revoked_at=grant.at)
    _burn(grant, worker, handover.key)


def revoke_token(handover: WrappedHandover) -> None:
    """Of a key that was ended. Where that fails the token opens to a key that is refused everywhere."""
    try:
        wrapping_backend().revoke_wrapping(MOUNT[handover.key.credential.environment], handover.accessor)
    except BackendError as error:
        _log.warning("a wrapping token is left to expire", extra={"key_id": handover.key_id, "why": error.internal})


def is_unopened(handover: WrappedHandover) -> bool:
    """Asks the backend. Raises BackendUnavailableError."""
    return wrapping_backend().is_unopened(MOUNT[handover.key.credential.environment], handover.accessor)


def close_dead(grant: Grant, handover: WrappedHandover, lease: Lease) -> None:
    """Of a key that ended otherwise: whoever opens the token finds one that is refused everywhere."""
    account = handover.key.credential.account
    with recorded(grant, _PERMISSIONS, "handover.taken_back", account=account, **_about(handover), key_is_dead=True):
        hold(lease)
        handover.compare_and_swap(revoked_at=grant.at)


def note_used(grant: Grant, handover: WrappedHandover) -> None:
    """Somebody uses the key, and nobody has said yet that they are the one who should."""
    account = handover.key.credential.account
    with recorded(grant, _PERMISSIONS, "handover.used", account=account, **_about(handover)):
        handover.compare_and_swap(used_at=grant.at)


def confirm(grant: Grant, handover: WrappedHandover) -> None:
    """Whoever collected it says that the receiver has the key."""
    account = handover.key.credential.account
    with recorded(grant, _PERMISSIONS, "handover.confirmed", account=account, **_about(handover)):
        handover.compare_and_swap(confirmed_at=grant.at)


def suspect(
    grant: Grant, worker: Grant, handover: WrappedHandover, *, may_burn: bool = True, mints_again: bool
) -> bool:
    """Inside a `recorded` block: the alarm, and the end of a key that somebody may have who should not.

    Whether the key was burned: one in use, or that the merchant cannot do without, goes on and is for a person to
    decide about. `worker`: the system's own grant, which ends the key whoever it is that suspects.
    """
    key, account = handover.key, handover.key.credential.account
    burns = may_burn and not is_used(key)
    handover.compare_and_swap(suspected_at=grant.at)
    announce(
        grant,
        NoticeKind.HANDOVER_SUSPECTED,
        account,
        handover.subject,
        key_id=key.key_id,
        credential_id=key.credential_id,
        is_burned=burns,
        is_minted_again=burns and mints_again,
    )
    if burns:
        _burn(grant, worker, key)
    return burns


def find_open(subject: str) -> WrappedHandover | None:
    return _handovers().filter(_OPEN, subject=subject).first()


def require_open(subject: str, key_id: str) -> WrappedHandover:
    """That of this key. Raises StateConflictError when no token of it is out."""
    handover = find_open(subject)
    if handover is None or handover.key_id != key_id:
        raise StateConflictError("No wrapping token of that key is out. Look at what became of it.")
    return handover


def may_mint_again(subject: str) -> bool:
    """A few times; whoever goes on intercepting after that is for people to find."""
    return WrappedHandover.objects.filter(subject=subject, suspected_at__isnull=False).count() < MOST_SUSPICIONS


def list_to_settle(prefix: str, now: datetime) -> list[WrappedHandover]:
    """Of the environments that this process serves, those that are over: the key is dead or in use, or nobody confirmed
    in time. `prefix`: of the subjects."""
    is_late = Q(expires_at__lte=now - CONFIRM_WITHIN) | Q(key__use__isnull=False)
    over = Q(key__state__in=DEAD_STATES) | Q(is_late, used_at__isnull=True)
    served = _handovers().filter(key__credential__account__environment__in=settings.ENVIRONMENTS)
    return list(served.filter(_OPEN, over, subject__startswith=prefix).order_by("created_at")[:100])


def is_ended(handover: WrappedHandover) -> bool:
    return KeyState(handover.key.state) in DEAD_STATES


def is_used(key: Key) -> bool:
    return KeyUse.objects.filter(key=key).exists()


def _burn(grant: Grant, worker: Grant, key: Key) -> None:
    """The merchant was told that it was issued, so it is told of its end too."""
    burn_key(worker, key)
    announce(
        grant,
        NoticeKind.KEY_REVOKED,
        key.credential.account,
        key.key_id,
        reason=str(key.reason),
        key_id=key.key_id,
        credential_id=key.credential_id,
    )


def _handovers() -> QuerySet[WrappedHandover]:
    rows: QuerySet[WrappedHandover] = WrappedHandover.objects.select_related("key__credential__account__merchant")
    return rows


_OPEN = Q(confirmed_at__isnull=True, revoked_at__isnull=True, suspected_at__isnull=True)


def _about(handover: WrappedHandover) -> dict[str, JsonValue]:
    return {"subject": handover.subject, "key_id": handover.key_id, "accessor": handover.accessor}

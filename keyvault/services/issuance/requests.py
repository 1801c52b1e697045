"""Asking for a credential, deciding about it under four eyes, issuing it, collecting it once."""

import secrets
from collections.abc import Iterator
from datetime import datetime

from django.conf import settings
from django.db.models import Q, QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, Operator, Service
from keyvault.domain.canonical import JsonValue
from keyvault.domain.digests import PEPPER_SET
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import clean_text, find_text_fault
from keyvault.domain.ids import mint_id
from keyvault.domain.issuance import (
    APPROVALS_NEEDED,
    COLLECT_WITHIN,
    COLLECTED_DELIVERIES,
    REQUEST_LIFETIME,
    Delivery,
    IssuancePlan,
    IssuanceState,
    can_transition_issuance,
)
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyState
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.recipients import find_recipient_fault
from keyvault.models import Account, Credential, IssuanceApproval, IssuanceRequest, Key, ServiceToken
from keyvault.services.approvals.break_glass import note_break_glass
from keyvault.services.approvals.four_eyes import approving_operator, locked, note_command_line_approval
from keyvault.services.issuance.collection import record_collection, require_collectable
from keyvault.services.keys.lifecycle import activate_key, discard_key, note_stored, stage_key
from keyvault.services.merchants.merchants import require_staying
from keyvault.services.merchants.operators import operator_row
from keyvault.services.peppers.ring import freshen_peppers
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.stored_copies import (
    find_stored,
    newest_version,
    read_string,
    require_served,
    store_string,
)
from keyvault.services.work.leases import Lease, hold

_AT_ONCE = 100
"""Length of every list of work."""


def approvals_needed(environment: Environment) -> int:
    """The host's policy, never below the environment's own."""
    chosen: int = settings.APPROVALS_NEEDED[environment]
    return max(APPROVALS_NEEDED[environment], chosen)


def request_issuance(
    grant: Grant,
    account: Account,
    *,
    kind: KeyKind,
    label: str,
    delivery: Delivery,
    expires_in_days: int | None = None,
    recipient_public_key: str = "",
) -> IssuanceRequest:
    """Asks for a new credential. Approved at once where the environment's policy wants no second person.

    For a service the person answers who made its token. Raises RequestInvalidError, listing what does not fit;
    StateConflictError when the merchant has left; NotFoundError where this process is not for the environment.
    """
    principal = grant.principal
    if not isinstance(principal, Operator | Service):
        raise TypeError("operators and services ask for credentials")
    environment = Environment(account.environment)
    require_served(environment)
    plan = IssuancePlan(account.merchant_id, environment, kind, label, delivery, expires_in_days, recipient_public_key)
    _refuse_faults(plan, principal)
    needed = approvals_needed(environment)
    request = IssuanceRequest(
        request_id=mint_id("req", secrets.token_bytes),
        account=account,
        kind=kind,
        label=label,
        delivery=delivery,
        recipient_public_key=recipient_public_key,
        expires_in_days=expires_in_days,
        plan_digest=plan.digest(),
        approvals_needed=needed,
        state=IssuanceState.PENDING if needed else IssuanceState.APPROVED,
        requester=operator_row(principal) if isinstance(principal, Operator) else None,
        requested_via=ServiceToken.objects.get(pk=principal.token_id) if isinstance(principal, Service) else None,
        requester_person=principal.person,
        created_at=grant.at,
        expires_at=grant.at + REQUEST_LIFETIME,
        decided_at=None if needed else grant.at,
    )
    with recorded(
        grant,
        P.ISSUANCE_REQUEST,
        "issuance.requested",
        account=account,
        **_about(request),
        plan_digest=request.plan_digest,
        kind=kind,
        label=label,
        delivery=delivery,
        approvals_needed=needed,
    ):
        require_staying(account)
        request.save()
    return request


def approve_issuance(grant: Grant, request: IssuanceRequest, plan_digest: str) -> IssuanceRequest:
    """One person's yes to exactly what they were shown; with enough of them the worker issues.

    Raises StateConflictError when the request is no longer pending, has expired, is not what `plan_digest`
    says, or this person has approved it already (the database says so too).
    """
    _require_pending(request, grant.at)
    if request.plan_digest != request.plan().digest():
        raise StateConflictError("The request was altered.", internal=f"{request.request_id} fails its digest")
    operator = approving_operator(
        grant,
        request.approvals,
        shown_digest=plan_digest,
        stored_digest=request.plan_digest,
        requester_person=request.requester_person,
    )
    with recorded(
        grant,
        P.ISSUANCE_APPROVE,
        "issuance.approved",
        account=request.account,
        **_about(request),
        plan_digest=plan_digest,
    ):
        locked(request)
        IssuanceApproval(
            request=request,
            approver=operator_row(operator),
            person=operator.person,
            plan_digest=plan_digest,
            created_at=grant.at,
        ).save()
        note_command_line_approval(
            grant,
            request.account.environment,
            event="issuance.approved",
            subject=request.request_id,
            requester_person=request.requester_person,
        )
        if request.approvals.count() >= request.approvals_needed:
            request.compare_and_swap(state=IssuanceState.APPROVED, decided_at=grant.at)
    return request


def reject_issuance(grant: Grant, request: IssuanceRequest, why: str) -> IssuanceRequest:
    told = clean_text(why, 300)
    return _close(grant, P.ISSUANCE_REJECT, request, IssuanceState.REJECTED, "issuance.rejected", why=told)


def withdraw_issuance(grant: Grant, request: IssuanceRequest) -> IssuanceRequest:
    """By whoever asked, as long as nothing was issued."""
    operator = grant.principal
    if not isinstance(operator, Operator) or operator.person != request.requester_person:
        raise StateConflictError("Only whoever asked for it can withdraw it; you may reject it.")
    return _close(grant, P.ISSUANCE_WITHDRAW, request, IssuanceState.WITHDRAWN, "issuance.withdrawn")


def end_issuance(grant: Grant, request: IssuanceRequest, why: str) -> IssuanceRequest:
    """Of a merchant that leaves: withdrawn, whoever asked for it."""
    return _close(
        grant, P.MERCHANTS_OFFBOARD, request, IssuanceState.WITHDRAWN, "issuance.withdrawn", why=clean_text(why, 300)
    )


def expire_issuance(grant: Grant, request: IssuanceRequest) -> IssuanceRequest:
    if grant.at < request.expires_at:
        raise StateConflictError("The request has not expired.")
    return _close(grant, P.ISSUANCE_EXECUTE, request, IssuanceState.EXPIRED, "issuance.expired")


def issue_approved(request: IssuanceRequest, lease: Lease, now: datetime) -> Key:
    """The worker's part: generate, hash, store, activate. May be killed anywhere and run again.

    A digest is stored first, then the string goes to the secret backend, then one transaction makes the key
    good and the request issued. A run that finds the backend holding the staged key's string adopts it;
    one that does not burns the staged key, which nobody ever held, and makes another.

    Raises StateConflictError when the request is not approved, BackendUnavailableError.
    """
    if request.state != IssuanceState.APPROVED:
        raise StateConflictError(f"The request is {request.state}, not approved.")
    if request.plan_digest != request.plan().digest():
        raise StateConflictError("The request is not what was approved.", internal=f"{request.request_id} digest")
    freshen_peppers(PEPPER_SET[Environment(request.account.environment)])  # before any transaction needs them
    grant = authorize(WORKER, P.ISSUANCE_EXECUTE, request.account, now=now)
    key = _adopt_staged(grant, request, lease)
    if key is None:
        before = 0 if request.credential is None else newest_version(request.credential)
        key, text = _stage(grant, request, lease)
        version = store_string(key, text, purpose=request.request_id, after=before)
    else:
        stored = find_stored(key.credential)
        if stored is None:
            raise StateConflictError("The stored string went away.", internal=request.request_id)
        version = stored.version
    with recorded(
        grant,
        P.ISSUANCE_EXECUTE,
        "issuance.issued",
        account=request.account,
        **_about(request),
        key_id=key.key_id,
        credential_id=key.credential_id,
    ):
        hold(lease)
        note_stored(grant, key, version)
        activate_key(grant, key)
        request.compare_and_swap(state=IssuanceState.ISSUED, key=key, issued_at=grant.at)
        announce(
            grant,
            NoticeKind.KEY_ISSUED,
            request.account,
            key.key_id,
            key_id=key.key_id,
            credential_id=key.credential_id,
            key_kind=request.kind,
            request_id=request.request_id,
        )
    return key


def burn_withdrawn(request: IssuanceRequest, lease: Lease, now: datetime) -> None:
    """Ends what a worker had begun when the request was withdrawn: the staged key, and its string if it was stored."""
    if request.state != IssuanceState.WITHDRAWN or request.credential is None:
        return
    grant = authorize(WORKER, P.ISSUANCE_EXECUTE, request.account, now=now)
    stored = find_stored(request.credential)
    for key in request.credential.keys.filter(state=KeyState.PRE_ACTIVATION):
        with recorded(grant, P.ISSUANCE_EXECUTE, "issuance.abandoned", account=request.account, **_about(request)):
            hold(lease)
            if stored is not None and stored.labels.get("key_id") == key.key_id:
                note_stored(grant, key, stored.version)
            discard_key(grant, key)


def collect_key(grant: Grant, request: IssuanceRequest) -> Plaintext:
    """The issued string, to the person who asked for it and once. Raises StateConflictError on a second try,
    NotFoundError where this process is not for the environment.

    In production a string shown to a person is break-glass: it is noted, and stays in sight until reviewed.
    """
    operator = grant.principal
    if not isinstance(operator, Operator) or operator.person != request.requester_person:
        raise StateConflictError("Only whoever asked for the key collects it.")
    if request.requested_via is not None:
        raise StateConflictError("A service asked for the key, and collects it over REST.")
    require_served(Environment(request.account.environment))
    text = read_string(require_collectable(request, grant.at))
    with record_collection(grant, request):
        if request.account.environment == Environment.PRODUCTION:
            note_break_glass(
                grant,
                event="issuance.collected",
                subject=request.request_id,
                requester_person=request.requester_person,
                why="a production key was shown to a person",
            )
    return text


def describe_request(request: IssuanceRequest) -> dict[str, JsonValue]:
    """What the service plane tells about a request: never material."""
    described: dict[str, JsonValue] = {
        **_about(request),
        "state": request.state,
        "merchant_id": request.account.merchant_id,
        "environment": request.account.environment,
        "kind": request.kind,
        "label": request.label,
        "delivery": request.delivery,
        "created_at": request.created_at.isoformat(),
        "expires_at": request.expires_at.isoformat(),
        "approvals_needed": request.approvals_needed,
        "credential_id": None if request.key is None else request.credential_id,
        "key_id": request.key_id,
    }
    if request.recipient_public_key:
        described["recipient_public_key"] = request.recipient_public_key
    return described


def list_approved() -> list[IssuanceRequest]:
    return list(_served().filter(state=IssuanceState.APPROVED).order_by("created_at")[:_AT_ONCE])


def list_overdue(now: datetime) -> list[IssuanceRequest]:
    return list(_served().filter(state=IssuanceState.PENDING, expires_at__lte=now)[:_AT_ONCE])


def list_uncollected(now: datetime) -> list[IssuanceRequest]:
    """Whose keys are to be burned, see `is_uncollected`: those that nobody uses, and those that are dead anyway."""
    unused = Q(key__use__isnull=True) | Q(key__state__in=DEAD_STATES)
    return list(_uncollected(now).filter(unused).order_by("issued_at")[:_AT_ONCE])


def list_used_uncollected(now: datetime, after: tuple[datetime, str] | None = None) -> list[IssuanceRequest]:
    """Whose keys would be burned, but are in use: somebody has them, rightly or not.

    At most _AT_ONCE, the earliest issued first. `after`: `issued_at` and id of the last one that is not wanted again.
    """
    used = _uncollected(now).filter(key__use__isnull=False).exclude(key__state__in=DEAD_STATES)
    if after is not None:
        issued_at, request_id = after
        later = Q(issued_at__gt=issued_at) | Q(request_id__gt=request_id)
        used = used.filter(later, issued_at__gte=issued_at)
    return list(used.order_by("issued_at", "request_id")[:_AT_ONCE])


def list_withdrawn() -> list[IssuanceRequest]:
    """Withdrawn requests for which a key stands staged."""
    withdrawn = _served().filter(state=IssuanceState.WITHDRAWN, credential__keys__state=KeyState.PRE_ACTIVATION)
    return list(withdrawn.distinct()[:_AT_ONCE])


def get_request(request_id: str) -> IssuanceRequest | None:
    return _requests().filter(request_id=request_id).first()


def _requests() -> QuerySet[IssuanceRequest]:
    return IssuanceRequest.objects.select_related(
        "account__merchant", "requested_via", "credential__account", "key__credential__account"
    )


def _served() -> QuerySet[IssuanceRequest]:
    """Those of the environments that this process is for: it has the peppers of no other."""
    return _requests().filter(account__environment__in=settings.ENVIRONMENTS)


def _uncollected(now: datetime) -> QuerySet[IssuanceRequest]:
    """`is_uncollected`, in rows."""
    issued = _served().filter(state=IssuanceState.ISSUED, kind=KeyKind.PRIVATE, delivery__in=COLLECTED_DELIVERIES)
    return issued.filter(issued_at__lte=now - COLLECT_WITHIN)


def _stage(grant: Grant, request: IssuanceRequest, lease: Lease) -> tuple[Key, Plaintext]:
    with recorded(grant, P.ISSUANCE_EXECUTE, "issuance.staged", account=request.account, **_about(request)):
        hold(lease)
        credential = request.credential
        if credential is None:
            credential = Credential(
                credential_id=mint_id("crd", secrets.token_bytes),
                account=request.account,
                kind=request.kind,
                label=request.label,
                delivery=request.delivery,
                created_at=grant.at,
            )
            credential.save()
            request.compare_and_swap(credential=credential)
        return stage_key(grant, credential, expires_in_days=request.expires_in_days)


def _adopt_staged(grant: Grant, request: IssuanceRequest, lease: Lease) -> Key | None:
    """The key of an earlier run if its string reached the backend; every other staged key is burned."""
    if request.credential is None:
        return None
    stored = find_stored(request.credential)
    adopted = None
    for key in request.credential.keys.filter(state=KeyState.PRE_ACTIVATION):
        if stored is not None and stored.labels.get("key_id") == key.key_id:
            adopted = key
        else:
            with recorded(grant, P.ISSUANCE_EXECUTE, "issuance.restarted", account=request.account, **_about(request)):
                hold(lease)
                discard_key(grant, key)
    return adopted


def _close(
    grant: Grant,
    permission: P,
    request: IssuanceRequest,
    state: IssuanceState,
    event: str,
    **details: JsonValue,
) -> IssuanceRequest:
    if not can_transition_issuance(IssuanceState(request.state), state):
        raise StateConflictError(f"The request is {request.state}; it cannot be {state} any more.")
    with recorded(grant, permission, event, account=request.account, **_about(request), **details):
        request.compare_and_swap(state=state, decided_at=grant.at)
    return request


def _require_pending(request: IssuanceRequest, now: datetime) -> None:
    if request.state != IssuanceState.PENDING:
        raise StateConflictError(f"The request is {request.state} already.")
    if now >= request.expires_at:
        raise StateConflictError("The request has expired. Ask again.")


def _refuse_faults(plan: IssuancePlan, principal: Operator | Service) -> None:
    faults = []
    if (fault := find_text_fault(plan.label, 100)) is not None:
        faults.append(Fault("/label", fault))
    if plan.expires_in_days is not None and not 1 <= plan.expires_in_days <= 3650:
        faults.append(Fault("/expires_in_days", "1 to 3650, or nothing"))
    faults += _find_delivery_faults(plan, principal)
    if faults:
        raise RequestInvalidError("The request cannot be made like that.", faults)


def _find_delivery_faults(plan: IssuancePlan, principal: Operator | Service) -> Iterator[Fault]:
    """What is sealed is sealed to somebody. A production key is shown to nobody, but to a person under break-glass."""
    is_sealed = plan.delivery is Delivery.SEALED
    if isinstance(principal, Operator) and is_sealed:
        yield Fault("/delivery", "sealed is for services that ask over REST, and collect there")
    elif is_sealed and not plan.recipient_public_key:
        yield Fault("/recipient_public_key", "sealed delivery needs the recipient's public key")
    elif plan.recipient_public_key and not is_sealed:
        yield Fault("/delivery", "a recipient's public key goes with sealed delivery and no other")
    elif is_sealed and (fault := find_recipient_fault(plan.recipient_public_key)) is not None:
        yield Fault("/recipient_public_key", fault)
    if (
        isinstance(principal, Service)
        and plan.delivery is Delivery.SHOW_ONCE
        and plan.environment is Environment.PRODUCTION
    ):
        yield Fault("/delivery", "in production a service is given a key sealed, or in the secret backend")


def _about(request: IssuanceRequest) -> dict[str, JsonValue]:
    return {"request_id": request.request_id}

"""Request a credential, decide on it under four eyes, issue it, and collect it once."""

import secrets
from collections.abc import Callable, Iterator
from datetime import datetime

from django.conf import settings
from django.db.models import Q, QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, OperatorPrincipal, Service, is_claimed
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
    MAX_EXPIRES_IN_DAYS,
    REQUEST_LIFETIME,
    Delivery,
    IssuancePlan,
    IssuanceState,
    can_transition_issuance,
)
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyState
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.recipient_keys import find_recipient_fault
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Account, Credential, IssuanceApproval, IssuanceRequest, Key, ServiceToken
from keyvault.services.approvals.break_glass import note_break_glass
from keyvault.services.approvals.four_eyes import approving_operator, record_approval
from keyvault.services.issuance.collection import record_collection, require_collectable
from keyvault.services.keys.lifecycle import activate_key, discard_key, note_stored, stage_key
from keyvault.services.merchants.merchants import require_not_offboarded
from keyvault.services.operators.operators import operator_row
from keyvault.services.peppers.ring import refresh_peppers
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
from keyvault.services.work.clock import host_time
from keyvault.services.work.leases import Lease, hold, renew
from keyvault.services.work.row_turns import batch_after, list_batch

"""Maximum rows that one listing returns."""


def approvals_needed(environment: Environment) -> int:
    """Return the approvals that an operator's request needs: those of the settings, but at least the minimum."""
    chosen: int = settings.APPROVALS_NEEDED[environment]
    return max(APPROVALS_NEEDED[environment], chosen)


def approvals_needed_by(principal: OperatorPrincipal | Service, environment: Environment) -> int:
    """Return the approvals that the principal's request needs: a service's needs one even in the sandbox."""
    return max(approvals_needed(environment), 1 if isinstance(principal, Service) else 0)


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
    """Request a new credential.

    An operator's request is approved immediately if the environment's policy requires no second person. A service acts
    for the person who created its token; its request needs an approval in every environment.

    Raises RequestInvalidError with every fault, StateConflictError if the merchant was offboarded, and NotFoundError if
    this process does not serve the environment.
    """
    principal = grant.principal
    if not isinstance(principal, OperatorPrincipal | Service):
        raise TypeError("only operators and services can request credentials")
    environment = Environment(account.environment)
    require_served(environment)
    plan = IssuancePlan(account.merchant_id, environment, kind, label, delivery, expires_in_days, recipient_public_key)
    _require_valid(plan, principal)
    needed = approvals_needed_by(principal, environment)
    token = ServiceToken.objects.get(pk=principal.token_id) if isinstance(principal, Service) else None
    request = IssuanceRequest(
        issuance_request_id=mint_id("req", secrets.token_bytes),
        account=account,
        account_environment=account.environment,
        kind=kind,
        label=label,
        delivery=delivery,
        recipient_public_key=recipient_public_key,
        expires_in_days=expires_in_days,
        plan_digest=plan.digest(),
        approvals_needed=needed,
        state=IssuanceState.PENDING if needed else IssuanceState.APPROVED,
        requester=operator_row(principal) if isinstance(principal, OperatorPrincipal) else None,
        requested_via=token,
        requester_person=principal.person,
        is_requester_claimed=is_claimed(principal) if token is None else token.is_creator_claimed,
        created_at=grant.at,
        expires_at=grant.at + REQUEST_LIFETIME,
        decided_at=None if needed else grant.at,
    )
    with recorded(
        grant,
        P.ISSUANCE_REQUEST,
        "issuance.requested",
        account=account,
        **_audit_details(request),
        plan_digest=request.plan_digest,
        kind=kind,
        label=label,
        delivery=delivery,
        approvals_needed=needed,
    ):
        require_not_offboarded(account)
        request.save()
    return request


def approve_issuance(grant: Grant, request: IssuanceRequest, plan_digest: str) -> IssuanceRequest:
    """Record one person's approval of the plan that they were shown. The worker issues once there are enough.

    Raises StateConflictError if the request is not pending, has expired or does not match `plan_digest`, or if this
    person has already approved it. A database constraint enforces the last rule too.
    """
    _require_pending(request, grant.at)
    if request.plan_digest != request.plan().digest():
        raise StateConflictError(
            "The request was altered after it was made. Reject it and make a new one.",
            internal=f"{request.issuance_request_id} fails its digest",
        )
    operator = approving_operator(grant, request, plan_digest)
    with recorded(
        grant,
        P.ISSUANCE_APPROVE,
        "issuance.approved",
        account=request.account,
        **_audit_details(request),
        plan_digest=plan_digest,
    ):
        approval, environment = IssuanceApproval(request=request), request.account.environment
        if record_approval(grant, request, operator, approval, environment=environment, event="issuance.approved"):
            request.compare_and_swap(state=IssuanceState.APPROVED, decided_at=grant.at)
    return request


def reject_issuance(grant: Grant, request: IssuanceRequest, why: str) -> IssuanceRequest:
    reason = clean_text(why, 300)
    return _close(grant, P.ISSUANCE_REJECT, request, IssuanceState.REJECTED, "issuance.rejected", why=reason)


def withdraw_issuance(grant: Grant, request: IssuanceRequest) -> IssuanceRequest:
    """Withdraw a request before anything is issued. Only the person who requested it may do this."""
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal) or operator.person != request.requester_person:
        raise StateConflictError("Only the person who made the request can withdraw it. You can reject it instead.")
    return _close(grant, P.ISSUANCE_WITHDRAW, request, IssuanceState.WITHDRAWN, "issuance.withdrawn")


def end_issuance(grant: Grant, request: IssuanceRequest, why: str) -> IssuanceRequest:
    """Withdraw any request of a merchant that is being offboarded."""
    return _close(
        grant, P.MERCHANTS_OFFBOARD, request, IssuanceState.WITHDRAWN, "issuance.withdrawn", why=clean_text(why, 300)
    )


def expire_issuance(grant: Grant, request: IssuanceRequest) -> IssuanceRequest:
    if grant.at < request.expires_at:
        raise StateConflictError("The request has not expired.")
    return _close(grant, P.ISSUANCE_EXECUTE, request, IssuanceState.EXPIRED, "issuance.expired")


def issue_approved(
    request: IssuanceRequest, lease: Lease, now: datetime, clock: Callable[[], datetime] = host_time
) -> Key:
    """Generate, hash, store and activate the key of an approved request. The worker calls this.

    The function may be killed at any point and run again. The digest is stored first, then the string goes to the
    secret backend, then one transaction activates the key and marks the request as issued. A run that finds the staged
    key's string in the backend adopts that key. Otherwise it discards the staged key, which was never handed out, and
    stages another. It renews the lease before it writes the string, because a worker that took over may have discarded
    the key.

    Raises StateConflictError if the request is not approved, and BackendUnavailableError.
    """
    if request.state != IssuanceState.APPROVED:
        raise StateConflictError(f"The request is {request.state}, not approved.")
    if request.plan_digest != request.plan().digest():
        raise StateConflictError(
            "The request differs from the approved plan. Make a new request.",
            internal=f"{request.issuance_request_id} digest",
        )
    refresh_peppers(PEPPER_SET[Environment(request.account.environment)])  # before any transaction
    grant = authorize(WORKER, P.ISSUANCE_EXECUTE, request.account, now=now)
    key = _adopt_staged(grant, request, lease)
    if key is None:
        before = 0 if request.credential is None else newest_version(request.credential)
        key, text = _stage(grant, request, lease)
        version = store_string(
            key, text, purpose=request.issuance_request_id, after=before, fence=lambda: renew(lease, clock())
        )
    else:
        stored = find_stored(key.credential)
        if stored is None:
            raise StateConflictError(
                "The key string is missing from the secret backend.", internal=request.issuance_request_id
            )
        version = stored.version
    with recorded(
        grant,
        P.ISSUANCE_EXECUTE,
        "issuance.issued",
        account=request.account,
        **_audit_details(request),
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
            issuance_request_id=request.issuance_request_id,
        )
    return key


def discard_withdrawn(request: IssuanceRequest, lease: Lease, now: datetime) -> None:
    """Discard the staged key of a withdrawn request, and its string if that was stored."""
    if request.state != IssuanceState.WITHDRAWN or request.credential is None:
        return
    grant = authorize(WORKER, P.ISSUANCE_EXECUTE, request.account, now=now)
    stored = find_stored(request.credential)
    for key in request.credential.keys.filter(state=KeyState.PRE_ACTIVATION):
        with recorded(
            grant, P.ISSUANCE_EXECUTE, "issuance.abandoned", account=request.account, **_audit_details(request)
        ):
            hold(lease)
            if stored is not None and stored.labels.get("key_id") == key.key_id:
                note_stored(grant, key, stored.version)
            discard_key(grant, key)


def collect_key(grant: Grant, request: IssuanceRequest) -> Plaintext:
    """Return the issued string, once, to the person who requested it.

    In production this is break-glass: it is recorded and stays listed until it is reviewed.

    Raises StateConflictError on a second attempt, and NotFoundError if this process does not serve the environment.
    """
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal) or operator.person != request.requester_person:
        raise StateConflictError("Only the person who requested the key can collect it.")
    if request.requested_via is not None:
        raise StateConflictError("A service requested the key and must collect it over REST.")
    require_served(Environment(request.account.environment))
    text = read_string(require_collectable(request, grant.at))
    with record_collection(grant, request):
        if request.account.environment == Environment.PRODUCTION:
            note_break_glass(
                grant,
                event="issuance.collected",
                subject=request.issuance_request_id,
                requester_person=request.requester_person,
                why="a production key was shown to a person",
            )
    return text


def describe_request(request: IssuanceRequest) -> dict[str, JsonValue]:
    """Describe a request for the service plane, without secret material."""
    described: dict[str, JsonValue] = {
        "issuance_request_id": request.issuance_request_id,
        "state": request.state,
        "merchant_id": request.account.merchant_id,
        "environment": request.account.environment,
        "kind": request.kind,
        "label": request.label,
        "delivery": request.delivery,
        "created_at": format_timestamp(request.created_at),
        "expires_at": format_timestamp(request.expires_at),
        "approvals_needed": request.approvals_needed,
        "credential_id": None if request.key is None else request.credential_id,
        "key_id": request.key_id,
    }
    if request.recipient_public_key:
        described["recipient_public_key"] = request.recipient_public_key
    return described


def list_approved(after: IssuanceRequest | None = None) -> list[IssuanceRequest]:
    return batch_after(_served().filter(state=IssuanceState.APPROVED), "created_at", after)


def list_overdue(now: datetime, after: IssuanceRequest | None = None) -> list[IssuanceRequest]:
    return batch_after(_served().filter(state=IssuanceState.PENDING, expires_at__lte=now), "created_at", after)


def list_uncollected(now: datetime, after: IssuanceRequest | None = None) -> list[IssuanceRequest]:
    """Return requests whose keys are to be discarded (`is_uncollected`): unused keys and dead ones."""
    unused = Q(key__use__isnull=True) | Q(key__state__in=DEAD_STATES)
    return batch_after(_uncollected(now).filter(unused), "issued_at", after)


def list_used_uncollected(now: datetime, after: tuple[datetime, str] | None = None) -> list[IssuanceRequest]:
    """Return requests whose uncollected keys are in use, with or without authorization.

    The list is in order of issue and has at most one batch of rows. `after`: exclusive start, as the `issued_at` and id
    of the last row already seen.
    """
    used = _uncollected(now).filter(key__use__isnull=False).exclude(key__state__in=DEAD_STATES)
    if after is not None:
        issued_at, issuance_request_id = after
        later = Q(issued_at__gt=issued_at) | Q(issuance_request_id__gt=issuance_request_id)
        used = used.filter(later, issued_at__gte=issued_at)
    return list_batch(used.order_by("issued_at", "issuance_request_id"))


def list_withdrawn(after: IssuanceRequest | None = None) -> list[IssuanceRequest]:
    """Return withdrawn requests that still have a staged key."""
    # Few keys are staged at any time, but withdrawn requests are kept.
    staged = Key.objects.filter(state=KeyState.PRE_ACTIVATION)
    withdrawn = _served().filter(state=IssuanceState.WITHDRAWN, credential__in=staged.values("credential"))
    return batch_after(withdrawn, "created_at", after)


def get_request(issuance_request_id: str) -> IssuanceRequest | None:
    return select_requests().filter(issuance_request_id=issuance_request_id).first()


def select_requests() -> QuerySet[IssuanceRequest]:
    """Return all requests, each with what its description needs."""
    return IssuanceRequest.objects.select_related(
        "account__merchant", "requested_via", "credential__account", "key__credential__account"
    )


def _served() -> QuerySet[IssuanceRequest]:
    """Select requests in the environments that this process serves. It has no other environment's peppers."""
    return select_requests().filter(account__environment__in=settings.ENVIRONMENTS)


def _uncollected(now: datetime) -> QuerySet[IssuanceRequest]:
    """Express `is_uncollected` as a query."""
    issued = _served().filter(state=IssuanceState.ISSUED, kind=KeyKind.PRIVATE, delivery__in=COLLECTED_DELIVERIES)
    return issued.filter(issued_at__lte=now - COLLECT_WITHIN)


def _stage(grant: Grant, request: IssuanceRequest, lease: Lease) -> tuple[Key, Plaintext]:
    with recorded(grant, P.ISSUANCE_EXECUTE, "issuance.staged", account=request.account, **_audit_details(request)):
        hold(lease)
        credential = request.credential
        if credential is None:
            credential = Credential(
                credential_id=mint_id("crd", secrets.token_bytes),
                account=request.account,
                account_environment=request.account_environment,
                kind=request.kind,
                label=request.label,
                delivery=request.delivery,
                created_at=grant.at,
            )
            credential.save()
            request.compare_and_swap(credential=credential)
        return stage_key(grant, credential, expires_in_days=request.expires_in_days)


def _adopt_staged(grant: Grant, request: IssuanceRequest, lease: Lease) -> Key | None:
    """Return an earlier run's key if its string reached the backend. Discard every other staged key."""
    if request.credential is None:
        return None
    stored = find_stored(request.credential)
    adopted = None
    for key in request.credential.keys.filter(state=KeyState.PRE_ACTIVATION):
        if stored is not None and stored.labels.get("key_id") == key.key_id:
            adopted = key
        else:
            with recorded(
                grant, P.ISSUANCE_EXECUTE, "issuance.restarted", account=request.account, **_audit_details(request)
            ):
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
        raise StateConflictError(f"The request is {request.state} and cannot become {state}.")
    with recorded(grant, permission, event, account=request.account, **_audit_details(request), **details):
        request.compare_and_swap(state=state, decided_at=grant.at)
    return request


def _require_pending(request: IssuanceRequest, now: datetime) -> None:
    if request.state != IssuanceState.PENDING:
        raise StateConflictError(f"The request is already {request.state}.")
    if now >= request.expires_at:
        raise StateConflictError("The request has expired. Make a new one.")


def _require_valid(plan: IssuancePlan, principal: OperatorPrincipal | Service) -> None:
    faults = []
    if (fault := find_text_fault(plan.label, 100)) is not None:
        faults.append(Fault("/label", fault))
    if plan.expires_in_days is not None and not 1 <= plan.expires_in_days <= MAX_EXPIRES_IN_DAYS:
        faults.append(Fault("/expires_in_days", f"1 to {MAX_EXPIRES_IN_DAYS}, or omitted"))
    faults += _find_delivery_faults(plan, principal)
    if faults:
        raise RequestInvalidError("Invalid issuance request. Correct the listed fields.", faults)


def _find_delivery_faults(plan: IssuancePlan, principal: OperatorPrincipal | Service) -> Iterator[Fault]:
    """Yield the faults of a delivery.

    Sealed delivery needs a recipient. Only an operator under break-glass may be shown a production key.
    """
    is_sealed = plan.delivery is Delivery.SEALED
    if isinstance(principal, OperatorPrincipal) and is_sealed:
        yield Fault("/delivery", "sealed delivery is only for services that request and collect keys over REST")
    elif is_sealed and not plan.recipient_public_key:
        yield Fault("/recipient_public_key", "sealed delivery needs the recipient's public key")
    elif plan.recipient_public_key and not is_sealed:
        yield Fault("/delivery", "a recipient's public key requires sealed delivery")
    elif is_sealed and (fault := find_recipient_fault(plan.recipient_public_key)) is not None:
        yield Fault("/recipient_public_key", fault)
    if (
        isinstance(principal, Service)
        and plan.delivery is Delivery.SHOW_ONCE
        and plan.environment is Environment.PRODUCTION
    ):
        yield Fault("/delivery", "in production a service receives a key sealed or in the secret backend only")


def _audit_details(request: IssuanceRequest) -> dict[str, JsonValue]:
    return {"issuance_request_id": request.issuance_request_id}

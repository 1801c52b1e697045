"""The authorization decision: `decide` denies by default, and the first failed check determines the denial.

A verdict is a value: a `Grant` or a `Denial`. Only the last line of `decide` creates a Grant.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from keyvault.access.catalog import Bearer, Endpoint, NoMatchingEndpoint
from keyvault.access.customers import Customer, CustomerFault
from keyvault.access.permissions import Permission
from keyvault.access.principals import KeyHolder, OperatorPrincipal, Principal, Service, System
from keyvault.access.roles import Role, roles_with
from keyvault.access.rules import EndpointRequest, EndpointRule, OperationRule, Rule, Target
from keyvault.domain.errors import ABSENT
from keyvault.domain.errors import ErrorCode as Code
from keyvault.domain.keys import KeyKind
from keyvault.domain.networks import is_within


@dataclass(frozen=True, slots=True)
class Denial:
    """A denied request and the reason. `detail` is for the caller, `internal` for the operators' log.

    `holder` is set once possession of the key was proved: only then may the response name the key.
    """

    code: Code
    detail: str
    internal: str = ""
    holder: KeyHolder | None = None
    allowed_methods: tuple[str, ...] = ()
    retry_after_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """Proof of authorization, which every writing service requires."""

    principal: Principal
    rule: Rule
    target: Target | EndpointRequest
    at: datetime


@dataclass(frozen=True, slots=True)
class Check:
    """One applied rule of a trace, identified by the error code of its denial."""

    rule: Code
    passed: bool


_Step = Callable[..., Denial | None]
_Steps = tuple[tuple[Code, _Step], ...]


def decide(
    rule: Rule,
    principal: Principal,
    target: Target | EndpointRequest,
    now: datetime,
    trace: list[Check] | None = None,
) -> Grant | Denial:
    """Decide whether the principal may act on the target now. `trace` collects each applied rule, in order."""
    for name, step in _steps(rule):
        denial = step(rule, principal, target)
        if trace is not None:
            trace.append(Check(name, denial is None))
        if denial is not None:
            return denial
    return Grant(principal, rule, target, now)


def _steps(rule: Rule) -> _Steps:
    return _ENDPOINT_STEPS if isinstance(rule, EndpointRule) else _OPERATION_STEPS


# --- operations on the service's own data -----------------------------------------------------------------


_KEY_PERMISSIONS = {
    KeyKind.PUBLIC: frozenset[Permission](),
    KeyKind.PRIVATE: frozenset(
        {
            Permission.ROTATIONS_ACKNOWLEDGE,
            Permission.KEYS_REVOKE_SELF,
            Permission.ORDERS_CREATE,
            Permission.CUSTOMER_TOKENS_WRITE,
            Permission.RECIPIENTS_WRITE,
        }
    ),
}
"""Write permissions of an API key: its merchant's own data, and of its credential the acknowledgment of a rotation, the
recipient key, and its own revocation."""


OUTSIDE_SCOPE = "This concerns merchants or environments outside your scope. Ask an operator whose scope has them."


def _holds_permission(rule: OperationRule, principal: Principal, target: Target) -> Denial | None:
    held = _KEY_PERMISSIONS[principal.kind] if isinstance(principal, KeyHolder) else principal.permissions
    if rule.permission in held:
        return None
    detail = f"This requires the permission {rule.permission}."
    if isinstance(principal, OperatorPrincipal) and (roles := sorted(roles_with(rule.permission, frozenset(Role)))):
        detail += f" Roles that have it: {', '.join(roles)}."
    return Denial(Code.PERMISSION_MISSING, detail, internal=f"{principal.actor} lacks {rule.permission}")


def _within_scope(rule: OperationRule, principal: Principal, target: Target) -> Denial | None:
    """Deny what is outside an operator's scope. An account appears absent; the whole installation is refused."""
    if not isinstance(principal, OperatorPrincipal) or rule.is_personal or principal.scope.covers(target.scope):
        return None
    internal = f"{principal.actor} has a scope without {target.scope}"
    if target.scope.merchants is None:
        return Denial(Code.PERMISSION_MISSING, OUTSIDE_SCOPE, internal=internal)
    return Denial(Code.NOT_FOUND, ABSENT, internal=internal)


def _within_environment(rule: OperationRule, principal: Principal, target: Target) -> Denial | None:
    if not isinstance(principal, Service | KeyHolder) or target.environment is None:
        return None
    environments = (
        principal.scope.environments if isinstance(principal, Service) else frozenset({principal.environment})
    )
    if target.environment in environments:
        return None
    return Denial(
        Code.PERMISSION_MISSING,
        f"This credential is not valid for {target.environment}.",
        internal=f"{principal.actor} is valid for {sorted(environments)}",
    )


def _within_merchants(rule: OperationRule, principal: Principal, target: Target) -> Denial | None:
    if isinstance(principal, OperatorPrincipal | System) or target.merchant_id is None:
        return None
    merchants = principal.scope.merchants if isinstance(principal, Service) else frozenset({principal.merchant_id})
    if merchants is None or target.merchant_id in merchants:
        return None
    return Denial(
        Code.NOT_FOUND,
        ABSENT,
        internal=f"{principal.actor} has no access to merchant {target.merchant_id}",
    )


def _by_second_person(rule: OperationRule, principal: Principal, target: Target) -> Denial | None:
    if not rule.second_person:
        return None
    if isinstance(principal, OperatorPrincipal) and principal.person != target.requester_person:
        return None
    return Denial(
        Code.STATE_CONFLICT,
        "This requires a second person: the requester cannot approve it.",
        internal=f"{principal.actor} is the requester or not an operator",
    )


_OPERATION_STEPS: _Steps = (
    (Code.PERMISSION_MISSING, _holds_permission),
    # Merchants first: another merchant's data appears absent, in every environment.
    (Code.NOT_FOUND, _within_merchants),
    (Code.NOT_FOUND, _within_scope),
    (Code.PERMISSION_MISSING, _within_environment),
    (Code.STATE_CONFLICT, _by_second_person),
)


# --- requests for an endpoint, in the order of the contract's verdict table -------------------------------


def _is_named_merchant(rule: EndpointRule, holder: KeyHolder, request: EndpointRequest) -> Denial | None:
    named = {request.named_merchant, request.merchant_context} - {None}
    if named <= {holder.merchant_id}:
        return None
    return Denial(
        Code.MERCHANT_MISMATCH,
        "The key belongs to a different merchant than the request names. Use that merchant's key.",
        internal=f"the request names {' and '.join(sorted(map(str, named)))}, the key is {holder.merchant_id}'s",
        holder=holder,
    )


def _is_not_suspended(rule: EndpointRule, holder: KeyHolder, request: EndpointRequest) -> Denial | None:
    if holder.merchant_active and holder.account_active:
        return None
    return Denial(
        Code.MERCHANT_SUSPENDED,
        "The merchant is suspended in this environment. Contact your account manager.",
        internal="the account is suspended" if holder.merchant_active else "the merchant is suspended",
        holder=holder,
    )


def _is_cataloged(rule: EndpointRule, holder: KeyHolder, request: EndpointRequest) -> Denial | None:
    return deny_unmatched(rule.endpoint, holder) if isinstance(rule.endpoint, NoMatchingEndpoint) else None


def deny_unmatched(unmatched: NoMatchingEndpoint, holder: KeyHolder | None) -> Denial:
    """Return the denial of a request that matches no endpoint."""
    if unmatched.allowed:
        return Denial(
            Code.METHOD_NOT_ALLOWED,
            f"The endpoint supports only {', '.join(unmatched.allowed)}.",
            holder=holder,
            allowed_methods=unmatched.allowed,
        )
    return Denial(Code.ENDPOINT_UNKNOWN, "The endpoint catalog has no such endpoint.", holder=holder)


def _is_right_kind(rule: EndpointRule, holder: KeyHolder, request: EndpointRequest) -> Denial | None:
    endpoint = _endpoint(rule)
    if holder.kind in endpoint.credentials:
        return None
    return Denial(
        Code.METHOD_NOT_SUPPORTED,
        f"{endpoint.name} does not accept the {holder.kind} API key. Use the {endpoint.kinds} API key.",
        holder=holder,
    )


def _takes_bearer(rule: EndpointRule, holder: KeyHolder, request: EndpointRequest) -> Denial | None:
    endpoint = _endpoint(rule)
    if not request.has_bearer or endpoint.bearer is not Bearer.NONE:
        return None
    return Denial(
        Code.BEARER_NOT_SUPPORTED,
        f"{endpoint.name} does not accept a customer access token. Omit the Authorization header.",
        holder=holder,
    )


def _is_not_in_browser(rule: EndpointRule, holder: KeyHolder, request: EndpointRequest) -> Denial | None:
    if not request.has_origin or holder.kind is not KeyKind.PRIVATE or holder.reports_origin:
        return None
    return Denial(
        Code.PRIVATE_KEY_IN_BROWSER,
        "The request has a private key and an Origin header. Use private keys only in a trusted backend.",
        holder=holder,
    )


def _is_from_network(rule: EndpointRule, holder: KeyHolder, request: EndpointRequest) -> Denial | None:
    address = request.client_address
    if not holder.networks or (address is not None and is_within(address, holder.networks)):
        return None
    detail = (
        "The credential is restricted to certain networks, and the client address is unknown."
        if address is None
        else f"The credential may not be used from {address}. Use an allowed network."
    )
    return Denial(Code.IP_NOT_ALLOWED, detail, holder=holder)


def _has_context(rule: EndpointRule, holder: KeyHolder, request: EndpointRequest) -> Denial | None:
    endpoint = _endpoint(rule)
    for what, source, context in (
        ("merchant", endpoint.merchant_from, request.merchant_context),
        ("store", endpoint.store_from, request.store_context),
    ):
        if source is not None and not (context or "").strip():
            return Denial(
                Code.CONTEXT_MISSING, f"{endpoint.name} requires a {what} context in {source}.", holder=holder
            )
    return None


def _has_customer(rule: EndpointRule, holder: KeyHolder, request: EndpointRequest) -> Denial | None:
    if request.has_bearer or _endpoint(rule).bearer is not Bearer.REQUIRED:
        return None
    return Denial(
        Code.CUSTOMER_TOKEN_MISSING,
        "The endpoint requires a customer access token in Authorization: Bearer.",
        holder=holder,
    )


def _proves_customer(rule: EndpointRule, holder: KeyHolder, request: EndpointRequest) -> Denial | None:
    # A Bearer that was not judged is not accepted.
    if not request.has_bearer or isinstance(request.customer, Customer) or _is_expired_or_revoked(request.customer):
        return None
    return Denial(Code.CUSTOMER_TOKEN_INVALID, "The customer access token is not valid.", holder=holder)


def _is_expired_or_revoked(customer: Customer | CustomerFault | None) -> bool:
    return customer in {CustomerFault.EXPIRED, CustomerFault.REVOKED}


def _customer_has_not_expired(rule: EndpointRule, holder: KeyHolder, request: EndpointRequest) -> Denial | None:
    if request.customer is not CustomerFault.EXPIRED:
        return None
    return Denial(Code.CUSTOMER_TOKEN_EXPIRED, "The customer access token has expired. Issue a new one.", holder=holder)


def _customer_is_not_revoked(rule: EndpointRule, holder: KeyHolder, request: EndpointRequest) -> Denial | None:
    if request.customer is not CustomerFault.REVOKED:
        return None
    return Denial(Code.CUSTOMER_TOKEN_REVOKED, "The customer access token was revoked.", holder=holder)


def _endpoint(rule: EndpointRule) -> Endpoint:
    if isinstance(rule.endpoint, NoMatchingEndpoint):
        raise TypeError("an earlier step denies a request without an endpoint")
    return rule.endpoint


_ENDPOINT_STEPS: _Steps = (
    (Code.MERCHANT_MISMATCH, _is_named_merchant),
    (Code.MERCHANT_SUSPENDED, _is_not_suspended),
    (Code.ENDPOINT_UNKNOWN, _is_cataloged),
    (Code.METHOD_NOT_SUPPORTED, _is_right_kind),
    (Code.BEARER_NOT_SUPPORTED, _takes_bearer),
    (Code.PRIVATE_KEY_IN_BROWSER, _is_not_in_browser),
    (Code.IP_NOT_ALLOWED, _is_from_network),
    (Code.CONTEXT_MISSING, _has_context),
    (Code.CUSTOMER_TOKEN_MISSING, _has_customer),
    (Code.CUSTOMER_TOKEN_INVALID, _proves_customer),
    (Code.CUSTOMER_TOKEN_EXPIRED, _customer_has_not_expired),
    (Code.CUSTOMER_TOKEN_REVOKED, _customer_is_not_revoked),
)

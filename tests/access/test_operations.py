"""`decide` for operations on the service's own data: role, permission and second person."""

from datetime import UTC, datetime
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.access.decision import Check, Denial, Grant, decide
from keyvault.access.permissions import SERVICE_PERMISSIONS
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import (
    HOST,
    SINGLE_SIGN_ON,
    WORKER,
    Channel,
    KeyHolder,
    OperatorPrincipal,
    Principal,
    Service,
    System,
)
from keyvault.access.roles import Role
from keyvault.access.rules import PLATFORM, Target, operation
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SANDBOX, PRODUCTION = Environment.SANDBOX, Environment.PRODUCTION
ACME = Target(SANDBOX, "acme")

# Role by permission: x allowed, 2 allowed for another person's request, - denied.
#   key_administrator, technical_account_manager, approver, auditor, incident_responder
MATRIX = """
merchants:read           x x x x x
merchants:write          x - - - -
merchants:offboard       x - - - x
webhooks:write           x x - - -
webhooks:deliver         - - - - -
notices:read             x x x x x
notices:mark             x x x - x
keys:read                x x x x x
keys:verify              - - - - -
keys:replicate           - - - - -
keys:replicate_digests   - - - - -
keys:suspend             x x - - x
keys:resume              x - - - -
keys:revoke              x - - - x
keys:revoke_self         - - - - -
keys:report_compromise   x - - - x
credentials:restrict     x - - - -
recipients:write         - - - - -
recipients:approve       x - x - -
recipients:withdraw      x - - - x
catalog:read             x x x x x
catalog:write            x - - - -
limits:write             x x - - -
orders:create            - - - - -
customer_tokens:write    - - - - -
verdicts:explain         x x x x x
issuance:read            x x x x x
issuance:request         x x - - -
issuance:approve         2 - 2 - -
issuance:reject          x - x - -
issuance:withdraw        x x - - -
issuance:collect         x x - - -
issuance:execute         - - - - -
rotations:read           x x x x x
rotations:write          x x - - x
rotations:approve        2 - 2 - -
rotations:bypass         x - - - x
rotations:begin          - - - - -
rotations:advance        - - - - -
rotations:acknowledge    - - - - -
schedules:write          x x - - -
tokens:read              x - - x x
tokens:write             x - - - -
operators:read           x - x x -
operators:write          x - - - -
operators:approve        2 - 2 - -
operators:enroll         - - - - -
sessions:write           x x x x x
audit:read               x - - x x
audit:sign               - - - - -
connections:read         x x x x x
connections:write        x x - - -
peppers:read             x - - x -
peppers:write            - - - - -
keys:rehash              - - - - -
backend:reconcile        - - - - -
revocation_log:append    - - - - -
processes:watch          - - - - -
revocations:replay       - - - - -
installation:maintain    - - - - -
break_glass:review       2 - 2 - -
"""
ROLES = [
    Role.KEY_ADMINISTRATOR,
    Role.TECHNICAL_ACCOUNT_MANAGER,
    Role.APPROVER,
    Role.AUDITOR,
    Role.INCIDENT_RESPONDER,
]
CELLS = {
    (role, P(line.split()[0])): cell
    for line in MATRIX.strip().splitlines()
    for role, cell in zip(ROLES, line.split()[1:], strict=True)
}


def operator(*roles: Role, person: str = "per_anna", username: str = "anna") -> OperatorPrincipal:
    return OperatorPrincipal(username, person, frozenset(roles), EVERYWHERE)


def service(
    *permissions: P,
    environments: frozenset[Environment] = frozenset(Environment),
    merchants: frozenset[str] | None = None,
) -> Service:
    return Service("tok_1", "gateway", "per_anna", frozenset(permissions), AccessScope(merchants, environments))


def holder(merchant_id: str = "acme", environment: Environment = SANDBOX) -> KeyHolder:
    return KeyHolder("A" * 16, "crd_1", KeyKind.PRIVATE, environment, merchant_id)


def asked(principal: Principal, permission: P, target: Target = ACME) -> str:
    verdict = decide(operation(permission), principal, target, NOW)
    return "allowed" if isinstance(verdict, Grant) else verdict.code.value


def test_matrix_covers_every_role_and_permission() -> None:
    assert set(CELLS) == set(product(Role, P))


@pytest.mark.parametrize(("role", "permission"), CELLS)
def test_operation_by_role_on_another_person_s_request(role: Role, permission: P) -> None:
    target = Target(SANDBOX, "acme", requester_person="per_bert")
    expected = "permission_missing" if CELLS[role, permission] == "-" else "allowed"
    assert asked(operator(role), permission, target) == expected


@pytest.mark.parametrize(("role", "permission"), CELLS)
def test_operation_by_role_on_a_request_of_the_same_person(role: Role, permission: P) -> None:
    """Guarantee: a requester cannot approve or review their own request in any role (four eyes)."""
    target = Target(SANDBOX, "acme", requester_person="per_anna")
    expected = {"-": "permission_missing", "2": "state_conflict", "x": "allowed"}[CELLS[role, permission]]
    assert asked(operator(role), permission, target) == expected


@pytest.mark.parametrize("permission", sorted(permission for permission in P if operation(permission).second_person))
def test_operation_four_eyes_compare_persons_not_names(permission: P) -> None:
    """A second operator of the same person is no second person; another person with the same role is."""
    target = Target(PRODUCTION, "acme", requester_person="per_anna")
    again = operator(Role.APPROVER, Role.KEY_ADMINISTRATOR, username="anna-admin")
    assert asked(again, permission, target) == "state_conflict"
    assert asked(operator(Role.APPROVER, person="per_bert", username="anna"), permission, target) == "allowed"


def test_operation_four_eyes_without_a_requester_checks_the_role_alone() -> None:
    """Without a requester the role alone decides; the service that records an approval compares persons again."""
    for permission in (P.ISSUANCE_APPROVE, P.ROTATIONS_APPROVE, P.BREAK_GLASS_REVIEW):
        assert asked(operator(Role.APPROVER), permission, PLATFORM) == "allowed"
        assert asked(operator(Role.AUDITOR), permission, PLATFORM) == "permission_missing"
        assert asked(service(permission), permission, PLATFORM) == "state_conflict"


def test_operation_four_eyes_apply_where_the_contract_requires_them() -> None:
    assert {permission for permission in P if operation(permission).second_person} == {
        P.ISSUANCE_APPROVE,
        P.ROTATIONS_APPROVE,
        P.BREAK_GLASS_REVIEW,
        P.OPERATORS_APPROVE,
    }


def test_operation_creator_of_a_token_cannot_approve_the_requests_of_the_token() -> None:
    """Guarantee: a token's request counts as its creator's, so no person approves their own request through a token."""
    token = service(P.ISSUANCE_REQUEST)
    assert asked(token, P.ISSUANCE_REQUEST) == "allowed"
    target = Target(SANDBOX, "acme", requester_person=token.person)
    assert asked(operator(Role.APPROVER, person=token.person), P.ISSUANCE_APPROVE, target) == "state_conflict"
    assert asked(operator(Role.APPROVER, person="per_bert"), P.ISSUANCE_APPROVE, target) == "allowed"


@pytest.mark.parametrize("permission", [P.ISSUANCE_APPROVE, P.ROTATIONS_APPROVE, P.BREAK_GLASS_REVIEW])
@pytest.mark.parametrize(
    "principal",
    [
        service(P.ISSUANCE_APPROVE, P.ROTATIONS_APPROVE, P.BREAK_GLASS_REVIEW),
        System("worker", frozenset(P)),
        System("host", frozenset(P), Channel.COMMAND_LINE),
    ],
    ids=lambda principal: principal.actor,
)
def test_operation_only_people_are_a_second_person(principal: Principal, permission: P) -> None:
    """A service that had the permission could still not approve."""
    assert asked(principal, permission, Target(SANDBOX, "acme", requester_person="per_bert")) == "state_conflict"


@given(st.sets(st.sampled_from(Role)), st.sampled_from(P))
def test_operation_by_several_roles_is_allowed_if_one_of_them_is(roles: set[Role], permission: P) -> None:
    target = Target(SANDBOX, "acme", requester_person="per_bert")
    alone = {asked(operator(role), permission, target) for role in roles}
    assert (asked(operator(*roles), permission, target) == "allowed") == ("allowed" in alone)


@pytest.mark.parametrize("permission", P)
def test_operation_nothing_starts_allowed(permission: P) -> None:
    """Guarantee: a principal without roles or permissions is denied every operation on every target."""
    for principal in (operator(), service(), System("powerless", frozenset())):
        for target in (PLATFORM, ACME, Target(PRODUCTION, "acme", "per_bert")):
            assert asked(principal, permission, target) == "permission_missing"


# --- services ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("permission", sorted(SERVICE_PERMISSIONS))
@pytest.mark.parametrize("environment", Environment)
def test_service_outside_its_environments_lacks_permission(permission: P, environment: Environment) -> None:
    """A sandbox token serves the sandbox alone: 403 `permission_missing` elsewhere."""
    own = service(permission, environments=frozenset({environment}))
    other = PRODUCTION if environment is SANDBOX else SANDBOX
    assert asked(own, permission, Target(environment, "acme")) == "allowed"
    assert asked(own, permission, Target(other, "acme")) == "permission_missing"


@pytest.mark.parametrize("permission", sorted(SERVICE_PERMISSIONS))
def test_service_outside_its_merchants_finds_nothing(permission: P) -> None:
    """Another merchant's object is `not_found`, like an object that never existed."""
    own = service(permission, merchants=frozenset({"acme"}))
    assert asked(own, permission, Target(SANDBOX, "acme")) == "allowed"
    assert asked(own, permission, Target(SANDBOX, "globex")) == "not_found"
    assert asked(service(permission, merchants=frozenset()), permission, Target(SANDBOX, "acme")) == "not_found"
    assert asked(service(permission), permission, Target(SANDBOX, "globex")) == "allowed"


def test_service_without_the_permission_learns_nothing_of_merchants() -> None:
    """Guarantee: the permission is judged first, so without it the code does not reveal which merchants exist."""
    token = service(P.KEYS_READ, merchants=frozenset({"acme"}), environments=frozenset({SANDBOX}))
    for target in (ACME, Target(SANDBOX, "globex"), Target(PRODUCTION, "globex")):
        assert asked(token, P.KEYS_REVOKE, target) == "permission_missing"


def test_denial_for_another_merchant_s_object_does_not_name_it() -> None:
    verdict = decide(
        operation(P.KEYS_READ), service(P.KEYS_READ, merchants=frozenset({"acme"})), Target(SANDBOX, "globex"), NOW
    )
    assert isinstance(verdict, Denial)
    assert "globex" not in verdict.detail
    assert "globex" in verdict.internal


# --- key holders and systems ------------------------------------------------------------------------------


OWN = {P.ROTATIONS_ACKNOWLEDGE, P.KEYS_REVOKE_SELF, P.ORDERS_CREATE, P.CUSTOMER_TOKENS_WRITE, P.RECIPIENTS_WRITE}


@pytest.mark.parametrize("permission", P)
def test_key_holder_writes_the_data_of_its_own_merchant_and_nothing_else(permission: P) -> None:
    """Guarantee: a private key has no access to the console or the service plane; a public key writes nothing."""
    assert asked(holder(), permission) == ("allowed" if permission in OWN else "permission_missing")
    public = KeyHolder("A" * 16, "crd_1", KeyKind.PUBLIC, SANDBOX, "acme")
    assert asked(public, permission) == "permission_missing"


@pytest.mark.parametrize("permission", sorted(OWN))
def test_key_holder_acts_in_its_own_account_only(permission: P) -> None:
    assert asked(holder(), permission, Target(PRODUCTION, "acme")) == "permission_missing"
    assert asked(holder(), permission, Target(SANDBOX, "globex")) == "not_found"
    assert permission not in SERVICE_PERMISSIONS


@pytest.mark.parametrize("permission", P)
def test_systems_have_only_their_own_permissions(permission: P) -> None:
    """The worker executes and the host sets up; neither may approve, read or revoke."""
    worker = {P.ISSUANCE_EXECUTE, P.ROTATIONS_BEGIN, P.ROTATIONS_ADVANCE, P.WEBHOOKS_DELIVER}
    worker |= {P.AUDIT_SIGN, P.KEYS_REHASH, P.BACKEND_RECONCILE, P.REVOCATION_LOG_APPEND, P.PROCESSES_WATCH}
    worker |= {P.REVOCATIONS_REPLAY}
    host = {P.OPERATORS_WRITE, P.MERCHANTS_WRITE, P.TOKENS_WRITE, P.PEPPERS_READ, P.PEPPERS_WRITE}
    host |= {P.REVOCATIONS_REPLAY, P.OPERATORS_ENROLL, P.INSTALLATION_MAINTAIN}
    assert (asked(WORKER, permission) == "allowed") == (permission in worker)
    assert (asked(HOST, permission) == "allowed") == (permission in host)


# --- denial details --------------------------------------------------------------------------------------


def test_trace_of_an_operation_ends_with_the_rule_that_failed() -> None:
    trace: list[Check] = []
    decide(operation(P.KEYS_READ), operator(Role.AUDITOR), ACME, NOW, trace)
    assert [check.passed for check in trace] == [True] * 5
    trace.clear()
    decide(operation(P.KEYS_REVOKE), operator(Role.AUDITOR), ACME, NOW, trace)
    assert [(check.rule.value, check.passed) for check in trace] == [("permission_missing", False)]


@pytest.mark.parametrize(
    ("principal", "actor"),
    [
        (operator(), "operator:anna"),
        (service(), "service:tok_1"),
        (holder(), f"key:{'A' * 16}"),
        (WORKER, "system:worker"),
        (HOST, "system:host"),
        (SINGLE_SIGN_ON, "system:single_sign_on"),
    ],
)
def test_principals_are_named_in_the_audit_log_by_what_they_proved(principal: Principal, actor: str) -> None:
    """Principals of two kinds never have the same name in the log."""
    assert principal.actor == actor


def test_grant_of_an_operation_carries_its_target() -> None:
    """A grant for one account cannot be used on another: the services compare."""
    verdict = decide(operation(P.KEYS_READ), operator(Role.AUDITOR), ACME, NOW)
    assert isinstance(verdict, Grant)
    assert (verdict.target, verdict.rule, verdict.at) == (ACME, operation(P.KEYS_READ), NOW)

"""What each role may do: separation of duties, restated independently of the table."""

from itertools import chain, combinations

import pytest

from keyvault.access.permissions import SERVICE_PERMISSIONS
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import CONSOLE, HOST, SINGLE_SIGN_ON, WORKER
from keyvault.access.roles import FOUR_EYES_ROLES, ROLE_PERMISSIONS, Role, permissions_of

READING = {
    P.MERCHANTS_READ,
    P.KEYS_READ,
    P.ISSUANCE_READ,
    P.ROTATIONS_READ,
    P.CATALOG_READ,
    P.VERDICTS_EXPLAIN,
    P.TOKENS_READ,
    P.AUDIT_READ,
    P.NOTICES_READ,
    P.CONNECTIONS_READ,
    P.PEPPERS_READ,
    P.OPERATORS_READ,
    P.SESSIONS_WRITE,  # of one's own session alone
}
HOLDERS = {P.ROTATIONS_ACKNOWLEDGE, P.KEYS_REVOKE_SELF, P.ORDERS_CREATE, P.CUSTOMER_TOKENS_WRITE, P.RECIPIENTS_WRITE}
APPROVING = {P.ISSUANCE_APPROVE, P.ISSUANCE_REJECT, P.ROTATIONS_APPROVE, P.BREAK_GLASS_REVIEW, P.OPERATORS_APPROVE} | {
    P.RECIPIENTS_APPROVE,
}
ENGINE = {P.ISSUANCE_EXECUTE, P.ROTATIONS_BEGIN, P.ROTATIONS_ADVANCE, P.WEBHOOKS_DELIVER} | {
    P.AUDIT_SIGN,
    P.KEYS_REHASH,
    P.BACKEND_RECONCILE,
    P.REVOCATION_LOG_APPEND,
    P.PROCESSES_WATCH,
}


def test_roles_are_the_five_documented_ones() -> None:
    assert set(ROLE_PERMISSIONS) == set(Role)
    assert {role.value for role in Role} == {
        "key_administrator",
        "technical_account_manager",
        "approver",
        "auditor",
        "incident_responder",
    }


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("permission", sorted(APPROVING))
def test_roles_only_key_administrators_and_approvers_approve(role: Role, permission: P) -> None:
    """Guarantee: separation of duties. The role that manages a merchant submits requests and never approves them."""
    may = permission in ROLE_PERMISSIONS[role]
    assert may == (role in {Role.KEY_ADMINISTRATOR, Role.APPROVER})


def test_roles_account_manager_requests_and_suspends_but_never_revokes() -> None:
    """Guarantee: the technical account manager coordinates, without approval, resumption, revocation or tokens."""
    held = ROLE_PERMISSIONS[Role.TECHNICAL_ACCOUNT_MANAGER]
    assert held.isdisjoint(APPROVING)
    assert held - READING == {
        P.ISSUANCE_REQUEST,
        P.ISSUANCE_WITHDRAW,
        P.ISSUANCE_COLLECT,
        P.ROTATIONS_WRITE,
        P.KEYS_SUSPEND,
        P.LIMITS_WRITE,
        P.WEBHOOKS_WRITE,
        P.SCHEDULES_WRITE,
        P.NOTICES_MARK,
        P.CONNECTIONS_WRITE,
    }


def test_roles_every_operator_may_explain_a_refusal() -> None:
    for role in Role:
        assert ROLE_PERMISSIONS[role] >= {P.CATALOG_READ, P.VERDICTS_EXPLAIN}


def test_roles_only_key_administrators_change_the_rules() -> None:
    """The rules of an endpoint and the allowed networks of a credential protect every key."""
    for role in Role:
        held = ROLE_PERMISSIONS[role] & {P.CATALOG_WRITE, P.CREDENTIALS_RESTRICT}
        assert bool(held) == (role is Role.KEY_ADMINISTRATOR)


def test_roles_only_key_administrators_change_operators() -> None:
    """Guarantee: only the role that has every permission of an approval changes operators."""
    for role in Role:
        assert (P.OPERATORS_WRITE in ROLE_PERMISSIONS[role]) == (role is Role.KEY_ADMINISTRATOR)
    assert all(ROLE_PERMISSIONS[role].isdisjoint(APPROVING) for role in set(Role) - FOUR_EYES_ROLES)


def test_roles_approver_does_nothing_but_approve() -> None:
    """Guarantee: an approver neither requests nor collects keys, so no single person obtains one.

    Every role may mark notices.
    """
    assert ROLE_PERMISSIONS[Role.APPROVER] - READING == {*APPROVING, P.NOTICES_MARK}


def test_roles_auditor_changes_nothing() -> None:
    assert ROLE_PERMISSIONS[Role.AUDITOR] <= READING
    assert ROLE_PERMISSIONS[Role.AUDITOR] >= {P.AUDIT_READ, P.KEYS_READ, P.TOKENS_READ}


def test_roles_incident_responder_revokes_and_requests_replacements() -> None:
    """A responder may revoke a key alone and request its replacement, but not resume, approve or collect one."""
    assert ROLE_PERMISSIONS[Role.INCIDENT_RESPONDER] - READING == {
        P.KEYS_SUSPEND,
        P.KEYS_REVOKE,
        P.KEYS_REPORT_COMPROMISE,
        P.RECIPIENTS_WITHDRAW,
        P.ROTATIONS_WRITE,
        P.ROTATIONS_BYPASS,
        P.MERCHANTS_OFFBOARD,
        P.NOTICES_MARK,
    }


def test_roles_no_console_role_has_system_permissions_or_creates_operators() -> None:
    """Guarantee: only the worker issues keys and only the host creates operators."""
    for role in Role:
        assert ROLE_PERMISSIONS[role].isdisjoint({*ENGINE, *HOLDERS, P.OPERATORS_ENROLL, P.KEYS_VERIFY})


def test_roles_worker_and_host_have_their_own_few_rights() -> None:
    """A compromised worker can neither approve nor read; the host's shell cannot approve."""
    assert WORKER.permissions == ENGINE | {P.REVOCATIONS_REPLAY}
    operators = {P.OPERATORS_WRITE, P.OPERATORS_ENROLL}
    peppers = {P.PEPPERS_READ, P.PEPPERS_WRITE}
    maintenance = {P.REVOCATIONS_REPLAY, P.INSTALLATION_MAINTAIN}
    assert HOST.permissions == {P.MERCHANTS_WRITE, P.TOKENS_WRITE} | maintenance | operators | peppers
    assert HOST.permissions.isdisjoint(APPROVING | ENGINE)
    assert CONSOLE.permissions == {P.SESSIONS_WRITE}
    assert SINGLE_SIGN_ON.permissions == operators


def test_service_tokens_may_be_given_only_what_the_contract_lists() -> None:
    """No token approves, resumes, suspends or acknowledges: that is for people, or for the merchant's own key."""
    assert {
        P.KEYS_READ,
        P.KEYS_VERIFY,
        P.KEYS_REVOKE,
        P.KEYS_REPLICATE,
        P.KEYS_REPLICATE_DIGESTS,
        P.ISSUANCE_REQUEST,
        P.ISSUANCE_COLLECT,
        P.ROTATIONS_READ,
        P.ROTATIONS_WRITE,
    } == SERVICE_PERMISSIONS
    assert SERVICE_PERMISSIONS.isdisjoint(APPROVING | HOLDERS)


@pytest.mark.parametrize(
    "roles", [frozenset(some) for some in chain.from_iterable(combinations(Role, count) for count in range(6))]
)
def test_permissions_of_several_roles_are_theirs_together(roles: frozenset[Role]) -> None:
    held = permissions_of(roles)
    assert all((permission in held) == any(permission in ROLE_PERMISSIONS[role] for role in roles) for permission in P)


def test_permissions_of_no_role_are_none() -> None:
    """A disabled operator may do nothing."""
    assert permissions_of(frozenset()) == frozenset()

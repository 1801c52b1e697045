"""The merchants and environments of a principal, and the decision about an operator who has a scope."""

from datetime import UTC, datetime
from itertools import chain, combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.access.decision import Denial, Grant, decide
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.access.rules import PLATFORM, Target, operation
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.domain.environments import Environment

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SANDBOX, PRODUCTION = Environment.SANDBOX, Environment.PRODUCTION
MERCHANTS = ("acme", "globex", "initech")
ACCOUNTS = tuple(product(MERCHANTS, Environment))
FUTURE = "future"
"""A merchant that no scope names; a scope of all merchants has it."""

merchants = st.none() | st.frozensets(st.sampled_from(MERCHANTS))
environments = st.frozensets(st.sampled_from(Environment), min_size=1)
scopes = st.builds(AccessScope, merchants, environments)
targets = st.builds(
    Target,
    environment=st.none() | st.sampled_from(Environment),
    merchant_id=st.none() | st.sampled_from(MERCHANTS),
    requester_person=st.none() | st.sampled_from(["per_anna", "per_bert"]),
    within=scopes,
)


def operator(scope: AccessScope, *roles: Role) -> OperatorPrincipal:
    return OperatorPrincipal("anna", "per_anna", frozenset(roles), scope)


def accounts_in(scope: AccessScope) -> set[tuple[str, Environment]]:
    """Return the accounts of the scope, with those of a merchant that is created later."""
    return {(name, env) for name, env in product((*MERCHANTS, FUTURE), Environment) if scope.has(name, env)}


@given(scopes, scopes)
def test_scope_covers_exactly_the_scopes_whose_accounts_it_has(one: AccessScope, other: AccessScope) -> None:
    is_empty = other.merchants == frozenset()
    assert one.covers(other) == (accounts_in(other) <= accounts_in(one)) or is_empty


@given(scopes, st.none() | st.sampled_from(MERCHANTS), st.none() | st.sampled_from(Environment))
def test_scope_narrowed_has_the_accounts_that_both_have(
    scope: AccessScope, merchant: str | None, environment: Environment | None
) -> None:
    narrowed = scope.narrowed_to(merchant, environment)
    assert accounts_in(narrowed) == {
        (name, env) for name, env in accounts_in(scope) if merchant in (None, name) and environment in (None, env)
    }


def test_whole_installation_has_every_account_and_covers_every_scope() -> None:
    subsets = chain.from_iterable(combinations(MERCHANTS, size) for size in range(len(MERCHANTS) + 1))
    every = [AccessScope(frozenset(names), frozenset({env})) for names in subsets for env in Environment]
    assert all(EVERYWHERE.covers(scope) for scope in every)
    assert not any(scope.covers(EVERYWHERE) for scope in every)
    assert all(EVERYWHERE.has(*account) for account in ACCOUNTS)


@given(scopes, st.frozensets(st.sampled_from(Role)), st.sampled_from(P), targets)
def test_scope_only_takes_away(scope: AccessScope, roles: frozenset[Role], permission: P, target: Target) -> None:
    """Guarantee: an operator with a scope may do what its roles allow, and only to what its scope covers."""
    rule = operation(permission)
    limited = decide(rule, operator(scope, *roles), target, NOW)
    unlimited = decide(rule, operator(EVERYWHERE, *roles), target, NOW)
    if isinstance(unlimited, Denial) and unlimited.code.value == "permission_missing":
        assert isinstance(limited, Denial)
        assert limited.code == unlimited.code
    elif rule.is_personal or scope.covers(target.scope):
        assert type(limited) is type(unlimited)
    else:
        assert isinstance(limited, Denial)
        assert limited.code.value == ("permission_missing" if target.scope.merchants is None else "not_found")


@pytest.mark.parametrize(
    ("target", "code"),
    [
        (Target(SANDBOX, "acme"), "allowed"),
        (Target(PRODUCTION, "acme"), "not_found"),
        (Target(SANDBOX, "globex"), "not_found"),
        (Target(within=AccessScope(frozenset({"acme"}), frozenset({SANDBOX}))), "allowed"),
        (Target(within=AccessScope(frozenset({"acme"}))), "not_found"),
        (Target(within=AccessScope(frozenset({"acme", "globex"}), frozenset({SANDBOX}))), "not_found"),
        (Target(within=AccessScope(None, frozenset({SANDBOX}))), "permission_missing"),
        (PLATFORM, "permission_missing"),
    ],
)
def test_operator_outside_of_its_scope_finds_nothing(target: Target, code: str) -> None:
    """Other accounts appear absent. A target that concerns all merchants reveals none, so it is refused openly."""
    limited = operator(AccessScope(frozenset({"acme"}), frozenset({SANDBOX})), *Role)
    verdict = decide(operation(P.ROTATIONS_WRITE), limited, target, NOW)
    assert ("allowed" if isinstance(verdict, Grant) else verdict.code.value) == code
    if isinstance(verdict, Denial):
        assert "globex" not in verdict.detail


def test_operator_with_a_scope_ends_its_own_session() -> None:
    limited = operator(AccessScope(frozenset(), frozenset({SANDBOX})), Role.AUDITOR)
    assert isinstance(decide(operation(P.SESSIONS_WRITE), limited, PLATFORM, NOW), Grant)


@pytest.mark.parametrize("permission", [P.ISSUANCE_APPROVE, P.ROTATIONS_APPROVE, P.BREAK_GLASS_REVIEW])
def test_approver_with_a_scope_approves_only_within_it(permission: P) -> None:
    """Guarantee: the second person of another merchant's request is never an approver without that merchant."""
    limited = operator(AccessScope(frozenset({"acme"})), Role.APPROVER)
    for merchant, allowed in (("acme", True), ("globex", False)):
        target = Target(PRODUCTION, merchant, requester_person="per_bert")
        assert isinstance(decide(operation(permission), limited, target, NOW), Grant) == allowed

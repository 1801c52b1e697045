"""The use of roles: which permissions count for which role, and how seldom a use is written."""

from datetime import timedelta
from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.models import Operator, RoleUse
from keyvault.models.recording import UnrecordedWriteError
from keyvault.services.operators.operators import set_roles
from keyvault.services.operators.role_use import UNUSED_AFTER, find_used_roles, is_unused, replace_role_uses, write_uses
from tests.factories import grant, make_operator, now

pytestmark = pytest.mark.django_db


@pytest.mark.database
@pytest.mark.postgres_once
@pytest.mark.parametrize(
    ("permissions", "roles"),
    [
        ([P.AUDIT_READ], {"auditor"}),
        ([P.ROTATIONS_APPROVE], {"approver"}),
        ([P.OPERATORS_READ], {"approver", "auditor"}),
        ([P.BREAK_GLASS_REVIEW, P.AUDIT_READ], {"approver", "auditor"}),
        ([P.KEYS_READ, P.SESSIONS_WRITE], set()),
        ([P.KEYS_REVOKE], set()),
    ],
)
def test_role_use_counts_for_the_roles_that_permit_it(permissions: list[P], roles: set[str]) -> None:
    """Neither what every operator may do nor what the operator may not do counts as use of a role."""
    assert find_used_roles(make_operator("tam", Role.APPROVER, Role.AUDITOR), permissions) == roles


@pytest.mark.database
def test_role_use_is_written_once_a_day(django_assert_num_queries: Any) -> None:
    make_operator("tam", Role.AUDITOR)
    first = now()
    with django_assert_num_queries(2):
        write_uses("tam", [Role.AUDITOR], first)
    with django_assert_num_queries(1):
        write_uses("tam", [Role.AUDITOR], first + timedelta(hours=23))
    assert RoleUse.objects.get().last_used_at == first
    write_uses("tam", [Role.AUDITOR], first + timedelta(hours=25))
    assert RoleUse.objects.get().last_used_at == first + timedelta(hours=25)


def test_role_use_begins_with_the_role_and_ends_with_it() -> None:
    """A role that was just granted is not unused, and one that was removed has no use."""
    make_operator("tam", Role.AUDITOR, Role.INCIDENT_RESPONDER)
    at = now()
    write_uses("tam", [Role.AUDITOR], at)
    row = Operator.objects.get()
    later = at + timedelta(days=30)
    set_roles(grant(HOST, P.OPERATORS_WRITE, at=later), row, [Role.AUDITOR, Role.TECHNICAL_ACCOUNT_MANAGER])
    uses = {use.role: use for use in RoleUse.objects.all()}
    assert set(uses) == {"auditor", "technical_account_manager"}
    assert uses["auditor"].last_used_at == at
    assert (uses["technical_account_manager"].granted_at, uses["technical_account_manager"].last_used_at) == (
        later,
        None,
    )
    day = timedelta(days=1)
    assert [role for role, use in uses.items() if is_unused(use, at + UNUSED_AFTER)] == ["auditor"]
    assert not any(is_unused(use, at + UNUSED_AFTER - day) for use in uses.values())
    assert all(is_unused(use, later + UNUSED_AFTER) for use in uses.values())


def test_role_uses_are_replaced_only_with_the_roles() -> None:
    make_operator("tam", Role.AUDITOR)
    with pytest.raises(UnrecordedWriteError):
        replace_role_uses(Operator.objects.get(), frozenset(), now())

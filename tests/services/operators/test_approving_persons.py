"""The two persons who decide on changes of operators: who counts, and that no change leaves fewer."""

from collections.abc import Callable
from functools import partial

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.access.scopes import NOWHERE, AccessScope
from keyvault.domain.errors import StateConflictError
from keyvault.models import Operator
from keyvault.services.operators.approving_persons import has_two_approving_persons
from keyvault.services.operators.operators import disable_operator, set_roles, set_scope
from tests.factories import SANDBOX, grant, make_merchant, make_operator
from tests.services.racing import TIMEOUT_SECONDS, held_open, start, wait_until_blocked

pytestmark = [pytest.mark.database, pytest.mark.django_db]

ALL_SANDBOX = AccessScope(None, frozenset({SANDBOX}))


def row_of(username: str) -> Operator:
    return Operator.objects.get(username=username)


def disable(username: str) -> None:
    disable_operator(grant(HOST, P.OPERATORS_WRITE), row_of(username))


def demote(username: str) -> None:
    set_roles(grant(HOST, P.OPERATORS_WRITE), row_of(username), [Role.AUDITOR])


def limit(username: str) -> None:
    set_scope(grant(HOST, P.OPERATORS_WRITE), row_of(username), ALL_SANDBOX)


def test_approving_persons_are_an_administrator_and_another_person() -> None:
    admin = make_operator("admin", Role.KEY_ADMINISTRATOR)
    assert not has_two_approving_persons()
    make_operator("admin-too", Role.APPROVER, person=admin.person)
    make_operator("limited", Role.APPROVER, scope=ALL_SANDBOX)
    make_operator("new", Role.APPROVER, scope=NOWHERE)
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    assert not has_two_approving_persons()
    make_operator("approver", Role.APPROVER)
    assert has_two_approving_persons()


def test_approving_persons_without_an_administrator_are_none() -> None:
    """Approvers cannot request a change of an operator."""
    for name in ("one", "two"):
        make_operator(name, Role.APPROVER)
    assert not has_two_approving_persons()


@pytest.mark.parametrize("remove", [disable, demote, limit])
def test_approving_persons_stay_two(remove: Callable[[str], None]) -> None:
    """Guarantee: a shell alone cannot restore the state in which it may add an approver alone."""
    make_merchant("acme")
    make_operator("admin", Role.KEY_ADMINISTRATOR)
    make_operator("approver", Role.APPROVER)
    with pytest.raises(StateConflictError, match="one of the last two persons"):
        remove("approver")
    assert has_two_approving_persons()
    make_operator("second", Role.APPROVER)
    remove("approver")
    assert has_two_approving_persons()


@pytest.mark.parametrize("roles", [[Role.APPROVER], [Role.APPROVER, Role.AUDITOR]])
def test_approving_role_exchanged_for_another_one_leaves_two(roles: list[Role]) -> None:
    make_operator("one", Role.KEY_ADMINISTRATOR)
    make_operator("two", Role.KEY_ADMINISTRATOR)
    set_roles(grant(HOST, P.OPERATORS_WRITE), row_of("two"), roles)
    assert has_two_approving_persons()


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_approving_persons_removed_concurrently_leave_two() -> None:
    make_operator("admin", Role.KEY_ADMINISTRATOR)
    for name in ("one", "two"):
        make_operator(name, Role.APPROVER)
    with held_open(partial(disable, "one")):
        slower = start(partial(demote, "two"))
        wait_until_blocked(slower)
    with pytest.raises(StateConflictError, match="one of the last two persons"):
        slower.result(TIMEOUT_SECONDS)
    assert has_two_approving_persons()

"""The two persons who decide on changes of operators: who counts, and that no change leaves fewer."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
from allauth.socialaccount.models import SocialAccount
from pytest_django import Settings

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.access.scopes import NOWHERE, AccessScope
from keyvault.domain.errors import StateConflictError
from keyvault.models import Operator
from keyvault.services.operator_changes import approve_change, change_roles
from keyvault.services.operators.approving_persons import has_two_approving_persons
from keyvault.services.operators.operators import disable_operator, find_operator, set_roles, set_scope
from keyvault.services.recording.transaction import recorded
from keyvault.services.sessions.invitations import prepare_sign_in
from keyvault.services.sessions.second_factors import reset_second_factors
from tests.factories import SANDBOX, cheap_password_hashes, grant, make_merchant, make_operator, now
from tests.services.racing import TIMEOUT_SECONDS, held_open, start, wait_until_blocked

pytestmark = pytest.mark.django_db

ALL_SANDBOX = AccessScope(None, frozenset({SANDBOX}))


def row_of(username: str) -> Operator:
    return Operator.objects.get(username=username)


def disable(username: str) -> None:
    disable_operator(grant(HOST, P.OPERATORS_WRITE), row_of(username))


def demote(username: str) -> None:
    set_roles(grant(HOST, P.OPERATORS_WRITE), row_of(username), [Role.AUDITOR])


def limit(username: str) -> None:
    set_scope(grant(HOST, P.OPERATORS_WRITE), row_of(username), ALL_SANDBOX)


def reset(username: str) -> None:
    reset_second_factors(grant(HOST, P.OPERATORS_WRITE), row_of(username))


def make_enrolled(username: str, role: Role) -> None:
    """An operator with a second factor."""
    make_operator(username, role)
    with cheap_password_hashes():
        prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), row_of(username))


@pytest.mark.database
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


@pytest.mark.parametrize("remove", [disable, demote, limit, reset])
def test_approving_persons_who_can_sign_in_stay_two(remove: Callable[[str], None]) -> None:
    """Guarantee: a shell alone cannot leave only one person who can approve.

    A person without a second factor cannot approve, so an invited person does not replace one who can.
    """
    make_merchant("acme")
    make_enrolled("admin", Role.KEY_ADMINISTRATOR)
    make_enrolled("approver", Role.APPROVER)
    make_operator("invited", Role.APPROVER)
    with pytest.raises(StateConflictError, match="one of the last two persons"):
        remove("approver")
    make_enrolled("second", Role.APPROVER)
    remove("approver")
    with pytest.raises(StateConflictError, match="one of the last two persons"):
        remove("second")


def test_approver_made_on_a_command_line_replaces_nobody_before_the_review() -> None:
    """One person with a shell does not replace the approvers by operators of their own."""
    make_enrolled("admin", Role.KEY_ADMINISTRATOR)
    for name in ("approver", "third"):
        make_enrolled(name, Role.APPROVER)
    make_enrolled("made", Role.AUDITOR)
    allowed = grant(find_operator("admin", "root"), P.OPERATORS_WRITE)
    change = change_roles(allowed, row_of("made"), [Role.APPROVER], "joins the approvers")
    assert change is not None
    approve_change(grant(find_operator("approver", "root"), P.OPERATORS_APPROVE), change, change.plan_digest)
    disable("third")
    with pytest.raises(StateConflictError, match="one of the last two persons"):
        disable("approver")


def test_administrator_who_can_sign_in_is_not_replaced_by_an_invited_one() -> None:
    for name in ("admin", "approver"):
        make_enrolled(name, Role.KEY_ADMINISTRATOR if name == "admin" else Role.APPROVER)
    make_operator("invited", Role.KEY_ADMINISTRATOR)
    with pytest.raises(StateConflictError, match="the last active one"):
        disable("admin")


def test_invited_approver_of_a_new_installation_is_replaced() -> None:
    """An invited person counts as the second one, and can be disabled and replaced before the first sign-in."""
    make_enrolled("admin", Role.KEY_ADMINISTRATOR)
    make_operator("mistyped", Role.APPROVER)
    assert has_two_approving_persons()
    disable("mistyped")
    assert not has_two_approving_persons()


@pytest.mark.parametrize(("factors", "is_refused"), [(("mfa",), True), ((), False)])
def test_second_factor_at_the_identity_provider_counts(
    factors: tuple[str, ...], is_refused: bool, settings: Settings
) -> None:
    settings.IDENTITY_PROVIDER = mock.Mock(second_factors=factors)
    make_enrolled("admin", Role.KEY_ADMINISTRATOR)
    make_operator("approver", Role.APPROVER)
    approver = row_of("approver")
    with recorded(grant(HOST, P.OPERATORS_WRITE), P.OPERATORS_WRITE, "operator.signed_in"):
        SocialAccount(user=approver, provider="https://id.example", uid="1").save()
        approver.swap_beside({}, last_login=now())
    with pytest.raises(StateConflictError, match="last two") if is_refused else nullcontext():
        disable("approver")


@pytest.mark.parametrize("roles", [[Role.APPROVER], [Role.APPROVER, Role.AUDITOR]])
def test_approving_role_exchanged_for_another_one_leaves_two(roles: list[Role]) -> None:
    make_enrolled("one", Role.KEY_ADMINISTRATOR)
    make_enrolled("two", Role.KEY_ADMINISTRATOR)
    set_roles(grant(HOST, P.OPERATORS_WRITE), row_of("two"), roles)
    assert has_two_approving_persons()


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_approving_persons_removed_concurrently_leave_two() -> None:
    make_enrolled("admin", Role.KEY_ADMINISTRATOR)
    for name in ("one", "two"):
        make_enrolled(name, Role.APPROVER)
    with held_open(partial(disable, "one")):
        slower = start(partial(demote, "two"))
        wait_until_blocked(slower)
    with pytest.raises(StateConflictError, match="one of the last two persons"):
        slower.result(TIMEOUT_SECONDS)
    assert has_two_approving_persons()

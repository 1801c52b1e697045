"""Operators: created on the host, with the permissions of their roles."""

import json
from collections.abc import Callable
from functools import partial

import pytest
from django.contrib.auth.models import Group
from django.db import IntegrityError, transaction

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST, Channel
from keyvault.access.roles import ROLE_PERMISSIONS, Role
from keyvault.access.scopes import EVERYWHERE, NOWHERE, AccessScope
from keyvault.domain.errors import NotFoundError, PermissionMissingError, RequestInvalidError, StateConflictError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import AuditEntry, Operator
from keyvault.models.recording import collect_subjects
from keyvault.services.operator_changes import enroll_operator
from keyvault.services.operators.operators import (
    MAX_SCOPE_MERCHANTS,
    create_operator,
    disable_operator,
    find_operator,
    link_person,
    operator_row,
    reset_password,
    set_roles,
    set_scope,
)
from keyvault.services.recording.authorization import is_allowed, operator_principal
from tests.factories import PASSWORD, SANDBOX, grant, make_merchant, make_operator, now
from tests.services.conftest import Scene
from tests.services.racing import TIMEOUT_SECONDS, held_open, start, wait_until_blocked
from tests.services.rows import dump_tables

pytestmark = pytest.mark.django_db


@pytest.mark.database
def test_roles_equal_the_groups_of_the_migration(db: None) -> None:
    assert set(Group.objects.values_list("name", flat=True)) == {role.value for role in Role}


@pytest.mark.parametrize("role", list(Role))
def test_operator_principal_holds_the_permissions_of_its_roles(db: None, role: Role) -> None:
    operator = make_operator("operator", role)
    assert operator.roles == {role}
    assert operator.permissions == ROLE_PERMISSIONS[role]
    assert operator.channel is Channel.CONSOLE


def test_operator_without_a_role_has_no_permission(db: None) -> None:
    assert make_operator("operator").permissions == frozenset()


def test_operator_in_a_group_that_is_not_a_role_gains_nothing(db: None) -> None:
    make_operator("operator", Role.AUDITOR)
    row = Operator.objects.get(username="operator")
    with collect_subjects():
        row.groups.add(Group.objects.create(name="superusers"))
    assert operator_principal(row).roles == {Role.AUDITOR}


def test_operator_disabled_has_no_permission_and_cannot_be_named(db: None) -> None:
    make_operator("operator", Role.APPROVER)
    row = Operator.objects.get(username="operator")
    disable_operator(grant(HOST, P.OPERATORS_WRITE), row)
    assert operator_principal(row).permissions == frozenset()
    assert not is_allowed(operator_principal(row), P.KEYS_READ, now=now())
    with pytest.raises(NotFoundError):
        find_operator("operator", "root")


def test_operator_named_on_the_command_line_carries_channel_and_host_user(db: None) -> None:
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    found = find_operator("tam", "root")
    assert (found.channel, found.host_user, found.actor) == (Channel.COMMAND_LINE, "root", "operator:tam")
    with pytest.raises(NotFoundError):
        find_operator("unknown", "root")


def test_operator_with_a_second_login_is_the_same_person(db: None) -> None:
    first = make_operator("one", Role.APPROVER)
    second = make_operator("two", Role.KEY_ADMINISTRATOR, person=first.person)
    other = make_operator("three", Role.APPROVER)
    assert second.person == first.person != other.person
    assert operator_row(second).username == "two"


def test_operator_with_a_taken_name_is_refused(db: None) -> None:
    make_operator("tam", Role.AUDITOR)
    with pytest.raises(StateConflictError):
        make_operator("tam", Role.KEY_ADMINISTRATOR)
    assert Operator.objects.get().roles == {Role.AUDITOR}


@pytest.mark.parametrize("password", ["short", "password1234", "another-operator"])
def test_operator_with_a_weak_password_is_refused(db: None, password: str) -> None:
    """Too short, too common, or equal to the username."""
    allowed = grant(HOST, P.OPERATORS_ENROLL)
    with pytest.raises(RequestInvalidError):
        create_operator(allowed, username="another-operator", roles=[], scope=EVERYWHERE, password=Plaintext(password))
    assert not Operator.objects.exists()


@pytest.mark.database
def test_operator_password_reset_ends_sessions_and_stores_no_plaintext(db: None) -> None:
    make_operator("tam", Role.AUDITOR)
    row = Operator.objects.get()
    before = row.get_session_auth_hash()
    reset_password(grant(HOST, P.OPERATORS_ENROLL), row, Plaintext("another long pass phrase"))
    row = Operator.objects.get()
    assert row.check_password("another long pass phrase")
    assert not row.check_password(PASSWORD)
    assert row.get_session_auth_hash() != before
    tables = repr(dump_tables())
    assert PASSWORD not in tables
    assert "another long pass phrase" not in tables


def _disable(row: Operator) -> None:
    disable_operator(grant(HOST, P.OPERATORS_WRITE), row)


def _demote(row: Operator) -> None:
    set_roles(grant(HOST, P.OPERATORS_WRITE), row, [Role.AUDITOR])


ACME_SANDBOX = AccessScope(frozenset({"acme"}), frozenset({SANDBOX}))


def test_operator_without_a_scope_has_no_access() -> None:
    """Guarantee: nothing starts allowed, also not a row that no service made."""
    assert Operator(username="new").access_scope == NOWHERE


def test_operator_is_created_with_its_scope(db: None) -> None:
    make_merchant("acme")
    assert make_operator("tam", Role.AUDITOR, scope=ACME_SANDBOX).scope == ACME_SANDBOX
    with pytest.raises(RequestInvalidError):
        make_operator("new", Role.AUDITOR, scope=AccessScope(frozenset({"absent"})))
    created = json.loads(bytes(AuditEntry.objects.get(event="operator.created").body))["details"]
    assert created["scope"] == {"merchants": ["acme"], "environments": ["sandbox"]}


@pytest.mark.database
def test_operator_is_linked_to_a_person_before_it_has_a_scope_only(db: None) -> None:
    """What an operator requested or approved stays under the person that it then had."""
    tam = make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    make_operator("new", Role.APPROVER, scope=NOWHERE)
    new = Operator.objects.get(username="new")
    link_person(grant(HOST, P.OPERATORS_WRITE), new, operator_row(tam))
    assert Operator.objects.get(username="new").person == tam.person
    set_scope(grant(HOST, P.OPERATORS_WRITE), new, EVERYWHERE)
    other = operator_row(make_operator("other", Role.AUDITOR))
    with pytest.raises(StateConflictError, match="has had access"):
        link_person(grant(HOST, P.OPERATORS_WRITE), new, other)
    with collect_subjects(), pytest.raises(IntegrityError, match="once it has a scope"), transaction.atomic():
        new.compare_and_swap(person=other.person)
    with collect_subjects(), pytest.raises(IntegrityError, match="once it has a scope"), transaction.atomic():
        Operator.objects.get(username="new").compare_and_swap(scope_merchants=[])


def _link(username: str, other: str) -> None:
    one, two = (Operator.objects.get(username=name) for name in (username, other))
    link_person(grant(HOST, P.OPERATORS_WRITE), one, two)


def _make_new(*usernames: str) -> None:
    for username in usernames:
        make_operator(username, Role.APPROVER, scope=NOWHERE)


def _list_persons() -> set[str]:
    return set(Operator.objects.values_list("person", flat=True))


@pytest.mark.database
def test_operator_is_linked_with_the_operators_of_its_person(db: None) -> None:
    """Guarantee: one human with several linked operators is one person, in whatever order they were linked."""
    _make_new("first", "second", "third")
    disable_operator(grant(HOST, P.OPERATORS_WRITE), Operator.objects.get(username="third"))
    jane = make_operator("jane", Role.KEY_ADMINISTRATOR)
    before = Operator.objects.get(username="first").get_session_auth_hash()
    _link("first", "second")
    with pytest.raises(StateConflictError, match="is disabled"):
        _link("third", "second")
    _link("second", "jane")
    moved = Operator.objects.filter(username__in=["first", "second"])
    assert {row.person for row in moved} == {jane.person}
    assert Operator.objects.get(username="first").get_session_auth_hash() != before
    linked = AuditEntry.objects.filter(event="operator.person_linked").order_by("sequence")
    details = [json.loads(bytes(entry.body))["details"] for entry in linked]
    assert [(each["username"], each["same_person_as"]) for each in details] == [
        ("first", "second"),
        ("second", "jane"),
        ("first", "jane"),
    ]
    _link("first", "jane")
    assert linked.count() == 3


@pytest.mark.database
def test_operator_is_not_linked_away_from_one_with_a_scope(db: None) -> None:
    """Guarantee: an operator that may act never becomes another person than one that was linked to it."""
    _make_new("first", "second", "other")
    make_operator("jane", Role.KEY_ADMINISTRATOR)
    second = Operator.objects.get(username="second")
    enroll_operator(
        grant(HOST, P.OPERATORS_ENROLL), username="third", roles=[], scope=EVERYWHERE, same_person_as=second
    )
    for other in ("jane", "other"):
        with pytest.raises(StateConflictError, match="Operator third has had access as a person of its own"):
            _link("second", other)
    assert not AuditEntry.objects.filter(event="operator.person_linked").exists()
    _link("other", "third")
    _link("first", "second")
    assert len(_list_persons()) == 2


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "links", [(("a", "b"), ("b", "jane")), (("b", "jane"), ("a", "b")), (("b", "a"), ("a", "jane"))]
)
def test_operators_linked_concurrently_are_one_person(links: tuple[tuple[str, str], tuple[str, str]]) -> None:
    """Guarantee: no link misses an operator that a concurrent one moves."""
    _make_new("a", "b")
    make_operator("jane", Role.KEY_ADMINISTRATOR)
    with held_open(partial(_link, *links[0])):
        slower = start(partial(_link, *links[1]))
        wait_until_blocked(slower)
    slower.result(TIMEOUT_SECONDS)
    assert len(_list_persons()) == 1


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_operator_invited_while_its_person_is_linked_is_the_same_person() -> None:
    _make_new("b")
    jane, b = make_operator("jane", Role.KEY_ADMINISTRATOR), Operator.objects.get(username="b")
    allowed = grant(HOST, P.OPERATORS_ENROLL)
    with held_open(partial(_link, "b", "jane")):
        slower = start(partial(enroll_operator, allowed, username="a", roles=[], scope=EVERYWHERE, same_person_as=b))
        wait_until_blocked(slower)
    assert slower.result(TIMEOUT_SECONDS).person == jane.person


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_operator_linked_while_another_one_is_invited_to_its_person_is_refused() -> None:
    _make_new("b")
    make_operator("jane", Role.KEY_ADMINISTRATOR)
    b, allowed = Operator.objects.get(username="b"), grant(HOST, P.OPERATORS_ENROLL)
    with held_open(partial(enroll_operator, allowed, username="a", roles=[], scope=EVERYWHERE, same_person_as=b)):
        slower = start(partial(_link, "b", "jane"))
        wait_until_blocked(slower)
    with pytest.raises(StateConflictError, match="Operator a has had access"):
        slower.result(TIMEOUT_SECONDS)


def test_operator_scope_is_replaced_audited_and_ends_sessions(db: None) -> None:
    make_merchant("acme")
    make_operator("tam", Role.AUDITOR)
    row = Operator.objects.get()
    before = row.get_session_auth_hash()
    set_scope(grant(HOST, P.OPERATORS_WRITE), row, ACME_SANDBOX)
    row = Operator.objects.get()
    assert operator_principal(row).scope == ACME_SANDBOX
    assert row.get_session_auth_hash() != before
    details = json.loads(bytes(AuditEntry.objects.get(event="operator.scope_changed").body))["details"]
    assert details.pop("host_user")
    assert details == {
        "username": "tam",
        "old": {"merchants": None, "environments": ["production", "sandbox"]},
        "new": {"merchants": ["acme"], "environments": ["sandbox"]},
    }
    set_scope(grant(HOST, P.OPERATORS_WRITE), row, ACME_SANDBOX)
    assert AuditEntry.objects.filter(event="operator.scope_changed").count() == 1
    set_scope(grant(HOST, P.OPERATORS_WRITE), row, EVERYWHERE)
    assert operator_principal(Operator.objects.get()).scope == EVERYWHERE


@pytest.mark.parametrize(
    ("scope", "pointer"),
    [
        (AccessScope(frozenset({"acme", "absent"})), "/merchant"),
        (AccessScope(frozenset()), "/merchant"),
        (AccessScope(frozenset({f"m-{number}" for number in range(MAX_SCOPE_MERCHANTS + 1)})), "/merchant"),
        (AccessScope(None, frozenset()), "/environment"),
    ],
)
def test_operator_scope_that_names_nothing_known_is_refused(db: None, scope: AccessScope, pointer: str) -> None:
    make_merchant("acme")
    make_operator("tam", Role.AUDITOR)
    with pytest.raises(RequestInvalidError) as caught:
        set_scope(grant(HOST, P.OPERATORS_WRITE), Operator.objects.get(), scope)
    assert {fault.pointer for fault in caught.value.faults} == {pointer}
    assert Operator.objects.get().access_scope == EVERYWHERE


@pytest.mark.parametrize("remove", ["disable", "demote", "limit"])
def test_operators_keep_an_administrator_of_the_whole_installation(db: None, remove: str) -> None:
    """Otherwise no operator could change what concerns every merchant."""
    make_merchant("acme")
    make_operator("approver", Role.APPROVER)
    make_operator("one", Role.KEY_ADMINISTRATOR)
    make_operator("two", Role.KEY_ADMINISTRATOR, scope=ACME_SANDBOX)
    one, two = (Operator.objects.get(username=name) for name in ("one", "two"))
    removing = {"disable": _disable, "demote": _demote, "limit": _limit}[remove]
    with pytest.raises(StateConflictError, match="the last active one"):
        removing(one)
    set_scope(grant(HOST, P.OPERATORS_WRITE), two, EVERYWHERE)
    removing(one)


def _limit(row: Operator) -> None:
    set_scope(grant(HOST, P.OPERATORS_WRITE), row, ACME_SANDBOX)


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("second", [_disable, _demote])
@pytest.mark.parametrize("first", [_disable, _demote])
def test_operators_two_administrators_removed_concurrently_leave_one(
    first: Callable[[Operator], None], second: Callable[[Operator], None]
) -> None:
    """Disable or demote both key administrators concurrently: the second change is refused."""
    make_operator("approver", Role.APPROVER)
    for name in ("one", "two"):
        make_operator(name, Role.KEY_ADMINISTRATOR)
    one, two = (Operator.objects.get(username=name) for name in ("one", "two"))
    with held_open(partial(first, one)):
        slower = start(partial(second, two))
        wait_until_blocked(slower)
    with pytest.raises(StateConflictError, match="the last active one"):
        slower.result(TIMEOUT_SECONDS)
    remaining = Operator.objects.filter(is_active=True, groups__name=Role.KEY_ADMINISTRATOR)
    assert [row.username for row in remaining] == ["two"]


def test_operator_created_by_an_operator_is_refused(scene: Scene) -> None:
    """Otherwise an operator who may request or approve could create a second person."""
    for operator in (scene.tam, scene.approver, scene.admin, scene.responder):
        with pytest.raises(PermissionMissingError):
            grant(operator, P.OPERATORS_ENROLL)


def test_host_principal_sets_up_but_neither_requests_nor_approves_nor_reads(scene: Scene) -> None:
    """A shell on the host must not bypass the second person."""
    allowed = {permission for permission in P if is_allowed(HOST, permission, now=now())}
    # Replaying a revocation only repeats a denial.
    setting_up = {
        P.OPERATORS_WRITE,
        P.OPERATORS_ENROLL,
        P.MERCHANTS_WRITE,
        P.TOKENS_WRITE,
        P.PEPPERS_READ,
        P.PEPPERS_WRITE,
        P.INSTALLATION_MAINTAIN,
    }
    assert allowed == {*setting_up, P.REVOCATIONS_REPLAY}

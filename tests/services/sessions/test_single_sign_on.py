"""Operators of single sign-on: created and linked in one transaction, and changed by the identity provider only."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from allauth.socialaccount.models import SocialAccount, SocialApp, SocialToken
from django.db import IntegrityError
from django.db.models.signals import pre_save

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.access.scopes import NOWHERE
from keyvault.access.single_sign_on import FederatedIdentity, SignOnFault
from keyvault.domain.environments import Environment
from keyvault.domain.errors import StateConflictError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import AuditEntry, Operator
from keyvault.models.recording import UnrecordedWriteError
from keyvault.services.operators.operators import reset_password, set_roles
from keyvault.services.recording.authorization import is_allowed, operator_principal
from keyvault.services.sessions.refusals import sign_in_refusals
from keyvault.services.sessions.single_sign_on import SignOnRefusedError, sign_on
from tests.factories import PASSWORD, account, grant, make_merchant, make_operator, now
from tests.services.racing import TIMEOUT_SECONDS, held_open, start, wait_until_blocked

pytestmark = pytest.mark.django_db

ISSUER = "https://id.example.com"


@pytest.fixture(autouse=True)
def fresh_refusals() -> None:
    sign_in_refusals.forget()


def identity(subject: str = "1", name: str = "jane", *roles: Role) -> FederatedIdentity:
    return FederatedIdentity(ISSUER, subject, name, frozenset(roles or {Role.AUDITOR}), now())


def events() -> list[str]:
    return list(AuditEntry.objects.order_by("pk").values_list("event", flat=True))


@pytest.mark.database
def test_single_sign_on_creates_link_and_operator_together() -> None:
    """Without its link the operator would exist with roles, but without a way to sign in."""

    def fail(**_: object) -> None:
        raise OSError("killed")

    pre_save.connect(fail, SocialAccount)
    try:
        with pytest.raises(OSError, match="killed"):
            sign_on(identity(), None, "", now())
    finally:
        pre_save.disconnect(fail, SocialAccount)
    assert not Operator.objects.exists()
    assert events() == []


def test_single_sign_on_is_audited_with_each_change() -> None:
    at = now()
    sign_on(identity(), "192.0.2.1", "", at)
    sign_on(identity("1", "jane", Role.APPROVER), "192.0.2.1", "", at + timedelta(hours=1))
    assert events() == [
        "operator.linked",
        "operator.created",
        "operator.signed_in",
        "operator.roles_changed",
        "operator.signed_in",
    ]
    assert Operator.objects.get().last_login == at + timedelta(hours=1)


def test_single_sign_on_operator_starts_without_access() -> None:
    """Guarantee: whatever its roles, it requests and approves nothing until two persons give it a scope."""
    make_merchant("acme")
    jane = operator_principal(sign_on(identity("1", "jane", *Role), None, "", now()).operator)
    assert (jane.roles, jane.scope) == (frozenset(Role), NOWHERE)
    places = (None, account("acme", Environment.SANDBOX), account("acme", Environment.PRODUCTION))
    allowed = {each for each in P for place in places if is_allowed(jane, each, place, now=now())}
    assert allowed == {P.SESSIONS_WRITE}


def test_single_sign_on_operator_of_the_host_is_never_taken_over() -> None:
    make_operator("jane", Role.KEY_ADMINISTRATOR)
    with pytest.raises(SignOnRefusedError) as refused:
        sign_on(identity(), None, "", now())
    assert refused.value.fault is SignOnFault.NAME_TAKEN
    assert not SocialAccount.objects.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda row: set_roles(grant(HOST, P.OPERATORS_WRITE), row, [Role.KEY_ADMINISTRATOR]),
        lambda row: reset_password(grant(HOST, P.OPERATORS_ENROLL), row, Plaintext(PASSWORD)),
    ],
    ids=["roles", "password"],
)
def test_single_sign_on_operator_is_not_changed_on_the_host(change: Callable[[Operator], None]) -> None:
    """The next sign-in would undo the roles, and a password would bypass the identity provider."""
    operator = sign_on(identity(), None, "", now()).operator
    with pytest.raises(StateConflictError, match="single sign-on"):
        change(operator)
    assert operator.roles == {Role.AUDITOR}
    assert not Operator.objects.get().has_usable_password()


def test_single_sign_on_rows_are_written_by_services_only() -> None:
    operator = sign_on(identity(), None, "", now()).operator
    link = SocialAccount.objects.get()
    for write in (link.save, link.delete, SocialAccount(user=operator, provider=ISSUER, uid="2").save):
        with pytest.raises(UnrecordedWriteError):
            write()
    for row in (SocialToken(account=link, token="t"), SocialApp(provider="openid_connect")):
        with pytest.raises(UnrecordedWriteError, match="never stored"):
            row.save()


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_single_sign_on_concurrent_first_sign_ins_create_one_operator() -> None:
    with held_open(lambda: sign_on(identity(), None, "", now())):
        slower = start(lambda: sign_on(identity(), None, "", now()))
        wait_until_blocked(slower)
    with pytest.raises(IntegrityError):
        slower.result(TIMEOUT_SECONDS)
    assert (Operator.objects.count(), SocialAccount.objects.count()) == (1, 1)
    assert sign_on(identity(), None, "", now()).operator == Operator.objects.get()

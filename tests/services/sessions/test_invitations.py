"""Invitations: a link lets its operator set up a sign-in once, and for a limited time."""

from datetime import datetime, timedelta

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.access.scopes import EVERYWHERE
from keyvault.domain.errors import NotFoundError, RequestInvalidError, StateConflictError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import ConsoleSession, Operator
from keyvault.services.operators.operators import create_operator, disable_operator
from keyvault.services.recording.authorization import operator_principal
from keyvault.services.sessions.invitations import (
    INVITATION_LIFETIME,
    accept_invitation,
    find_invited,
    invite,
    prepare_sign_in,
)
from keyvault.services.sessions.second_factors import (
    TOTP,
    FactorAttempt,
    NewFactor,
    check_code,
    encrypt_seed,
    has_second_factor,
    list_second_factors,
    new_totp_seed,
    totp_code,
)
from tests.admin.desk import dump
from tests.factories import PASSWORD, grant, now
from tests.services.rows import last_body
from tests.services.sessions.test_sessions import start_session

pytestmark = pytest.mark.django_db


@pytest.fixture
def new() -> Operator:
    allowed = grant(HOST, P.OPERATORS_ENROLL)
    return create_operator(allowed, username="new", roles=[Role.AUDITOR], scope=EVERYWHERE, password=None)


def invited(row: Operator, at: datetime | None = None) -> Plaintext:
    return invite(grant(HOST, P.OPERATORS_ENROLL, at=at or now()), row)


def some_factor() -> NewFactor:
    return NewFactor(TOTP, {"secret": encrypt_seed(new_totp_seed())})


@pytest.mark.database
def test_invitation_sets_the_password_and_the_factor_once(new: Operator) -> None:
    token = invited(new)
    found, late = find_invited(token, now()), find_invited(token, now())
    codes = accept_invitation(found, Plaintext(PASSWORD), some_factor, now())
    assert len(codes) == 10
    row = Operator.objects.get(username="new")
    assert row.check_password(PASSWORD)
    assert has_second_factor(row)
    with pytest.raises(NotFoundError, match="not valid"):
        find_invited(token, now())
    with pytest.raises(StateConflictError):
        accept_invitation(late, Plaintext("another long pass phrase"), some_factor, now())
    assert Operator.objects.get(username="new").check_password(PASSWORD)
    assert len(list_second_factors(row)) == 2


def test_invitation_without_a_proved_factor_sets_nothing(new: Operator) -> None:
    """No half-finished sign-in exists: neither a password without a second factor, nor the reverse."""
    token = invited(new)
    with pytest.raises(RequestInvalidError):
        accept_invitation(find_invited(token, now()), Plaintext(PASSWORD), lambda: None, now())
    with pytest.raises(RequestInvalidError, match="too weak"):
        accept_invitation(find_invited(token, now()), Plaintext("short"), some_factor, now())
    row = find_invited(token, now())
    assert not row.has_usable_password()
    assert list_second_factors(row) == []


def test_invitation_that_is_accepted_ends_the_operators_sessions(new: Operator) -> None:
    found = find_invited(invited(new), now())
    start_session(operator_principal(found))
    accept_invitation(found, Plaintext(PASSWORD), some_factor, now())
    assert not ConsoleSession.objects.exists()
    assert last_body("operator.enrolled")["details"]["sessions_ended"] == 1


def test_invitation_expires(new: Operator) -> None:
    at = now()
    token = invited(new, at)
    assert find_invited(token, at + INVITATION_LIFETIME - timedelta(seconds=1)) == new
    with pytest.raises(NotFoundError):
        find_invited(token, at + INVITATION_LIFETIME)


def test_invitation_is_stored_as_a_digest_only(new: Operator) -> None:
    assert invited(new).reveal() not in dump()


def test_invitation_is_replaced_by_the_next_one(new: Operator) -> None:
    first, second = invited(new), invited(new)
    with pytest.raises(NotFoundError):
        find_invited(first, now())
    assert find_invited(second, now()) == new


def test_invitation_of_a_disabled_operator_is_void(new: Operator) -> None:
    token = invited(new)
    disable_operator(grant(HOST, P.OPERATORS_WRITE), new)
    with pytest.raises(NotFoundError):
        find_invited(token, now())
    with pytest.raises(StateConflictError, match="disabled"):
        invited(new)


def test_invitation_of_nobody_is_void(new: Operator) -> None:
    """An operator without an invitation is not found by an empty token."""
    for token in ("", "None", "x" * 43):
        with pytest.raises(NotFoundError):
            find_invited(Plaintext(token), now())


def test_invitation_replaces_no_second_factor(new: Operator) -> None:
    """An invitation is no way around the reset of second factors."""
    prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), new)
    with pytest.raises(StateConflictError, match="Reset its second factors first"):
        invited(new)


def test_invitation_ends_with_the_first_sign_in(new: Operator) -> None:
    token = invited(new)
    seed = prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), new).totp_seed
    assert find_invited(token, now()) == new
    check_code(FactorAttempt(new, None), totp_code(seed, now()), now())
    with pytest.raises(NotFoundError):
        find_invited(token, now())

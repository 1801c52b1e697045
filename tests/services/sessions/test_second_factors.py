"""Second factors: each code is accepted once, guesses are counted, and seeds are encrypted."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from allauth.mfa.models import Authenticator
from django.db import DatabaseError

from keyvault.access.limits import SIGN_IN_FAILURES
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.backends.base import BackendUnavailableError
from keyvault.domain.errors import StateConflictError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import AuditEntry, Notice, Operator
from keyvault.models.recording import UnrecordedWriteError
from keyvault.services.recording.authorization import operator_principal
from keyvault.services.sessions.devices import KnownDevice, read_device, write_device
from keyvault.services.sessions.invitations import prepare_sign_in
from keyvault.services.sessions.lockout import SignInLockedError, SignInRefusedError
from keyvault.services.sessions.second_factor_adapter import SecondFactorAdapter
from keyvault.services.sessions.second_factors import (
    PASSKEY,
    FactorAttempt,
    NewFactor,
    add_second_factor,
    check_code,
    check_passkey,
    confirm_totp,
    count_recovery_codes,
    encrypt_seed,
    has_second_factor,
    list_second_factors,
    new_recovery_codes,
    new_totp_seed,
    remove_second_factor,
    reset_second_factors,
    totp_code,
)
from tests.admin.desk import dump
from tests.factories import grant, make_operator, own_keystore
from tests.factories import now as current_time
from tests.services.racing import race

PERIOD = timedelta(seconds=30)

pytestmark = pytest.mark.django_db


@pytest.fixture
def now() -> datetime:
    """The middle of a period, so that a code of another period is always one of a neighbor."""
    return current_time().replace(second=15, microsecond=0)


@pytest.fixture
def tam() -> Operator:
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    return tam_again()


@pytest.fixture
def seed(tam: Operator) -> Plaintext:
    return prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), tam).totp_seed


def tam_again() -> Operator:
    row: Operator = Operator.objects.get(username="tam")
    return row


def own_grant(row: Operator) -> Any:
    return grant(operator_principal(row), P.SESSIONS_WRITE)


def add_codes(row: Operator) -> list[str]:
    factor, codes = new_recovery_codes()
    add_second_factor(own_grant(row), row, factor)
    return [code.reveal() for code in codes]


def add_passkey(row: Operator, name: str = "laptop") -> Authenticator:
    add_second_factor(own_grant(row), row, NewFactor(PASSKEY, {"name": name}))
    return list_second_factors(row)[-1]


def is_accepted(row: Operator, code: str, at: datetime, **attempt: Any) -> bool:
    try:
        check_code(FactorAttempt(row, **{"address": "192.0.2.1", **attempt}), code, at)
    except SignInRefusedError:
        return False
    return True


def details_of(event: str) -> list[dict[str, Any]]:
    return [json.loads(bytes(row.body))["details"] for row in AuditEntry.objects.filter(event=event).order_by("pk")]


# -------------------------------------------------------------------------------------------- authenticator app


@pytest.mark.database
def test_totp_code_is_accepted_once(tam: Operator, seed: Plaintext, now: datetime) -> None:
    code = totp_code(seed, now)
    assert is_accepted(tam, code, now)
    assert not is_accepted(tam, code, now)
    assert not is_accepted(tam, code, now + PERIOD)
    assert is_accepted(tam, totp_code(seed, now + PERIOD), now + PERIOD)


def test_totp_code_older_than_the_last_accepted_one_is_refused(tam: Operator, seed: Plaintext, now: datetime) -> None:
    assert is_accepted(tam, totp_code(seed, now + PERIOD), now)
    assert not is_accepted(tam, totp_code(seed, now), now)


@pytest.mark.parametrize(("periods", "is_right"), [(-2, False), (-1, True), (0, True), (1, True), (2, False)])
def test_totp_code_of_a_neighboring_period_is_accepted(
    tam: Operator, seed: Plaintext, now: datetime, periods: int, is_right: bool
) -> None:
    assert is_accepted(tam, totp_code(seed, now + periods * PERIOD), now) is is_right


@pytest.mark.parametrize(
    "change",
    [
        lambda code: code[:5],
        lambda code: f"0{code}",
        lambda code: "",
        lambda code: "".join(chr(ord(digit) - ord("0") + ord("\N{FULLWIDTH DIGIT ZERO}")) for digit in code),
        lambda code: f"{code[:5]}\x00",
        lambda code: "٣" * 6,
        lambda code: "-" + code[1:],
    ],
)
def test_totp_code_is_six_ascii_digits(
    tam: Operator, seed: Plaintext, now: datetime, change: Callable[[str], str]
) -> None:
    """No other spelling of a right code is accepted."""
    assert not is_accepted(tam, change(totp_code(seed, now)), now)


def test_totp_code_with_a_space_is_accepted(tam: Operator, seed: Plaintext, now: datetime) -> None:
    """Authenticator apps show two groups of three digits."""
    code = totp_code(seed, now)
    assert is_accepted(tam, f" {code[:3]} {code[3:]}", now)


def test_totp_code_of_another_operator_is_refused(tam: Operator, seed: Plaintext, now: datetime) -> None:
    make_operator("other", Role.AUDITOR)
    other = Operator.objects.get(username="other")
    prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), other)
    assert not is_accepted(other, totp_code(seed, now), now)


def test_totp_confirmation_uses_its_code_up(tam: Operator, now: datetime) -> None:
    seed = new_totp_seed()
    assert confirm_totp(encrypt_seed(seed), "000000" if totp_code(seed, now) != "000000" else "1", now) is None
    factor = confirm_totp(encrypt_seed(seed), totp_code(seed, now), now)
    assert factor is not None
    add_second_factor(own_grant(tam), tam, factor)
    assert not is_accepted(tam, totp_code(seed, now), now)
    assert is_accepted(tam, totp_code(seed, now + PERIOD), now)


def test_totp_seed_and_recovery_codes_are_encrypted(tam: Operator, seed: Plaintext) -> None:
    """A copy of the database contains no seed and no code."""
    codes = add_codes(tam)
    stored = dump()
    assert seed.reveal() not in stored
    assert not [code for code in codes if code in stored]


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_totp_code_of_concurrent_requests_is_accepted_once(now: datetime) -> None:
    """Of 100 uses of one code, ten at a time, one is accepted. The others wait for the row, and see the code used."""
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    seed = prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), tam_again()).totp_seed
    code = totp_code(seed, now)
    rounds = [_race(10, lambda row, device: is_accepted(row, code, now, device=device)) for _ in range(10)]
    assert [won for winners in rounds for won in winners].count(True) == 1


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_recovery_code_of_concurrent_requests_is_accepted_once(now: datetime) -> None:
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    code = add_codes(tam_again())[4]
    assert _race(10, lambda row, device: is_accepted(row, code, now, device=device)).count(True) == 1


def _race(count: int, use: Callable[[Operator, str], bool]) -> list[bool]:
    """Use a code from this many devices at the same time: each device has its own counter of failures."""
    row = tam_again()
    devices = [write_device(row, KnownDevice(f"device-{number}", None), None) for number in range(count)]
    return race(*(lambda device=device: use(tam_again(), device) for device in devices))


# ----------------------------------------------------------------------------------------------- recovery codes


def test_recovery_code_is_accepted_once(tam: Operator, seed: Plaintext, now: datetime) -> None:
    codes = add_codes(tam)
    assert len(set(codes)) == 10
    assert is_accepted(tam, f"{codes[3][:4]} {codes[3][4:]}", now)
    assert not is_accepted(tam, codes[3], now)
    assert is_accepted(tam, codes[9], now)
    assert count_recovery_codes(list_second_factors(tam)[-1]) == 8


def test_recovery_codes_are_replaced_as_a_whole(tam: Operator, seed: Plaintext, now: datetime) -> None:
    old, new = add_codes(tam), add_codes(tam)
    assert not is_accepted(tam, old[0], now)
    assert is_accepted(tam, new[0], now)


def test_recovery_codes_alone_are_no_second_factor(tam: Operator) -> None:
    add_codes(tam)
    assert not has_second_factor(tam)


# --------------------------------------------------------------------------------------------- guesses and audit


@pytest.mark.database
def test_guesses_of_second_factors_lock_before_the_code_is_checked(
    tam: Operator, seed: Plaintext, now: datetime
) -> None:
    """An attacker with the password has ten guesses for 30 minutes, of all kinds of codes together."""
    codes = add_codes(tam)
    for number in range(SIGN_IN_FAILURES - 1):
        assert not is_accepted(tam, "0" * (6 if number % 2 else 8), now)
    with pytest.raises(SignInLockedError):
        is_accepted(tam, "not a code", now)
    for code in (totp_code(seed, now), codes[0]):
        with pytest.raises(SignInLockedError, match="No second factor is checked"):
            is_accepted(tam, code, now, address="198.51.100.1")
    (locked,) = details_of("operator.locked")
    assert (locked["username"], locked["by"], locked["checked"]) == ("tam", "name", "second_factor")
    assert Notice.objects.filter(kind="operator.locked", subject="tam", is_alarm=True).count() == 1


def test_guesses_that_the_backend_cannot_check_are_not_counted(
    tam: Operator, seed: Plaintext, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the secret backend is unavailable, operators do not lock themselves out."""
    code = totp_code(seed, now)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise BackendUnavailableError("The secrets manager is unavailable.")

        patch.setattr(SecondFactorAdapter, "decrypt", fail)
        for _ in range(SIGN_IN_FAILURES + 1):
            with pytest.raises(BackendUnavailableError):
                is_accepted(tam, code, now)
    assert is_accepted(tam, code, now)


@pytest.mark.parametrize("changed_to", ["keystore", pytest.param("vault", marks=pytest.mark.openbao)])
def test_factors_of_the_former_secret_backend_are_refused_with_the_remedy_and_can_be_reset(
    tam: Operator, seed: Plaintext, now: datetime, changed_to: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Their seeds stay in the former backend: no code is accepted or counted, and a reset replaces the factors."""
    codes = add_codes(tam)
    with ExitStack() as changed:
        if changed_to == "vault":
            request.getfixturevalue("vault_service")
        else:
            changed.enter_context(own_keystore(tmp_path))
        for _ in range(SIGN_IN_FAILURES + 1):
            for code in (totp_code(seed, now), codes[0]):
                with pytest.raises(StateConflictError, match="another secret backend"):
                    is_accepted(tam, code, now)
        reset_second_factors(grant(HOST, P.OPERATORS_WRITE), tam)
        renewed = prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), tam_again()).totp_seed
        assert is_accepted(tam_again(), totp_code(renewed, now), now)


@pytest.mark.database
def test_guesses_elsewhere_do_not_lock_a_known_device(tam: Operator, seed: Plaintext, now: datetime) -> None:
    device = write_device(tam, None, "192.0.2.1")
    for _ in range(SIGN_IN_FAILURES - 1):
        assert not is_accepted(tam, "000000", now)
    with pytest.raises(SignInLockedError):
        is_accepted(tam, "000000", now)
    assert is_accepted(tam, totp_code(seed, now), now, device=device)


def test_sign_in_is_audited_with_its_factor_and_ends_an_invitation(
    tam: Operator, seed: Plaintext, now: datetime
) -> None:
    cookie = check_code(FactorAttempt(tam, "192.0.2.7"), totp_code(seed, now), now)
    assert details_of("operator.signed_in") == [{"factor": "totp", "address": "192.0.2.7", "device": "new"}]
    assert tam_again().last_login == now
    assert read_device(tam, cookie) is not None
    later = now + PERIOD
    check_code(FactorAttempt(tam, None, cookie, is_step_up=True), totp_code(seed, later), later)
    assert details_of("operator.second_factor_confirmed") == [
        {"factor": "totp", "address": "unknown", "device": "known"}
    ]
    assert tam_again().last_login == now


@pytest.mark.database
def test_sign_in_without_its_audit_entry_uses_no_code_up(
    tam: Operator, seed: Plaintext, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The use of a code and its entry share one transaction."""
    code = totp_code(seed, now)
    with monkeypatch.context() as patch:

        def fail(**_: object) -> None:
            raise DatabaseError("the log is full")

        patch.setattr("keyvault.services.recording.transaction.append_entries", fail)
        with pytest.raises(DatabaseError):
            is_accepted(tam, code, now)
    assert is_accepted(tam, code, now)


def test_sign_in_of_an_operator_changed_meanwhile_is_refused(tam: Operator, seed: Plaintext, now: datetime) -> None:
    """A reset between the password and the second factor ends the sign-in."""
    stale = tam_again()
    prepared = prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), tam)
    assert not is_accepted(stale, totp_code(prepared.totp_seed, now), now)


def test_passkey_that_is_verified_is_audited(tam: Operator, now: datetime) -> None:
    passkey = add_passkey(tam)
    check_passkey(FactorAttempt(tam, None), lambda: passkey, now)
    assert details_of("operator.signed_in")[0]["factor"] == "webauthn"
    with pytest.raises(SignInRefusedError):
        check_passkey(FactorAttempt(tam, None), lambda: None, now)


def test_sign_in_from_a_new_device_or_address_is_announced(tam: Operator, seed: Plaintext, now: datetime) -> None:
    """The operators see each sign-in from an unfamiliar place, and none from a known one."""
    cookie = check_code(FactorAttempt(tam, "192.0.2.1"), totp_code(seed, now - PERIOD), now)
    cookie = check_code(FactorAttempt(tam, "192.0.2.1", cookie), totp_code(seed, now), now)
    check_code(FactorAttempt(tam, "198.51.100.1", cookie), totp_code(seed, now + PERIOD), now)
    found = Notice.objects.filter(kind="operator.unfamiliar_sign_in").order_by("created_at", "pk")
    assert [(notice.subject, notice.is_alarm) for notice in found] == [("tam", False)] * 2
    assert {(notice.payload["device"], notice.payload["address"]) for notice in found} == {
        ("new", "192.0.2.1"),
        ("known", "198.51.100.1"),
    }


# ------------------------------------------------------------------------------------------------ add and remove


def test_second_factor_is_not_written_outside_of_a_recorded_transaction(tam: Operator, seed: Plaintext) -> None:
    (factor,) = list_second_factors(tam)
    for write in (factor.save, factor.delete, factor.record_usage):
        with pytest.raises(UnrecordedWriteError):
            write()


def test_removal_of_a_factor_ends_the_operators_sessions_and_devices(tam: Operator, seed: Plaintext) -> None:
    before, device = tam.get_session_auth_hash(), write_device(tam, None, "192.0.2.1")
    passkey = add_passkey(tam)
    assert tam.get_session_auth_hash() == before
    remove_second_factor(own_grant(tam), tam, passkey.pk)
    assert tam_again().get_session_auth_hash() != before
    assert read_device(tam_again(), device) is None
    assert details_of("operator.second_factor_removed") == [{"username": "tam", "factor": "webauthn", "name": "laptop"}]


def test_removal_of_the_last_factor_is_refused(tam: Operator, seed: Plaintext) -> None:
    """Recovery codes are no factor to sign in with for long."""
    add_codes(tam)
    (app,) = (factor for factor in list_second_factors(tam) if factor.type == "totp")
    with pytest.raises(StateConflictError, match="only second factor"):
        remove_second_factor(own_grant(tam), tam, app.pk)


def test_removal_of_another_operators_factor_is_refused(tam: Operator, seed: Plaintext) -> None:
    make_operator("other", Role.AUDITOR)
    other = Operator.objects.get(username="other")
    passkey = add_passkey(other)
    with pytest.raises(StateConflictError, match="already removed"):
        remove_second_factor(own_grant(tam), tam, passkey.pk)


def test_reset_removes_every_factor_and_ends_sessions(tam: Operator, seed: Plaintext) -> None:
    add_codes(tam)
    before = tam.get_session_auth_hash()
    reset_second_factors(grant(HOST, P.OPERATORS_WRITE), tam)
    assert list_second_factors(tam) == []
    assert tam_again().get_session_auth_hash() != before


def test_passkeys_of_an_operator_are_bounded(tam: Operator) -> None:
    for number in range(10):
        add_passkey(tam, str(number))
    with pytest.raises(StateConflictError, match="10 passkeys"):
        add_passkey(tam)

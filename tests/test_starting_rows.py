"""Tests of `start_with`."""

from pathlib import Path

import pytest
from django.db import connection, transaction
from django.test import override_settings

from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Key, Operator
from keyvault.services.audit.checkpoint_marks import read_marks
from keyvault.services.audit.checkpoints import sign_due
from keyvault.services.recording.audit_chain import verify_audit
from keyvault.services.secrets.backend import MOUNT, secret_backend
from keyvault.services.secrets.stored_copies import read_string

from .factories import account, have_peppers, issue, make_merchant, make_operator, now, request_key
from .process_state import forget_process_state
from .services.rows import dump_tables
from .starting_rows import start_with

pytestmark = [pytest.mark.database, pytest.mark.django_db]

calls: list[str] = []


def make(username: str) -> str:
    calls.append(username)
    have_peppers()
    make_merchant("acme")
    return make_operator(username, Role.TECHNICAL_ACCOUNT_MANAGER).username


def test_copies_equal_the_rows_that_the_services_wrote() -> None:
    found = []
    for _ in range(3):
        with transaction.atomic():
            assert start_with(make, "tam") == "tam"
            found.append(dump_tables())
            assert verify_audit().first_broken is None
            issue(account("acme"))
            connection.check_constraints()
            transaction.set_rollback(True)
    assert found[0] == found[1] == found[2]
    assert calls.count("tam") == 1


def make_key() -> tuple[str, str]:
    calls.append("key")
    make_merchant("acme")
    key, text = issue(account("acme"))
    return key.key_id, text.reveal()


def test_copies_of_a_key_have_its_string_whatever_an_earlier_test_did_with_it() -> None:
    for _ in range(3):
        with transaction.atomic():
            key_id, text = start_with(make_key)
            key = Key.objects.select_related("credential__account").get(pk=key_id)
            assert read_string(key).reveal() == text
            place = MOUNT[Environment.SANDBOX], key.credential.backend_path
            secret_backend().destroy(*place, 1)
            secret_backend().put(*place, Plaintext("of a later key"), {}, expected_version=1)
            transaction.set_rollback(True)
    assert calls.count("key") == 1


def sign() -> None:
    calls.append("sign")
    make_merchant("acme")
    sign_due(now())


def test_copies_have_the_evidence_and_the_log_that_the_services_wrote(data_dir: Path) -> None:
    found = []
    for _ in range(3):
        forget_process_state(data_dir)
        with transaction.atomic():
            start_with(sign)
            found.append(read_marks("service"))
            transaction.set_rollback(True)
    assert found[0] == found[1] == found[2]
    assert found[0].stored is not None
    assert found[0].logged is not None
    assert calls.count("sign") == 1


def test_function_runs_with_settings_of_the_test() -> None:
    for needed, state in ((0, "approved"), (1, "pending")):
        with transaction.atomic(), override_settings(APPROVALS_NEEDED={"sandbox": needed, "production": 1}):
            assert start_with(request) == state
            transaction.set_rollback(True)


def request() -> str:
    make_merchant("acme")
    return str(request_key(account("acme")).state)


def test_function_runs_in_a_database_with_rows() -> None:
    """Copies would collide with rows that a test made before."""
    make_operator("auditor", Role.AUDITOR)
    assert start_with(make, "other") == "other"
    assert calls.count("other") == 1
    assert Operator.objects.count() == 2

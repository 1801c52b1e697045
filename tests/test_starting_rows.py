"""Tests of `start_with`."""

import pytest
from django.db import connection, transaction

from keyvault.access.roles import Role
from keyvault.models import Operator
from keyvault.services.recording.audit_chain import verify_audit

from .factories import account, have_peppers, issue, make_merchant, make_operator
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


def test_function_runs_in_a_database_with_rows() -> None:
    """Copies would collide with rows that a test made before."""
    make_operator("auditor", Role.AUDITOR)
    assert start_with(make, "other") == "other"
    assert calls.count("other") == 1
    assert Operator.objects.count() == 2

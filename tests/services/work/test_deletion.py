"""Deletion of expired rows: a row that is renewed meanwhile stays."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from keyvault.models import WorkLease
from keyvault.services.work.deletion import delete_batch
from tests.factories import now

pytestmark = pytest.mark.django_db


def test_row_that_is_renewed_after_it_was_read_stays() -> None:
    """A payment is retried, or a lease claimed, in that moment."""
    old = now() - timedelta(days=1)
    for subject in ("kept", "gone"):
        WorkLease.objects.create(subject=subject, due_at=old)

    def renew(execute: Callable[..., Any], sql: str, *others: Any) -> Any:
        if sql.startswith("DELETE"):
            WorkLease.objects.filter(subject="kept").update(due_at=now() + timedelta(days=1))
        return execute(sql, *others)

    with connection.execute_wrapper(renew):
        assert delete_batch(WorkLease.objects.filter(due_at__lt=now()).order_by("due_at")) == 1
    assert [row.subject for row in WorkLease.objects.all()] == ["kept"]

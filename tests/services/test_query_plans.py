"""Queries of workers and repeated requests use an index that returns exactly the rows asked for."""

import pytest

from keyvault.models import Change
from keyvault.services.issuance import requests
from keyvault.services.keys import lifecycle
from tests.factories import account, issue, make_merchant, now
from tests.plans import copy_row, explain

pytestmark = [pytest.mark.postgres, pytest.mark.django_db]


@pytest.fixture(autouse=True)
def merchant(db: None) -> None:
    make_merchant()


def test_last_sequence_reads_only_the_changes_of_its_key() -> None:
    """The cost of an engine run or a repeated revocation does not grow with the change feed."""
    key, _ = issue(account())
    copy_row(Change, subject_id="'key' || n")
    (plan,) = explain(lambda: lifecycle.last_sequence(key))
    assert "change_by_subject" in plan
    assert "Index Cond: (((subject_kind)::text = 'key'::text) AND ((subject_id)::text =" in plan
    assert "Sort" not in plan


def test_list_expired_reads_only_expired_keys() -> None:
    (plan,) = explain(lambda: lifecycle.list_expired(now()))
    assert "key_expiring" in plan
    assert "Seq Scan on keyvault_key" not in plan
    assert "Sort" not in plan


def test_list_used_uncollected_after_a_request_skips_the_earlier_ones() -> None:
    (plan,) = explain(lambda: requests.list_used_uncollected(now(), after=(now(), "req_0")))
    assert "request_uncollected" in plan
    assert "Index Cond: ((issued_at" in plan
    assert "Sort" not in plan

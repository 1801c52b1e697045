"""What workers and repeated requests ask again and again has an index that gives exactly the rows asked for."""

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


def test_last_sequence_reads_the_changes_of_its_key_only() -> None:
    """Guarantee: neither a turn of the engine nor a repeated revocation costs more as the change feed grows."""
    key, _ = issue(account())
    copy_row(Change, subject_id="'key' || n")
    (plan,) = explain(lambda: lifecycle.last_sequence(key))
    assert "change_by_subject" in plan
    assert "Index Cond: (((subject_kind)::text = 'key'::text) AND ((subject_id)::text =" in plan
    assert "Sort" not in plan


def test_list_expired_reads_the_keys_that_have_expired_only() -> None:
    (plan,) = explain(lambda: lifecycle.list_expired(now()))
    assert "key_expiring" in plan
    assert "Seq Scan on keyvault_key" not in plan
    assert "Sort" not in plan


def test_list_used_uncollected_goes_on_behind_a_request_without_reading_those_before_it() -> None:
    (plan,) = explain(lambda: requests.list_used_uncollected(now(), after=(now(), "req_0")))
    assert "request_uncollected" in plan
    assert "Index Cond: ((issued_at" in plan
    assert "Sort" not in plan

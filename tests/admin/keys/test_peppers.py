"""Pepper versions in the console: readable by permission, changed by no one."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from keyvault.backends.base import Mount
from keyvault.domain.digests import PepperSet
from keyvault.models import PepperVersion
from keyvault.services.secrets.backend import secret_backend
from tests.admin.desk import Desk, address, browser, set_up_desk, text_of
from tests.factories import issue, own_keystore
from tests.services.peppering import rotate, skip_propagation


@pytest.fixture
def desk(db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """Return a desk with its own keystore."""
    skip_propagation(monkeypatch)
    with own_keystore(tmp_path):
        yield set_up_desk()


def shown(desk: Desk, number: int = 1) -> str:
    row = PepperVersion.objects.get(pepper_set="sandbox", number=number)
    page = text_of(browser(desk.auditor).get(address("keyvault_pepperversion_change", row.pk)))
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def test_pepper_pages_show_each_version_and_count_no_keys(desk: Desk) -> None:
    """Counting reads every key, so the page names the command that counts."""
    issue(desk.sandbox)
    rotate()
    with CaptureQueriesContext(connection) as queries:
        page = shown(desk, 2)
    assert not [query for query in queries if "keyvault_key" in query["sql"]]
    assert "Used for digests now yes" in page
    assert "show_peppers --list counts what depends on a version" in page
    listed = text_of(browser(desk.admin).get(address("keyvault_pepperversion_changelist")))
    assert "sandbox 2" in listed
    assert "service 1" in listed


def test_pepper_page_warns_when_the_backend_has_lost_it(desk: Desk) -> None:
    secret_backend().destroy(Mount.PEPPERS, PepperSet.SANDBOX, 1)
    assert "The secret backend lacks it. Only running processes have it, in memory" in shown(desk)


def test_pepper_pages_show_only_the_sets_that_the_process_serves(desk: Desk) -> None:
    with override_settings(ENVIRONMENTS=("sandbox",)):
        listed = text_of(browser(desk.auditor).get(address("keyvault_pepperversion_changelist")))
        assert "sandbox 1" in listed
        assert "production 1" not in listed
        row = PepperVersion.objects.get(pepper_set="production")
        assert browser(desk.auditor).get(address("keyvault_pepperversion_change", row.pk)).status_code == 404


def test_pepper_pages_require_a_permission(desk: Desk) -> None:
    assert browser(desk.tam).get(address("keyvault_pepperversion_changelist")).status_code == 403

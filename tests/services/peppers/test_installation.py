"""Pepper ownership: those of another installation are never adopted, used or destroyed."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
from django.core.management import call_command
from django.db.models import QuerySet

from keyvault.backends.base import Mount, StoredVersion, VersionState
from keyvault.domain.digests import PepperSet
from keyvault.domain.errors import IntegrityError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import AuditEntry, Installation, PepperVersion
from keyvault.services.peppers import ring
from keyvault.services.peppers.installation import ensure_installation, installation_id
from keyvault.services.peppers.ring import ensure_peppers, put_pepper
from keyvault.services.secrets.backend import secret_backend
from tests.factories import forget_keystore, have_peppers, now, own_keystore
from tests.services.peppering import destroy, retire, rotate, skip_propagation
from tests.services.racing import race
from tests.services.rows import disable_triggers

pytestmark = pytest.mark.django_db

SANDBOX = PepperSet.SANDBOX
OTHER = "another-installation"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    skip_propagation(monkeypatch)
    with own_keystore(tmp_path):
        yield tmp_path


def reset_installation() -> None:
    """Turn the database into that of a new installation before its set-up, with the same secret backend."""
    disable_triggers()
    PepperVersion.objects.all()._raw_delete("default")
    Installation.objects.all()._raw_delete("default")
    forget_keystore()


def put_foreign_pepper(number: int) -> None:
    with mock.patch.object(ring, "installation_id", return_value=OTHER):
        put_pepper(SANDBOX, number)


def status() -> tuple[int, str]:
    output, code = StringIO(), 0
    try:
        call_command("show_peppers", "--json", stdout=output)
    except SystemExit as end:
        code = int(str(end.code))
    return code, output.getvalue()


@pytest.mark.database
def test_installation_is_named_once_before_the_first_pepper() -> None:
    have_peppers()
    ensure_installation(now())
    assert Installation.objects.count() == 1
    assert AuditEntry.objects.filter(event="installation.created").count() == 1
    for pepper_set in PepperSet:
        assert secret_backend().read(Mount.PEPPERS, pepper_set, 1).labels["installation"] == installation_id()
    rotate()
    assert secret_backend().read(Mount.PEPPERS, SANDBOX, 2).labels["installation"] == installation_id()


@pytest.mark.database
def test_installation_before_the_set_up_has_no_id() -> None:
    with pytest.raises(IntegrityError, match="was not set up"):
        installation_id()


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_installation_created_by_concurrent_first_runs_is_one() -> None:
    assert race(*[lambda: ensure_installation(now())] * 4) == [None] * 4
    assert Installation.objects.count() == 1


@pytest.mark.database
def test_installation_set_up_over_foreign_peppers_is_refused() -> None:
    """A new or cloned database with production's secret backend stops and names the owner of the peppers."""
    have_peppers()
    ours = installation_id()
    reset_installation()
    with (
        mock.patch("keyvault.services.peppers.installation.mint_installation_id", return_value=OTHER),
        pytest.raises(IntegrityError, match="belongs to another installation") as refused,
    ):
        ensure_peppers(now())
    message = refused.value.internal or ""
    assert ours in message
    assert "KEYVAULT_VAULT_PREFIX" in message
    assert not PepperVersion.objects.exists()
    assert {len(secret_backend().versions(Mount.PEPPERS, each)) for each in PepperSet} == {1}


@pytest.mark.database
def test_pepper_of_another_installation_is_not_adopted() -> None:
    have_peppers()
    put_foreign_pepper(2)
    code, output = status()
    assert (code, "sandbox pepper 2 belongs to installation another-installation" in output) == (1, True)
    with pytest.raises(IntegrityError, match="belongs to another installation"):
        rotate()
    assert PepperVersion.objects.filter(pepper_set=SANDBOX).count() == 1


@pytest.mark.database
def test_pepper_of_a_killed_rotation_is_listed_without_a_fault() -> None:
    have_peppers()
    put_pepper(SANDBOX, 2)
    code, report = status()
    assert (code, json.loads(report)["rowless"]) == (0, [{"pepper_set": "sandbox", "number": 2, "fault": ""}])
    output = StringIO()
    call_command("show_peppers", stdout=output)
    assert "sandbox 2  in the secret backend, unknown to the database" in output.getvalue()
    assert rotate().number == 2
    assert json.loads(status()[1])["rowless"] == []


@pytest.mark.database
def test_pepper_of_another_installation_is_not_destroyed() -> None:
    """The other installation's keys depend on it."""
    have_peppers()
    rotate()
    retire(SANDBOX, 1)
    disable_triggers()
    QuerySet(Installation).update(installation_id=OTHER)
    with pytest.raises(IntegrityError, match="belongs to another installation"):
        destroy(SANDBOX, 1)
    assert secret_backend().versions(Mount.PEPPERS, SANDBOX)[0] == StoredVersion(1, VersionState.LIVE)


@pytest.mark.database
def test_pepper_without_an_owner_is_not_destroyed() -> None:
    """Another program may have written it, even though its value matches our row."""
    have_peppers()
    rotate()
    retire(SANDBOX, 1)
    stored = secret_backend().read(Mount.PEPPERS, SANDBOX, 1)
    unlabeled = replace(stored, labels={})
    with (
        mock.patch.object(type(secret_backend()), "read", return_value=unlabeled),
        pytest.raises(IntegrityError, match="belongs to another installation"),
    ):
        destroy(SANDBOX, 1)
    assert secret_backend().versions(Mount.PEPPERS, SANDBOX)[0] == StoredVersion(1, VersionState.LIVE)


@pytest.mark.database
def test_pepper_without_an_owner_and_without_a_row_is_refused() -> None:
    secret_backend().put(
        Mount.PEPPERS, SANDBOX, Plaintext(base64.b64encode(bytes(32)).decode()), {}, expected_version=0
    )
    with pytest.raises(IntegrityError, match="belongs to another installation"):
        ensure_peppers(now())

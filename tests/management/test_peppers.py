"""Peppers on the command line: rotated, listed, retired; any fault is named and exits 1."""

import io
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.test import Client

from keyvault.access.roles import Role
from keyvault.backends.base import BackendUnavailableError, Mount
from keyvault.backends.local import LocalKeystore
from keyvault.domain.digests import PepperSet
from keyvault.models import AuditEntry
from keyvault.services.maintenance import renew_peppers
from keyvault.services.pepper_rotation import rotation
from keyvault.services.peppers.ring import load_peppers
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.startup.startup_checks import require_ready
from tests.factories import (
    account,
    forget_keystore,
    have_peppers,
    issue,
    make_merchant,
    make_operator,
    now,
    own_keystore,
)
from tests.services.keys.test_lifecycle import verdict
from tests.services.peppering import rehash, skip_propagation
from tests.services.peppers.test_ring import stored, swap_keystore

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    skip_propagation(monkeypatch)
    with own_keystore(tmp_path):
        yield tmp_path


@pytest.fixture(autouse=True)
def first_peppers(folder: Path, db: None) -> None:
    have_peppers()


def run(*arguments: str) -> Any:
    output = io.StringIO()
    call_command(*arguments, "--json", stdout=output)
    return json.loads(output.getvalue())


def status(*more: str) -> tuple[int, Any]:
    """Return the exit code and the answer."""
    output, code = io.StringIO(), 0
    try:
        call_command("show_peppers", *more, "--json", stdout=output)
    except SystemExit as end:
        code = int(str(end.code))
    return code, json.loads(output.getvalue())


def of(answer: Any, pepper_set: str, number: int) -> Any:
    return next(each for each in answer["versions"] if (each["pepper_set"], each["number"]) == (pepper_set, number))


@pytest.mark.database
def test_pepper_commands_rotate_list_and_retire_a_pepper(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rotation, a used key moves to the new pepper and an unused one is listed; once it has ended, the old
    pepper retires.
    """
    make_merchant("acme")
    _, used = issue(account(), label="used")
    idle, _ = issue(account(), label="idle")
    rotated = run("rotate_pepper", "--set", "sandbox")
    assert (rotated["set"], rotated["version"]) == ("sandbox", 2)
    load_peppers.refresh()
    renew_peppers()
    load_peppers.refresh()
    assert verdict(used) is None
    rehash()
    code, answer = status("--list", "--dormant-days", "0")
    assert (code, answer["ok"]) == (0, True)
    assert [of(answer, "sandbox", number)["living"] for number in (1, 2)] == [1, 1]
    assert of(answer, "sandbox", 2)["is_hashing"]
    assert idle.key_id in {each["key_id"] for each in answer["dormant"]}
    with pytest.raises(CommandError) as refused:
        run("retire_pepper", "--set", "sandbox", "--version", "1")
    for expected in (idle.key_id, idle.credential_id, "acme", "never used", "rotate or revoke"):
        assert expected in str(refused.value)
    make_operator("responder", Role.INCIDENT_RESPONDER)
    run("revoke_key", idle.key_id, "--by", "responder", "--reason", "superseded")
    retired = run("retire_pepper", "--set", "sandbox", "--version", "1")
    assert (retired["destroyed_at"], retired["destroyable_from"] > retired["retired_at"]) == (None, True)
    with pytest.raises(CommandError, match="may be destroyed from"):
        run("retire_pepper", "--set", "sandbox", "--version", "1", "--destroy")
    code, answer = status()
    assert (code, of(answer, "sandbox", 1)["stored"]) == (0, True), "waiting for destruction is no fault"
    output = io.StringIO()
    call_command("show_peppers", stdout=output)
    assert f"can be destroyed from {retired['destroyable_from'][:10]}" in output.getvalue()
    monkeypatch.setattr(rotation, "KEPT_AFTER_RETIREMENT", timedelta(0))
    assert run("retire_pepper", "--set", "sandbox", "--version", "1", "--destroy")["destroyed_at"] is not None
    code, answer = status()
    assert code == 0
    assert of(answer, "sandbox", 1)["stored"] is False
    assert verdict(used) is None
    assert AuditEntry.objects.filter(event="pepper.destroyed").count() == 1


def test_show_peppers_as_text_names_every_version() -> None:
    output = io.StringIO()
    call_command("show_peppers", "--list", stdout=output)
    for pepper_set in PepperSet:
        assert f"{pepper_set} 1  loaded, creates the digests" in output.getvalue()


def test_show_peppers_names_a_missing_pepper() -> None:
    secret_backend().destroy(Mount.PEPPERS, PepperSet.SANDBOX, 1)
    load_peppers.cache_clear()
    code, answer = status()
    assert code == 1
    assert "sandbox pepper 1 is gone" in of(answer, "sandbox", 1)["fault"]
    assert of(answer, "production", 1)["fault"] == ""
    with pytest.raises(ImproperlyConfigured, match="sandbox pepper 1 is gone: restore"):
        require_ready()


def test_show_peppers_names_swapped_environments(folder: Path) -> None:
    """Both swapped peppers are named, and the process does not start."""
    sandbox, production, service = (stored(each) for each in PepperSet)
    swap_keystore(folder, {PepperSet.SANDBOX: production, PepperSet.PRODUCTION: sandbox, PepperSet.SERVICE: service})
    code, answer = status()
    assert code == 1
    assert "it is production pepper 1; the environments were swapped" in of(answer, "sandbox", 1)["fault"]
    assert "it is sandbox pepper 1; the environments were swapped" in of(answer, "production", 1)["fault"]
    with pytest.raises(ImproperlyConfigured, match="environments were swapped"):
        require_ready()


def test_show_peppers_of_a_pepper_in_memory_only_is_an_alarm() -> None:
    """Such a pepper works until the process ends, so it can still be restored."""
    secret_backend().destroy(Mount.PEPPERS, PepperSet.SANDBOX, 1)
    code, answer = status()
    assert code == 1
    assert "Only running processes have it" in of(answer, "sandbox", 1)["fault"]


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_pepper_start_without_the_backend_is_logged_and_ready_once_it_returns(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No restart is needed; until the backend returns the process is not ready."""

    def sealed(*_: object) -> object:
        raise BackendUnavailableError("The secrets manager cannot answer now.", internal="Vault is sealed")

    forget_keystore()
    with monkeypatch.context() as patch:
        patch.setattr(LocalKeystore, "read", sealed)
        require_ready()
        assert {getattr(record, "why", "") for record in caplog.records} == {"Vault is sealed"}
        assert client.get("/readyz").status_code == 503
    assert client.get("/readyz").json()["status"] == "ready"


def test_dormant_key_is_a_key_unused_for_long() -> None:
    make_merchant("acme")
    old, _ = issue(account(), at=now() - timedelta(days=40))
    new, _ = issue(account(), label="new")
    _, answer = status("--list")
    assert [each["key_id"] for each in answer["dormant"]] == [old.key_id]
    assert of(answer, "sandbox", 1)["dormant"] == 1
    assert new.pepper_version == 1

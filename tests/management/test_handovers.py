"""Wrapping tokens on the command line: printed once, confirmed, or suspected."""

from typing import Any

import pytest
from django.core.management import CommandError

from keyvault.domain.plaintext import Plaintext
from keyvault.services import upkeep
from rotation.services.engine import advance_rotation
from rotation.services.reports import get_rotation
from tests.services.rows import dump_tables
from tests.services.wrappings import Wrappings, begin_wrapping

from .test_commands import issue, run

pytestmark = [pytest.mark.database, pytest.mark.django_db]


@pytest.fixture
def wraps(db: None, monkeypatch: pytest.MonkeyPatch, settings: Any) -> Wrappings:
    run("seed_demo")
    return begin_wrapping(monkeypatch, settings)


def collect(what: str, name: str, *words: str) -> Any:
    return run("collect_key", what, name, "--by", "tam", *(words or ("--reveal",)))


def test_issue_key_wrapped_without_a_vault_is_refused(db: None) -> None:
    run("seed_demo")
    with pytest.raises(CommandError, match="/delivery: only a Vault"):
        issue("sandbox", "--delivery", "wrapped")


@pytest.mark.parametrize("environment", ["sandbox", "production"])
def test_issue_key_wrapped_prints_a_token_that_opens(wraps: Wrappings, environment: str) -> None:
    shown = issue(environment, "--delivery", "wrapped", "--reveal")
    assert "key" not in shown
    assert set(shown["wrapped"]) == {"token", "creation_path", "expires_at"}
    assert shown["key_id"] in wraps.open(Plaintext(shown["wrapped"]["token"])).reveal()
    assert shown["wrapped"]["token"] not in repr(dump_tables())


def test_collect_key_wrapped_is_given_and_confirmed(wraps: Wrappings) -> None:
    issued = issue("sandbox", "--delivery", "wrapped")
    given = collect("--request", issued["request_id"])
    assert (given["key_id"], set(given)) == (issued["key_id"], {"key_id", "wrapped"})
    wraps.open(Plaintext(given["wrapped"]["token"]))
    said = collect("--request", issued["request_id"], "--arrived", issued["key_id"])
    assert said == {"key_id": issued["key_id"], "outcome": "collected"}
    with pytest.raises(CommandError, match="collected already"):
        collect("--request", issued["request_id"])


def test_collect_key_wrapped_that_did_not_open_is_made_anew(wraps: Wrappings) -> None:
    issued = issue("sandbox", "--delivery", "wrapped")
    wraps.open(Plaintext(collect("--request", issued["request_id"])["wrapped"]["token"]))
    said = collect("--request", issued["request_id"], "--not-opened", issued["key_id"])
    assert "interception" in said["outcome"]
    assert upkeep.issue_due() == 1
    assert collect("--request", issued["request_id"])["key_id"] != issued["key_id"]


def test_collect_key_of_a_rotation_wrapped_is_given_confirmed_or_suspected(wraps: Wrappings) -> None:
    issued = issue("sandbox", "--delivery", "wrapped")
    name = run("rotate_key", "--credential", issued["credential_id"], "--requested-by", "tam", "--proof", "ack")[
        "rotation_id"
    ]
    advance_rotation(name)
    first = collect("--rotation", name)
    wraps.open(Plaintext(first["wrapped"]["token"]))
    assert "interception" in collect("--rotation", name, "--not-opened", first["key_id"])["outcome"]
    advance_rotation(name)
    second = collect("--rotation", name)
    assert second["key_id"] != first["key_id"]
    assert second["key_id"] in wraps.open(Plaintext(second["wrapped"]["token"])).reveal()
    assert collect("--rotation", name, "--arrived", second["key_id"])["outcome"] == "collected"
    assert get_rotation(name).collected_at is not None

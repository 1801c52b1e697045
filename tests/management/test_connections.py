"""Provider connections on the command line: set from a file or standard input, listed, removed; never printed."""

import io
import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.core.management import CommandError, call_command

from keyvault.access.roles import Role
from keyvault.backends.base import Mount
from keyvault.models import ProviderConnection
from keyvault.services.secrets.backend import secret_backend
from tests.factories import have_peppers, make_merchant, make_operator

pytestmark = pytest.mark.django_db

PLACE = ("--merchant", "acme", "--environment", "sandbox")
STRIPE = (*PLACE, "--provider", "stripe")
SECRET = "sk_test_" + "Zq7" * 8


@pytest.fixture(autouse=True)
def people() -> None:
    have_peppers()
    make_merchant("acme")
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    make_operator("auditor", Role.AUDITOR)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "stripe.key"
    path.write_text(f"{SECRET}\n")
    return path


def output_of(command: str, *arguments: str) -> str:
    out = StringIO()
    call_command(command, *arguments, stdout=out)
    return out.getvalue()


def stored() -> str:
    row = ProviderConnection.objects.get(removed_at=None)
    return secret_backend().read(Mount.SANDBOX, row.backend_path).secret.reveal()


@pytest.mark.database
def test_set_connection_stores_the_file_and_prints_no_secret(file: Path) -> None:
    """The secret is printed neither with --json nor without."""
    text = output_of("set_connection", *STRIPE, "--secret-file", str(file), "--by", "tam")
    answer = json.loads(output_of("set_connection", *STRIPE, "--secret-file", str(file), "--by", "tam", "--json"))
    assert stored() == SECRET
    assert SECRET not in text + json.dumps(answer)
    assert (answer["provider"], answer["mode"], answer["backend_version"]) == ("stripe", "test", 2)
    assert answer["stored_by"] == "operator:tam"


def test_set_connection_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b'{"user": "a", "password": "b"}\n')))
    output_of("set_connection", *STRIPE, "--secret-file", "-", "--by", "tam")
    assert stored() == '{"user": "a", "password": "b"}'


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "must not be empty"), (b"\xff\xfe", "UTF-8"), (b"x" * 20_000, "8192 bytes"), (b"sk_live_51H", "live key")],
)
def test_set_connection_with_invalid_credentials_is_refused_with_the_reason(
    file: Path, content: bytes, reason: str
) -> None:
    file.write_bytes(content)
    with pytest.raises(CommandError, match=reason) as refused:
        output_of("set_connection", *STRIPE, "--secret-file", str(file), "--by", "tam")
    assert "sk_live_51H" not in str(refused.value)
    assert not ProviderConnection.objects.exists()


def test_set_connection_from_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="/secret_file: cannot be read"):
        output_of("set_connection", *STRIPE, "--secret-file", str(tmp_path / "none"), "--by", "tam")


def test_set_connection_by_an_auditor_is_refused(file: Path) -> None:
    """The command line grants no more than the operator's role."""
    with pytest.raises(CommandError, match="permission_missing"):
        output_of("set_connection", *STRIPE, "--secret-file", str(file), "--by", "auditor")


@pytest.mark.database
def test_list_connections_shows_the_accounts_connections_without_secrets(file: Path) -> None:
    output_of("set_connection", *STRIPE, "--secret-file", str(file), "--by", "tam")
    listing = output_of("list_connections", *PLACE, "--json")
    (listed,) = json.loads(listing)["connections"]
    assert SECRET not in listing + output_of("list_connections", *PLACE)
    assert listed["connection_id"].startswith("con_")
    assert "backend_path" not in listed, "only the service reads the local keystore"
    production = json.loads(
        output_of("list_connections", "--merchant", "acme", "--environment", "production", "--json")
    )
    assert production == {"connections": []}


@pytest.mark.database
def test_removed_connection_is_not_listed(file: Path) -> None:
    output_of("set_connection", *STRIPE, "--secret-file", str(file), "--by", "tam")
    assert json.loads(output_of("remove_connection", *STRIPE, "--by", "tam", "--json"))["removed_at"]
    assert json.loads(output_of("list_connections", *PLACE, "--json")) == {"connections": []}
    with pytest.raises(CommandError, match="not_found"):
        output_of("remove_connection", *STRIPE, "--by", "tam")

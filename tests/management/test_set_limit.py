"""`set_limit` and `show_catalog` for scripts."""

import io
import json
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from keyvault.access.catalog import BUILT_IN
from keyvault.access.endpoints import EndpointDraft
from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.domain.keys import KeyKind
from keyvault.models import AuditEntry, LimitOverride
from keyvault.services.catalog.endpoints import add_endpoint
from tests.factories import account, grant, make_merchant, make_operator

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def people() -> None:
    make_merchant("acme")
    make_operator("admin", Role.KEY_ADMINISTRATOR)
    make_operator("auditor", Role.AUDITOR)


def run(*arguments: str) -> Any:
    output = io.StringIO()
    call_command(*arguments, "--json", stdout=output)
    return json.loads(output.getvalue())


def set_limit(*arguments: str, by: str = "admin") -> Any:
    return run("set_limit", "--environment", "sandbox", *arguments, "--by", by)


@pytest.mark.database
def test_set_limit_of_an_account_answers_the_effective_limit() -> None:
    answer = set_limit("--merchant", "acme", "--rate", "7", "--per-seconds", "60")
    assert answer == {
        "merchant": "acme",
        "environment": "sandbox",
        "endpoint": None,
        "rate": 7,
        "per_seconds": 60,
        "source": "account",
    }
    assert (account("acme").limit_count, account("acme").limit_seconds) == (7, 60)
    cleared = set_limit("--merchant", "acme", "--clear")
    assert (cleared["rate"], cleared["per_seconds"], cleared["source"]) == (25, 1, "default")


def test_set_limit_of_an_endpoint_and_of_the_pair() -> None:
    where = ["--endpoint", "orders.create"]
    wide = set_limit(*where, "--rate", "5", "--per-seconds", "1")
    assert (wide["merchant"], wide["endpoint"], wide["rate"], wide["source"]) == (None, "orders.create", 5, "endpoint")
    pair = set_limit(*where, "--merchant", "acme", "--rate", "9", "--per-seconds", "1")
    assert (pair["merchant"], pair["rate"], pair["source"]) == ("acme", 9, "pair")
    cleared = set_limit(*where, "--merchant", "acme", "--clear")
    assert (cleared["rate"], cleared["source"]) == (5, "endpoint")
    none = set_limit(*where, "--clear")
    assert (none["rate"], none["per_seconds"], none["source"]) == (None, None, "default")


def test_set_limit_is_recorded_with_the_operator_and_the_host_user() -> None:
    set_limit("--merchant", "acme", "--rate", "7", "--per-seconds", "60")
    entry = AuditEntry.objects.latest("id")
    body = json.loads(bytes(entry.body))
    assert (entry.event, entry.actor, body["channel"]) == ("limit.set", "operator:admin", "command_line")
    assert body["details"]["host_user"]


@pytest.mark.parametrize(
    ("arguments", "returncode"),
    [
        (["--merchant", "acme", "--rate", "0", "--per-seconds", "1"], 1),
        (["--merchant", "acme", "--rate", "1", "--per-seconds", "86401"], 1),
        (["--merchant", "acme", "--rate", "1000001", "--per-seconds", "1"], 1),
        (["--merchant", "nobody", "--rate", "1", "--per-seconds", "1"], 1),
        (["--endpoint", "no.such", "--rate", "1", "--per-seconds", "1"], 1),
        (["--merchant", "acme", "--endpoint", "no.such", "--clear"], 1),
        (["--merchant", "acme"], 2),
        (["--merchant", "acme", "--rate", "1"], 2),
        (["--merchant", "acme", "--clear", "--rate", "1", "--per-seconds", "1"], 2),
        (["--rate", "1", "--per-seconds", "1"], 2),
    ],
)
def test_set_limit_with_invalid_arguments_is_refused(arguments: list[str], returncode: int) -> None:
    with pytest.raises(CommandError) as refused:
        set_limit(*arguments)
    assert refused.value.returncode == returncode
    assert (account("acme").limit_count, LimitOverride.objects.count()) == (None, 0)


def test_set_limit_without_the_permission_is_refused() -> None:
    """The command line is bound by the operator's roles, as the console is."""
    with pytest.raises(CommandError, match="permission_missing"):
        set_limit("--merchant", "acme", "--rate", "7", "--per-seconds", "60", by="auditor")


def test_show_catalog_prints_every_endpoint_with_its_rule_and_limits() -> None:
    adding = grant(make_operator("cataloger", Role.KEY_ADMINISTRATOR), P.CATALOG_WRITE)
    draft = EndpointDraft(
        "refunds.create",
        "POST",
        "/refunds/<refund_id>",
        frozenset(KeyKind),
        merchant_from="path:refund_id",
        limit_count=5,
        limit_seconds=60,
    )
    add_endpoint(adding, draft)
    answer = run("show_catalog")
    endpoints = {endpoint.pop("name"): endpoint for endpoint in answer["endpoints"]}
    assert endpoints.keys() == {endpoint.name for endpoint in BUILT_IN.endpoints} | {"refunds.create"}
    assert endpoints["refunds.create"] == {
        "method": "POST",
        "path": "/refunds/<refund_id>",
        "credential": "public or private",
        "credentials": ["private", "public"],
        "bearer": "none",
        "merchant_from": "path:refund_id",
        "store_from": None,
        "idempotency_key": False,
        "limit": {"count": 5, "seconds": 60},
        "on_limiter_loss": "local_share",
        "built_in": False,
        "summary": "",
        "authorization": {
            "Method": "POST",
            "Path": "/refunds/<refund_id>",
            "X-Api-Key": "public or private API key",
            "Bearer": "not supported",
            "Context": "merchant from path:refund_id",
            "Idempotency-Key": "not used",
            "Limit": "5 per 60 s, in addition to the account's",
            "Limiter lost": "each process allows a share of the limit",
        },
    }
    assert endpoints["orders.create"]["limit"] is None
    assert endpoints["orders.create"]["idempotency_key"] is True
    assert answer["account_limits"] == {
        "sandbox": {"count": 25, "seconds": 1},
        "production": {"count": 100, "seconds": 1},
    }


def test_show_catalog_without_json_is_a_table() -> None:
    output = io.StringIO()
    call_command("show_catalog", stdout=output)
    lines = output.getvalue().splitlines()
    assert lines[0].split()[:4] == ["endpoint", "method", "path", "key"]
    assert any(line.startswith("orders.retrieve") and "optional" in line for line in lines)
    assert "sandbox 25 per 1 s" in lines[-1]

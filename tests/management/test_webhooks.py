"""Webhook endpoints on the command line."""

import json
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from keyvault.access.roles import Role
from keyvault.models import WebhookEndpoint
from keyvault.services.webhooks.endpoints import signing_secrets
from tests.factories import have_peppers, make_merchant, make_operator, now

pytestmark = [pytest.mark.database, pytest.mark.django_db]

PLACE = ("--merchant", "acme", "--environment", "sandbox")
URL = "https://acme.example/hooks"


@pytest.fixture(autouse=True)
def people() -> None:
    have_peppers()
    make_merchant("acme")
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    make_operator("auditor", Role.AUDITOR)


def said(command: str, *arguments: str) -> str:
    out = StringIO()
    call_command(command, *arguments, stdout=out)
    return out.getvalue()


def test_add_webhook_reveals_the_secret_when_asked_to() -> None:
    answer = json.loads(said("add_webhook", *PLACE, "--url", URL, "--by", "tam", "--reveal", "--json"))
    endpoint = WebhookEndpoint.objects.get(pk=answer["endpoint"])
    assert [secret.reveal() for secret in signing_secrets(endpoint, now())] == [answer["secret"]]


def test_add_webhook_keeps_the_secret_to_itself_otherwise() -> None:
    """Nothing is printed that a terminal's history or a log of a build would keep."""
    assert "whsec_" not in said("add_webhook", *PLACE, "--url", URL, "--by", "tam")
    assert "whsec_" not in said("list_webhooks", *PLACE, "--json")


def test_add_webhook_that_does_not_fit_is_refused_with_the_reason() -> None:
    with pytest.raises(CommandError, match="/url: must have a public address"):
        said("add_webhook", *PLACE, "--url", "https://10.0.0.1/", "--by", "tam")


def test_add_webhook_in_the_name_of_an_auditor_is_refused() -> None:
    """A command line opens no more than the console does."""
    with pytest.raises(CommandError, match="permission_missing"):
        said("add_webhook", *PLACE, "--url", URL, "--by", "auditor")


def test_webhooks_lists_the_endpoints_of_the_account() -> None:
    said("add_webhook", *PLACE, "--url", URL, "--by", "tam")
    (listed,) = json.loads(said("list_webhooks", *PLACE, "--json"))["endpoints"]
    assert (listed["url"], listed["disabled_at"], listed["due"]) == (URL, None, 0)
    production = json.loads(said("list_webhooks", "--merchant", "acme", "--environment", "production", "--json"))
    assert production == {"endpoints": []}

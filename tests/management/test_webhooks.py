"""Webhook endpoints on the command line."""

import json
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from keyvault.access.roles import Role
from keyvault.models import WebhookBreaker, WebhookEndpoint
from keyvault.services.webhooks.endpoints import signing_secrets
from tests.factories import have_peppers, make_merchant, make_operator, now

pytestmark = pytest.mark.django_db

PLACE = ("--merchant", "acme", "--environment", "sandbox")
URL = "https://acme.example/hooks"


@pytest.fixture(autouse=True)
def people() -> None:
    have_peppers()
    make_merchant("acme")
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    make_operator("auditor", Role.AUDITOR)


def output_of(command: str, *arguments: str) -> str:
    out = StringIO()
    call_command(command, *arguments, stdout=out)
    return out.getvalue()


@pytest.mark.database
def test_add_webhook_with_reveal_prints_the_secret() -> None:
    answer = json.loads(output_of("add_webhook", *PLACE, "--url", URL, "--by", "tam", "--reveal", "--json"))
    endpoint = WebhookEndpoint.objects.get(pk=answer["endpoint"])
    assert [secret.reveal() for secret in signing_secrets(endpoint, now())] == [answer["secret"]]


def test_add_webhook_without_reveal_prints_no_secret() -> None:
    """The secret is not printed, so neither terminal history nor build logs keep it."""
    assert "whsec_" not in output_of("add_webhook", *PLACE, "--url", URL, "--by", "tam")
    assert "whsec_" not in output_of("list_webhooks", *PLACE, "--json")


def test_add_webhook_with_an_invalid_url_is_refused_with_the_reason() -> None:
    with pytest.raises(CommandError, match="/url: must have a public address"):
        output_of("add_webhook", *PLACE, "--url", "https://10.0.0.1/", "--by", "tam")


def test_add_webhook_by_an_auditor_is_refused() -> None:
    """The command line grants no more than the operator's role."""
    with pytest.raises(CommandError, match="permission_missing"):
        output_of("add_webhook", *PLACE, "--url", URL, "--by", "auditor")


def test_list_webhooks_shows_the_endpoints_of_the_account() -> None:
    output_of("add_webhook", *PLACE, "--url", URL, "--by", "tam")
    (listed,) = json.loads(output_of("list_webhooks", *PLACE, "--json"))["endpoints"]
    assert (listed["url"], listed["disabled_at"], listed["due"]) == (URL, None, 0)
    assert (listed["attempts_without_reply"], listed["paused_until"]) == (0, None)
    production = json.loads(output_of("list_webhooks", "--merchant", "acme", "--environment", "production", "--json"))
    assert production == {"endpoints": []}


def test_list_webhooks_shows_an_endpoint_paused_by_its_breaker() -> None:
    output_of("add_webhook", *PLACE, "--url", URL, "--by", "tam")
    WebhookBreaker.objects.create(endpoint=WebhookEndpoint.objects.get(), failures=4, open_until=now())
    (listed,) = json.loads(output_of("list_webhooks", *PLACE, "--json"))["endpoints"]
    assert listed["attempts_without_reply"] == 4
    assert listed["paused_until"] is not None

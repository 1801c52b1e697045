"""Logged-in operators and the console's addresses, for tests."""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.db import connection
from django.test import Client
from django.urls import URLPattern, URLResolver, reverse

from keyvault.access import principals
from keyvault.access.endpoints import EndpointDraft
from keyvault.access.permissions import Permission
from keyvault.access.roles import Role
from keyvault.domain.keys import KeyKind
from keyvault.models import Account, CatalogEndpoint, Operator, Refusal
from keyvault.services.catalog.endpoints import add_endpoint
from keyvault.services.sessions.step_up import note_second_factor
from tests.factories import (
    PRODUCTION,
    SANDBOX,
    account,
    grant,
    have_peppers,
    make_merchant,
    make_operator,
    now,
    the_operator,
)
from tests.starting_rows import start_with

SHAPED = re.compile(r"kv_(?:pub|prv|svc)_(?:sbx|prd|all)_[0-9A-Za-z]{65}")
"""A whole key or token of this suite."""


@dataclass(frozen=True)
class Desk:
    """A merchant in both environments, and one operator of each role."""

    sandbox: Account
    production: Account
    tam: principals.OperatorPrincipal
    approver: principals.OperatorPrincipal
    admin: principals.OperatorPrincipal
    auditor: principals.OperatorPrincipal
    responder: principals.OperatorPrincipal


def set_up_desk() -> Desk:
    return start_with(_set_up_desk)


def _set_up_desk() -> Desk:
    have_peppers()
    make_merchant("acme")
    return Desk(
        sandbox=account("acme", SANDBOX),
        production=account("acme", PRODUCTION),
        tam=make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER),
        approver=make_operator("approver", Role.APPROVER),
        admin=make_operator("admin", Role.KEY_ADMINISTRATOR),
        auditor=make_operator("auditor", Role.AUDITOR),
        responder=make_operator("responder", Role.INCIDENT_RESPONDER),
    )


def make_endpoint(name: str = "refunds.create", **changed: Any) -> CatalogEndpoint:
    """Create an upstream endpoint that an operator added, by default a POST for private keys."""
    defaults: dict[str, Any] = {
        "method": "POST",
        "path": "/refunds/<refund_id>",
        "credentials": frozenset({KeyKind.PRIVATE}),
    }
    adding = the_operator("admin", Role.KEY_ADMINISTRATOR)
    return add_endpoint(grant(adding, Permission.CATALOG_WRITE), EndpointDraft(name, **{**defaults, **changed}))


def make_refusal(request_id: str = "R" * 22, **changes: Any) -> Refusal:
    """Store a refusal of an unauthenticated key."""
    columns = {
        "entry_point": "verify",
        "environment": SANDBOX,
        "endpoint": "orders.retrieve",
        "code": "credential_invalid",
        "detail": "The API key is not valid.",
        "source": "192.0.2.7",
        "trace": [["credential_invalid", False]],
    }
    return Refusal.objects.create(request_id=request_id, at=now(), **{**columns, **changes})


def browser(operator: principals.OperatorPrincipal, **options: Any) -> Client:
    """Return a signed-in client of the operator: password and second factor. Internal faults have status 500."""
    client = with_password(operator, **options)
    pass_second_factor(client, now())
    return client


def with_password(operator: principals.OperatorPrincipal, **options: Any) -> Client:
    """Return a client that has passed the page of the password only."""
    client = Client(raise_request_exception=False, **options)
    client.force_login(Operator.objects.get(username=operator.username))
    return client


def pass_second_factor(client: Client, at: datetime) -> None:
    session = client.session
    note_second_factor(session, at)
    session.save()
    client.cookies[settings.SESSION_COOKIE_NAME] = str(session.session_key)


def address(page: str, *ids: object) -> str:
    """Return the address of a page by its name, such as `keyvault_key_revoke`, and ids."""
    return reverse(f"admin:{page}", args=[str(each) for each in ids])


def list_routes(urls: Any = None, prefix: str = "/admin/") -> Iterator[tuple[str, str]]:
    """Yield the name of each page with its path, as the console routes it. `urls`: by default all."""
    for pattern in admin.site.get_urls() if urls is None else urls:
        path = prefix + str(pattern.pattern).lstrip("^")
        if isinstance(pattern, URLResolver):
            yield from list_routes(pattern.url_patterns, path)
        elif isinstance(pattern, URLPattern):
            yield pattern.name or "everything else", path


def hidden(response: Any, name: str) -> str:
    """Return the value of a hidden form field."""
    found = re.search(rf'<input type="hidden" name="{name}" value="([^"]*)"', text_of(response))
    assert found is not None, f"no hidden {name} on the page"
    return html.unescape(found[1])


def text_of(response: Any) -> str:
    text: str = response.getvalue().decode()  # also of a streamed response
    return text


def dump() -> str:
    """Return everything in the database as text, to search for what must not be there."""
    parts = []
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f"SELECT * FROM {connection.ops.quote_name(table)}")  # noqa: S608  our own tables' names
            for row in cursor.fetchall():
                parts += [bytes(cell).decode("latin-1") if isinstance(cell, memoryview) else str(cell) for cell in row]
    return "\n".join(parts)

"""A backend service that calls the service plane."""

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from django.test import Client

import keyvault.project.urls  # noqa: F401  loads all environments, whichever test runs first
from keyvault.access.permissions import SERVICE_PERMISSIONS
from keyvault.domain.keystring import StringScope
from keyvault.services.usage.recorder import UsageLog
from tests.factories import make_merchant, make_token
from tests.starting_rows import start_with

from .integration import Ask, asking, make_roomy_merchants

Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def usage(monkeypatch: pytest.MonkeyPatch) -> UsageLog:
    """Return the usage log of the planes, without its thread; a test flushes it itself."""
    log = UsageLog()
    monkeypatch.setattr(UsageLog, "start", lambda self: None)
    for module in ("keyvault.hotpath.adapters.assembly", "keyvault.api.integration"):
        monkeypatch.setattr(f"{module}.usage_log", log)
    return log


@pytest.fixture
def token(db: None) -> str:
    return start_with(_make_token)


def _make_token() -> str:
    make_merchant("acme")
    make_merchant("globex")
    return make_token(*SERVICE_PERMISSIONS, scope=StringScope.ALL)[1].reveal()


@pytest.fixture
def call(token: str) -> Call:
    """Return a function that sends JSON with the service token and sets `.body` to the parsed answer."""
    client = Client(raise_request_exception=False)

    def send(method: str, path: str, body: Any = None, **headers: str) -> Any:
        sent: Any = {"HTTP_AUTHORIZATION": f"Bearer {token}", **headers}
        response: Any = client.generic(
            method,
            path,
            data=body if isinstance(body, bytes) else b"" if body is None else _json(body),
            content_type="application/json",
            **sent,
        )
        response.body = response.json() if response.content else None
        return response

    return send


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()


def new_key() -> dict[str, str]:
    """Return an Idempotency-Key that no other request has, for `Call`."""
    return {"HTTP_IDEMPOTENCY_KEY": uuid4().hex}


@pytest.fixture
def ask(db: None, client: Client) -> Ask:
    """Return a client of the integration plane for `acme` and `globex`, with limits that no test reaches."""
    start_with(make_roomy_merchants)
    return asking(client)

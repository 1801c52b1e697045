"""A backend service that calls the service plane."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

import keyvault.project.urls  # noqa: F401  with all environments, whichever test comes first
from keyvault.access.permissions import SERVICE_PERMISSIONS
from keyvault.domain.environments import Environment
from keyvault.domain.keystring import StringScope
from keyvault.services.usage.recorder import UsageLog
from tests.factories import make_merchant, make_token

from .integration import Ask, asking, change_account

Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def usage(monkeypatch: pytest.MonkeyPatch) -> UsageLog:
    """The usage log of the doors, without its thread: a test flushes it by hand."""
    log = UsageLog()
    monkeypatch.setattr(UsageLog, "start", lambda self: None)
    for module in ("keyvault.hotpath.adapters.assembly", "keyvault.api.integration"):
        monkeypatch.setattr(f"{module}.usage_log", log)
    return log


@pytest.fixture
def token(db: None) -> str:
    make_merchant("acme")
    make_merchant("globex")
    return make_token(*SERVICE_PERMISSIONS, scope=StringScope.ALL)[1].reveal()


@pytest.fixture
def call(token: str) -> Call:
    """Sends JSON with the service token; the answer's body is parsed in `.body`."""
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


@pytest.fixture
def ask(db: None, client: Client) -> Ask:
    """The integration plane of `acme` and `globex`, whose limits no test reaches by accident."""
    for merchant_id in ("acme", "globex"):
        make_merchant(merchant_id)
        for environment in Environment:
            change_account(merchant_id, environment, limit_count=1000, limit_seconds=1)
    return asking(client)

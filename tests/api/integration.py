"""A merchant's backend and a browser, for tests of the integration plane."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

from django.test import Client

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST, KeyHolder
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.domain.plaintext import Plaintext
from keyvault.hotpath.adapters.stores import DatabaseStore
from keyvault.hotpath.frontends.threaded_frontend import StoreUnavailableError
from keyvault.hotpath.messages.pending_requests import RULES, Found
from keyvault.models import Account, Key
from keyvault.services.recording.transaction import recorded
from tests.factories import SANDBOX, account, grant, issue, make_merchant

ORDERS = "/sandbox/merchants/orders"
ORDER = {"amount_minor": 1299, "currency": "EUR"}

Ask = Callable[..., Any]
"""`ask(method, path, body, key=…, bearer=…, idempotency=…, **headers)`; the parsed body is in `.body`."""

_keys: Iterator[int] = count()
_NO_BODY: Any = object()


def asking(client: Client) -> Ask:
    """Return an `Ask`. Each POST carries a fresh Idempotency-Key unless one is given; None omits it."""

    def send(
        method: str,
        path: str,
        body: Any = _NO_BODY,
        *,
        key: Plaintext | None = None,
        bearer: str | None = None,
        idempotency: str | None = "",
        content_type: str = "application/json",
        **headers: str,
    ) -> Any:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            sent["X-Api-Key"] = key.reveal()
        if bearer is not None:
            sent["Authorization"] = f"Bearer {bearer}"
        if method == "POST" and idempotency is not None:
            sent["Idempotency-Key"] = idempotency or f"attempt-{next(_keys)}"
        raw = b"" if body is _NO_BODY else body if isinstance(body, bytes) else json.dumps(body).encode()
        response: Any = client.generic(method, path, data=raw, content_type=content_type, headers=sent)
        response.body = response.json() if response.content else None
        return response

    return send


def make_roomy_merchants() -> None:
    """Make `acme` and `globex`, with limits that no test reaches."""
    for merchant_id in ("acme", "globex"):
        make_merchant(merchant_id)
        for environment in Environment:
            change_account(merchant_id, environment, limit_count=1000, limit_seconds=1)


@contextmanager
def losing(what: str) -> Iterator[None]:
    """Make the engine's database fail when it is asked for this: `KEY`, `TOKEN`, `CUSTOMER` or `RULES`."""
    find = DatabaseStore.find

    def find_or_lose(store: DatabaseStore, kind: str, ids: frozenset[str], address: str | None) -> Mapping[str, Found]:
        if kind == what:
            raise StoreUnavailableError
        return find(store, kind, ids, address)

    with mock.patch.object(DatabaseStore, "find", find_or_lose):
        if what != RULES:
            yield
            return
        with mock.patch.object(DatabaseStore, "read_rules", side_effect=StoreUnavailableError):
            yield


def change_account(merchant_id: str = "acme", environment: Environment = SANDBOX, **changes: Any) -> Account:
    """Return the account with these columns set."""
    row = account(merchant_id, environment)
    with recorded(grant(HOST, P.MERCHANTS_WRITE, row), P.MERCHANTS_WRITE, "test.changed", account=row):
        row.compare_and_swap(**changes)
    return row


def expect(response: Any, status: int, code: str) -> None:
    """Expect a problem document with that status and code."""
    assert (response.status_code, response.body.get("code")) == (status, code), response.content
    assert response["Content-Type"] == "application/problem+json"
    assert response["Cache-Control"] == "no-store"
    assert response.body["request_id"] == response["X-Request-Id"]
    assert ("WWW-Authenticate" in response) == (status == 401)


def pointers(response: Any) -> list[str]:
    return [fault["pointer"] for fault in response.body["errors"]]


def private(merchant_id: str = "acme", environment: Environment = SANDBOX) -> Plaintext:
    return issue(account(merchant_id, environment))[1]


def public(merchant_id: str = "acme", environment: Environment = SANDBOX) -> Plaintext:
    return issue(account(merchant_id, environment), kind=KeyKind.PUBLIC)[1]


def issue_token(ask: Ask, key: Plaintext, customer_id: str = "cust-1", **body: Any) -> Any:
    response = ask("POST", f"/sandbox/customers/{customer_id}/access-tokens", body, key=key)
    assert response.status_code == 201, response.content
    return response.body


def holder_of(key: Key) -> KeyHolder:
    """Return the key's holder, for the services."""
    credential = key.credential
    return KeyHolder(
        key.key_id,
        credential.credential_id,
        KeyKind(credential.kind),
        credential.environment,
        credential.account.merchant_id,
    )

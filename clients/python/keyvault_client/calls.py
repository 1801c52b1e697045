"""The calls of a merchant: which request each one is. The sync and the async client share them."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from keyvault.domain.plaintext import Plaintext
from keyvault_client.keystrings import as_plaintext

_Outcome = TypeVar("_Outcome")


@dataclass(frozen=True, slots=True)
class MerchantCall:
    """A call before its checks. `path`: relative to the base URL. `body`: sent unchanged with each attempt."""

    method: str
    path: str = field(repr=False)
    body: bytes = field(default=b"", repr=False)
    idempotency_key: str | None = None
    customer_token: Plaintext | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """A success. `headers`: names in lower case. `json`: the parsed body, None without one."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)
    json: Any = field(repr=False)

    @property
    def request_id(self) -> str | None:
        return self.headers.get("x-request-id")


class Calls(ABC, Generic[_Outcome]):
    """The calls of a client. `_Outcome` is Response, or an awaitable of it."""

    @abstractmethod
    def _start(self, call: MerchantCall) -> _Outcome: ...

    def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        body: bytes | None = None,
        idempotency_key: str | None = None,
        customer_token: str | Plaintext | None = None,
    ) -> _Outcome:
        """Send a request and return its success. Raises KeyvaultError, see `errors`.

        Args:
            path: relative to the base URL, such as `/merchants/orders`.
            json: the body as an object, encoded once. Instead of it `body`: the exact bytes of JSON.
            idempotency_key: of a POST or PATCH; default: a new one for each call. To repeat a call after an error, give
                the key and the body of the first.
            customer_token: a customer access token, where the endpoint supports it.
        """
        customer_token = None if customer_token is None else as_plaintext(customer_token)
        content = _encode(json) if body is None else body
        return self._start(MerchantCall(method.upper(), path, content, idempotency_key, customer_token))

    def create_order(
        self, amount_minor: int, currency: str, customer_id: str | None = None, *, idempotency_key: str | None = None
    ) -> _Outcome:
        """Create an order. `amount_minor`: in the currency's smallest unit."""
        order = {"amount_minor": amount_minor, "currency": currency}
        fields = order if customer_id is None else order | {"customer_id": customer_id}
        return self.request("POST", "/merchants/orders", json=fields, idempotency_key=idempotency_key)

    def retrieve_order(self, order_token: str, *, customer_token: str | Plaintext | None = None) -> _Outcome:
        customer_token = None if customer_token is None else as_plaintext(customer_token)
        return self.request("GET", f"/merchants/orders/{quote(order_token, safe='')}", customer_token=customer_token)

    def retrieve_configuration(self) -> _Outcome:
        """Return the account's client configuration. It requires a public key."""
        return self.request("GET", "/client/configuration")

    def create_customer_token(
        self, customer_id: str, ttl_seconds: int | None = None, *, idempotency_key: str | None = None
    ) -> _Outcome:
        """Create a customer access token. The answer shows it once."""
        fields = {} if ttl_seconds is None else {"ttl_seconds": ttl_seconds}
        path = f"/customers/{quote(customer_id, safe='')}/access-tokens"
        return self.request("POST", path, json=fields, idempotency_key=idempotency_key)

    def revoke_customer_token(self, token_id: str) -> _Outcome:
        return self.request("DELETE", f"/customers/access-tokens/{quote(token_id, safe='')}")

    def retrieve_customer(self, customer_token: str | Plaintext) -> _Outcome:
        customer_token = as_plaintext(customer_token)
        return self.request("GET", "/customers/me", customer_token=customer_token)

    def acknowledge(self) -> _Outcome:
        """Acknowledge the receipt of a rotation's replacement. Raises NotFoundError when this key is none."""
        return self.request("POST", "/credentials/acknowledge")

    def retrieve_replacement(self) -> _Outcome:
        """Return the open rotation's sealed replacement. Raises NotFoundError without one."""
        return self.request("GET", "/credentials/replacement")

    def set_recipient_key(self, recipient_public_key: str) -> _Outcome:
        """Set the X25519 key to which replacements are sealed: 32 bytes in base64url without padding."""
        return self.request("PUT", "/credentials/recipient-key", json={"recipient_public_key": recipient_public_key})

    def revoke_own_key(self) -> _Outcome:
        """Revoke the key that this client uses, because it leaked."""
        return self.request("POST", "/credentials/revoke-self")


def _encode(value: Any) -> bytes:
    return b"" if value is None else json.dumps(value, separators=(",", ":"), allow_nan=False).encode()

"""Verify a key over HTTP, as one of the platform's backend services does."""

import http.client
import json
from typing import Any

from keyvault.domain.environments import Environment
from keyvault.domain.plaintext import Plaintext

TIMEOUT_SECONDS = 10


class DemoVerifier:
    """One persistent connection for one thread. `ask` raises OSError or HTTPException when there is no reply."""

    def __init__(self, address: str, port: int, token: Plaintext) -> None:
        self._connection = http.client.HTTPConnection(address, port, timeout=TIMEOUT_SECONDS)
        self._token = token

    def ask(self, key: Plaintext, **more: Any) -> dict[str, Any]:
        """Return the decision on the key."""
        asked = {
            "key": key.reveal(),
            "environment": Environment.SANDBOX,
            "endpoint": "orders.retrieve",
            **more,
        }
        try:
            self._connection.request(
                "POST",
                "/v1/keys/verify",
                json.dumps(asked),
                {"Authorization": f"Bearer {self._token.reveal()}", "Content-Type": "application/json"},
            )
            answer = self._connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException):
            self.close()
            raise
        if answer.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(f"the verify call itself failed with status {answer.status}")
        decision: dict[str, Any] = json.loads(body)
        return decision

    def close(self) -> None:
        self._connection.close()

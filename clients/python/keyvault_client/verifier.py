"""The verifier of a backend service: asks Keyvault whether a request is allowed, and fails closed."""

import json
import logging
import re
import ssl
import time
from typing import Any, Self

from keyvault.domain.plaintext import Plaintext
from keyvault_client.addresses import parse_base_url, require_environment
from keyvault_client.decisions import (
    PROBLEM_TYPE,
    Decision,
    Identity,
    Question,
    refuse_unavailable,
    refuse_unreadable,
)
from keyvault_client.effects import HEADER_VALUE, Failure, HttpReply, SendRequest, Steps, read_request_id
from keyvault_client.errors import RefusedError, printable_code
from keyvault_client.keystrings import as_plaintext, kind_and_scope
from keyvault_client.retries import WHOLE_SECONDS
from keyvault_client.transport import AsyncRunner, SyncRunner

logger = logging.getLogger("keyvault_client")

_SOCKET = "unix://"
_HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")


class ServiceAddress:
    """How to reach the service: its URL or Unix socket, the service token, and the TLS settings.

    Raises RefusedError when they do not fit together.
    """

    def __init__(
        self, url: str, environment: str, service_token: str | Plaintext, tls: ssl.SSLContext | None = None
    ) -> None:
        service_token = as_plaintext(service_token)
        self.tls = tls
        self.socket: str | None = None
        if url.startswith(_SOCKET):
            self.socket, url = url.removeprefix(_SOCKET), "http://localhost"
            if not self.socket.startswith("/"):
                raise RefusedError("The socket's path is not absolute. Use unix:///path.", refusal="base_url")
        self.url = parse_base_url(url)
        require_environment(environment, self.url)
        self.environment = environment
        self.token = service_token
        if kind_and_scope(self.token)[0] != "svc":
            raise RefusedError("The service token is not one. A service token begins like kv_svc_.", refusal="key")

    def send(self, method: str, path: str, body: bytes, timeout: float) -> SendRequest:
        """Return the request with the service token. `timeout`: of the whole exchange, in seconds."""
        headers: dict[str, str | Plaintext] = {
            "Authorization": Plaintext(f"Bearer {self.token.reveal()}"),
            "Content-Type": "application/json",
        }
        return SendRequest(method, self.url + path, headers, body, time.monotonic() + timeout)


class VerifierLogic:
    """What the sync and the async client share. It does no I/O, see `effects`."""

    def __init__(self, address: ServiceAddress, timeout: float) -> None:
        self._address = address
        self._timeout = timeout

    def verify(self, question: Question) -> Steps[Decision]:
        environment = self._address.environment
        try:
            body = question.encode(environment)
        except (TypeError, ValueError):
            return self._log(refuse_unreadable("the question is not valid"))
        outcome = yield self._address.send("POST", "/v1/keys/verify", body, self._timeout)
        return self._log(_judge(outcome, environment))

    def _log(self, decision: Decision) -> Decision:
        if decision.cause is not None:
            logger.warning("keyvault: no decision: %s", decision.cause)
        return decision


class Verifier:
    """Asks the service about each request. Threads may share it; it reuses connections.

    Args:
        url: `https://keyvault.internal`, or `unix:///run/keyvault/verifier.sock`.
        environment: of the keys that this service accepts.
        service_token: a service token with the permission `keys:verify`.
        timeout: the deadline of a question, in seconds. It does not cover name resolution.
        tls: default: the public certificate authorities.

    Raises RefusedError for a configuration that would disclose the token.
    """

    _logic_type = VerifierLogic

    def __init__(
        self,
        url: str,
        environment: str,
        service_token: str | Plaintext,
        *,
        timeout: float = 2,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        service_token = as_plaintext(service_token)
        address = ServiceAddress(url, environment, service_token, tls)
        self._logic = self._logic_type(address, timeout)
        self._runner = SyncRunner(tls, address.socket)

    def verify(self, question: Question) -> Decision:
        """Return the decision: a refusal with status 503 unless the service decides before the deadline."""
        return self._runner.run(self._logic.verify(question))

    def close(self) -> None:
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class AsyncVerifier:
    """Verifier for asyncio and trio: `await verifier.verify(question)`. Use it on one event loop."""

    _logic_type = VerifierLogic

    def __init__(
        self,
        url: str,
        environment: str,
        service_token: str | Plaintext,
        *,
        timeout: float = 2,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        service_token = as_plaintext(service_token)
        address = ServiceAddress(url, environment, service_token, tls)
        self._logic = self._logic_type(address, timeout)
        self._runner = AsyncRunner(tls, address.socket)

    async def verify(self, question: Question) -> Decision:
        """Return the decision: a refusal with status 503 unless the service decides before the deadline."""
        return await self._runner.run(self._logic.verify(question))

    async def close(self) -> None:
        await self._runner.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def _judge(outcome: HttpReply | Failure, environment: str) -> Decision:
    if isinstance(outcome, Failure):
        return refuse_unavailable(outcome.cause)
    members = outcome.members()
    if outcome.status == 200:
        return _read_decision(members, environment) or refuse_unavailable("the decision is not complete")
    code = members.get("code")
    code = code if isinstance(code, str) else None
    cause = f"the service answered {outcome.status} {printable_code(code)}"
    # The question is well-formed, so these concern the client's method, path or headers.
    if code in {"request_invalid", "payload_too_large"}:
        return refuse_unreadable(cause)
    retry_after = outcome.headers.get("retry-after", "")
    if outcome.status != 503 or not WHOLE_SECONDS.fullmatch(retry_after):
        retry_after = "1"
    return refuse_unavailable(cause, retry_after)


def _read_decision(members: dict[str, Any], environment: str) -> Decision | None:
    """Return the service's decision, or None unless it is complete and consistent."""
    allowed, status, headers = members.get("allowed"), members.get("status"), members.get("headers")
    own = _read_headers(headers)
    if own is None or isinstance(status, bool) or not isinstance(status, int):
        return None
    if allowed is True:
        identity = _read_identity(members, environment)
        return None if identity is None or status != 200 else Decision(identity, 200, own)
    problem, code, request_id = members.get("problem"), members.get("code"), read_request_id(members.get("request_id"))
    if allowed is not False or not isinstance(problem, dict) or not isinstance(code, str) or not 400 <= status <= 599:
        return None
    check = members.get("check")
    named = {name: value for name, value in own if name.lower() not in {"content-type", "x-request-id"}}
    named["Content-Type"] = PROBLEM_TYPE
    if request_id is not None:
        named["X-Request-Id"] = request_id
    return Decision(
        None,
        status,
        tuple(named.items()),
        json.dumps(problem).encode(),
        code,
        check if isinstance(check, int) else None,
        request_id,
    )


def _read_identity(members: dict[str, Any], environment: str) -> Identity | None:
    """Return the identity of a decision, or None unless it is complete and of this environment."""
    names = ("key_id", "credential_id", "kind", "merchant_id", "environment")
    customer_id = members.get("customer_id")
    if not all(isinstance(members.get(name), str) and members[name] for name in names):
        return None
    if not isinstance(customer_id, str | None):
        return None
    identity = Identity(**{name: members[name] for name in names}, customer_id=customer_id or None)
    is_valid = identity.environment == environment and identity.kind in {"private", "public"}
    return identity if is_valid else None


def _read_headers(headers: object) -> tuple[tuple[str, str], ...] | None:
    if headers is None:
        return ()
    if not isinstance(headers, dict):
        return None
    pairs = tuple(headers.items())
    is_valid = all(
        _HEADER_NAME.fullmatch(name) and isinstance(value, str) and HEADER_VALUE.fullmatch(value)
        for name, value in pairs
    )
    return pairs if is_valid else None

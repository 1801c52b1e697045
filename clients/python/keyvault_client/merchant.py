"""The client of a merchant's backend: sends requests with the merchant's API key, and takes up its replacement."""

import json
import logging
import os
import re
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from threading import Lock
from typing import Self
from urllib.parse import unquote

from keyvault.domain.plaintext import Plaintext
from keyvault_client.addresses import parse_base_url, require_environment
from keyvault_client.calls import Calls, MerchantCall, Response
from keyvault_client.effects import Failure, HttpReply, KeySource, Pause, ReadKey, SendRequest, Steps, read_request_id
from keyvault_client.errors import (
    DeadlineError,
    KeySourceError,
    KeyvaultError,
    NoAnswerError,
    RefusedError,
    UnexpectedAnswerError,
    answer_error,
)
from keyvault_client.key_sources import as_key_source
from keyvault_client.keystrings import ENVIRONMENT_SCOPES, KEY_SHAPED, is_same, key_id, kind_and_scope
from keyvault_client.retries import RetryBudget, backoff, is_temporary, parse_http_date, parse_retry_after
from keyvault_client.transport import AsyncRunner, SyncRunner

logger = logging.getLogger("keyvault_client")

_RELOADS = {"credential_invalid", "environment_mismatch", "key_not_active", "key_expired", "key_revoked"}
"""Codes of a 401 that another key can change."""

_PUBLIC_PATHS = {"/client/configuration"}
_PATH = re.compile(r"/[\x21-\x7e]*")
_METHOD = re.compile(r"[A-Z]{1,20}")
_IDEMPOTENCY_KEY = re.compile(r"[\x20-\x7e]{1,255}")

AnyKey = str | Plaintext | KeySource | Callable[[], str | Plaintext]


@dataclass(frozen=True, slots=True)
class MerchantOptions:
    """Options of a client. Times are in seconds.

    Attributes:
        deadline: of one call with all its attempts and waits. Calls outlive a restart of the service that is shorter.
            MerchantClient's does not cover name resolution.
        attempt_timeout: of one attempt.
        max_attempts: of one call. By default as many as fit into the default deadline.
        retry_budget: retries that all calls of a client share. A call that succeeds with its first attempt
            earns a tenth of one. In a restart each call in progress spends about one for every 3 seconds.
        acknowledge: acknowledge a replacement before it is used. The predecessor stays in use until the service has
            accepted the replacement.
        tls: default: the public certificate authorities.
    """

    deadline: float = 60
    attempt_timeout: float = 20
    max_attempts: int = 20
    retry_budget: float = 100
    acknowledge: bool = True
    tls: ssl.SSLContext | None = None


class _MerchantLogic:
    """What the sync and the async client share. It does no I/O, see `effects`."""

    def __init__(self, base_url: str, environment: str, source: KeySource, options: MerchantOptions) -> None:
        self._base = parse_base_url(base_url)
        require_environment(environment, self._base)
        self._environment = environment
        self._source = source
        self._options = options
        self._budget = RetryBudget(options.retry_budget)
        self._key: Plaintext | None = None
        self._read_at = 0.0
        # By process id: a forked process does not have the thread of its parent that would release the lock.
        self._watching: dict[int, Lock] = {}

    def call(self, call: MerchantCall) -> Steps[Response]:
        call = self._checked(call)
        deadline = time.monotonic() + self._options.deadline
        yield from self.watch(deadline)
        key = self._key if self._key is not None else (yield from self._read_first(deadline))
        self._require_usable(key, call.path)
        may_reload = True
        attempt = 1
        while True:
            outcome = yield self._request(call, key, deadline)
            answer = _judge(outcome)
            if isinstance(answer, Response):
                if attempt == 1:
                    self._budget.earn()
                return answer
            if may_reload and answer.status == 401 and answer.code in _RELOADS:
                may_reload = False
                try:
                    reloaded = yield from self._reload(key, call, deadline)
                except (KeySourceError, RefusedError) as error:
                    # The caller needs the service's answer; a source without a usable key is why it stands.
                    raise answer from error
                if reloaded is not None:
                    key = reloaded
                    attempt += 1
                    continue
            if not is_temporary(answer.status, answer.code) or attempt >= self._options.max_attempts:
                raise answer
            wait = max(answer.retry_after_seconds or 0.0, backoff(attempt))
            if deadline - time.monotonic() < wait or not self._budget.spend():
                raise answer
            yield Pause(wait)
            attempt += 1

    def watch(self, deadline: float, *, now: bool = False) -> Steps[bool]:
        """Read the source again if it is time, or `now`. Returns whether another key is in use after it.

        With `now`, the first key is read, too, and acknowledged: it may be a replacement that nothing else proves.
        """
        every, before = self._source.watch_seconds, self._key
        is_due = before is not None and every is not None and time.monotonic() >= self._read_at + every
        if not (now or is_due):
            return False
        watching = self._watching.setdefault(os.getpid(), Lock())
        if not watching.acquire(blocking=False):
            return False
        try:
            found = yield from self._read_source(deadline)
            if before is not None and is_same(found, before):
                return False
            self._require_key(found)
            if not (yield from self._is_accepted(found, deadline, unknown=False)):
                return False
            # A call may have read or reloaded a newer key meanwhile.
            if self._key is before:
                self._take_up(found)
            return before is not None
        except KeySourceError as error:
            logger.warning("keyvault: the key source failed, no key is taken up: %s", type(error.__cause__).__name__)
            return False
        except RefusedError as error:
            logger.warning("keyvault: the key source has no valid key, none is taken up: %s", error)
            return False
        finally:
            watching.release()

    def _read_source(self, deadline: float) -> Steps[Plaintext]:
        """Read the key source. Raises KeySourceError."""
        self._read_at = time.monotonic()
        found: Plaintext | Exception = yield ReadKey(self._source, self._seconds_left(deadline))
        if isinstance(found, Exception):
            raise KeySourceError(f"the key source failed: {type(found).__name__}") from found
        return found

    def _read_first(self, deadline: float) -> Steps[Plaintext]:
        found = yield from self._read_source(deadline)
        self._require_key(found)
        self._key = found
        return found

    def _reload(self, refused: Plaintext, call: MerchantCall, deadline: float) -> Steps[Plaintext | None]:
        """Return another key after the service refused this one, or None without one."""
        current = self._key
        if current is not None and not is_same(current, refused):
            return current  # Another call has reloaded it.
        found = yield from self._read_source(deadline)
        if is_same(found, refused):
            return None
        self._require_usable(found, call.path)
        if not (yield from self._is_accepted(found, deadline, unknown=True)):
            return None
        self._take_up(found)
        return found

    def _is_accepted(self, key: Plaintext, deadline: float, *, unknown: bool) -> Steps[bool]:
        """Acknowledge with a new key, and return whether the service accepts the key; `unknown` without an answer."""
        if not self._options.acknowledge or kind_and_scope(key)[0] != "prv":
            return True
        outcome = yield self._request(MerchantCall("POST", "/credentials/acknowledge"), key, deadline)
        # 404: the key is valid, and no replacement of an open rotation.
        if isinstance(outcome, HttpReply) and outcome.status in {204, 404}:
            return True
        if isinstance(outcome, HttpReply) and outcome.status in {401, 403}:
            logger.warning("keyvault: the service refused the new key %s with %d", key_id(key), outcome.status)
            return False
        return unknown

    def _take_up(self, key: Plaintext) -> None:
        self._key = key
        logger.info("keyvault: the client uses the key %s from now on", key_id(key))

    def _request(self, call: MerchantCall, key: Plaintext, deadline: float) -> SendRequest:
        headers: dict[str, str | Plaintext] = {"X-Api-Key": key, "Accept": "application/json"}
        if call.body:
            headers["Content-Type"] = "application/json"
        if call.idempotency_key is not None:
            headers["Idempotency-Key"] = call.idempotency_key
        if call.customer_token is not None:
            headers["Authorization"] = Plaintext(f"Bearer {call.customer_token.reveal()}")
        end = min(deadline, time.monotonic() + self._options.attempt_timeout)
        return SendRequest(call.method, self._base + call.path, headers, call.body, end)

    def _checked(self, call: MerchantCall) -> MerchantCall:
        """Return the call with its Idempotency-Key. Raises RefusedError."""
        if not _METHOD.fullmatch(call.method):
            raise RefusedError("The method is not valid.", refusal="path")
        _require_path(call.path)
        token = call.customer_token
        if token is not None and kind_and_scope(token) != ("cat", ENVIRONMENT_SCOPES[self._environment]):
            raise RefusedError("The customer access token is not one of this environment.", refusal="bearer")
        own_key = call.idempotency_key
        if own_key is None and call.method in {"POST", "PATCH"}:
            own_key = secrets.token_hex(16)
        if own_key is not None and (not _IDEMPOTENCY_KEY.fullmatch(own_key) or KEY_SHAPED.search(own_key)):
            raise RefusedError(
                "The Idempotency-Key is not 1 to 255 printable ASCII characters.", refusal="idempotency_key"
            )
        return replace(call, idempotency_key=own_key)

    def _require_key(self, key: Plaintext) -> None:
        kind, scope = kind_and_scope(key)
        if kind not in {"prv", "pub"}:
            raise RefusedError("The key source did not return an API key.", refusal="key")
        if scope != ENVIRONMENT_SCOPES[self._environment]:
            raise RefusedError(
                f"The key is not of {self._environment}. Use that environment's key.", refusal="environment"
            )

    def _require_usable(self, key: Plaintext, path: str) -> None:
        self._require_key(key)
        if kind_and_scope(key)[0] == "pub" and path not in _PUBLIC_PATHS:
            raise RefusedError("The endpoint requires a private key, and the key is public.", refusal="kind")

    def _seconds_left(self, deadline: float) -> float:
        return max(min(deadline - time.monotonic(), self._options.attempt_timeout), 0.001)


class MerchantClient(Calls[Response]):
    """The client of a merchant's backend. Threads may share it.

    Args:
        base_url: the environment's base URL, such as `https://api.example/sandbox`.
        environment: `sandbox` or `production`.
        key: the API key, a function that returns it, or a source (`FileKey`, `EnvironmentKey`, `VaultKey`). A source is
            watched: a replacement is taken up, and acknowledged, without a restart.

    Raises RefusedError for a configuration that would disclose the key.
    """

    def __init__(self, base_url: str, environment: str, key: AnyKey, options: MerchantOptions | None = None) -> None:
        key = as_key_source(key)  # Error reports show arguments: no frame keeps the text.
        options = options or MerchantOptions()
        self._logic = _MerchantLogic(base_url, environment, key, options)
        self._runner = SyncRunner(options.tls)
        self._deadline = options.deadline

    def watch_key(self) -> bool:
        """Read the key source now, for a process without traffic, and acknowledge a new key.

        The first call also reads and acknowledges the first key. Returns whether another key replaced the one in use.
        """
        return self._runner.run(self._logic.watch(time.monotonic() + self._deadline, now=True))

    def close(self) -> None:
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, call: MerchantCall) -> Response:
        return self._runner.run(self._logic.call(call))


class AsyncMerchantClient(Calls[Awaitable[Response]]):
    """MerchantClient for asyncio and trio: `await client.create_order(…)`. Use it on one event loop."""

    def __init__(self, base_url: str, environment: str, key: AnyKey, options: MerchantOptions | None = None) -> None:
        key = as_key_source(key)  # Error reports show arguments: no frame keeps the text.
        options = options or MerchantOptions()
        self._logic = _MerchantLogic(base_url, environment, key, options)
        self._runner = AsyncRunner(options.tls)
        self._deadline = options.deadline

    async def watch_key(self) -> bool:
        """Read the key source now, for a process without traffic, and acknowledge a new key.

        The first call also reads and acknowledges the first key. Returns whether another key replaced the one in use.
        """
        return await self._runner.run(self._logic.watch(time.monotonic() + self._deadline, now=True))

    async def close(self) -> None:
        await self._runner.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _start(self, call: MerchantCall) -> Awaitable[Response]:
        return self._runner.run(self._logic.call(call))


def _require_path(path: str) -> None:
    """Raise RefusedError for a path that not every server reads alike, or that contains a key."""
    unescaped = unquote(path)
    if not _PATH.fullmatch(path) or path.startswith("//") or "\\" in path or "#" in path:
        raise RefusedError("The path is not valid. Use an absolute path of visible ASCII characters.", refusal="path")
    if re.search(r"%(?![0-9A-Fa-f]{2})", path):
        raise RefusedError("The path has an invalid escape.", refusal="path")
    if KEY_SHAPED.search(path) or KEY_SHAPED.search(unescaped):
        raise RefusedError("The path contains a key. Logs and proxies store URLs.", refusal="path")
    if {".", ".."} & set(unquote(path.partition("?")[0]).split("/")):
        raise RefusedError("The path contains a dot segment.", refusal="path")


def _judge(outcome: HttpReply | Failure) -> Response | KeyvaultError:
    if isinstance(outcome, Failure):
        return (DeadlineError if outcome.is_deadline else NoAnswerError)(f"no complete answer: {outcome.cause}")
    if not 200 <= outcome.status <= 299:
        return _read_problem(outcome)
    if not outcome.body:
        return Response(outcome.status, outcome.headers, b"", None)
    media_type = outcome.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if media_type == "application/json" and "content-encoding" not in outcome.headers:
            return Response(outcome.status, outcome.headers, outcome.body, json.loads(outcome.body))
    except (ValueError, RecursionError):
        pass
    return UnexpectedAnswerError("the answer is not JSON", status=outcome.status, request_id=outcome.request_id)


def _read_problem(reply: HttpReply) -> KeyvaultError:
    """Read a problem document (RFC 9457), and ignore what is not one. A proxy's answer may have a request id, too."""
    problem = reply.members()
    code, check = problem.get("code"), problem.get("check")
    sent_at = parse_http_date(reply.headers.get("date")) or datetime.now(UTC)
    return answer_error(
        reply.status,
        code if isinstance(code, str) else None,
        check if isinstance(check, int) and not isinstance(check, bool) and abs(check) < 1000 else None,
        read_request_id(problem.get("request_id")) or reply.request_id,
        parse_retry_after(reply.headers.get("retry-after"), sent_at),
    )

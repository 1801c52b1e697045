"""The slow path: every request for verify, its batch and forward-auth, with every possible refusal.

    pending = slow_path.open_request(method, target, headers, body)
    while isinstance(found := slow_path.step(pending), DataRequirements):
        ...  # read them into `pending`, and call `slow_path.admit`

A step uses memory and the data read for this request. While memory is not fresh, it uses that data alone. It reports
all missing data together.
"""

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from urllib.parse import urlsplit

from msgspec import UNSET

from keyvault.access.catalog import Endpoint, NoMatchingEndpoint
from keyvault.access.customers import CustomerRecord
from keyvault.access.decision import Denial, Grant, decide
from keyvault.access.judgement import Judgement, VerificationRequest, deny_stale, judge
from keyvault.access.permissions import Permission
from keyvault.access.policy_snapshot import PolicySnapshot
from keyvault.access.principals import Service
from keyvault.access.rules import PLATFORM, Target, operation
from keyvault.access.verification import TokenRecord, find_exposed
from keyvault.domain.environments import Environment
from keyvault.domain.errors import (
    DependencyUnavailableError,
    ErrorCode,
    Fault,
    KeyvaultError,
    NotFoundError,
    RequestInvalidError,
    VerifierStaleError,
)
from keyvault.domain.free_text import MAX_REDACTED_LENGTH
from keyvault.domain.keys import KeyRecord
from keyvault.domain.redaction import redact
from keyvault.hotpath.engine.engine import Engine
from keyvault.hotpath.engine.ports import EngineVerdict
from keyvault.hotpath.messages.pending_requests import (
    BATCH,
    VERIFY,
    DataRequirements,
    Found,
    Headers,
    MissingDataError,
    PendingRequest,
    SeveralMissingDataError,
    find_dialect,
    merge_requirements,
    read_forwarded_request,
    read_json_body,
)
from keyvault.hotpath.messages.rendering import decision, denial_problem, encode, nginx_answer, problem_answer
from keyvault.hotpath.messages.requests import (
    VerifyRequest,
    decode_batch,
    decode_verify,
    read_batch,
    read_verify,
    split_batch,
)
from keyvault.hotpath.messages.responses import HttpResponse
from keyvault.hotpath.slow_path.sources import CachedSources, read_for
from keyvault.wire.entry_points import VerificationEntryPoint
from keyvault.wire.gateways import SERVICE_TOKEN, Dialect, Forwarded, identity_headers
from keyvault.wire.headers import API_KEY, REQUEST_ID, clean_client_request_id, is_repeated, read_bearer
from keyvault.wire.limits import limit_headers
from keyvault.wire.problems import Problem, problem
from keyvault.wire.trace_context import TRACEPARENT, traced

_log = logging.getLogger("keyvault.requests")


class VerificationDeniedError(Exception):
    """Refuses the whole request with a denial. `is_verdict`: it is a verdict on the client's key, and recorded."""

    def __init__(self, denial: Denial, headers: Mapping[str, str] | None = None, *, is_verdict: bool = False) -> None:
        super().__init__(denial.detail)
        self.denial = denial
        self.headers = dict(headers or {})
        self.is_verdict = is_verdict


class SlowPath:
    """Steps through requests of the service plane on one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def open_request(self, method: str, target: str, headers: Headers, body: bytes | None) -> PendingRequest:
        """Return the request to step through. `body` is None when it was larger than 64 KiB and not read."""
        pending = PendingRequest(method, target, headers, body, self._engine.ports.random_bytes)
        pending.begun_at = self._engine.ports.monotonic()
        return pending

    def step(self, pending: PendingRequest) -> HttpResponse | DataRequirements:
        traceparent = pending.headers.get(TRACEPARENT)
        if traceparent is None:
            found = self._step(pending)
        else:
            with traced(traceparent):
                found = self._step(pending)
        if isinstance(found, HttpResponse):
            ports = self._engine.ports
            ports.note_slow_path(ports.monotonic() - pending.begun_at)
        return found

    def _step(self, pending: PendingRequest) -> HttpResponse | DataRequirements:
        engine = self._engine
        with engine.lock:
            engine.catch_up()
            may_remember = engine.may_remember()
        pending.at = datetime.fromtimestamp(engine.ports.wall(), UTC)
        path = pending.target.partition("?")[0]
        dialect = find_dialect(pending)
        try:
            if dialect is not None:
                return self._authorize(pending, dialect, CachedSources(engine, pending, may_remember))
            return self._verify(pending, path == BATCH, CachedSources(engine, pending, may_remember))
        except MissingDataError as missing:
            return merge_requirements([missing])
        except SeveralMissingDataError as several:
            return merge_requirements(several.each)
        except (VerificationDeniedError, KeyvaultError) as error:
            return self._refuse(pending, dialect, error)

    def answer_failure(self, pending: PendingRequest) -> HttpResponse:
        """Log the current exception and return the response for an internal error."""
        with traced(pending.headers.get(TRACEPARENT)):
            _log.exception("unhandled", extra={"request_id": pending.request_id})
        return self._refuse(pending, find_dialect(pending), _FaultError("Something went wrong on our side."))

    # --- verify ---------------------------------------------------------------------------------------------

    def _verify(self, pending: PendingRequest, is_batch: bool, sources: CachedSources) -> HttpResponse:
        _refuse_exposed(pending.target)
        service = self._service(sources, read_bearer(pending.headers.get("authorization")), _NO_TOKEN)
        if pending.method != "POST":
            raise _MethodError(("POST",))
        body = read_json_body(pending)
        if is_batch:
            tags = self._decide_cached(pending, body) if sources.may_remember else []
            if tags and len(pending.decided) == len(tags):
                return _batch_answer(pending)
            batch = decode_batch(body) or read_batch(body)
            for environment in dict.fromkeys(request.environment for request in batch):
                _require_served(environment, service, pending.at)
            return self._decide_batch(pending, batch, service, sources, tags)
        request = decode_verify(body) or read_verify(body)
        _require_served(request.environment, service, pending.at)
        if sources.may_remember:
            self._decide_known(pending, [request], service)
        text = pending.decided.get(0) or self._decide(pending, 0, request, service, sources, pending.request_id)
        self._bind_token(pending, sources)
        return HttpResponse(200, text, pending.request_id)

    def _decide_cached(self, pending: PendingRequest, body: bytes) -> list[bytes]:
        """Decide a batch whose requests were all granted before. Returns the tags under which grants can be cached."""
        authorization, pieces = _authorization(pending), split_batch(body)
        if pieces is None or authorization is None:
            return []
        engine = self._engine
        tags = engine.request_tags(authorization, pieces)
        if not (pending.decided or pending.spent):
            with engine.lock:
                engine.catch_up()
                if engine.may_remember():
                    wall, request_id = engine.ports.wall(), pending.request_id.encode()
                    pending.decided |= engine.decide_cached(tags, wall, request_id)
        return tags

    def _decide_known(
        self, pending: PendingRequest, batch: list[VerifyRequest], service: Service, tags: Sequence[bytes] = ()
    ) -> None:
        """Decide plain grants from memory and from the data read for this request. `tags`: where to cache them."""
        engine, decided, own_id = self._engine, pending.decided, pending.request_id.encode()
        is_single = _is_single(pending)
        caller = engine.caller(service)
        with engine.lock:
            engine.catch_up()
            # Read under the lock, so that no use is recorded with a time before the last report.
            wall = engine.ports.wall()
            token = engine.memory.tokens.by_id.get(service.token_id) if tags else None
            if token is not None and token.record.service is not service:
                token = None
            for number, request in enumerate(batch):
                if number in decided or number in pending.spent:
                    continue
                record = read_for(pending, request.key) if pending.found else None
                request_id = own_id if is_single else b"%b-%d" % (own_id, number)
                cache_target = None if token is None else (token, tags[number])
                text = engine.decide_known(request, caller, wall, request_id, record, cache_target=cache_target)
                if text is not None:
                    decided[number] = text
                    engine.answered_from_memory += record is None
                    engine.granted_after_read += record is not None

    def _decide_batch(
        self,
        pending: PendingRequest,
        batch: list[VerifyRequest],
        service: Service,
        sources: CachedSources,
        tags: Sequence[bytes],
    ) -> HttpResponse:
        """Decide each request once: nothing is spent twice while data for others is read."""
        if sources.may_remember:
            self._decide_known(pending, batch, service, tags)
        missing: list[MissingDataError] = []
        for number, request in enumerate(batch):
            if number in pending.decided:
                continue
            request_id = f"{pending.request_id}-{number}"
            try:
                pending.decided[number] = self._decide(pending, number, request, service, sources, request_id)
            except MissingDataError as missing_data:
                missing.append(missing_data)
        if missing:
            raise SeveralMissingDataError(missing)
        self._bind_token(pending, sources)
        return _batch_answer(pending)

    def _decide(
        self,
        pending: PendingRequest,
        number: int,
        request: VerifyRequest,
        service: Service,
        sources: CachedSources,
        request_id: str,
    ) -> bytes:
        """Return one decision as JSON. Raises MissingDataError; then nothing was recorded or spent."""
        engine = self._engine
        environment = Environment(request.environment)
        if environment not in engine.ports.environments:
            raise NotFoundError(f"This process does not serve {environment}.")
        rules = sources.rules()
        endpoint = _endpoint(request, rules, engine.base_paths[environment])
        presented = _verification_request(request, environment, endpoint, service)
        sources.number = number
        judgement = _judge(presented, sources, pending.at)
        if not presented.is_dry:
            verdict = EngineVerdict(
                judgement,
                request_id,
                VerificationEntryPoint.VERIFY,
                environment,
                endpoint.name if isinstance(endpoint, Endpoint) else "",
                request.client_ip or f"token:{service.token_id}",
                (request.user_agent or "")[:MAX_REDACTED_LENGTH],
                presented.origin,
                service.is_probe,
                pending.at,
            )
            engine.ports.note_verdict(verdict)
            if sources.may_remember:
                self._learn(pending, request, verdict, endpoint, rules, sources.token)
        if _is_single(pending):
            _refuse_cost(judgement)
        return encode(decision(judgement, request_id, has_trace=presented.is_dry))

    def _learn(
        self,
        pending: PendingRequest,
        request: VerifyRequest,
        verdict: EngineVerdict,
        endpoint: Endpoint | NoMatchingEndpoint,
        rules: PolicySnapshot,
        token: TokenRecord | None,
    ) -> None:
        """Cache the verdict for the fast path. `rules`: the snapshot that it was judged by, current or not."""
        engine, judgement = self._engine, verdict.judgement
        with engine.lock:
            if isinstance(judgement.verdict, Grant):
                if isinstance(endpoint, Endpoint):
                    engine.learn(request, judgement, endpoint, rules)
                return
            authorization = _authorization(pending)
            if authorization is not None and token is not None and _is_single(pending):
                engine.learn_denial(verdict, authorization, pending.body or b"", token, rules)

    def _bind_token(self, pending: PendingRequest, sources: CachedSources) -> None:
        """Cache the proved token, so that the caller's next request takes the fast path."""
        authorization, token = _authorization(pending), sources.token
        if token is None or authorization is None or not sources.may_remember:
            return
        engine = self._engine
        with engine.lock:
            engine.catch_up()
            entry = engine.memory.tokens.by_id.get(token.service.token_id)
            if entry is not None and entry.record is token:
                entry.derived = engine.caller(token.service)
                engine.memory.tokens.bind(entry, engine.memory.tag(authorization))

    # --- forward-auth ---------------------------------------------------------------------------------------

    def _authorize(self, pending: PendingRequest, dialect: Dialect, sources: CachedSources) -> HttpResponse:
        # Envoy's URL is the client's own: the judgement checks it, and attributes a key in it.
        if dialect is not Dialect.ENVOY:
            _refuse_exposed(pending.target)
        headers = pending.headers
        service = self._service(sources, headers.get(SERVICE_TOKEN), _NO_GATEWAY)
        forwarded = read_forwarded_request(pending, dialect)
        environment = _environment_of(service, forwarded, self._engine.ports.base_urls)
        if environment not in self._engine.ports.environments:
            raise NotFoundError(f"This process does not serve {environment}.")
        base_path = self._engine.base_paths[environment]
        endpoint = sources.rules().catalog.match(forwarded.method, forwarded.uri, base_path)
        name, merchant, store = "", None, None
        if isinstance(endpoint, Endpoint):
            name = endpoint.name
            merchant, store = endpoint.read_contexts(forwarded.uri, headers)
        authorization = headers.get("authorization")
        presented = VerificationRequest(
            key=headers.get(API_KEY),
            environment=environment,
            endpoint=endpoint,
            url=forwarded.uri,
            merchant_context=merchant,
            store_context=store,
            bearer=authorization if is_repeated(authorization) else read_bearer(authorization),
            origin=headers.get("origin"),
            client_address=forwarded.address,
            scope=service.scope.merchants,
        )
        judgement = _judge(presented, sources, pending.at)
        self._engine.ports.note_verdict(
            EngineVerdict(
                judgement,
                pending.request_id,
                VerificationEntryPoint(dialect),
                environment,
                name,
                forwarded.address or f"token:{service.token_id}",
                (headers.get("user-agent") or "")[:MAX_REDACTED_LENGTH],
                presented.origin,
                service.is_probe,
                pending.at,
            )
        )
        limits = limit_headers(judgement.spend)
        verdict, holder = judgement.verdict, judgement.holder
        if isinstance(verdict, Denial):
            raise VerificationDeniedError(verdict, limits, is_verdict=True)
        if holder is None:
            raise TypeError("a grant needs a proved key")
        identity = identity_headers(holder, judgement.customer, pending.request_id)
        identity.pop(REQUEST_ID)  # every response has it
        return HttpResponse(200, b"", pending.request_id, (_NO_STORE, *identity.items(), *limits.items()))

    # --- data read for a request ----------------------------------------------------------------------------

    def stamp(self) -> int:
        """Return the change count. Take it before a read begins, and pass it to `admit`."""
        with self._engine.lock:
            self._engine.catch_up()
            return self._engine.changes

    def admit(self, kind: str, found: Mapping[str, Found | None], stamp: int) -> None:
        """Cache the records that were read, unless a change overlapped the read or memory is not fresh."""
        engine = self._engine
        with engine.lock:
            if not self._may_admit(stamp):
                return
            now = engine.ports.monotonic()
            for identity, record in found.items():
                match record:
                    case KeyRecord():
                        engine.memory.admit_key(record)
                    case CustomerRecord():
                        engine.memory.admit_customer(record)
                    case TokenRecord():
                        engine.memory.admit_token(record)
                    case None:
                        engine.memory.absent.put(kind, identity, now)

    def admit_rules(self, rules: PolicySnapshot, stamp: int) -> None:
        with self._engine.lock:
            if self._may_admit(stamp):
                self._engine.rules = rules

    def _may_admit(self, stamp: int) -> bool:
        self._engine.catch_up()
        return self._engine.changes == stamp and self._engine.may_remember()

    # --- verify and forward-auth ----------------------------------------------------------------------------

    def _service(self, sources: CachedSources, presented: str | None, refusal: Denial) -> Service:
        """Authenticate the caller. Raises VerificationDeniedError unless the token is valid and may verify."""
        service = sources.prove_service(presented)
        if service is None:
            raise VerificationDeniedError(refusal)
        verdict = decide(operation(Permission.KEYS_VERIFY), service, PLATFORM, sources.now)
        if isinstance(verdict, Denial):
            raise VerificationDeniedError(verdict)
        return service

    def _refuse(
        self, pending: PendingRequest, dialect: Dialect | None, error: VerificationDeniedError | KeyvaultError
    ) -> HttpResponse:
        request_id = pending.request_id
        headers: dict[str, str] = {}
        if isinstance(error, VerificationDeniedError):
            found, headers = denial_problem(error.denial, request_id), error.headers
            internal = error.denial.internal
        else:
            found, internal = _error_problem(error, request_id), error.internal
        if isinstance(error, _MethodError):
            headers = {"Allow": ", ".join(error.allowed)}
        answer = problem_answer(found, request_id, headers)
        if not (isinstance(error, VerificationDeniedError) and error.is_verdict):
            entry_point = VerificationEntryPoint.VERIFY if dialect is None else VerificationEntryPoint(dialect)
            self._engine.ports.note_refusal(entry_point, str(found.body["code"]))
        if dialect is Dialect.NGINX:
            answer = nginx_answer(answer, str(found.body["code"]))
        _log.info(
            "refused",
            extra={
                "request_id": request_id,
                "client_request_id": clean_client_request_id(pending.headers.get(REQUEST_ID)) or "",
                "method": pending.method,
                # Redact before truncating: half a key would no longer be recognized.
                "path": redact(pending.target.partition("?")[0])[:300],
                "status": answer.status,
                "code": str(found.body["code"]),
                "internal": internal,
            },
        )
        return answer


class _FaultError(KeyvaultError):
    code = ErrorCode.INTERNAL_ERROR


class _MethodError(KeyvaultError):
    code = ErrorCode.METHOD_NOT_ALLOWED

    def __init__(self, allowed: tuple[str, ...]) -> None:
        super().__init__(f"This path does not support the method. Use {' or '.join(allowed)}.")
        self.allowed = allowed


def _is_single(pending: PendingRequest) -> bool:
    return pending.target.partition("?")[0] == VERIFY


def _authorization(pending: PendingRequest) -> bytes | None:
    """Return the header as sent, to be tagged; None when it is missing or cannot hold a token."""
    text = pending.headers.get("authorization")
    return text.encode() if text is not None and text.isascii() else None


def _batch_answer(pending: PendingRequest) -> HttpResponse:
    texts = [pending.decided[number] for number in range(len(pending.decided))]
    return HttpResponse(200, b'{"decisions":[%b]}' % b",".join(texts), pending.request_id)


def _judge(presented: VerificationRequest, sources: CachedSources, now: datetime) -> Judgement:
    try:
        return judge(presented, sources, now)
    except VerifierStaleError as error:
        if error.internal:
            _log.warning("a key cannot be judged", extra={"why": error.internal})
        return deny_stale(error.detail, error.internal)


def _refuse_exposed(target: str) -> None:
    exposed = find_exposed(target)
    if exposed is not None:
        raise VerificationDeniedError(exposed)


def _refuse_cost(judgement: Judgement) -> None:
    """Reject a cost above every burst as the caller's own error, not as a denial of its client."""
    verdict = judgement.verdict
    if isinstance(verdict, Denial) and verdict.code is ErrorCode.REQUEST_INVALID:
        raise RequestInvalidError("The request is invalid.", [Fault("/cost", verdict.detail)])


def _error_problem(error: KeyvaultError, request_id: str) -> Problem:
    faults = (error.faults or (Fault("", error.detail),)) if isinstance(error, RequestInvalidError) else ()
    wait = error.retry_after_seconds if isinstance(error, DependencyUnavailableError) else None
    allowed = error.allowed if isinstance(error, _MethodError) else ()
    return problem(
        error.code, error.detail, request_id, faults=faults, allowed_methods=allowed, retry_after_seconds=wait
    )


def _require_served(environment: str, service: Service, now: datetime) -> None:
    verdict = decide(operation(Permission.KEYS_VERIFY), service, Target(environment=Environment(environment)), now)
    if isinstance(verdict, Denial):
        raise VerificationDeniedError(verdict)


def _endpoint(request: VerifyRequest, rules: PolicySnapshot, base_path: str) -> Endpoint | NoMatchingEndpoint:
    if request.endpoint is not UNSET:
        return rules.catalog.find(request.endpoint)
    return rules.catalog.match(request.method or "", request.path or "", base_path)


def _verification_request(
    request: VerifyRequest, environment: Environment, endpoint: Endpoint | NoMatchingEndpoint, service: Service
) -> VerificationRequest:
    merchant, store = _text_or_none(request.merchant), _text_or_none(request.store)
    path = _text_or_none(request.path)
    if isinstance(endpoint, Endpoint):
        merchant_context, store_context = endpoint.read_contexts(path, {}, merchant, store)
    else:
        merchant_context, store_context = merchant, store
    return VerificationRequest(
        key=request.key,
        environment=environment,
        endpoint=endpoint,
        url=path or "",
        merchant=merchant,
        merchant_context=merchant_context,
        store_context=store_context,
        bearer=_text_or_none(request.customer_token),
        origin=_text_or_none(request.origin),
        client_address=_text_or_none(request.client_ip),
        cost=request.cost or 1,
        scope=service.scope.merchants,
        is_dry=request.dry_run is True,
    )


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


_NO_STORE = ("Cache-Control", "no-store")
_NO_TOKEN = Denial(ErrorCode.SERVICE_TOKEN_INVALID, "Send a valid service token in Authorization: Bearer.")
_NO_GATEWAY = Denial(
    ErrorCode.SERVICE_TOKEN_INVALID, f"The gateway must send a valid service token in {SERVICE_TOKEN}, exactly once."
)


def _environment_of(service: Service, forwarded: Forwarded, base_urls: Mapping[Environment, str]) -> Environment:
    """Return the one environment of the gateway's token.

    Raises VerificationDeniedError if the token has several environments, or if the request went to another
    environment's host.
    """
    if len(service.scope.environments) != 1:
        detail = "This service token has several environments. Use a token for exactly one environment in a gateway."
        raise VerificationDeniedError(Denial(ErrorCode.PERMISSION_MISSING, detail))
    (environment,) = service.scope.environments
    hosts = {name: urlsplit(url).hostname for name, url in base_urls.items()}
    is_unreadable = forwarded.hostname == "" and len(set(hosts.values())) > 1
    if is_unreadable or (forwarded.hostname != hosts[environment] and forwarded.hostname in hosts.values()):
        detail = f"The gateway's token is for {environment}, but the request went to a host of another environment."
        raise VerificationDeniedError(Denial(ErrorCode.PERMISSION_MISSING, detail))
    return environment

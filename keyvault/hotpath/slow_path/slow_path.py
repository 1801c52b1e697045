"""The whole way: every question of verify, its batch and forward-auth, with everything that can be wrong with it.

    question = answering.ask(method, target, headers, body)
    while isinstance(found := answering.step(question), Needs): … read them into the question, and `answering.admit` …

A step is made of what is in memory and of what was read for this very question; while nothing may be remembered, of
the latter alone. What it lacks it says, all at once.
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
from keyvault.hotpath.messages.questions import (
    BATCH,
    VERIFY,
    DataRequirements,
    Found,
    Headers,
    MissingDataError,
    PendingRequest,
    SeveralMissingDataError,
    body_of,
    dialect_of,
    forwarded_of,
    needs_of,
)
from keyvault.hotpath.messages.rendering import decision, denial_problem, encode, problem_answer
from keyvault.hotpath.messages.requests import (
    VerifyRequest,
    read_asked,
    read_asked_batch,
    read_batch,
    read_verify,
    split_batch,
)
from keyvault.hotpath.messages.responses import HttpResponse
from keyvault.hotpath.slow_path.sources import CachedSources, read_for
from keyvault.wire.gateways import (
    AUTH_CODE,
    AUTH_STATUS,
    SERVICE_TOKEN,
    Dialect,
    Forwarded,
    identity_headers,
    nginx_status,
)
from keyvault.wire.headers import API_KEY, REQUEST_ID, clean_client_request_id, is_repeated, read_bearer
from keyvault.wire.limits import limit_headers
from keyvault.wire.problems import Problem, problem

_log = logging.getLogger("keyvault.requests")


class VerificationDeniedError(Exception):
    """Carries a denial of the whole request out to where answers are written."""

    def __init__(self, denial: Denial, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(denial.detail)
        self.denial = denial
        self.headers = dict(headers or {})


class SlowPath:
    """The service plane's questions, put to one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ask(self, method: str, target: str, headers: Headers, body: bytes | None) -> PendingRequest:
        """`body` None: it is larger than 64 KiB and was not read."""
        return PendingRequest(method, target, headers, body, self._engine.ports.random_bytes)

    def step(self, question: PendingRequest) -> HttpResponse | DataRequirements:
        engine = self._engine
        with engine.lock:
            engine.catch_up()
            may_remember = engine.may_remember()
        question.at = datetime.fromtimestamp(engine.ports.wall(), UTC)
        path = question.target.partition("?")[0]
        dialect = dialect_of(question)
        try:
            if dialect is not None:
                return self._authorize(question, dialect, CachedSources(engine, question, may_remember))
            return self._verify(question, path == BATCH, CachedSources(engine, question, may_remember))
        except MissingDataError as lacking:
            return needs_of([lacking])
        except SeveralMissingDataError as several:
            return needs_of(several.each)
        except (VerificationDeniedError, KeyvaultError) as error:
            return self._refuse(question, dialect, error)

    def break_off(self, question: PendingRequest) -> HttpResponse:
        """What is answered when something of ours has failed: called where the exception is, which it tells the log."""
        _log.exception("unhandled", extra={"request_id": question.request_id})
        return self._refuse(question, dialect_of(question), _FaultError("Something went wrong on our side."))

    # --- verify ---------------------------------------------------------------------------------------------

    def _verify(self, question: PendingRequest, is_batch: bool, sources: CachedSources) -> HttpResponse:
        _refuse_exposed(question.target)
        service = self._service(sources, read_bearer(question.headers.get("authorization")), _NO_TOKEN)
        if question.method != "POST":
            raise _MethodError(("POST",))
        body = body_of(question)
        if is_batch:
            tags = self._decide_again(question, body) if sources.may_remember else []
            if tags and len(question.decided) == len(tags):
                return _batch_answer(question)
            batch = read_asked_batch(body) or read_batch(body)
            for environment in dict.fromkeys(asked.environment for asked in batch):
                _require_served(environment, service, question.at)
            return self._decide_batch(question, batch, service, sources, tags)
        asked = read_asked(body) or read_verify(body)
        _require_served(asked.environment, service, question.at)
        if sources.may_remember:
            self._decide_known(question, [asked], service)
        text = question.decided.get(0) or self._decide(question, 0, asked, service, sources, question.request_id)
        self._bind(question, sources)
        return HttpResponse(200, text, question.request_id)

    def _decide_again(self, question: PendingRequest, body: bytes) -> list[bytes]:
        """A batch whose questions were all granted before; the tags of its questions, where they can be asked again."""
        authorization, pieces = _authorization(question), split_batch(body)
        if pieces is None or authorization is None:
            return []
        engine = self._engine
        tags = engine.question_tags(authorization, pieces)
        if not question.decided:
            with engine.lock:
                engine.catch_up()
                if engine.may_remember():
                    wall, request_id = engine.ports.wall(), question.request_id.encode()
                    question.decided |= engine.decide_again(tags, wall, request_id)
        return tags

    def _decide_known(
        self, question: PendingRequest, batch: list[VerifyRequest], service: Service, tags: Sequence[bytes] = ()
    ) -> None:
        """What is in memory, or was read for this question, and is yes. `tags` of those that may be asked again."""
        engine, decided, own_id = self._engine, question.decided, question.request_id.encode()
        is_single = _is_single(question)
        caller = engine.caller(service)
        with engine.lock:
            engine.catch_up()
            # Of now and under the lock: no use is noted with a time that a report has passed already.
            wall = engine.ports.wall()
            token = engine.memory.tokens.by_id.get(service.token_id) if tags else None
            if token is not None and token.record.service is not service:
                token = None
            for number, asked in enumerate(batch):
                if number in decided:
                    continue
                record = read_for(question, asked.key) if question.found else None
                request_id = own_id if is_single else b"%b-%d" % (own_id, number)
                asker = None if token is None else (token, tags[number])
                text = engine.decide_known(asked, caller, wall, request_id, record, asker=asker)
                if text is not None:
                    decided[number] = text
                    engine.answered_from_memory += record is None

    def _decide_batch(
        self,
        question: PendingRequest,
        batch: list[VerifyRequest],
        service: Service,
        sources: CachedSources,
        tags: Sequence[bytes],
    ) -> HttpResponse:
        """Each is decided once: what was spent for one is not spent again while others are read for."""
        if sources.may_remember:
            self._decide_known(question, batch, service, tags)
        lacking: list[MissingDataError] = []
        for number, asked in enumerate(batch):
            if number in question.decided:
                continue
            request_id = f"{question.request_id}-{number}"
            try:
                question.decided[number] = self._decide(question, number, asked, service, sources, request_id)
            except MissingDataError as lack:
                lacking.append(lack)
        if lacking:
            raise SeveralMissingDataError(lacking)
        self._bind(question, sources)
        return _batch_answer(question)

    def _decide(
        self,
        question: PendingRequest,
        number: int,
        asked: VerifyRequest,
        service: Service,
        sources: CachedSources,
        request_id: str,
    ) -> bytes:
        """One decision as its JSON. Raises MissingDataError, having noted and spent nothing."""
        engine = self._engine
        environment = Environment(asked.environment)
        if environment not in engine.ports.environments:
            raise NotFoundError(f"This process does not serve {environment}.")
        rules = sources.rules()
        endpoint = _endpoint(asked, rules, engine.base_paths[environment])
        presented = _presented(asked, environment, endpoint, service)
        sources.number = number
        judgement = _judge(presented, sources, question.at)
        if not presented.is_dry:
            verdict = EngineVerdict(
                judgement,
                request_id,
                "verify",
                environment,
                endpoint.name if isinstance(endpoint, Endpoint) else "",
                asked.client_ip or f"token:{service.token_id}",
                (asked.user_agent or "")[:MAX_REDACTED_LENGTH],
                presented.origin,
                service.is_probe,
                question.at,
            )
            engine.ports.note_verdict(verdict)
            if sources.may_remember:
                self._learn(question, asked, verdict, endpoint, rules, sources.token)
        if _is_single(question):
            _refuse_cost(judgement)
        return encode(decision(judgement, request_id, has_trace=presented.is_dry))

    def _learn(
        self,
        question: PendingRequest,
        asked: VerifyRequest,
        verdict: EngineVerdict,
        endpoint: Endpoint | NoMatchingEndpoint,
        rules: PolicySnapshot,
        token: TokenRecord | None,
    ) -> None:
        """The next one like it goes the fast way. `rules` that it was judged by, whatever has become of them."""
        engine, judgement = self._engine, verdict.judgement
        with engine.lock:
            if isinstance(judgement.verdict, Grant):
                if isinstance(endpoint, Endpoint):
                    engine.learn(asked, judgement, endpoint, rules)
                return
            authorization = _authorization(question)
            if authorization is not None and token is not None and _is_single(question):
                engine.learn_denial(verdict, authorization, question.body or b"", token, rules)

    def _bind(self, question: PendingRequest, sources: CachedSources) -> None:
        """The next request of this caller goes the fast way."""
        authorization, token = _authorization(question), sources.token
        if token is None or authorization is None or not sources.may_remember:
            return
        engine = self._engine
        with engine.lock:
            engine.catch_up()
            known = engine.memory.tokens.by_id.get(token.service.token_id)
            if known is not None and known.record is token:
                known.about = engine.caller(token.service)
                engine.memory.tokens.bind(known, engine.memory.tag(authorization))

    # --- forward-auth ---------------------------------------------------------------------------------------

    def _authorize(self, question: PendingRequest, dialect: Dialect, sources: CachedSources) -> HttpResponse:
        # Envoy's URL is the client's: a key in it is attributed by the judgement.
        if dialect is not Dialect.ENVOY:
            _refuse_exposed(question.target)
        headers = question.headers
        service = self._service(sources, headers.get(SERVICE_TOKEN), _NO_GATEWAY)
        forwarded = forwarded_of(question, dialect)
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
            scope=service.merchants,
        )
        judgement = _judge(presented, sources, question.at)
        self._engine.ports.note_verdict(
            EngineVerdict(
                judgement,
                question.request_id,
                dialect,
                environment,
                name,
                forwarded.address or f"token:{service.token_id}",
                (headers.get("user-agent") or "")[:MAX_REDACTED_LENGTH],
                presented.origin,
                service.is_probe,
                question.at,
            )
        )
        limits = limit_headers(judgement.spend)
        verdict, holder = judgement.verdict, judgement.holder
        if isinstance(verdict, Denial):
            raise VerificationDeniedError(verdict, limits)
        if holder is None:
            raise TypeError("a grant is given after proof")
        identity = identity_headers(holder, judgement.customer, question.request_id)
        identity.pop(REQUEST_ID)  # every answer has it
        return HttpResponse(200, b"", question.request_id, (_NO_STORE, *identity.items(), *limits.items()))

    # --- what was read for a question ---------------------------------------------------------------------

    def stamp(self) -> int:
        """To be taken before a reading begins, and given with what it found."""
        with self._engine.lock:
            self._engine.catch_up()
            return self._engine.changes

    def admit(self, kind: str, found: Mapping[str, Found | None], stamp: int) -> None:
        """Remembers what was read, unless something was changed meanwhile, or nothing may be remembered now."""
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

    # --- both -----------------------------------------------------------------------------------------------

    def _service(self, sources: CachedSources, presented: str | None, refusal: Denial) -> Service:
        """Who asks, once that is proved and may verify. Raises DeniedError."""
        service = sources.prove_service(presented)
        if service is None:
            raise VerificationDeniedError(refusal)
        verdict = decide(operation(Permission.KEYS_VERIFY), service, PLATFORM, sources.now)
        if isinstance(verdict, Denial):
            raise VerificationDeniedError(verdict)
        return service

    def _refuse(
        self, question: PendingRequest, dialect: Dialect | None, error: VerificationDeniedError | KeyvaultError
    ) -> HttpResponse:
        request_id = question.request_id
        headers: dict[str, str] = {}
        if isinstance(error, VerificationDeniedError):
            found, headers = denial_problem(error.denial, request_id), error.headers
            internal = error.denial.internal
        else:
            found, internal = _error_problem(error, request_id), error.internal
        if isinstance(error, _MethodError):
            headers = {"Allow": ", ".join(error.allowed)}
        answer = problem_answer(found, request_id, headers)
        if dialect is Dialect.NGINX:
            told = {AUTH_STATUS: str(found.status), AUTH_CODE: str(found.body["code"])}
            answer = HttpResponse(nginx_status(found.status), answer.body, request_id, (*answer.headers, *told.items()))
        _log.info(
            "refused",
            extra={
                "request_id": request_id,
                "client_request_id": clean_client_request_id(question.headers.get(REQUEST_ID)) or "",
                "method": question.method,
                # Redacted before it is cut: half a key no longer has the shape of one.
                "path": redact(question.target.partition("?")[0])[:300],
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
        super().__init__("The method is not one of this path.")
        self.allowed = allowed


def _is_single(question: PendingRequest) -> bool:
    return question.target.partition("?")[0] == VERIFY


def _authorization(question: PendingRequest) -> bytes | None:
    """The header as it was sent, for whoever knows it by its tag. None: there is none, or none that a token fits in."""
    text = question.headers.get("authorization")
    return text.encode() if text is not None and text.isascii() else None


def _batch_answer(question: PendingRequest) -> HttpResponse:
    texts = [question.decided[number] for number in range(len(question.decided))]
    return HttpResponse(200, b'{"decisions":[%b]}' % b",".join(texts), question.request_id)


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
    """A cost that no burst holds is the caller's to mend, not its client's."""
    verdict = judgement.verdict
    if isinstance(verdict, Denial) and verdict.code is ErrorCode.REQUEST_INVALID:
        raise RequestInvalidError("The request does not fit.", [Fault("/cost", verdict.detail)])


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


def _endpoint(asked: VerifyRequest, rules: PolicySnapshot, base_path: str) -> Endpoint | NoMatchingEndpoint:
    if asked.endpoint is not UNSET:
        return rules.catalog.find(asked.endpoint)
    return rules.catalog.match(asked.method or "", asked.path or "", base_path)


def _presented(
    asked: VerifyRequest, environment: Environment, endpoint: Endpoint | NoMatchingEndpoint, service: Service
) -> VerificationRequest:
    merchant, store = _given(asked.merchant), _given(asked.store)
    path = _given(asked.path)
    if isinstance(endpoint, Endpoint):
        merchant_context, store_context = endpoint.read_contexts(path, {}, merchant, store)
    else:
        merchant_context, store_context = merchant, store
    return VerificationRequest(
        key=asked.key,
        environment=environment,
        endpoint=endpoint,
        url=path or "",
        merchant=merchant,
        merchant_context=merchant_context,
        store_context=store_context,
        bearer=_given(asked.customer_token),
        origin=_given(asked.origin),
        client_address=_given(asked.client_ip),
        cost=asked.cost or 1,
        scope=service.merchants,
        is_dry=asked.dry_run is True,
    )


def _given(value: object) -> str | None:
    return value if isinstance(value, str) else None


_NO_STORE = ("Cache-Control", "no-store")
_NO_TOKEN = Denial(ErrorCode.SERVICE_TOKEN_INVALID, "This needs a valid service token in Authorization: Bearer.")
_NO_GATEWAY = Denial(
    ErrorCode.SERVICE_TOKEN_INVALID, f"The gateway needs a valid service token in {SERVICE_TOKEN}, sent once."
)


def _environment_of(service: Service, forwarded: Forwarded, base_urls: Mapping[Environment, str]) -> Environment:
    """The one environment of the gateway's token. Raises DeniedError: several, or another one's host was asked for."""
    if len(service.environments) != 1:
        detail = "A gateway's service token names exactly one environment, and this one names several."
        raise VerificationDeniedError(Denial(ErrorCode.PERMISSION_MISSING, detail))
    (environment,) = service.environments
    hosts = {name: urlsplit(url).hostname for name, url in base_urls.items()}
    is_unreadable = forwarded.hostname == "" and len(set(hosts.values())) > 1
    if is_unreadable or (forwarded.hostname != hosts[environment] and forwarded.hostname in hosts.values()):
        detail = f"The gateway's token is for {environment}, and the request did not go to a host of it."
        raise VerificationDeniedError(Denial(ErrorCode.PERMISSION_MISSING, detail))
    return environment

"""The whole way: every question of verify, its batch and forward-auth, with everything that can be wrong with it.

    question = Question(method, target, headers, body)
    while isinstance(found := answering.step(question), Needs): … read them into the question, and `answering.admit` …

A step is made of what is in memory and of what was read for this very question; while nothing may be remembered, of
the latter alone. What it lacks it says, all at once.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlsplit

from msgspec import UNSET

from keyvault.access.catalog import Endpoint, Miss
from keyvault.access.customers import CustomerRecord
from keyvault.access.decision import Denial, Grant, decide
from keyvault.access.judgement import Judgement, Presented, deny_stale, judge
from keyvault.access.limits import Bucket, Spend
from keyvault.access.permissions import Permission
from keyvault.access.principals import Service
from keyvault.access.rule_book import RuleBook
from keyvault.access.rules import PLATFORM, Target, operation
from keyvault.access.verification import TokenRecord, find_exposed, judge_service_token, read_service_token
from keyvault.domain.digests import PEPPER_SET, Peppers, PepperSet
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
from keyvault.domain.keys import KeyRecord
from keyvault.domain.keystring import KeyString
from keyvault.domain.redaction import redact
from keyvault.hotpath.answers import Answer
from keyvault.hotpath.engine import Caller, Engine, Verdict
from keyvault.hotpath.memory import Known
from keyvault.hotpath.rendering import decision, denial_problem, encode, problem_answer
from keyvault.hotpath.requests import Asked, read_asked, read_asked_batch, read_batch, read_verify, split_batch
from keyvault.wire.gateways import (
    AUTH_CODE,
    AUTH_STATUS,
    ENVOY_ADDRESS,
    NAMES,
    SERVICE_TOKEN,
    Dialect,
    Forwarded,
    Misread,
    identity_headers,
    last_address,
    nginx_status,
    read_forwarded,
)
from keyvault.wire.headers import API_KEY, REQUEST_ID, came_twice, clean_client_request_id, mint_request_id, read_bearer
from keyvault.wire.limits import limit_headers
from keyvault.wire.problems import Problem, problem

_log = logging.getLogger("keyvault.requests")

VERIFY, BATCH = "/v1/keys/verify", "/v1/keys/verify-batch"
ENVOY = "/v1/authorize/envoy/"
GATEWAYS: Final = {
    "/v1/authorize/traefik": Dialect.TRAEFIK,
    "/v1/authorize/nginx": Dialect.NGINX,
}

KEY, CUSTOMER, TOKEN, RULES = "key", "customer_token", "service_token", "rules"
"""What may be needed; the first three by id, and named like the subjects of changes."""

Found = KeyRecord | CustomerRecord | TokenRecord


def is_ours(path: str) -> bool:
    """Whether this is one of the paths that the engine answers; the path without its query."""
    return path in _OURS or path.startswith(ENVOY)


_OURS: Final = frozenset({VERIFY, BATCH, *GATEWAYS})


class Headers(dict[str, str]):
    """By name in any case; the keys are lower case, and of what came twice both values, with a comma between.

    Their repr names them only: credentials are among them.
    """

    def __repr__(self) -> str:
        return f"Headers({sorted(self)})"

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]  # narrower
        return super().get(name.lower(), default)


@dataclass(frozen=True, slots=True)
class Payment:
    """What is to be spent for one question, of a batch by its number."""

    number: int
    buckets: tuple[Bucket, ...]
    cost: int
    refuse_on_loss: bool


@dataclass(frozen=True, slots=True)
class Needs:
    """What a step lacks. `address` of the client: look-ups of those that fail too often wait for each other."""

    ids: Mapping[str, frozenset[str]]
    payments: tuple[Payment, ...] = ()
    address: str | None = None


class LackingError(Exception):
    """This cannot be decided without what it names."""

    def __init__(
        self, kind: str, identity: str = "", payment: Payment | None = None, address: str | None = None
    ) -> None:
        super().__init__(kind)
        self.kind = kind
        self.identity = identity
        self.payment = payment
        self.address = address


class Question:
    """One request, and what was read for it so far."""

    __slots__ = ("at", "body", "decided", "found", "headers", "method", "paid", "request_id", "rules", "target")

    def __init__(
        self, method: str, target: str, headers: Headers, body: bytes | None, random_bytes: Callable[[int], bytes]
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.request_id = mint_request_id(random_bytes)
        self.found: dict[tuple[str, str], Found | Exception | None] = {}
        self.rules: RuleBook | Exception | None = None
        self.paid: dict[int, Spend | Exception] = {}
        self.decided: dict[int, bytes] = {}
        self.at = datetime.min.replace(tzinfo=UTC)


class DeniedError(Exception):
    """Carries a denial of the whole request out to where answers are written."""

    def __init__(self, denial: Denial, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(denial.detail)
        self.denial = denial
        self.headers = dict(headers or {})


class Answering:
    """The service plane's questions, put to one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ask(self, method: str, target: str, headers: Headers, body: bytes | None) -> Question:
        """`body` None: it is larger than 64 KiB and was not read."""
        return Question(method, target, headers, body, self._engine.ports.random_bytes)

    def step(self, question: Question) -> Answer | Needs:
        engine = self._engine
        with engine.lock:
            engine.catch_up()
            may_remember = engine.may_remember()
        question.at = datetime.fromtimestamp(engine.ports.wall(), UTC)
        path = question.target.partition("?")[0]
        dialect = _dialect(question)
        try:
            if dialect is not None:
                return self._authorize(question, dialect, _Sources(engine, question, may_remember))
            return self._verify(question, path == BATCH, _Sources(engine, question, may_remember))
        except LackingError as lacking:
            return _needs([lacking])
        except _Lacking as several:
            return _needs(several.each)
        except (DeniedError, KeyvaultError) as error:
            return self._refuse(question, dialect, error)

    def break_off(self, question: Question) -> Answer:
        """What is answered when something of ours has failed: called where the exception is, which it tells the log."""
        _log.exception("unhandled", extra={"request_id": question.request_id})
        return self._refuse(question, _dialect(question), _FaultError("Something went wrong on our side."))

    # --- verify ---------------------------------------------------------------------------------------------

    def _verify(self, question: Question, is_batch: bool, sources: "_Sources") -> Answer:
        _refuse_exposed(question.target)
        service = self._service(sources, read_bearer(question.headers.get("authorization")), _NO_TOKEN)
        if question.method != "POST":
            raise _MethodError(("POST",))
        body = _json_body(question)
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
        return Answer(200, text, question.request_id)

    def _decide_again(self, question: Question, body: bytes) -> list[bytes]:
        """A batch whose questions were all granted before; the tags of its questions, where they can be asked again."""
        authorization, pieces = question.headers.get("authorization"), split_batch(body)
        if pieces is None or authorization is None or not authorization.isascii():
            return []
        engine = self._engine
        tags = engine.question_tags(authorization.encode(), pieces)
        if not question.decided:
            with engine.lock:
                engine.catch_up()
                if engine.may_remember():
                    wall, request_id = engine.ports.wall(), question.request_id.encode()
                    question.decided |= engine.decide_again(tags, wall, request_id)
        return tags

    def _decide_known(
        self, question: Question, batch: list[Asked], service: Service, tags: Sequence[bytes] = ()
    ) -> None:
        """What is in memory, or was read for this question, and is yes. `tags` of those that may be asked again."""
        engine, decided, own_id = self._engine, question.decided, question.request_id.encode()
        is_single = question.target.partition("?")[0] == VERIFY
        caller = Caller(service, engine.ports.environments)
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
                record = _read_for(question, asked.key) if question.found else None
                request_id = own_id if is_single else b"%b-%d" % (own_id, number)
                asker = None if token is None else (token, tags[number])
                text = engine.decide_known(asked, caller, wall, request_id, record, asker=asker)
                if text is not None:
                    decided[number] = text
                    engine.answered_from_memory += record is None
            engine.unread = None  # what is lacking is read for this question the whole way

    def _decide_batch(
        self, question: Question, batch: list[Asked], service: Service, sources: "_Sources", tags: Sequence[bytes]
    ) -> Answer:
        """Each is decided once: what was spent for one is not spent again while others are read for."""
        if sources.may_remember:
            self._decide_known(question, batch, service, tags)
        lacking: list[LackingError] = []
        for number, asked in enumerate(batch):
            if number in question.decided:
                continue
            request_id = f"{question.request_id}-{number}"
            try:
                question.decided[number] = self._decide(question, number, asked, service, sources, request_id)
            except LackingError as lack:
                lacking.append(lack)
        if lacking:
            raise _Lacking(lacking)
        self._bind(question, sources)
        return _batch_answer(question)

    def _decide(
        self,
        question: Question,
        number: int,
        asked: Asked,
        service: Service,
        sources: "_Sources",
        request_id: str,
    ) -> bytes:
        """One decision as its JSON. Raises LackingError, having noted and spent nothing."""
        engine = self._engine
        environment = Environment(asked.environment)
        if environment not in engine.ports.environments:
            raise NotFoundError(f"This process does not serve {environment}.")
        rules = sources.rules()
        endpoint = _endpoint(asked, rules, engine.ports.base_urls[environment])
        presented = _presented(asked, environment, endpoint, service)
        sources.number = number
        judgement = _judge(presented, sources, question.at)
        if not presented.is_dry:
            name = endpoint.name if isinstance(endpoint, Endpoint) else ""
            engine.ports.note_verdict(
                Verdict(
                    judgement,
                    request_id,
                    "verify",
                    environment,
                    name,
                    asked.client_ip or f"token:{service.token_id}",
                    asked.user_agent or "",
                    presented.origin,
                    service.is_probe,
                    question.at,
                )
            )
            if isinstance(judgement.verdict, Grant) and isinstance(endpoint, Endpoint) and sources.may_remember:
                with engine.lock:
                    engine.learn(asked, judgement, endpoint, rules)
        if number == 0 and question.target.startswith(VERIFY) and not question.target.startswith(BATCH):
            _refuse_cost(judgement)
        return encode(decision(judgement, request_id, has_trace=presented.is_dry))

    def _bind(self, question: Question, sources: "_Sources") -> None:
        """The next request of this caller goes the fast way."""
        authorization = question.headers.get("authorization")
        token = sources.token
        if token is None or authorization is None or not sources.may_remember or not authorization.isascii():
            return
        engine = self._engine
        with engine.lock:
            engine.catch_up()
            known = engine.memory.tokens.by_id.get(token.service.token_id)
            if known is not None and known.record is token:
                known.about = Caller(token.service, engine.ports.environments)
                engine.memory.tokens.bind(known, engine.memory.tag(authorization.encode()))

    # --- forward-auth ---------------------------------------------------------------------------------------

    def _authorize(self, question: Question, dialect: Dialect, sources: "_Sources") -> Answer:
        # Envoy's URL is the client's: a key in it is attributed by the judgement.
        if dialect is not Dialect.ENVOY:
            _refuse_exposed(question.target)
        headers = question.headers
        service = self._service(sources, headers.get(SERVICE_TOKEN), _NO_GATEWAY)
        forwarded = _read_forwarded(question, dialect)
        environment = _environment_of(service, forwarded, self._engine.ports.base_urls)
        if environment not in self._engine.ports.environments:
            raise NotFoundError(f"This process does not serve {environment}.")
        base_path = _base_path(self._engine.ports.base_urls[environment])
        endpoint = sources.rules().catalog.match(forwarded.method, forwarded.uri, base_path)
        name, merchant, store = "", None, None
        if isinstance(endpoint, Endpoint):
            name = endpoint.name
            merchant, store = endpoint.read_contexts(forwarded.uri, headers)
        authorization = headers.get("authorization")
        presented = Presented(
            key=headers.get(API_KEY),
            environment=environment,
            endpoint=endpoint,
            url=forwarded.uri,
            merchant_context=merchant,
            store_context=store,
            bearer=authorization if came_twice(authorization) else read_bearer(authorization),
            origin=headers.get("origin"),
            client_address=forwarded.address,
            scope=service.merchants,
        )
        judgement = _judge(presented, sources, question.at)
        self._engine.ports.note_verdict(
            Verdict(
                judgement,
                question.request_id,
                dialect,
                environment,
                name,
                forwarded.address or f"token:{service.token_id}",
                headers.get("user-agent") or "",
                presented.origin,
                service.is_probe,
                question.at,
            )
        )
        limits = limit_headers(judgement.spend)
        verdict, holder = judgement.verdict, judgement.holder
        if isinstance(verdict, Denial):
            raise DeniedError(verdict, limits)
        if holder is None:
            raise TypeError("a grant is given after proof")
        identity = identity_headers(holder, judgement.customer, question.request_id)
        identity.pop(REQUEST_ID)  # every answer has it
        return Answer(200, b"", question.request_id, (_NO_STORE, *identity.items(), *limits.items()))

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

    def admit_rules(self, rules: RuleBook, stamp: int) -> None:
        with self._engine.lock:
            if self._may_admit(stamp):
                self._engine.rules = rules

    def _may_admit(self, stamp: int) -> bool:
        self._engine.catch_up()
        return self._engine.changes == stamp and self._engine.may_remember()

    # --- both -----------------------------------------------------------------------------------------------

    def _service(self, sources: "_Sources", presented: str | None, refusal: Denial) -> Service:
        """Who asks, once that is proved and may verify. Raises DeniedError."""
        service = sources.prove_service(presented)
        if service is None:
            raise DeniedError(refusal)
        verdict = decide(operation(Permission.KEYS_VERIFY), service, PLATFORM, sources.now)
        if isinstance(verdict, Denial):
            raise DeniedError(verdict)
        return service

    def _refuse(self, question: Question, dialect: Dialect | None, error: DeniedError | KeyvaultError) -> Answer:
        request_id = question.request_id
        headers: dict[str, str] = {}
        if isinstance(error, DeniedError):
            found, headers = denial_problem(error.denial, request_id), error.headers
            internal = error.denial.internal
        else:
            found, internal = _error_problem(error, request_id), error.internal
        if isinstance(error, _MethodError):
            headers = {"Allow": ", ".join(error.allowed)}
        answer = problem_answer(found, request_id, headers)
        if dialect is Dialect.NGINX:
            told = {AUTH_STATUS: str(found.status), AUTH_CODE: str(found.body["code"])}
            answer = Answer(nginx_status(found.status), answer.body, request_id, (*answer.headers, *told.items()))
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


class _Lacking(Exception):  # noqa: N818  several of them, on their way to one answer
    def __init__(self, each: list[LackingError]) -> None:
        super().__init__(len(each))
        self.each = each


class _FaultError(KeyvaultError):
    code = ErrorCode.INTERNAL_ERROR


class _MethodError(KeyvaultError):
    code = ErrorCode.METHOD_NOT_ALLOWED

    def __init__(self, allowed: tuple[str, ...]) -> None:
        super().__init__("The method is not one of this path.")
        self.allowed = allowed


class _Sources:
    """What a judgement takes from: memory where it may be used, and what was read for this question."""

    def __init__(self, engine: Engine, question: Question, may_remember: bool) -> None:
        self.brand = engine.ports.brand
        self.base_urls = engine.ports.base_urls
        self.may_remember = may_remember
        self.now = question.at
        self.number = 0
        self.token: TokenRecord | None = None
        self._engine = engine
        self._question = question

    def peppers(self, environment: Environment) -> Peppers:
        return self._engine.ports.peppers(PEPPER_SET[environment])

    def take_pepper(self, peppers: Peppers, version: int) -> Peppers:
        return self._engine.ports.take_pepper(peppers, version)

    def find_key(self, key_id: str, address: str | None) -> KeyRecord | None:
        found = self._find(KEY, key_id, self._engine.memory.keys.by_id, address)
        return found if isinstance(found, KeyRecord) else None

    def find_customer(self, token_id: str) -> CustomerRecord | None:
        found = self._find(CUSTOMER, token_id, self._engine.memory.customers.by_id)
        return found if isinstance(found, CustomerRecord) else None

    def prove_service(self, presented: str | None) -> Service | None:
        keystring = read_service_token(presented, self.brand)
        if keystring is None:
            return None
        ports = self._engine.ports
        peppers = ports.peppers(PepperSet.SERVICE)
        found = self._find(TOKEN, keystring.key_id, self._engine.memory.tokens.by_id)
        record = found if isinstance(found, TokenRecord) else None
        if record is not None:
            peppers = ports.take_pepper(peppers, record.pepper_version)
        service = judge_service_token(keystring, record, peppers, self.now)
        if service is not None and record is not None:
            self.token = record
            ports.note_token_proof(record, keystring, peppers)
        return service

    def rules(self) -> RuleBook:
        """Raises LackingError, and VerifierStaleError when they could not be read."""
        read, remembered = self._question.rules, self._engine.rules
        if isinstance(read, Exception):
            raise VerifierStaleError("The rules cannot be looked up right now.")
        if read is not None:
            return read
        if remembered is not None and self.may_remember:
            return remembered
        raise LackingError(RULES)

    def buckets(self, record: KeyRecord, endpoint: Endpoint) -> tuple[Bucket, ...]:
        limit, setting = self.rules().endpoint_limit(record.account_id, record.environment, endpoint)
        return self._engine.ports.buckets(record, endpoint, limit, setting)

    def spend(self, buckets: tuple[Bucket, ...], cost: int, *, refuse_on_loss: bool) -> Spend:
        budgets = self._engine.ports.budgets
        paid = self._question.paid.get(self.number)
        if isinstance(paid, Spend):
            return paid
        if isinstance(paid, Exception):
            raise paid
        if budgets.is_local:
            return budgets.spend(buckets, cost, refuse_on_loss=refuse_on_loss)
        raise LackingError("payment", payment=Payment(self.number, buckets, cost, refuse_on_loss))

    def note_failed_proof(self, address: str | None) -> int | None:
        return self._engine.ports.note_failed_proof(address)

    def note_proof(self, record: KeyRecord, keystring: KeyString, peppers: Peppers) -> None:
        self._engine.ports.note_key_proof(record, keystring, peppers)

    def _find(
        self,
        kind: str,
        identity: str,
        shelf: Mapping[str, Known[KeyRecord] | Known[CustomerRecord] | Known[TokenRecord]],
        address: str | None = None,
    ) -> Found | None:
        """Raises LackingError, and VerifierStaleError when it could not be read, or is not to be trusted."""
        if self._engine.freshness.is_lost:
            raise VerifierStaleError(
                "The verifier knows of changes that its database lacks, and vouches for nothing until it is restarted.",
                internal="the change feed went back",
            )
        if (kind, identity) in self._question.found:
            found = self._question.found[kind, identity]
            if isinstance(found, Exception):
                raise VerifierStaleError(
                    "The service token cannot be looked up right now."
                    if kind == TOKEN
                    else "The key cannot be looked up right now."
                )
            return found
        if self.may_remember:
            known = shelf.get(identity)
            if known is not None:
                known.is_asked_for = True
                return known.record
            if self._engine.memory.absent.has(kind, identity, self._engine.ports.monotonic()):
                return None
        raise LackingError(kind, identity, address=address)


def _batch_answer(question: Question) -> Answer:
    texts = [question.decided[number] for number in range(len(question.decided))]
    return Answer(200, b'{"decisions":[%b]}' % b",".join(texts), question.request_id)


def _needs(each: Iterable[LackingError]) -> Needs:
    ids: dict[str, set[str]] = {}
    payments = []
    address = None
    for lacking in each:
        address = address or lacking.address
        if lacking.payment is not None:
            payments.append(lacking.payment)
        else:
            ids.setdefault(lacking.kind, set()).add(lacking.identity)
    return Needs({kind: frozenset(found) for kind, found in ids.items()}, tuple(payments), address)


def _judge(presented: Presented, sources: _Sources, now: datetime) -> Judgement:
    try:
        return judge(presented, sources, now)
    except VerifierStaleError as error:
        if error.internal:
            _log.warning("a key cannot be judged", extra={"why": error.internal})
        return deny_stale(error.detail, error.internal)


def _read_for(question: Question, text: str | None) -> KeyRecord | None:
    """What was read for this question of the key that it is about."""
    if text is None or not question.found:
        return None
    found = question.found.get((KEY, text[-65:-49]))
    return found if isinstance(found, KeyRecord) else None


def _dialect(question: Question) -> Dialect | None:
    """None: it is no gateway that asks."""
    path = question.target.partition("?")[0]
    return Dialect.ENVOY if path.startswith(ENVOY) else GATEWAYS.get(path)


def _refuse_exposed(target: str) -> None:
    exposed = find_exposed(target)
    if exposed is not None:
        raise DeniedError(exposed)


def _refuse_cost(judgement: Judgement) -> None:
    """A cost that no burst holds is the caller's to mend, not its client's."""
    verdict = judgement.verdict
    if isinstance(verdict, Denial) and verdict.code is ErrorCode.REQUEST_INVALID:
        raise RequestInvalidError("The request does not fit.", [Fault("/cost", verdict.detail)])


def _json_body(question: Question) -> bytes:
    """Raises RequestTooLarge and the like."""
    body = question.body
    if body is None:
        raise _BodyError(ErrorCode.PAYLOAD_TOO_LARGE, "The body is larger than 64 KiB.")
    media_type = (question.headers.get("content-type") or "").partition(";")[0].strip().lower()
    if body and media_type != "application/json":
        raise _BodyError(ErrorCode.MEDIA_TYPE_UNSUPPORTED, "The body must be application/json.")
    return body or b"{}"


class _BodyError(KeyvaultError):
    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code


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
        raise DeniedError(verdict)


def _endpoint(asked: Asked, rules: RuleBook, base_url: str) -> Endpoint | Miss:
    if asked.endpoint is not UNSET:
        return rules.catalog.find(asked.endpoint)
    return rules.catalog.match(asked.method or "", asked.path or "", _base_path(base_url))


def _base_path(base_url: str) -> str:
    return urlsplit(base_url).path


def _presented(asked: Asked, environment: Environment, endpoint: Endpoint | Miss, service: Service) -> Presented:
    merchant, store = _given(asked.merchant), _given(asked.store)
    path = _given(asked.path)
    if isinstance(endpoint, Endpoint):
        merchant_context, store_context = endpoint.read_contexts(path, {}, merchant, store)
    else:
        merchant_context, store_context = merchant, store
    return Presented(
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


def _read_forwarded(question: Question, dialect: Dialect) -> Forwarded:
    if dialect is Dialect.ENVOY:
        return Forwarded(
            method=question.method,
            uri=question.target.removeprefix(ENVOY.rstrip("/")),
            host=question.headers.get("host") or "",
            address=last_address(question.headers.get(ENVOY_ADDRESS)),
        )
    read = read_forwarded(NAMES[dialect], question.headers)
    if isinstance(read, Misread):
        fault = Fault("", f"{read.header} is missing, or cannot be read.")
        raise RequestInvalidError("The gateway does not say which request it asks about.", [fault])
    return read


def _environment_of(service: Service, forwarded: Forwarded, base_urls: Mapping[Environment, str]) -> Environment:
    """The one environment of the gateway's token. Raises DeniedError: several, or another one's host was asked for."""
    if len(service.environments) != 1:
        detail = "A gateway's service token names exactly one environment, and this one names several."
        raise DeniedError(Denial(ErrorCode.PERMISSION_MISSING, detail))
    (environment,) = service.environments
    hosts = {name: urlsplit(url).hostname for name, url in base_urls.items()}
    is_unreadable = forwarded.hostname == "" and len(set(hosts.values())) > 1
    if is_unreadable or (forwarded.hostname != hosts[environment] and forwarded.hostname in hosts.values()):
        detail = f"The gateway's token is for {environment}, and the request did not go to a host of it."
        raise DeniedError(Denial(ErrorCode.PERMISSION_MISSING, detail))
    return environment

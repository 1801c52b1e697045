"""The integration plane: one view for each environment, which judges first and then hands over to an endpoint's server.

The catalog says which endpoints there are; `Integration` is made with a server for each built-in one and fails to be
made when either side has an orphan, so that no route exists without a rule and no rule without a route. Upstream
endpoints have a rule here and no server: asking us for one is `endpoint_unknown`, as for anything that is not served.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from io import BytesIO
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.http import parse_header_parameters
from drf_spectacular.utils import OpenApiParameter
from rest_framework.exceptions import UnsupportedMediaType
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import Serializer
from rest_framework.views import APIView

from keyvault.access.catalog import BUILT_IN, Endpoint, NoMatchingEndpoint
from keyvault.access.customers import Customer
from keyvault.access.decision import Denial, Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import KeyHolder
from keyvault.api.cors import answer_preflight, cors_headers
from keyvault.api.exceptions import DeniedError
from keyvault.api.idempotency import answer_once
from keyvault.api.middleware import raw_url, request_id_of
from keyvault.api.parsers import StrictJSONParser
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, Fault, RequestInvalidError
from keyvault.models import Account
from keyvault.services.idempotency import Effect
from keyvault.services.merchants.merchants import find_account
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import usage_log
from keyvault.services.verification.judging import Judgement, VerificationRequest, judge_presented, note_use
from keyvault.services.verification.refusals import refusal_log
from keyvault.wire.headers import API_KEY, client_address, is_repeated, read_bearer
from keyvault.wire.limits import limit_headers


@dataclass(frozen=True)
class Call:
    """A request that was judged: who asks, for which customer, with which path variables."""

    request: Request
    endpoint: Endpoint
    holder: KeyHolder
    customer: Customer | None
    variables: Mapping[str, str]
    now: datetime

    @cached_property
    def account(self) -> Account:
        """Looked up once, and only by an endpoint that needs it."""
        return find_account(self.holder.merchant_id, self.holder.environment)

    def grant(self, permission: Permission) -> Grant:
        """The grant to write with. Raises PermissionMissingError."""
        return authorize(self.holder, permission, self.account, now=self.now)


@dataclass(frozen=True)
class EndpointServer:
    """What answers for one endpoint: `answers` at once, or `prepares` the effect of a request that creates.

    `serves_denied` says which denied requests, after proof, are answered all the same: whoever ends a leaked key may
    say so twice.

    The rest is for the OpenAPI page: the status of success, the shapes of bodies, what path variables look like, and
    the codes of refusals that are not the judgement's.
    """

    answers: Callable[[Call], Response] | None = None
    prepares: Callable[[Call], Effect] | None = None
    serves_denied: Callable[[Judgement], bool] = lambda judgement: False
    status: int = 200
    takes: type[Serializer[Any]] | None = None
    gives: type[Serializer[Any]] | None = None
    parameters: Sequence[OpenApiParameter] = ()
    codes: Sequence[ErrorCode] = ()


Servers = Mapping[str, EndpointServer]


def require_whole(servers: Servers) -> None:
    """Raises ImproperlyConfigured unless every built-in endpoint has a server of its own sort, and no other has one."""
    rules = {endpoint.name: endpoint for endpoint in BUILT_IN.endpoints}
    if orphans := rules.keys() ^ servers.keys():
        raise ImproperlyConfigured(f"the catalog and the routes disagree about {', '.join(sorted(orphans))}")
    for name, server in servers.items():
        wanted = server.prepares if rules[name].idempotent_by_key else server.answers
        if wanted is None or None not in {server.prepares, server.answers}:
            raise ImproperlyConfigured(f"{name} is served in another way than the catalog has it")


class IntegrationView(APIView):
    """Everything under an environment's base URL."""

    authentication_classes = ()
    permission_classes = (AllowAny,)  # the judgement below is the permission
    environment: Environment = Environment.SANDBOX
    servers: Servers = {}

    @property
    def allowed_methods(self) -> list[str]:
        """None of the view's own; a 405 lists those that the catalog has for the path."""
        return []

    @property
    def default_response_headers(self) -> dict[str, str]:
        return {}

    def options(self, request: Request, *args: Any, **kwargs: Any) -> Response:  # type: ignore[override]  # Django's
        return self.http_method_not_allowed(request, *args, **kwargs)

    def http_method_not_allowed(  # type: ignore[override]  # Django's request
        self, request: Request, *args: Any, **kwargs: Any
    ) -> Response:
        """Every method comes here, since the view has none of its own: the catalog knows which are allowed."""
        usage_log.start()
        now = datetime.now(UTC)
        endpoint = self._endpoint(request)
        preflight = answer_preflight(request, self.environment, self._path(request))
        if preflight is not None:
            return preflight
        judgement = self._judge(request, endpoint, now)
        headers = self._cors(request, endpoint, judgement)
        limits = limit_headers(judgement.spend)
        verdict = judgement.verdict
        server = self.servers[endpoint.name] if isinstance(endpoint, Endpoint) else None
        if isinstance(verdict, Denial) and not (server is not None and server.serves_denied(judgement)):
            self._note_refusal(request, endpoint, judgement, now)
            raise DeniedError(verdict, {**headers, **limits})
        holder = judgement.holder
        if server is None or holder is None or not isinstance(endpoint, Endpoint):
            raise TypeError("only what is served is granted")
        self.headers = {**self.headers, **headers, **limits}
        variables = endpoint.variables(self._path(request))
        return _serve(server, Call(request, endpoint, holder, judgement.customer, variables, now))

    def _endpoint(self, request: Request) -> Endpoint | NoMatchingEndpoint:
        return BUILT_IN.match(request.method or "", self._path(request))

    def _path(self, request: Request) -> str:
        """Relative to the base URL, see `EnvironmentMiddleware`."""
        return str(request._request.path_info).removeprefix(f"/{self.environment}")

    def _judge(self, request: Request, endpoint: Endpoint | NoMatchingEndpoint, now: datetime) -> Judgement:
        headers = request.headers
        authorization = headers.get("Authorization")
        address = _address(request)
        name = endpoint.name if isinstance(endpoint, Endpoint) else ""
        presented = VerificationRequest(
            key=headers.get(API_KEY),
            environment=self.environment,
            endpoint=endpoint,
            url=raw_url(request._request),
            bearer=authorization if is_repeated(authorization) else read_bearer(authorization),
            origin=headers.get("Origin"),
            client_address=address,
        )
        judgement = judge_presented(presented, now)
        note_use(
            judgement,
            usage_log,
            source=address or "unknown",
            user_agent=headers.get("User-Agent", ""),
            endpoint=name,
            origin=presented.origin,
        )
        return judgement

    def _note_refusal(
        self, request: Request, endpoint: Endpoint | NoMatchingEndpoint, judgement: Judgement, now: datetime
    ) -> None:
        refusal_log.note(
            judgement,
            request_id=request_id_of(request._request),
            door="integration",
            environment=self.environment,
            endpoint=endpoint.name if isinstance(endpoint, Endpoint) else "",
            source=_address(request) or "unknown",
            at=now,
        )

    def _cors(self, request: Request, endpoint: Endpoint | NoMatchingEndpoint, judgement: Judgement) -> dict[str, str]:
        if isinstance(endpoint, NoMatchingEndpoint):
            return {}
        return cors_headers(request.headers.get("Origin"), endpoint, judgement.holder)


def _address(request: Request) -> str | None:
    """The end client's, as far as the proxies before us are to be believed."""
    peer, forwarded = request.META.get("REMOTE_ADDR"), request.headers.get("X-Forwarded-For")
    return client_address(peer, forwarded, settings.TRUSTED_PROXIES)


def _serve(server: EndpointServer, call: Call) -> Response:
    if server.prepares is not None:
        prepare = server.prepares
        return answer_once(
            call.request,
            holder=call.holder.credential_id,
            endpoint=call.endpoint.name,
            environment=call.holder.environment,
            prepare=lambda: prepare(call),
            now=call.now,
        )
    if server.answers is None:
        raise TypeError("a server answers or prepares")
    if call.endpoint.method == "POST":
        _refuse_body(call.request)
    return server.answers(call)


def read_json(request: Request) -> dict[str, Any]:
    """The body of a request that may have one; none is an empty object. Raises what the parser raises."""
    body = request._request.body
    if not body:
        return {}
    # By hand, since REST framework takes a body of unknown length for none.
    if parse_header_parameters(request.content_type or "")[0] != StrictJSONParser.media_type:
        raise UnsupportedMediaType(request.content_type or "")
    return StrictJSONParser().parse(BytesIO(body))


def _refuse_body(request: Request) -> None:
    """Nothing is asked in a body here: whoever sends one means something that would not be done."""
    if request._request.body.strip() not in {b"", b"{}"}:
        raise RequestInvalidError("The request does not fit.", [Fault("", "This endpoint takes no body.")])

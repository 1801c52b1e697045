"""The integration plane: one view per environment judges a request, then calls the endpoint's server.

The catalog lists the endpoints. `require_matching_servers` checks that every built-in endpoint has a server, and every
server an endpoint, so that every route has a rule. Upstream endpoints have a rule and no server here: a request for one
is `endpoint_unknown`, like any path that is not served.
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
from keyvault.access.verification import find_exposed
from keyvault.api.cors import answer_preflight, cors_headers
from keyvault.api.exceptions import DeniedError
from keyvault.api.idempotency import answer_once
from keyvault.api.middleware import raw_url, request_id_of
from keyvault.api.openapi_components import Schema
from keyvault.api.parsers import StrictJSONParser
from keyvault.backends import meters
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, Fault, RequestInvalidError
from keyvault.models import Account
from keyvault.services.idempotency import Effect
from keyvault.services.merchants.merchants import find_account
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import usage_log
from keyvault.services.verification.judging import Judgement, VerificationRequest, judge_presented, note_use
from keyvault.services.verification.refusals import refusal_log
from keyvault.wire.entry_points import VerificationEntryPoint
from keyvault.wire.headers import API_KEY, address_from_environ, is_repeated, read_bearer
from keyvault.wire.limits import limit_headers


@dataclass(frozen=True)
class Call:
    """A judged request: its key holder, customer and path variables."""

    request: Request
    endpoint: Endpoint
    holder: KeyHolder
    customer: Customer | None
    variables: Mapping[str, str]
    now: datetime

    @cached_property
    def account(self) -> Account:
        """The key holder's account, read once and only on demand."""
        return find_account(self.holder.merchant_id, self.holder.environment)

    def grant(self, permission: Permission) -> Grant:
        """Return the grant for a write. Raises PermissionMissingError."""
        return authorize(self.holder, permission, self.account, now=self.now)


@dataclass(frozen=True)
class EndpointServer:
    """The implementation of one endpoint: `answers` responds, `prepares` returns the effect of a create request.

    `serves_denied` selects denied requests, with a proved key, that are served anyway: a holder may repeat the
    revocation of a leaked key.

    The other fields are for the OpenAPI page: the description, the success status, the bodies' schemas, the path
    parameters, and the error codes that do not come from the judgement.
    """

    description: str
    answers: Callable[[Call], Response] | None = None
    prepares: Callable[[Call], Effect] | None = None
    serves_denied: Callable[[Judgement], bool] = lambda judgement: False
    status: int = 200
    takes: type[Serializer[Any]] | None = None
    gives: Schema | None = None
    parameters: Sequence[OpenApiParameter] = ()
    codes: Sequence[ErrorCode] = ()


Servers = Mapping[str, EndpointServer]


def require_matching_servers(servers: Servers) -> None:
    """Check that the servers match the built-in endpoints.

    Raises ImproperlyConfigured for a missing or an extra server, or one of the wrong kind.
    """
    rules = {endpoint.name: endpoint for endpoint in BUILT_IN.endpoints}
    if orphans := rules.keys() ^ servers.keys():
        raise ImproperlyConfigured(f"endpoints in the catalog or in the routes only: {', '.join(sorted(orphans))}")
    for name, server in servers.items():
        wanted = server.prepares if rules[name].idempotent_by_key else server.answers
        if wanted is None or None not in {server.prepares, server.answers}:
            raise ImproperlyConfigured(f"{name}: its server does not match `idempotent_by_key` of the catalog")


class IntegrationView(APIView):
    """All endpoints under an environment's base URL."""

    authentication_classes = ()
    permission_classes = (AllowAny,)  # `http_method_not_allowed` judges the request
    environment: Environment = Environment.SANDBOX
    servers: Servers = {}

    @property
    def allowed_methods(self) -> list[str]:
        """Empty: a 405 lists the methods that the catalog has for the path."""
        return []

    @property
    def default_response_headers(self) -> dict[str, str]:
        return {}

    def options(self, request: Request, *args: Any, **kwargs: Any) -> Response:  # type: ignore[override]  # Django's
        return self.http_method_not_allowed(request, *args, **kwargs)

    def http_method_not_allowed(  # type: ignore[override]  # Django's request
        self, request: Request, *args: Any, **kwargs: Any
    ) -> Response:
        """Handle every method: the view defines none, and the catalog has the allowed ones."""
        usage_log.start()
        now = datetime.now(UTC)
        endpoint = self._endpoint(request)
        if find_exposed(raw_url(request._request)) is None:
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
            raise TypeError("a granted request needs a server and a key holder")
        self.headers = {**self.headers, **headers, **limits}
        variables = endpoint.variables(self._path(request))
        return _serve(server, Call(request, endpoint, holder, judgement.customer, variables, now))

    def _endpoint(self, request: Request) -> Endpoint | NoMatchingEndpoint:
        return BUILT_IN.match(request.method or "", self._path(request))

    def _path(self, request: Request) -> str:
        """Return the path relative to the base URL, see `EnvironmentMiddleware`."""
        return str(request._request.path_info).removeprefix(f"/{self.environment}")

    def _judge(self, request: Request, endpoint: Endpoint | NoMatchingEndpoint, now: datetime) -> Judgement:
        headers = request.headers
        authorization = headers.get("Authorization")
        address = address_from_environ(request.META, settings.TRUSTED_PROXIES)
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
        is_allowed = not isinstance(judgement.verdict, Denial)
        meters.note_verification(VerificationEntryPoint.INTEGRATION, is_allowed=is_allowed, source="rules")
        return judgement

    def _note_refusal(
        self, request: Request, endpoint: Endpoint | NoMatchingEndpoint, judgement: Judgement, now: datetime
    ) -> None:
        refusal_log.note(
            judgement,
            request_id=request_id_of(request._request),
            entry_point=VerificationEntryPoint.INTEGRATION,
            environment=self.environment,
            endpoint=endpoint.name if isinstance(endpoint, Endpoint) else "",
            source=address_from_environ(request.META, settings.TRUSTED_PROXIES) or "unknown",
            at=now,
        )

    def _cors(self, request: Request, endpoint: Endpoint | NoMatchingEndpoint, judgement: Judgement) -> dict[str, str]:
        if isinstance(endpoint, NoMatchingEndpoint):
            return {}
        return cors_headers(request.headers.get("Origin"), endpoint, judgement.holder)


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
        raise TypeError("a server needs `answers` or `prepares`")
    if call.endpoint.method == "POST":
        _refuse_body(call.request)
    return server.answers(call)


def read_json(request: Request) -> dict[str, Any]:
    """Parse an optional JSON body; a missing one is an empty object. Raises the parser's errors."""
    body = request._request.body
    if not body:
        return {}
    # REST framework treats a body of unknown length as empty.
    if parse_header_parameters(request.content_type or "")[0] != StrictJSONParser.media_type:
        raise UnsupportedMediaType(request.content_type or "")
    return StrictJSONParser().parse(BytesIO(body))


def _refuse_body(request: Request) -> None:
    """Reject a body, since ignoring it would hide the client's mistake. Raises RequestInvalidError."""
    if request._request.body.strip() not in {b"", b"{}"}:
        raise RequestInvalidError("The request is invalid.", [Fault("", "This endpoint accepts no body. Send none.")])

"""Forward-auth: a gateway asks about each request of its clients, and lets in those that are answered 200.

/v1/authorize/traefik, /v1/authorize/nginx, /v1/authorize/envoy/<the client's own path>
"""

from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from django.utils.functional import cached_property
from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from keyvault.access.catalog import Endpoint
from keyvault.access.decision import Denial
from keyvault.access.permissions import Permission
from keyvault.access.principals import Service
from keyvault.access.verification import find_exposed
from keyvault.api.exceptions import DeniedError
from keyvault.api.middleware import ENVOY, FORWARDED_HOST, raw_url, request_id_of
from keyvault.api.permissions import HasServiceToken
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, Fault, RequestInvalidError
from keyvault.services.authorization import authorize
from keyvault.services.catalog import match_endpoint
from keyvault.services.lookup import BASE_URLS, prove_service_token
from keyvault.services.refusals import refusal_log
from keyvault.services.usage import usage_log
from keyvault.services.verification import Judgement, Presented, judge_presented, note_use
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
from keyvault.wire.headers import API_KEY, came_twice, read_bearer
from keyvault.wire.limits import limit_headers

_INVALID = Denial(
    ErrorCode.SERVICE_TOKEN_INVALID, f"The gateway needs a valid service token in {SERVICE_TOKEN}, sent once."
)


class GatewayAuthentication(BaseAuthentication):
    """The gateway's own token; one that came twice is joined with a comma, which no token holds."""

    def authenticate(self, request: Request) -> tuple[Service, None]:
        service = prove_service_token(request.headers.get(SERVICE_TOKEN), datetime.now(UTC))
        if service is None:
            raise DeniedError(_INVALID)
        return service, None

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


class ForwardAuthView(APIView):
    """Any method: Envoy asks with its client's, the others with GET, and what the client's is they say in a header."""

    authentication_classes = (GatewayAuthentication,)
    permission_classes = (HasServiceToken,)
    dialect: Dialect = Dialect.TRAEFIK

    @property
    def allowed_methods(self) -> list[str]:
        """None of the view's own; a 405 lists those that the catalog has for the client's path."""
        return []

    @property
    def default_response_headers(self) -> dict[str, str]:
        return {}

    def initial(self, request: Request, *args: object, **kwargs: object) -> None:
        # Envoy's URL is the client's: a key in it is attributed by the judgement.
        exposed = None if self.dialect is Dialect.ENVOY else find_exposed(raw_url(request._request))
        if exposed is not None:
            raise DeniedError(exposed)
        super().initial(request, *args, **kwargs)
        self.now = datetime.now(UTC)
        authorize(self.service, Permission.KEYS_VERIFY, now=self.now)

    @cached_property
    def service(self) -> Service:
        if not isinstance(self.request.user, Service):
            raise DeniedError(_INVALID)
        return self.request.user

    def options(self, request: Request, *args: Any, **kwargs: Any) -> Response:  # type: ignore[override]  # Django's
        return self.http_method_not_allowed(request, *args, **kwargs)

    def http_method_not_allowed(  # type: ignore[override]  # Django's request
        self, request: Request, *args: Any, **kwargs: Any
    ) -> Response:
        """Every method comes here, since the view has none of its own."""
        usage_log.start()
        forwarded = self._read(request)
        environment = _environment_of(self.service, forwarded)
        judgement = self._judge(request, forwarded, environment)
        limits = limit_headers(judgement.spend)
        verdict, holder = judgement.verdict, judgement.holder
        if isinstance(verdict, Denial):
            raise DeniedError(verdict, limits)
        if holder is None:
            raise TypeError("a grant is given after proof")
        identity = identity_headers(holder, judgement.customer, request_id_of(request._request))
        return Response(headers={**identity, **limits})

    def finalize_response(self, request: Request, response: Response, *args: Any, **kwargs: Any) -> Response:
        """Every answer of the view passes here, its faults' too."""
        if self.dialect is Dialect.NGINX and response.status_code != 200:
            code = response.data["code"] if isinstance(response.data, dict) else ""
            self.headers = {**self.headers, AUTH_STATUS: str(response.status_code), AUTH_CODE: code}
            response.status_code = nginx_status(response.status_code)
        return super().finalize_response(request, response, *args, **kwargs)

    def _read(self, request: Request) -> Forwarded:
        if self.dialect is Dialect.ENVOY:
            meta = request.META
            return Forwarded(
                method=request.method or "",
                uri=raw_url(request._request).removeprefix(ENVOY.rstrip("/")),
                host=meta.get(FORWARDED_HOST, ""),
                address=last_address(request.headers.get(ENVOY_ADDRESS)),
            )
        read = read_forwarded(NAMES[self.dialect], request.headers)
        if isinstance(read, Misread):
            fault = Fault("", f"{read.header} is missing, or cannot be read.")
            raise RequestInvalidError("The gateway does not say which request it asks about.", [fault])
        return read

    def _judge(self, request: Request, forwarded: Forwarded, environment: Environment) -> Judgement:
        headers = request.headers
        authorization = headers.get("Authorization")
        endpoint = match_endpoint(forwarded.method, forwarded.uri, urlsplit(BASE_URLS[environment]).path)
        name, merchant, store = "", None, None
        if isinstance(endpoint, Endpoint):
            name = endpoint.name
            merchant, store = endpoint.read_contexts(forwarded.uri, headers)
        presented = Presented(
            key=headers.get(API_KEY),
            environment=environment,
            endpoint=endpoint,
            url=forwarded.uri,
            merchant_context=merchant,
            store_context=store,
            bearer=authorization if came_twice(authorization) else read_bearer(authorization),
            origin=headers.get("Origin"),
            client_address=forwarded.address,
            scope=self.service.merchants,
        )
        judgement = judge_presented(presented, self.now)
        source = forwarded.address or f"token:{self.service.token_id}"
        note_use(
            judgement,
            usage_log,
            source=source,
            user_agent=headers.get("User-Agent", ""),
            endpoint=name,
            origin=presented.origin,
            is_probe=self.service.is_probe,
        )
        refusal_log.note(
            judgement,
            request_id=request_id_of(request._request),
            door=self.dialect,
            environment=environment,
            endpoint=name,
            source=source,
            at=self.now,
        )
        return judgement


def _environment_of(service: Service, forwarded: Forwarded) -> Environment:
    """The one environment of the gateway's token. Raises DeniedError: several, or another one's host was asked for."""
    if len(service.environments) != 1:
        detail = "A gateway's service token names exactly one environment, and this one names several."
        raise DeniedError(Denial(ErrorCode.PERMISSION_MISSING, detail))
    (environment,) = service.environments
    hosts = {name: urlsplit(url).hostname for name, url in BASE_URLS.items()}
    is_unreadable = forwarded.hostname == "" and len(set(hosts.values())) > 1
    if is_unreadable or (forwarded.hostname != hosts[environment] and forwarded.hostname in hosts.values()):
        detail = f"The gateway's token is for {environment}, and the request did not go to a host of it."
        raise DeniedError(Denial(ErrorCode.PERMISSION_MISSING, detail))
    return environment

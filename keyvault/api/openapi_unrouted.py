"""OpenAPI operations without a view method.

One view serves all integration endpoints, and the verifier's engine serves verify, verify-batch and forward-auth.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from django.conf import settings
from django.urls import URLPattern, get_resolver
from drf_spectacular.utils import OpenApiParameter
from rest_framework.views import APIView

from keyvault.access.catalog import BUILT_IN, Bearer, Endpoint
from keyvault.access.endpoint_description import authorization_panel
from keyvault.access.permissions import Permission
from keyvault.api.integration import EndpointServer, IntegrationView
from keyvault.api.openapi import (
    NEEDED,
    PUBLIC_CODES,
    SERVICE_CODES,
    Auth,
    Documenter,
    documented,
    is_based_on_origin,
)
from keyvault.api.schemas import DECISION_BODY, DECISIONS_BODY, VERIFY_BATCH_REQUEST_BODY, VERIFY_REQUEST_BODY
from keyvault.domain.errors import ErrorCode as Code
from keyvault.domain.keys import KeyKind
from keyvault.wire.gateways import AUTH_CODE, AUTH_STATUS, NAMES, Dialect, nginx_status

_KEY_CODES = (
    Code.CREDENTIAL_AMBIGUOUS,
    Code.CREDENTIAL_MISSING,
    Code.CREDENTIAL_INVALID,
    Code.ENVIRONMENT_MISMATCH,
    Code.KEY_NOT_ACTIVE,
    Code.KEY_EXPIRED,
    Code.KEY_REVOKED,
    Code.MERCHANT_SUSPENDED,
    Code.METHOD_NOT_SUPPORTED,
    Code.IP_NOT_ALLOWED,
    Code.ENDPOINT_UNKNOWN,
    Code.VERIFIER_STALE,
)
_CUSTOMER_CODES = (Code.CUSTOMER_TOKEN_INVALID, Code.CUSTOMER_TOKEN_EXPIRED, Code.CUSTOMER_TOKEN_REVOKED)
_UPSTREAM_CODES = (
    *_KEY_CODES,
    *_CUSTOMER_CODES,
    Code.CUSTOMER_TOKEN_MISSING,
    Code.BEARER_NOT_SUPPORTED,
    Code.PRIVATE_KEY_IN_BROWSER,
    Code.MERCHANT_MISMATCH,
    Code.CONTEXT_MISSING,
    Code.RATE_LIMITED,
)
"""Codes of every verdict."""


def add_unrouted(endpoints: list[Any]) -> list[Any]:
    """drf-spectacular's preprocessing hook: add (path, path pattern, method, view) of each unrouted operation."""
    return [*endpoints, *_integration_plane(), *_verify(), *_forward_auth()]


def _stand_in(path: str, method: str, document: Documenter) -> tuple[str, str, str, Any]:
    """Return an endpoint with a documented view that is never routed."""

    def answer(self: APIView) -> None:
        raise NotImplementedError("documented only; another view serves it")

    view: type[APIView] = type("Documented", (APIView,), {method.lower(): document(answer)})
    return path, path, method, view.as_view()


# --- the integration plane --------------------------------------------------------------------------------


def _integration_plane() -> Iterator[Any]:
    servers = _servers()
    for endpoint in BUILT_IN.endpoints:
        yield _stand_in(_template(endpoint), endpoint.method, _document(endpoint, servers[endpoint.name]))


def _servers() -> Mapping[str, EndpointServer]:
    for pattern in get_resolver().url_patterns:
        if isinstance(pattern, URLPattern) and getattr(pattern.callback, "cls", None) is IntegrationView:
            servers: Mapping[str, EndpointServer] = pattern.callback.initkwargs["servers"]  # type: ignore[attr-defined]  # REST framework's
            return servers
    raise LookupError("no URL pattern serves the integration plane")


def _template(endpoint: Endpoint) -> str:
    """Return the OpenAPI path; environments based on the origin are a path parameter, others are servers."""
    prefix = "/{environment}" if is_based_on_origin() else ""
    return f"{prefix}{endpoint.path}".replace("<", "{").replace(">", "}")


def _document(endpoint: Endpoint, server: EndpointServer) -> Documenter:
    panel = dict(authorization_panel(endpoint))
    return documented(
        endpoint.name.replace(".", "_"),
        summary=endpoint.summary,
        description="\n".join((f"{server.description}\n", *(f"- {label}: {text}" for label, text in panel.items()))),
        panel=panel,
        answers={server.status: server.gives},
        takes=server.takes,
        plane=(*PUBLIC_CODES, Code.NOT_FOUND),
        # An endpoint without a body reads one nevertheless, to refuse it.
        codes=[
            *_verdict_codes(endpoint),
            *server.codes,
            *([Code.PAYLOAD_TOO_LARGE, Code.REQUEST_TIMEOUT] if endpoint.method == "POST" else []),
        ],
        auth=_auth(endpoint),
        parameters=[*_environment_parameter(), *server.parameters, *_cors(endpoint, server.status)],
        idempotency_key=NEEDED if endpoint.idempotent_by_key else None,
        tag="integration plane",
    )


def _verdict_codes(endpoint: Endpoint) -> Iterator[Code]:
    """Yield every code that a verdict for this endpoint may have."""
    yield from _KEY_CODES
    if endpoint.bearer is Bearer.NONE:
        yield Code.BEARER_NOT_SUPPORTED
    else:
        yield from _CUSTOMER_CODES
    if endpoint.bearer is Bearer.REQUIRED:
        yield Code.CUSTOMER_TOKEN_MISSING
    if KeyKind.PRIVATE in endpoint.credentials:
        yield Code.PRIVATE_KEY_IN_BROWSER
    if endpoint.spends:
        yield Code.RATE_LIMITED


def _auth(endpoint: Endpoint) -> Auth:
    keys = [f"{kind}Key" for kind in sorted(endpoint.credentials)]
    alone = [] if endpoint.bearer is Bearer.REQUIRED else [[key] for key in keys]
    with_customer = [] if endpoint.bearer is Bearer.NONE else [[key, "customerToken"] for key in keys]
    return [*alone, *with_customer]


def _environment_parameter() -> list[OpenApiParameter]:
    if not is_based_on_origin():
        return []
    return [OpenApiParameter("environment", str, OpenApiParameter.PATH, enum=settings.ENVIRONMENTS, required=True)]


def _cors(endpoint: Endpoint, status: int) -> Iterator[OpenApiParameter]:
    if KeyKind.PUBLIC in endpoint.credentials:
        text = "The request's origin, when the key's account lists it."
        yield _response_header("Access-Control-Allow-Origin", text, [status], is_always=False)
        yield _response_header("Vary", "Contains Origin.", [status])


# --- the verifier -----------------------------------------------------------------------------------------


def _verify() -> Iterator[Any]:
    one = documented(
        "keys_verify",
        summary="Verify a key.",
        description="Judges a key for one endpoint and returns the response for the client: `allowed`, or `status`, "
        "`headers` and `problem`. The call itself is 200 whenever a decision was reached. An allowed "
        "request counts as one use and spends from the limits, unless it is a `dry_run`, which adds the "
        "trace of the rules. A `cost` is a whole number; `2.0` is one.",
        permission=Permission.KEYS_VERIFY,
        takes=VERIFY_REQUEST_BODY,
        answers={200: DECISION_BODY},
    )
    several = documented(
        "keys_verify_batch",
        summary="Verify up to 100 keys, in a body of at most 64 KiB.",
        description="Judges each request as `POST /v1/keys/verify` does, and returns the decisions in the same order. "
        "One malformed request rejects the batch.",
        permission=Permission.KEYS_VERIFY,
        takes=VERIFY_BATCH_REQUEST_BODY,
        answers={200: DECISIONS_BODY},
    )
    yield _stand_in("/v1/keys/verify", "POST", one)
    yield _stand_in("/v1/keys/verify-batch", "POST", several)


# --- forward-auth -----------------------------------------------------------------------------------------


_CLIENT_CREDENTIALS: Auth = [
    ["gatewayToken", "privateKey"],
    ["gatewayToken", "privateKey", "customerToken"],
    ["gatewayToken", "publicKey"],
]


def _forward_auth() -> Iterator[Any]:
    for dialect, names in NAMES.items():
        parameters = [
            _header(names.method, "The method of the client's request.", pattern="^[^,]+$"),
            _header(names.uri, "The path and query of the client's request, as sent.", pattern="^/"),
            _header(names.host, "The Host of the client's request.", is_needed=False, pattern="^[^,]*$"),
            _header(names.address, "The client's address; the right-most entry counts.", is_needed=False),
        ]
        yield _stand_in(f"/v1/authorize/{dialect}", "GET", _gateway(dialect, parameters))
    path = OpenApiParameter(
        "path", str, OpenApiParameter.PATH, description="The client's path, at most 8 KiB with its query."
    )
    yield _stand_in("/v1/authorize/envoy/{path}", "GET", _gateway(Dialect.ENVOY, [path]))


def _gateway(dialect: Dialect, parameters: Iterable[OpenApiParameter]) -> Documenter:
    is_nginx = dialect is Dialect.NGINX
    headers = [_response_header(name, "For the upstream; empty where it does not apply.", [200]) for name in _IDENTITY]
    if is_nginx:
        headers += [
            _response_header(name, "The actual status, or the code, of the denial.", [401, 403])
            for name in (AUTH_STATUS, AUTH_CODE)
        ]
        headers.append(
            _response_header("Retry-After", "At a limit or during an outage: seconds to wait.", [403], is_always=False)
        )
    return documented(
        f"authorize_{dialect}",
        summary=f"Authorize a request that a client sent to {dialect.title()}.",
        description="For a subrequest of the gateway. Its headers describe the client's request, and only the "
        "gateway may set them. The gateway authenticates itself with `X-Service-Token`, for exactly one "
        "environment. The response does not depend on the method. Only 200 allows the request; its "
        "headers are for the upstream.",
        permission=Permission.KEYS_VERIFY,
        answers={200: None},
        plane=SERVICE_CODES,
        codes=_UPSTREAM_CODES,
        auth=_CLIENT_CREDENTIALS,
        parameters=[*parameters, *headers],
        tag="forward-auth",
        sent_as=nginx_status if is_nginx else int,
    )


_IDENTITY = ("X-Merchant-Id", "X-Environment", "X-Key-Id", "X-Credential-Id", "X-Customer-Id")


def _header(name: str, text: str, *, is_needed: bool = True, pattern: str = "") -> OpenApiParameter:
    schema = {"type": "string", **({"pattern": pattern} if pattern else {})}
    return OpenApiParameter(name, schema, OpenApiParameter.HEADER, required=is_needed, description=text)


def _response_header(name: str, text: str, statuses: list[int], *, is_always: bool = True) -> OpenApiParameter:
    return OpenApiParameter(name, str, OpenApiParameter.HEADER, required=is_always, description=text, response=statuses)

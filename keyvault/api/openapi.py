"""The OpenAPI page, generated from the catalog, the error table and the serializers.

`documented` describes a view's method; its codes determine every status, problem body and header. `finish` adds what
all operations share. `openapi_unrouted` has the operations without a view method, and `openapi_components` the bodies
that no serializer parses. `openapi_fields` has the schema of our own text field, and `openapi_examples` the examples.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from django.conf import settings
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework import serializers

from keyvault.access.endpoint_description import EXEMPT
from keyvault.access.permissions import Permission
from keyvault.api.openapi_components import COMPONENTS, TEXT, Schema, define
from keyvault.api.openapi_examples import add_examples
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode as Code
from keyvault.wire.headers import PREFERENCE_APPLIED
from keyvault.wire.idempotency import IDEMPOTENCY_KEY, REPLAYED
from keyvault.wire.problems import CONTENT_TYPE, HEAD_TOO_LARGE, PROBLEM_TYPES

Auth = Sequence[Sequence[str]]
"""Alternative sets of security schemes: a request needs every scheme of one set."""

BodySchema = type[serializers.Serializer[Any]] | type[str] | type[dict[str, Any]] | Schema | None
Documenter = Callable[[Any], Any]

SECURITY_SCHEMES = {
    "privateKey": {
        "type": "apiKey",
        "in": "header",
        "name": "X-Api-Key",
        "description": "A merchant's private API key, from a trusted backend only.",
    },
    "publicKey": {
        "type": "apiKey",
        "in": "header",
        "name": "X-Api-Key",
        "description": "A merchant's public API key, from a browser or an app.",
    },
    "customerToken": {
        "type": "http",
        "scheme": "bearer",
        "description": "A customer access token, in addition to the private key and never instead of it.",
    },
    "serviceToken": {
        "type": "http",
        "scheme": "bearer",
        "description": "A service token, for the platform's own backend services.",
    },
    "gatewayToken": {
        "type": "apiKey",
        "in": "header",
        "name": "X-Service-Token",
        "description": "A gateway's service token on forward-auth, where Authorization is the client's.",
    },
}
SERVICE_TOKEN: Auth = (("serviceToken",),)
NO_CREDENTIAL: Auth = ()

PUBLIC_CODES = (
    Code.CREDENTIAL_IN_URL,
    Code.REQUEST_INVALID,
    Code.URI_TOO_LONG,
    Code.METHOD_NOT_ALLOWED,
    Code.DEPENDENCY_UNAVAILABLE,
    Code.INTERNAL_ERROR,
)
"""Codes that any operation may return: wrong hosts, wrong methods and requests above the server's capacity are refused
before anything is read."""

SERVICE_CODES = (
    *PUBLIC_CODES,
    Code.SERVICE_TOKEN_INVALID,
    Code.PERMISSION_MISSING,
    Code.NOT_FOUND,
)
"""Codes that any operation of the service plane may return."""

_BODY_CODES = (Code.PAYLOAD_TOO_LARGE, Code.REQUEST_TIMEOUT, Code.MEDIA_TYPE_UNSUPPORTED)
_IDEMPOTENCY_CODES = (Code.IDEMPOTENCY_KEY_MISSING, Code.IDEMPOTENCY_IN_PROGRESS, Code.IDEMPOTENCY_BODY_MISMATCH)


NEEDED = OpenApiParameter(
    IDEMPOTENCY_KEY,
    {"type": "string", "pattern": '^(?!"+$)[!-~]([ -~]{0,253}[!-~])?$'},
    OpenApiParameter.HEADER,
    required=True,
    description="1 to 255 printable ASCII characters; a retry sends the same key and the same body.",
)
"""The Idempotency-Key parameter."""

PREFER_WAIT = OpenApiParameter(
    "Prefer",
    {"type": "string"},
    OpenApiParameter.HEADER,
    description="`wait=5` (RFC 7240): wait up to 5 seconds, which is the maximum, for the receipt to be complete.",
)

PROBLEM = define(
    "Problem",
    {
        "type": "object",
        "description": "RFC 9457. `check` is the number of the list of checks before a retry; `errors` lists the "
        "faults of the request; `request_id` is the support id.",
        "properties": {
            "type": {"type": "string", "format": "uri"},
            "title": TEXT,
            "status": {"type": "integer"},
            "code": {"type": "string", "enum": [code.value for code in Code]},
            "detail": TEXT,
            "request_id": TEXT,
            "check": {"type": "integer", "minimum": 1, "maximum": 5},
            "errors": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"pointer": {"type": "string", "format": "json-pointer"}, "detail": TEXT},
                    "required": ["pointer", "detail"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["type", "title", "status", "code", "detail", "request_id"],
        "additionalProperties": False,
    },
)

_SECONDS = {"type": "integer", "minimum": 1}
HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {
        "description": "The server's id of this request, for support.",
        "schema": {"type": "string", "minLength": 1},
    },
    "Cache-Control": {"description": "Responses are never cached.", "schema": {"type": "string", "const": "no-store"}},
    "WWW-Authenticate": {
        "description": "The required authentication scheme.",
        "schema": {"type": "string", "pattern": "^(ApiKey|Bearer) realm="},
    },
    "Allow": {"description": "The methods of the path.", "schema": TEXT},
    "Retry-After": {"description": "Seconds to wait before a retry.", "schema": _SECONDS},
    "RateLimit-Policy": {"description": 'The limits, such as `"account";q=25;w=1`.', "schema": TEXT},
    "RateLimit": {"description": 'The remaining quota, such as `"account";r=24;t=1`.', "schema": TEXT},
    REPLAYED: {
        "description": "Present when this is the stored response of an earlier attempt.",
        "schema": {"type": "string", "const": "true"},
    },
    PREFERENCE_APPLIED: {
        "description": "Present with `Prefer`: the maximum wait that the server applied, in seconds.",
        "schema": {"type": "string", "pattern": "^wait=[0-9]+$"},
    },
}


def documented(
    operation_id: str,
    *,
    summary: str,
    description: str,
    answers: Mapping[int | tuple[int, str], BodySchema],
    permission: Permission | None = None,
    codes: Iterable[Code] = (),
    plane: Iterable[Code] = SERVICE_CODES,
    auth: Auth = SERVICE_TOKEN,
    takes: BodySchema = None,
    parameters: Sequence[OpenApiParameter | type[serializers.Serializer[Any]]] = (),
    idempotency_key: OpenApiParameter | None = None,
    tag: str = "service plane",
    panel: Mapping[str, str] | None = None,
    sent_as: Callable[[int], int] = lambda status: status,
) -> Documenter:
    """Document a view's method. `openapi_examples` adds the examples.

    `permission`: what the service token needs; the view enforces it, and a test compares the two.
    `answers` has the bodies by status, or by status and media type where it is not JSON. `codes` are added to the
    plane's. `sent_as` maps a problem's status to the one sent.
    """
    every = [*plane, *codes, *(_BODY_CODES if takes is not None else ())]
    every += () if idempotency_key is None else _IDEMPOTENCY_CODES
    return extend_schema(
        operation_id=operation_id,
        summary=summary,
        description=description if permission is None else f"{description}\n\nPermission: `{permission}`.",
        tags=[tag],
        request={"application/json": takes} if isinstance(takes, dict) else takes,
        responses={
            **{status: OpenApiResponse(body, description="Success.") for status, body in answers.items()},
            **_problems(every, sent_as),
        },
        auth=[{name: [] for name in schemes} for schemes in auth],  # type: ignore[misc]  # as the specification has it; spectacular passes it through
        parameters=[*parameters, *([] if idempotency_key is None else [idempotency_key])],
        extensions={
            **({} if panel is None else {"x-authorization": dict(panel)}),
            **({} if permission is None else {"x-permission": permission.value}),
        },
    )


def in_path(name: str, pattern: str) -> OpenApiParameter:
    return OpenApiParameter(name, {"type": "string", "pattern": pattern}, OpenApiParameter.PATH, required=True)


def _problems(codes: Iterable[Code], sent_as: Callable[[int], int]) -> dict[tuple[int, str], OpenApiResponse]:
    """Return one response per status, with exactly the codes that it may carry."""
    by_status: dict[int, dict[Code, set[int]]] = defaultdict(lambda: defaultdict(set))
    for code in codes:
        for status in (PROBLEM_TYPES[code].status, *([HEAD_TOO_LARGE] if code is Code.REQUEST_INVALID else [])):
            by_status[sent_as(status)][code].add(status)
    return {
        (status, CONTENT_TYPE): OpenApiResponse(
            {
                "allOf": [PROBLEM],
                "properties": {
                    "status": {"enum": sorted(set[int]().union(*found.values()))},
                    "code": {"enum": [code.value for code in found]},
                },
            },
            description="\n".join(f"- `{code}`: {PROBLEM_TYPES[code].cause}" for code in found),
        )
        for status, found in sorted(by_status.items())
    }


# --- all operations -----------------------------------------------------------------------------------------


def is_based_on_origin() -> bool:
    """Return whether each environment's base URL is the origin followed by the environment's name."""
    return all(settings.BASE_URLS[name] == f"{settings.ORIGIN}/{name}" for name in Environment)


def finish(result: dict[str, Any], **_: Any) -> dict[str, Any]:
    """drf-spectacular's postprocessing hook: add servers, security schemes and response headers."""
    components = result["components"]
    _remove_enum_ids(result)
    for schema in components["schemas"].values():
        schema["additionalProperties"] = False  # bodies have listed properties only
    components["schemas"].update(COMPONENTS)
    components["securitySchemes"] = SECURITY_SCHEMES
    components["headers"] = {name: {"required": True, **header} for name, header in HEADERS.items()}
    result["servers"] = [{"url": settings.ORIGIN}]
    for path_item in result["paths"].values():
        for operation in path_item.values():
            add_examples(operation, components["schemas"])
            _add_headers(operation)
            _require_body(operation, components["schemas"])
            if "x-authorization" in operation and not is_based_on_origin():
                operation["servers"] = [
                    {"url": settings.BASE_URLS[Environment(name)], "description": name}
                    for name in settings.ENVIRONMENTS
                ]
    return result


def _remove_enum_ids(node: Any) -> None:
    """Remove the ids for drf-spectacular's enum-naming hook, which fails on two fields of one name."""
    if isinstance(node, dict):
        node.pop("x-spec-enum-id", None)
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _remove_enum_ids(inner)


def _require_body(operation: dict[str, Any], schemas: Mapping[str, Schema]) -> None:
    """Require a body that has required members; drf-spectacular does so for serializers only."""
    if (body := operation.get("requestBody")) is not None:
        (content,) = body["content"].values()
        if schemas[content["schema"]["$ref"].rpartition("/")[2]].get("required"):
            body["required"] = True


def _add_headers(operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    replays = any(parameter["name"] == IDEMPOTENCY_KEY for parameter in operation.get("parameters", ()))
    waits = any(parameter["name"] == PREFER_WAIT.name for parameter in operation.get("parameters", ()))
    is_limited = operation.get("x-authorization", {}).get("Limit", EXEMPT) != EXEMPT
    for status, response in responses.items():
        needed, possible = ["X-Request-Id", "Cache-Control", *_NEEDED.get(status, ())], [*_POSSIBLE.get(status, ())]
        if status < "300":
            needed += ["RateLimit-Policy", "RateLimit"] if is_limited else ()
            possible += [REPLAYED] if replays else ()
            possible += [PREFERENCE_APPLIED] if waits else ()
        response["headers"] = {
            **response.get("headers", {}),
            **{name: {"$ref": f"#/components/headers/{name}"} for name in needed},
            **{name: HEADERS[name] for name in possible},
        }


_NEEDED = {
    "401": ("WWW-Authenticate",),
    "405": ("Allow",),
    "429": ("Retry-After", "RateLimit-Policy", "RateLimit"),
}
_POSSIBLE = {
    "401": ("Retry-After",),  # after too many failed proofs
    "409": ("Retry-After",),  # while the first attempt runs
    "503": ("Retry-After",),
}

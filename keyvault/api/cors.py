"""CORS (the Fetch standard) for endpoints that accept a public key. CORS is not authorization.

A preflight carries no key, so an origin that any active account of the environment lists is allowed. The response
itself allows only the origins of the key's own account.
"""

from rest_framework.request import Request
from rest_framework.response import Response

from keyvault.access.catalog import BUILT_IN, Endpoint, NoMatchingEndpoint
from keyvault.access.principals import KeyHolder
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.services.merchants.client_configuration import is_listed_by, is_listed_by_any_account
from keyvault.wire.headers import API_KEY

_EXPOSED = "X-Request-Id, Retry-After, RateLimit, RateLimit-Policy"
_MAX_AGE_SECONDS = 600


def answer_preflight(request: Request, environment: Environment, path: str) -> Response | None:
    """Return the response to a preflight for a path with a public endpoint; None for every other request."""
    origin, method = request.headers.get("Origin"), request.headers.get("Access-Control-Request-Method")
    if request.method != "OPTIONS" or origin is None or method is None or not _is_public_path(path):
        return None
    headers = {"Vary": "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"}
    if _is_public(BUILT_IN.match(method, path)) and is_listed_by_any_account(origin, environment):
        headers |= {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": method,
            "Access-Control-Allow-Headers": f"{API_KEY}, Content-Type",
            "Access-Control-Max-Age": str(_MAX_AGE_SECONDS),
        }
    return Response(status=204, headers=headers)


def cors_headers(origin: str | None, endpoint: Endpoint, holder: KeyHolder | None) -> dict[str, str]:
    """Return the CORS headers of an endpoint's response; without a proved key only `Vary`."""
    if not _is_public(endpoint):
        return {}
    headers = {"Vary": "Origin"}
    if origin is not None and holder is not None and is_listed_by(origin, holder.merchant_id, holder.environment):
        headers |= {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _EXPOSED}
    return headers


def _is_public(endpoint: Endpoint | NoMatchingEndpoint) -> bool:
    return isinstance(endpoint, Endpoint) and KeyKind.PUBLIC in endpoint.credentials


def _is_public_path(path: str) -> bool:
    """Return whether the path has a public endpoint, for any method."""
    found = BUILT_IN.match("OPTIONS", path)
    return isinstance(found, NoMatchingEndpoint) and any(
        _is_public(BUILT_IN.match(method, path)) for method in found.allowed
    )

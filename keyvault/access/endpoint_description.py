"""The authorization panel of an endpoint: its requirements as text.

The console, the OpenAPI page, `GET /v1/endpoints` and `manage.py show_catalog` show it.
"""

from typing import Any

from keyvault.access.catalog import Bearer, Endpoint, LimiterFailurePolicy
from keyvault.access.limits import Limit

_BEARER = {
    Bearer.NONE: "not supported",
    Bearer.OPTIONAL: "optional: a customer access token in addition to the key",
    Bearer.REQUIRED: "required: a customer access token in addition to the key",
}
_ON_LIMITER_LOSS = {
    LimiterFailurePolicy.LOCAL_SHARE: "each process allows a share of the limit",
    LimiterFailurePolicy.REFUSE: "requests are refused: dependency_unavailable",
}


def format_limit(limit: Limit | None) -> str:
    """Format a limit: `25 per 1 s`, or `none`."""
    return "none" if limit is None else f"{limit.count} per {limit.seconds} s"


EXEMPT = "none, and exempt from the account's"
"""The `Limit` of an endpoint that spends from no limit."""


def authorization_panel(endpoint: Endpoint) -> list[tuple[str, str]]:
    """Return pairs of label and value, always the same labels in the same order."""
    context = [
        f"{what} from {source}"
        for what, source in (("merchant", endpoint.merchant_from), ("store", endpoint.store_from))
        if source is not None
    ]
    return [
        ("Method", endpoint.method),
        ("Path", endpoint.path),
        ("X-Api-Key", f"{endpoint.kinds} API key"),
        ("Bearer", _BEARER[endpoint.bearer]),
        ("Context", ", ".join(context) or "none"),
        ("Idempotency-Key", "required" if endpoint.idempotent_by_key else "not used"),
        ("Limit", _limit(endpoint)),
        ("Limiter lost", _ON_LIMITER_LOSS[endpoint.on_limiter_loss] if endpoint.spends else "not affected"),
    ]


def _limit(endpoint: Endpoint) -> str:
    if not endpoint.spends:
        return EXEMPT
    return (
        "the account's" if endpoint.limit is None else f"{format_limit(endpoint.limit)}, in addition to the account's"
    )


def describe_catalog_endpoint(endpoint: Endpoint) -> dict[str, Any]:
    """Describe an endpoint for the service plane and the command line, with its authorization panel."""
    limit = endpoint.limit
    return {
        "name": endpoint.name,
        "method": endpoint.method,
        "path": endpoint.path,
        "credential": endpoint.kinds,
        "credentials": sorted(endpoint.credentials),
        "bearer": endpoint.bearer,
        "merchant_from": str(endpoint.merchant_from or "") or None,
        "store_from": str(endpoint.store_from or "") or None,
        "idempotency_key": endpoint.idempotent_by_key,
        "limit": None if limit is None else {"count": limit.count, "seconds": limit.seconds},
        "on_limiter_loss": endpoint.on_limiter_loss,
        "built_in": endpoint.is_built_in,
        "summary": endpoint.summary,
        "authorization": dict(authorization_panel(endpoint)),
    }

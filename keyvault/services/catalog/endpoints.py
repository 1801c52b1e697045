"""Upstream endpoints that operators add, change, withdraw and restore. Changes apply to the next request."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from keyvault.access.catalog import BUILT_IN, Endpoint
from keyvault.access.decision import Grant
from keyvault.access.endpoint_description import authorization_panel
from keyvault.access.endpoints import EndpointDraft, read_endpoint
from keyvault.access.permissions import Permission
from keyvault.domain.audit import PLATFORM_CHAIN
from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import Fault, RequestInvalidError, StateConflictError
from keyvault.models import AuditChain, CatalogEndpoint
from keyvault.services.catalog.base_urls import BASE_URLS
from keyvault.services.catalog.catalog import endpoint_of
from keyvault.services.recording.transaction import recorded


def add_endpoint(grant: Grant, draft: EndpointDraft) -> CatalogEndpoint:
    """Add an endpoint.

    Raises RequestInvalidError with faults, also when a withdrawn endpoint has this name: restore that endpoint.
    """
    with recorded(grant, Permission.CATALOG_WRITE, "endpoint.added", endpoint=draft.name) as record:
        _serialize_writers()
        is_taken = CatalogEndpoint.objects.filter(name=draft.name, withdrawn_at__isnull=False).exists()
        if is_taken:
            fault = Fault("/name", "a withdrawn endpoint has this name: restore it and change it")
            raise RequestInvalidError("The endpoint cannot be added.", [fault])
        endpoint = _require_valid(draft, _live_endpoints())
        row = CatalogEndpoint(name=draft.name, created_at=grant.at, **_rule_columns(draft))
        row.save()
        record.details["rule"] = _describe_rule(endpoint)
    return row


def change_endpoint(grant: Grant, row: CatalogEndpoint, draft: EndpointDraft) -> None:
    """Replace every field of an endpoint except its name.

    Raises RequestInvalidError with faults, StateConflictError when the endpoint is withdrawn.
    """
    _require_live(row)
    if draft.name != row.name:
        raise RequestInvalidError("An endpoint's name cannot be changed.", [Fault("/name", f"must be {row.name}")])
    with recorded(grant, Permission.CATALOG_WRITE, "endpoint.changed", endpoint=row.name) as record:
        _serialize_writers()
        endpoint = _require_valid(draft, _live_endpoints(except_name=row.name))
        record.details |= {"before": _describe_rule(endpoint_of(row)), "rule": _describe_rule(endpoint)}
        row.compare_and_swap(**_rule_columns(draft))


def withdraw_endpoint(grant: Grant, row: CatalogEndpoint) -> None:
    """Make an endpoint unknown to every frontend until it is restored."""
    _require_live(row)
    with recorded(grant, Permission.CATALOG_WRITE, "endpoint.withdrawn", endpoint=row.name):
        row.compare_and_swap(withdrawn_at=grant.at)


def restore_endpoint(grant: Grant, row: CatalogEndpoint) -> None:
    """Restore a withdrawn endpoint unchanged.

    Raises StateConflictError when it is not withdrawn, or another endpoint now matches its requests.
    """
    if row.withdrawn_at is None:
        raise StateConflictError("The endpoint is not withdrawn.")
    with recorded(grant, Permission.CATALOG_WRITE, "endpoint.restored", endpoint=row.name) as record:
        _serialize_writers()
        try:
            endpoint = _require_valid(draft_of(row), _live_endpoints())
        except RequestInvalidError as error:
            raise StateConflictError(" ".join(fault.detail for fault in error.faults)) from error
        record.details["rule"] = _describe_rule(endpoint)
        row.compare_and_swap(withdrawn_at=None)


def draft_of(row: CatalogEndpoint) -> EndpointDraft:
    """Return the draft that creates exactly this endpoint."""
    endpoint = endpoint_of(row)
    return EndpointDraft(
        name=endpoint.name,
        method=endpoint.method,
        path=endpoint.path,
        credentials=endpoint.credentials,
        bearer=endpoint.bearer,
        idempotent_by_key=endpoint.idempotent_by_key,
        summary=endpoint.summary,
        merchant_from=row.merchant_from,
        store_from=row.store_from,
        limit_count=row.limit_count,
        limit_seconds=row.limit_seconds,
        on_limiter_loss=endpoint.on_limiter_loss,
    )


def _serialize_writers() -> None:
    """Serialize the catalog's writers, so that each sees the endpoints that conflict with its own.

    Locks the platform's audit chain, which the audit entry of the change locks anyway.
    """
    list(AuditChain.objects.select_for_update().filter(name=PLATFORM_CHAIN))


def _live_endpoints(except_name: str = "") -> list[Endpoint]:
    rows = CatalogEndpoint.objects.filter(withdrawn_at__isnull=True).exclude(name=except_name)
    return [*BUILT_IN.endpoints, *map(endpoint_of, rows)]


def _require_live(row: CatalogEndpoint) -> None:
    if row.withdrawn_at is not None:
        raise StateConflictError("The endpoint is withdrawn. Restore it first.")


def _require_valid(draft: EndpointDraft, others: Iterable[Endpoint]) -> Endpoint:
    read = read_endpoint(draft, others, _base_segments())
    if isinstance(read, Endpoint):
        return read
    raise RequestInvalidError("The endpoint is invalid.", read)


def _base_segments() -> frozenset[str]:
    paths = (urlsplit(url).path.strip("/") for url in BASE_URLS.values())
    return frozenset(path.split("/")[0].lower() for path in paths if path)


def _rule_columns(draft: EndpointDraft) -> dict[str, Any]:
    columns = asdict(draft) | {"credentials": sorted(draft.credentials)}
    del columns["name"]
    return columns


def _describe_rule(endpoint: Endpoint) -> JsonValue:
    """Return the rule for the audit log, in the terms of the authorization panel."""
    return dict(authorization_panel(endpoint)) | {"Summary": endpoint.summary}

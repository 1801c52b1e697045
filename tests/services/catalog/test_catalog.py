"""Upstream endpoints that operators add, change, withdraw and restore: effective immediately and audited."""

import json
from typing import Any

import pytest

from keyvault.access.catalog import Endpoint, NoMatchingEndpoint
from keyvault.access.decision import Denial, Grant
from keyvault.access.endpoints import EndpointDraft
from keyvault.access.permissions import Permission as P
from keyvault.domain.errors import ErrorCode, PermissionMissingError, RequestInvalidError, StateConflictError
from keyvault.domain.keys import KeyKind
from keyvault.models import AuditEntry, CatalogEndpoint
from keyvault.services.catalog.catalog import current_catalog, find_endpoint, match_endpoint
from keyvault.services.catalog.endpoints import (
    add_endpoint,
    change_endpoint,
    draft_of,
    restore_endpoint,
    withdraw_endpoint,
)
from keyvault.services.verification.judging import VerificationRequest, judge_presented
from tests.factories import SANDBOX, grant, issue, now
from tests.services.conftest import Scene, make_scene
from tests.services.racing import TIMEOUT_SECONDS, held_open, start, wait_until_blocked

pytestmark = pytest.mark.django_db


def make_draft(name: str = "refunds.create", **fields: Any) -> EndpointDraft:
    values = {"method": "POST", "path": "/refunds/<refund_id>", "credentials": frozenset({KeyKind.PRIVATE}), **fields}
    return EndpointDraft(name, **values)


def add(scene: Scene, *names: Any, **fields: Any) -> CatalogEndpoint:
    return add_endpoint(grant(scene.admin, P.CATALOG_WRITE), make_draft(*names, **fields))


def faults(error: RequestInvalidError) -> list[str]:
    return [fault.pointer for fault in error.faults]


def last_entry() -> tuple[str, dict[str, Any]]:
    entry = AuditEntry.objects.latest("id")
    return entry.event, json.loads(bytes(entry.body))["details"]


def denial_code(scene: Scene, key: Any) -> ErrorCode | None:
    endpoint = match_endpoint("POST", "/refunds/7")
    verification = VerificationRequest(key=key.reveal(), environment=SANDBOX, endpoint=endpoint)
    verdict = judge_presented(verification, now()).verdict
    return verdict.code if isinstance(verdict, Denial) else None


@pytest.mark.database
def test_endpoint_added_applies_to_the_next_request(scene: Scene) -> None:
    """An added endpoint needs no restart."""
    _, key = issue(scene.sandbox)
    assert denial_code(scene, key) is ErrorCode.ENDPOINT_UNKNOWN
    add(scene)
    assert denial_code(scene, key) is None
    event, details = last_entry()
    assert (event, details["endpoint"]) == ("endpoint.added", "refunds.create")
    assert details["rule"]["Path"] == "/refunds/<refund_id>"


def test_endpoint_changed_applies_immediately_and_is_audited_with_both_rules(scene: Scene) -> None:
    _, key = issue(scene.sandbox)
    row = add(scene)
    assert denial_code(scene, key) is None
    changing = grant(scene.admin, P.CATALOG_WRITE)
    change_endpoint(changing, row, make_draft(credentials=frozenset({KeyKind.PUBLIC}), summary="now public"))
    assert denial_code(scene, key) is ErrorCode.METHOD_NOT_SUPPORTED
    event, details = last_entry()
    assert event == "endpoint.changed"
    assert details["before"]["X-Api-Key"] == "private API key"
    assert details["rule"]["X-Api-Key"] == "public API key"


def test_endpoint_withdrawn_is_unknown_until_it_is_restored(scene: Scene) -> None:
    row = add(scene)
    withdraw_endpoint(grant(scene.admin, P.CATALOG_WRITE), row)
    assert isinstance(find_endpoint("refunds.create"), NoMatchingEndpoint)
    restore_endpoint(grant(scene.admin, P.CATALOG_WRITE), row)
    assert isinstance(find_endpoint("refunds.create"), Endpoint)
    entries = AuditEntry.objects.filter(event__startswith="endpoint.").order_by("id")
    events = list(entries.values_list("event", flat=True))
    assert events == ["endpoint.added", "endpoint.withdrawn", "endpoint.restored"]


def test_endpoint_row_equals_its_draft(scene: Scene) -> None:
    draft = make_draft(
        merchant_from="path:refund_id",
        store_from="header:X-Store-Id",
        idempotent_by_key=True,
        limit_count=5,
        limit_seconds=60,
        summary="Refunds an order.",
    )
    row = add_endpoint(grant(scene.admin, P.CATALOG_WRITE), draft)
    row.refresh_from_db()
    assert draft_of(row) == draft


def test_endpoint_that_overlaps_an_added_one_is_refused(scene: Scene) -> None:
    add(scene)
    with pytest.raises(RequestInvalidError) as refused:
        add(scene, "refunds.other", path="/refunds/<anything>")
    assert faults(refused.value) == ["/path"]
    assert "refunds.create" in refused.value.faults[0].detail


def test_endpoint_changed_to_overlap_another_is_refused_but_not_by_itself(scene: Scene) -> None:
    row, other = add(scene), add(scene, "refunds.list", path="/refunds", method="GET")
    changing = grant(scene.admin, P.CATALOG_WRITE)
    change_endpoint(changing, row, make_draft(summary="the same path"))
    with pytest.raises(RequestInvalidError):
        change_endpoint(changing, other, make_draft("refunds.list"))
    assert CatalogEndpoint.objects.get(name="refunds.list").path == "/refunds"


def test_endpoint_restored_over_an_overlapping_one_is_refused(scene: Scene) -> None:
    """A withdrawn rule cannot be restored over the rule that replaced it."""
    row = add(scene)
    withdraw_endpoint(grant(scene.admin, P.CATALOG_WRITE), row)
    add(scene, "refunds.again")
    with pytest.raises(StateConflictError, match=r"refunds\.again"):
        restore_endpoint(grant(scene.admin, P.CATALOG_WRITE), row)


@pytest.mark.parametrize("is_withdrawn", [False, True])
def test_endpoint_added_with_a_used_name_is_refused(scene: Scene, is_withdrawn: bool) -> None:
    """A name in old logs and limits never changes its meaning."""
    row = add(scene)
    if is_withdrawn:
        withdraw_endpoint(grant(scene.admin, P.CATALOG_WRITE), row)
    with pytest.raises(RequestInvalidError) as refused:
        add(scene, path="/elsewhere")
    assert "/name" in faults(refused.value)


def test_endpoint_renamed_or_changed_when_withdrawn_is_refused(scene: Scene) -> None:
    row = add(scene)
    changing = grant(scene.admin, P.CATALOG_WRITE)
    with pytest.raises(RequestInvalidError):
        change_endpoint(changing, row, make_draft("refunds.other"))
    withdraw_endpoint(changing, row)
    for action in (withdraw_endpoint, lambda allowed, row: change_endpoint(allowed, row, make_draft())):
        with pytest.raises(StateConflictError):
            action(changing, row)


def test_endpoint_changed_from_a_stale_row_is_a_conflict(scene: Scene) -> None:
    row = add(scene)
    stale = CatalogEndpoint.objects.get(pk=row.pk)
    changing = grant(scene.admin, P.CATALOG_WRITE)
    change_endpoint(changing, row, make_draft(summary="first"))
    with pytest.raises(StateConflictError):
        change_endpoint(changing, stale, make_draft(summary="second"))
    assert CatalogEndpoint.objects.get().summary == "first"


def test_endpoint_added_with_another_permission_is_refused(scene: Scene) -> None:
    """Only a grant for catalog:write changes the catalog."""
    other: Grant = grant(scene.admin, P.LIMITS_WRITE)
    with pytest.raises(PermissionMissingError):
        add_endpoint(other, make_draft())
    with pytest.raises(PermissionMissingError):
        grant(scene.tam, P.CATALOG_WRITE)
    assert not CatalogEndpoint.objects.exists()


def test_catalog_refused_addition_changes_nothing(scene: Scene) -> None:
    before = current_catalog().endpoints
    with pytest.raises(RequestInvalidError):
        add(scene, path="/v1/keys")
    assert current_catalog().endpoints == before
    assert not AuditEntry.objects.filter(event="endpoint.added").exists()


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_endpoints_that_overlap_added_concurrently_are_not_both_added(transactional_db: None) -> None:
    """No request line ever matches two endpoints."""
    scene = make_scene()
    allowed = [grant(scene.admin, P.CATALOG_WRITE) for _ in range(2)]
    with held_open(lambda: add_endpoint(allowed[0], make_draft())):
        slower = start(lambda: add_endpoint(allowed[1], make_draft("refunds.other", path="/refunds/<anything>")))
        wait_until_blocked(slower)
    assert isinstance(slower.exception(TIMEOUT_SECONDS), RequestInvalidError)
    assert [row.name for row in CatalogEndpoint.objects.all()] == ["refunds.create"]

"""Upstream endpoints: added, changed, withdrawn and restored by operators, in force at once, and audited."""

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
from tests.services.racing import PATIENCE_SECONDS, held_open, start, wait_until_blocked

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def wish(name: str = "refunds.create", **wished: Any) -> EndpointDraft:
    chosen = {"method": "POST", "path": "/refunds/<refund_id>", "credentials": frozenset({KeyKind.PRIVATE}), **wished}
    return EndpointDraft(name, **chosen)


def add(scene: Scene, *words: Any, **wished: Any) -> CatalogEndpoint:
    return add_endpoint(grant(scene.admin, P.CATALOG_WRITE), wish(*words, **wished))


def faults(error: RequestInvalidError) -> list[str]:
    return [fault.pointer for fault in error.faults]


def last_entry() -> tuple[str, dict[str, Any]]:
    entry = AuditEntry.objects.latest("id")
    return entry.event, json.loads(bytes(entry.body))["details"]


def code_of(scene: Scene, key: Any) -> ErrorCode | None:
    endpoint = match_endpoint("POST", "/refunds/7")
    presented = VerificationRequest(key=key.reveal(), environment=SANDBOX, endpoint=endpoint)
    verdict = judge_presented(presented, now()).verdict
    return verdict.code if isinstance(verdict, Denial) else None


def test_endpoint_added_is_judged_by_the_next_request(scene: Scene) -> None:
    """No restart between the operator's click and the first verdict on it."""
    _, key = issue(scene.sandbox)
    assert code_of(scene, key) is ErrorCode.ENDPOINT_UNKNOWN
    add(scene)
    assert code_of(scene, key) is None
    event, details = last_entry()
    assert (event, details["endpoint"]) == ("endpoint.added", "refunds.create")
    assert details["rule"]["Path"] == "/refunds/<refund_id>"


def test_endpoint_changed_holds_at_once_and_is_audited_with_both_rules(scene: Scene) -> None:
    _, key = issue(scene.sandbox)
    row = add(scene)
    assert code_of(scene, key) is None
    changing = grant(scene.admin, P.CATALOG_WRITE)
    change_endpoint(changing, row, wish(credentials=frozenset({KeyKind.PUBLIC}), summary="now public"))
    assert code_of(scene, key) is ErrorCode.METHOD_NOT_SUPPORTED
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


def test_endpoint_row_reads_as_what_was_wished(scene: Scene) -> None:
    wished = wish(
        merchant_from="path:refund_id",
        store_from="header:X-Store-Id",
        idempotent_by_key=True,
        limit_count=5,
        limit_seconds=60,
        summary="Refunds an order.",
    )
    row = add_endpoint(grant(scene.admin, P.CATALOG_WRITE), wished)
    row.refresh_from_db()
    assert draft_of(row) == wished


def test_endpoint_that_overlaps_an_added_one_is_refused(scene: Scene) -> None:
    add(scene)
    with pytest.raises(RequestInvalidError) as refused:
        add(scene, "refunds.other", path="/refunds/<anything>")
    assert faults(refused.value) == ["/path"]
    assert "refunds.create" in refused.value.faults[0].detail


def test_endpoint_changed_to_overlap_another_is_refused_but_not_by_itself(scene: Scene) -> None:
    row, other = add(scene), add(scene, "refunds.list", path="/refunds", method="GET")
    changing = grant(scene.admin, P.CATALOG_WRITE)
    change_endpoint(changing, row, wish(summary="the same path"))
    with pytest.raises(RequestInvalidError):
        change_endpoint(changing, other, wish("refunds.list"))
    assert CatalogEndpoint.objects.get(name="refunds.list").path == "/refunds"


def test_endpoint_restored_onto_another_one_s_requests_is_refused(scene: Scene) -> None:
    """A withdrawn rule does not come back over the one that took its place."""
    row = add(scene)
    withdraw_endpoint(grant(scene.admin, P.CATALOG_WRITE), row)
    add(scene, "refunds.again")
    with pytest.raises(StateConflictError, match=r"refunds\.again"):
        restore_endpoint(grant(scene.admin, P.CATALOG_WRITE), row)


@pytest.mark.parametrize("is_withdrawn", [False, True])
def test_endpoint_name_is_taken_once_and_for_all(scene: Scene, is_withdrawn: bool) -> None:
    """A name in old logs and limits never comes to mean something else by way of an addition."""
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
        change_endpoint(changing, row, wish("refunds.other"))
    withdraw_endpoint(changing, row)
    for act in (withdraw_endpoint, lambda allowed, row: change_endpoint(allowed, row, wish())):
        with pytest.raises(StateConflictError):
            act(changing, row)


def test_endpoint_changed_from_a_stale_row_is_a_conflict(scene: Scene) -> None:
    row = add(scene)
    stale = CatalogEndpoint.objects.get(pk=row.pk)
    changing = grant(scene.admin, P.CATALOG_WRITE)
    change_endpoint(changing, row, wish(summary="first"))
    with pytest.raises(StateConflictError):
        change_endpoint(changing, stale, wish(summary="second"))
    assert CatalogEndpoint.objects.get().summary == "first"


def test_endpoint_added_with_another_permission_is_refused(scene: Scene) -> None:
    """Only catalog:write opens the catalog, whoever holds the grant."""
    other: Grant = grant(scene.admin, P.LIMITS_WRITE)
    with pytest.raises(PermissionMissingError):
        add_endpoint(other, wish())
    with pytest.raises(PermissionMissingError):
        grant(scene.tam, P.CATALOG_WRITE)
    assert not CatalogEndpoint.objects.exists()


def test_catalog_refused_addition_leaves_it_as_it_was(scene: Scene) -> None:
    before = current_catalog().endpoints
    with pytest.raises(RequestInvalidError):
        add(scene, path="/v1/keys")
    assert current_catalog().endpoints == before
    assert not AuditEntry.objects.filter(event="endpoint.added").exists()


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_endpoints_that_overlap_added_at_once_are_not_both_taken(transactional_db: None) -> None:
    """No request line is ever for two endpoints, whoever was faster by how little."""
    scene = make_scene()
    allowed = [grant(scene.admin, P.CATALOG_WRITE) for _ in range(2)]
    with held_open(lambda: add_endpoint(allowed[0], wish())):
        slower = start(lambda: add_endpoint(allowed[1], wish("refunds.other", path="/refunds/<anything>")))
        wait_until_blocked(slower)
    assert isinstance(slower.exception(PATIENCE_SECONDS), RequestInvalidError)
    assert [row.name for row in CatalogEndpoint.objects.all()] == ["refunds.create"]

"""Limits that operators set: the most specific applies, from the next request, and the change is audited."""

import json
from typing import Any

import pytest

from keyvault.access.endpoints import EndpointDraft
from keyvault.access.limits import Limit
from keyvault.access.permissions import Permission as P
from keyvault.domain.errors import PermissionMissingError, RequestInvalidError, StateConflictError
from keyvault.domain.keys import KeyKind
from keyvault.models import AuditEntry, LimitOverride
from keyvault.services.catalog.endpoints import add_endpoint
from keyvault.services.limits.overrides import (
    LimitSource,
    account_limit_in_force,
    endpoint_limit_in_force,
    set_account_limit,
    set_endpoint_limit,
)
from tests.factories import PRODUCTION, SANDBOX, account, grant, make_merchant
from tests.services.conftest import Scene, make_scene
from tests.services.racing import TIMEOUT_SECONDS, held_open, start, wait_until_blocked

pytestmark = pytest.mark.django_db

NAME = "orders.retrieve"


def set_for_account(scene: Scene, limit: Limit | None) -> None:
    set_account_limit(grant(scene.tam, P.LIMITS_WRITE, scene.sandbox), scene.sandbox, limit)


def set_for_pair(scene: Scene, limit: Limit | None) -> LimitOverride | None:
    allowed = grant(scene.tam, P.LIMITS_WRITE, scene.sandbox)
    return set_endpoint_limit(allowed, SANDBOX, NAME, limit, scene.sandbox)


def set_for_endpoint(scene: Scene, limit: Limit | None) -> LimitOverride | None:
    return set_endpoint_limit(grant(scene.tam, P.LIMITS_WRITE), SANDBOX, NAME, limit)


def last_entry() -> tuple[str, str, dict[str, Any]]:
    entry = AuditEntry.objects.latest("id")
    return entry.event, entry.chain_id, json.loads(bytes(entry.body))["details"]


@pytest.mark.database
def test_account_limit_set_and_cleared_applies_and_is_audited(scene: Scene) -> None:
    set_for_account(scene, Limit(7, 60))
    assert account_limit_in_force(scene.sandbox) == (account_limit_in_force(account("acme")))
    assert account_limit_in_force(account("acme")).limit == Limit(7, 60)
    event, chain, details = last_entry()
    assert (event, chain) == ("limit.set", "account:acme/sandbox")
    assert (details["old"], details["new"]) == (None, {"count": 7, "seconds": 60})
    set_for_account(scene, None)
    found = account_limit_in_force(account("acme"))
    assert (found.limit, found.source) == (Limit(25, 1), LimitSource.DEFAULT)
    assert last_entry()[0] == "limit.cleared"


def test_account_limit_of_one_environment_does_not_affect_the_other(scene: Scene) -> None:
    set_for_account(scene, Limit(7, 60))
    assert account_limit_in_force(account("acme", PRODUCTION)).limit == Limit(100, 1)


def test_endpoint_limit_most_specific_applies(scene: Scene) -> None:
    def in_force() -> tuple[Limit | None, LimitSource]:
        found = endpoint_limit_in_force(SANDBOX, NAME, scene.sandbox)
        return found.limit, found.source

    assert in_force() == (None, LimitSource.DEFAULT)
    set_for_endpoint(scene, Limit(5, 1))
    assert in_force() == (Limit(5, 1), LimitSource.ENDPOINT)
    set_for_pair(scene, Limit(50, 1))
    assert in_force() == (Limit(50, 1), LimitSource.PAIR)
    make_merchant("globex")
    assert endpoint_limit_in_force(SANDBOX, NAME, account("globex")).limit == Limit(5, 1)
    assert endpoint_limit_in_force(PRODUCTION, NAME, scene.production).limit is None
    set_for_pair(scene, None)
    assert in_force() == (Limit(5, 1), LimitSource.ENDPOINT)
    set_for_endpoint(scene, None)
    assert in_force() == (None, LimitSource.DEFAULT)


def test_endpoint_limit_without_override_is_that_of_the_catalog(scene: Scene) -> None:
    draft = EndpointDraft(
        "refunds.list", "GET", "/refunds", frozenset({KeyKind.PRIVATE}), limit_count=3, limit_seconds=9
    )
    add_endpoint(grant(scene.admin, P.CATALOG_WRITE), draft)
    found = endpoint_limit_in_force(SANDBOX, "refunds.list")
    assert (found.limit, found.source) == (Limit(3, 9), LimitSource.DEFAULT)


def test_endpoint_limit_set_again_updates_its_row(scene: Scene) -> None:
    set_for_pair(scene, Limit(5, 1))
    set_for_pair(scene, Limit(6, 1))
    assert LimitOverride.objects.get().limit_count == 6
    assert last_entry()[2]["old"] == {"count": 5, "seconds": 1}


def test_endpoint_limit_cleared_when_absent_changes_nothing(scene: Scene) -> None:
    entries = AuditEntry.objects.count()
    assert set_for_pair(scene, None) is None
    set_for_account(scene, None)
    assert AuditEntry.objects.count() == entries


@pytest.mark.parametrize("name", ["no.such", "credentials.revoke_self", ""])
@pytest.mark.parametrize("limit", [Limit(5, 1), None])
def test_endpoint_limit_of_an_unlimited_or_unknown_endpoint_is_refused(
    scene: Scene, name: str, limit: Limit | None
) -> None:
    """A limit that would never apply must not be stored, least of all for the revocation of a leaked key."""
    with pytest.raises(RequestInvalidError):
        set_endpoint_limit(grant(scene.tam, P.LIMITS_WRITE), SANDBOX, name, limit)
    assert not LimitOverride.objects.exists()


def test_limit_set_with_a_grant_for_another_account_is_refused(scene: Scene) -> None:
    """A grant covers one account; a platform grant covers none."""
    others = (grant(scene.tam, P.LIMITS_WRITE, scene.production), grant(scene.tam, P.LIMITS_WRITE))
    for other in others:
        with pytest.raises(PermissionMissingError):
            set_account_limit(other, scene.sandbox, Limit(5, 1))
        with pytest.raises(PermissionMissingError):
            set_endpoint_limit(other, SANDBOX, NAME, Limit(5, 1), scene.sandbox)
    with pytest.raises(PermissionMissingError):
        set_endpoint_limit(grant(scene.tam, P.LIMITS_WRITE, scene.sandbox), SANDBOX, NAME, Limit(5, 1))


def test_account_limit_set_from_a_stale_row_is_a_conflict(scene: Scene) -> None:
    stale = account("acme")
    set_for_account(scene, Limit(5, 1))
    with pytest.raises(StateConflictError):
        set_account_limit(grant(scene.tam, P.LIMITS_WRITE, stale), stale, Limit(6, 1))


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_endpoint_limit_set_concurrently_is_a_conflict_for_the_second(transactional_db: None) -> None:
    scene = make_scene()
    with held_open(lambda: set_for_endpoint(scene, Limit(5, 1))):
        second = start(lambda: set_for_endpoint(scene, Limit(6, 1)))
        wait_until_blocked(second)
    assert isinstance(second.exception(TIMEOUT_SECONDS), StateConflictError)
    assert LimitOverride.objects.get().limit_count == 5

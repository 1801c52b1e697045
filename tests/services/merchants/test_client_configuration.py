"""An account's browser settings: client configuration, allowed origins and customer token lifetime."""

from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.errors import PermissionMissingError, RequestInvalidError, StateConflictError
from keyvault.models import Account
from keyvault.services.merchants.client_configuration import (
    MAX_BYTES,
    MAX_ORIGINS,
    is_listed_by,
    is_listed_by_any_account,
    set_allowed_origins,
    set_client_configuration,
    set_customer_token_bound,
)
from keyvault.services.merchants.merchants import resume_account, suspend_account, suspend_merchant
from tests.domain.minting import mint
from tests.factories import PRODUCTION, SANDBOX, account, grant, make_merchant
from tests.services.conftest import Scene
from tests.services.rows import last_body, last_ids, written_since

pytestmark = pytest.mark.django_db

SHOP = "https://shop.example"


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def list_origins(scene: Scene, *origins: str, place: Account | None = None) -> None:
    place = place or scene.sandbox
    set_allowed_origins(grant(scene.admin, P.MERCHANTS_WRITE, place), place, origins)


@pytest.mark.database
@pytest.mark.parametrize(
    "configuration",
    [{}, {"theme": "blue", "stores": [1, {"name": "Bücher"}], "beta": True, "note": None}, {"a": "x" * 16_376}],
)
def test_client_configuration_set_is_readable_and_audited_by_its_digest(
    scene: Scene, configuration: dict[str, Any]
) -> None:
    before = last_ids()
    set_client_configuration(grant(scene.admin, P.MERCHANTS_WRITE, scene.sandbox), scene.sandbox, configuration)
    assert account("acme", SANDBOX).client_configuration == configuration
    assert account("acme", PRODUCTION).client_configuration == {}
    assert written_since(before) == (["account.client_configuration_set"], [("account", "acme/sandbox")])
    assert len(last_body("account.client_configuration_set")["details"]["sha256"]) == 64


@pytest.mark.parametrize(
    "configuration",
    [
        [],
        "text",
        None,
        {"a": "x" * 16_377},
        {"a": 1.5},
        {"a": float("nan")},
        {"a": "\x00"},
        {"a\x00": 1},
        {"a": "\ud800"},
        {1: 2},
        {"a": object()},
        {"key": mint()},
        {mint(): 1},
        {"nested": [{"key": f"x {mint()[:40]}"}]},
        {"header": "Authorization: Bearer abcdefghijklmnopqrstuvwxyz0123456789"},
        {"url": "postgres://me:hunter2@db/x"},
        nested(100_000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_client_configuration_that_is_invalid_is_refused(scene: Scene, configuration: Any) -> None:
    """Every holder of a public key can read it, so nothing that looks like a secret is accepted."""
    allowed = grant(scene.admin, P.MERCHANTS_WRITE, scene.sandbox)
    with pytest.raises(RequestInvalidError) as refused:
        set_client_configuration(allowed, scene.sandbox, configuration)
    assert [fault.pointer for fault in refused.value.faults] == ["/configuration"]
    assert mint() not in refused.value.faults[0].detail
    assert account("acme", SANDBOX).client_configuration == {}
    assert MAX_BYTES == 16_384


@pytest.mark.parametrize(
    "configuration",
    [
        {"a": [{"b": mint()}]},
        {"Authorization": "opaque"},
        {"a": {"x_api_key": "opaque"}},
        {"a": "x-api-key: b"},
    ],
    ids=["value", "header", "header with an underscore", "header in a text"],
)
def test_client_configuration_with_a_secret_anywhere_is_refused(scene: Scene, configuration: Any) -> None:
    with pytest.raises(RequestInvalidError):
        set_client_configuration(grant(scene.admin, P.MERCHANTS_WRITE, scene.sandbox), scene.sandbox, configuration)


def test_client_configuration_with_browser_keys_of_other_vendors_is_accepted(scene: Scene) -> None:
    """Pages need such members, although the log redacts them."""
    configuration = {"maps": {"apiKey": "AIzaSyA1"}, "clientToken": "eyJ2ZXJzaW9u"}
    set_client_configuration(grant(scene.admin, P.MERCHANTS_WRITE, scene.sandbox), scene.sandbox, configuration)
    assert account("acme", SANDBOX).client_configuration == configuration


def test_client_configuration_set_without_permission_or_with_a_stale_copy_is_refused(scene: Scene) -> None:
    for operator in (scene.tam, scene.approver, scene.responder):
        with pytest.raises(PermissionMissingError):
            grant(operator, P.MERCHANTS_WRITE, scene.sandbox)
    stale = account("acme", SANDBOX)
    list_origins(scene, SHOP)
    with pytest.raises(StateConflictError):
        set_client_configuration(grant(scene.admin, P.MERCHANTS_WRITE, stale), stale, {})
    with pytest.raises(PermissionMissingError):
        set_client_configuration(grant(scene.admin, P.MERCHANTS_WRITE, scene.production), scene.sandbox, {})


def test_origins_listed_are_stored_once_in_lower_case(scene: Scene) -> None:
    before = last_ids()
    list_origins(scene, " HTTPS://Shop.Example ", SHOP, "http://localhost:3000")
    assert account("acme", SANDBOX).allowed_origins == [SHOP, "http://localhost:3000"]
    assert written_since(before) == (["account.origins_set"], [("account", "acme/sandbox")])
    assert last_body("account.origins_set")["details"] == {"origins": [SHOP, "http://localhost:3000"]}
    list_origins(scene)
    assert account("acme", SANDBOX).allowed_origins == []


@pytest.mark.parametrize("origin", ["*", "null", "https://*.example", "http://shop.example", f"{SHOP}/", ""])
def test_origins_with_an_invalid_one_are_refused(scene: Scene, origin: str) -> None:
    with pytest.raises(RequestInvalidError) as refused:
        list_origins(scene, SHOP, origin)
    assert [fault.detail[:7] for fault in refused.value.faults] == ["line 2:"]
    assert account("acme", SANDBOX).allowed_origins == []


def test_origins_above_the_maximum_are_refused(scene: Scene) -> None:
    list_origins(scene, *(f"https://s{number}.example" for number in range(MAX_ORIGINS)))
    with pytest.raises(RequestInvalidError):
        list_origins(scene, *(f"https://s{number}.example" for number in range(MAX_ORIGINS + 1)))


def test_origin_is_listed_for_its_account_and_environment_only(scene: Scene) -> None:
    make_merchant("globex")
    list_origins(scene, "http://localhost:3000", SHOP, "https://other.example")
    assert is_listed_by(SHOP, "acme", SANDBOX)
    assert not is_listed_by(SHOP, "acme", PRODUCTION)
    assert not is_listed_by(SHOP, "globex", SANDBOX)
    for origin in (SHOP, "http://localhost:3000", "https://other.example"):
        assert is_listed_by_any_account(origin, SANDBOX)
        assert not is_listed_by_any_account(origin, PRODUCTION)


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "%",
        "https://%",
        "https://sho_.example",
        "https://shop.exampl",
        "shop.example",
        f'{SHOP}", "x',
        "https://SHOP.example",
    ],
)
def test_origin_is_compared_exactly(scene: Scene, origin: str) -> None:
    """Neither a part of a listed origin nor a pattern matches."""
    list_origins(scene, SHOP, "https://other.example")
    assert not is_listed_by_any_account(origin, SANDBOX)
    assert not is_listed_by(origin, "acme", SANDBOX)


def test_origin_of_a_suspended_account_or_merchant_is_not_listed(scene: Scene) -> None:
    list_origins(scene, SHOP)
    place = grant(scene.admin, P.MERCHANTS_WRITE, scene.sandbox)
    suspend_account(place, scene.sandbox)
    assert not is_listed_by_any_account(SHOP, SANDBOX)
    resume_account(place, scene.sandbox)
    assert is_listed_by_any_account(SHOP, SANDBOX)
    suspend_merchant(grant(scene.admin, P.MERCHANTS_WRITE), scene.merchant)
    assert not is_listed_by_any_account(SHOP, SANDBOX)


@pytest.mark.parametrize(("seconds", "is_valid"), [(59, False), (60, True), (86_400, True), (86_401, False)])
def test_customer_token_bound_outside_a_minute_to_a_day_is_refused(scene: Scene, seconds: int, is_valid: bool) -> None:
    allowed = grant(scene.admin, P.MERCHANTS_WRITE, scene.sandbox)
    if is_valid:
        set_customer_token_bound(allowed, scene.sandbox, seconds)
        assert last_body("account.customer_token_bound_set")["details"] == {"seconds": seconds}
    else:
        with pytest.raises(RequestInvalidError):
            set_customer_token_bound(allowed, scene.sandbox, seconds)
    assert account("acme", SANDBOX).customer_token_seconds == (seconds if is_valid else 3600)

"""CORS on the integration plane: for public keys only, from the origins of their own account."""

from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.domain.plaintext import Plaintext
from keyvault.models import UseContext
from keyvault.services.merchants.client_configuration import set_allowed_origins
from keyvault.services.merchants.merchants import suspend_account, suspend_merchant
from keyvault.services.usage.recorder import UsageLog
from tests.domain.minting import mint
from tests.factories import PRODUCTION, SANDBOX, account, grant

from .integration import Ask, change_account, expect, private, public

pytestmark = pytest.mark.django_db

URL = "/sandbox/client/configuration"
SHOP, OTHER = "https://shop.example", "https://other.example"


@pytest.fixture(autouse=True)
def origins(ask: Ask) -> None:
    """Set SHOP for `acme` and OTHER for `globex`, in sandbox."""
    for merchant_id, origin in (("acme", SHOP), ("globex", OTHER)):
        place = account(merchant_id, SANDBOX)
        set_allowed_origins(grant(HOST, P.MERCHANTS_WRITE, place), place, [origin, "http://localhost:3000"])


def preflight(ask: Ask, url: str = URL, origin: str = SHOP, method: str = "GET") -> dict[str, str]:
    """Return the CORS headers of a preflight, which must answer 204."""
    answer = ask("OPTIONS", url, Origin=origin, Access_Control_Request_Method=method)
    assert (answer.status_code, answer.content) == (204, b"")
    assert {"Origin", "Access-Control-Request-Method"} <= varies(answer)
    assert "X-Request-Id" in answer
    return allowed(answer)


def varies(answer: Any) -> set[str]:
    return set(answer.get("Vary", "").split(", "))


def allowed(answer: Any) -> dict[str, str]:
    """Return the answer's CORS headers."""
    return {name: value for name, value in answer.items() if name.startswith("Access-Control-")}


@pytest.mark.parametrize("origin", [SHOP, OTHER, "http://localhost:3000"])
def test_preflight_from_an_origin_that_any_account_lists_is_granted(ask: Ask, origin: str) -> None:
    assert preflight(ask, origin=origin) == {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "GET",
        "Access-Control-Allow-Headers": "X-Api-Key, Content-Type",
        "Access-Control-Max-Age": "600",
    }


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "",
        "*",
        "https://nobody.example",
        "https://shop.example.evil.example",
        "https://shop.example:8443",
        "http://shop.example",
        "https://SHOP.example",
        "https://shop.example/",
        "https://shop%example",
        "https://shop_example",
        f'{SHOP}", "http://localhost:3000',
        f"{SHOP}, {OTHER}",
        "http://localhost:3000\\",
    ],
)
def test_preflight_from_any_other_origin_is_not_granted(ask: Ask, origin: str) -> None:
    """An origin is compared as a whole, never as a pattern."""
    assert preflight(ask, origin=origin) == {}


def test_preflight_with_a_key_in_its_url_is_refused_like_any_request(ask: Ask) -> None:
    """A client that sends a preflight would send the request, and its key, to the same address."""
    answer = ask("OPTIONS", f"{URL}?k=kv_prv_sbx_{'a' * 65}", Origin=SHOP, Access_Control_Request_Method="GET")
    expect(answer, 400, "credential_in_url")


def test_preflight_for_another_method_or_environment_is_not_granted(ask: Ask) -> None:
    assert preflight(ask, method="POST") == {}
    assert preflight(ask, method="get") == {}
    assert preflight(ask, method="OPTIONS") == {}
    assert preflight(ask, url="/production/client/configuration") == {}


@pytest.mark.parametrize("whole", [False, True])
def test_preflight_of_a_suspended_accounts_origin_is_not_granted(ask: Ask, whole: bool) -> None:
    if whole:
        suspend_merchant(grant(HOST, P.MERCHANTS_WRITE), account().merchant)
    else:
        suspend_account(grant(HOST, P.MERCHANTS_WRITE, account()), account())
    assert preflight(ask) == {}
    assert preflight(ask, origin=OTHER) != {}


@pytest.mark.parametrize(
    ("url", "method", "status", "code"),
    [
        ("/sandbox/merchants/orders", "POST", 405, "method_not_allowed"),
        ("/sandbox/customers/me", "GET", 405, "method_not_allowed"),
        ("/sandbox/credentials/revoke-self", "POST", 405, "method_not_allowed"),
        ("/sandbox/nowhere", "GET", 404, "endpoint_unknown"),
    ],
)
def test_preflight_for_a_private_or_unknown_endpoint_is_a_plain_options_request(
    ask: Ask, url: str, method: str, status: int, code: str
) -> None:
    """A browser never gets permission to send a private key."""
    answer = ask("OPTIONS", url, Origin=SHOP, Access_Control_Request_Method=method)
    expect(answer, status, code)
    assert allowed(answer) == {}


def test_options_without_preflight_headers_is_not_allowed(ask: Ask) -> None:
    for headers in ({}, {"Origin": SHOP}, {"Access_Control_Request_Method": "GET"}):
        answer = ask("OPTIONS", URL, **headers)
        expect(answer, 405, "method_not_allowed")
        assert answer["Allow"] == "GET"


def test_answer_is_for_the_origins_of_the_keys_own_account(ask: Ask) -> None:
    """A preflight may be granted for another merchant's origin; the answer itself is not."""
    key = public()
    for origin, listed in ((SHOP, True), (OTHER, False), ("null", False), (None, False)):
        answer = ask("GET", URL, key=key, **({} if origin is None else {"Origin": origin}))
        assert answer.status_code == 200
        assert "Origin" in varies(answer)
        assert allowed(answer) == (
            {
                "Access-Control-Allow-Origin": SHOP,
                "Access-Control-Expose-Headers": "X-Request-Id, Retry-After, RateLimit, RateLimit-Policy",
            }
            if listed
            else {}
        )


def test_denial_after_authentication_is_readable_by_the_shop(ask: Ask) -> None:
    change_account(limit_count=1, limit_seconds=3600)
    key = public()
    assert ask("GET", URL, key=key, Origin=SHOP).status_code == 200
    refused = ask("GET", URL, key=key, Origin=SHOP)
    expect(refused, 429, "rate_limited")
    assert refused["Access-Control-Allow-Origin"] == SHOP
    assert "Origin" in varies(refused)
    assert "Access-Control-Allow-Origin" not in ask("GET", URL, key=key, Origin=OTHER)


@pytest.mark.parametrize("key", [None, mint(), "x", ""])
def test_answer_before_authentication_allows_no_origin(ask: Ask, key: str | None) -> None:
    """The account's origins are known only once a key is authenticated."""
    answer = ask("GET", URL, key=None if key is None else Plaintext(key), Origin=SHOP)
    assert answer.status_code == 401
    assert "Origin" in varies(answer)
    assert allowed(answer) == {}


def test_answer_of_a_private_endpoint_allows_no_origin(ask: Ask) -> None:
    """A private endpoint allows no origin, not even a listed one: private keys do not belong in browsers."""
    answer = ask("GET", "/sandbox/merchants/orders/x", key=private(), Origin=SHOP)
    expect(answer, 403, "private_key_in_browser")
    assert allowed(answer) == {}
    assert "Origin" not in varies(answer)


def test_answer_of_the_other_environment_uses_its_own_origins(ask: Ask) -> None:
    answer = ask("GET", "/production/client/configuration", key=public("acme", PRODUCTION), Origin=SHOP)
    assert (answer.status_code, allowed(answer)) == (200, {})


def test_use_of_a_public_key_is_recorded_with_its_origin(ask: Ask, usage: UsageLog) -> None:
    """The usage report names the shops that hold the key; the recorded Origin is bounded and redacted."""
    key, shown = public(), mint(seed="shown by mistake")
    ask("GET", URL, key=key, Origin=SHOP)
    ask("GET", URL, key=key)
    ask("GET", URL, key=key, Origin=f"https://{shown}.{'x' * 500}.example")
    usage.flush()
    noted = sorted(UseContext.objects.values_list("origin", flat=True))
    assert noted[0] == ""
    assert SHOP in noted
    assert len(noted) == 3
    assert all(len(origin) <= 120 and str(shown) not in origin for origin in noted)

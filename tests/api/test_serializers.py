"""Input on the service plane is read exactly as sent, or refused: nothing is coerced or trimmed."""

from typing import Any

import pytest

from .conftest import Call

VERIFY = {"key": None, "environment": "sandbox", "endpoint": "orders.create"}


@pytest.mark.parametrize(
    "change",
    [
        {"endpoint": 4},
        {"endpoint": ""},
        {"endpoint": "a\x00"},
        {"merchant": 4},
        {"user_agent": 4},
        {"origin": True},
        {"client_ip": 4},
        {"client_ip": " 192.0.2.1"},
        {"client_ip": "fe80::1%eth0"},
        {"cost": "1"},
        {"cost": True},
        {"dry_run": "yes"},
        {"dry_run": 1},
    ],
)
def test_verify_field_of_a_wrong_type_or_format_is_refused(call: Call, change: dict[str, Any]) -> None:
    response = call("POST", "/v1/keys/verify", VERIFY | change)
    assert (response.status_code, response.body["code"]) == (400, "request_invalid")
    assert [fault["pointer"] for fault in response.body["errors"]] == [f"/{name}" for name in change]


@pytest.mark.parametrize("method", ["get", " GET", "GET\n", "GET ", "", "A" * 17])
def test_verify_method_in_another_form_is_refused(call: Call, method: str) -> None:
    asked = {"key": None, "environment": "sandbox", "method": method, "path": "/merchants/orders"}
    response = call("POST", "/v1/keys/verify", asked)
    assert [fault["pointer"] for fault in response.body["errors"]] == ["/method"]


def test_verify_batch_accepts_1_to_100_requests(call: Call) -> None:
    for count, expected in ((0, 400), (1, 200), (100, 200), (101, 400)):
        response = call("POST", "/v1/keys/verify-batch", {"requests": [VERIFY] * count})
        assert response.status_code == expected, count
    response = call("POST", "/v1/keys/verify-batch", {"requests": [VERIFY, VERIFY | {"endpoint": 4}]})
    assert [fault["pointer"] for fault in response.body["errors"]] == ["/requests/1/endpoint"]


@pytest.mark.parametrize(
    "query",
    [
        "limit=5&limit=6",
        "environment=sandbox&environment=sandbox",
        "limit=%205",
        "limit=5.0",
        "limit=1_0",
        "limit=%D9%A5",
        "limit=0",
        "limit=201",
        "limit=",
        "merchant=",
        "merchant=%00",
        "cursor=x",
        "cursor=crd_" + "a" * 20 + "%0A",
        "nonsense=1",
    ],
)
def test_credentials_query_with_unknown_or_repeated_parameters_is_refused(call: Call, query: str) -> None:
    response = call("GET", f"/v1/credentials?{query}")
    assert (response.status_code, response.body["code"]) == (400, "request_invalid")
    assert [fault["pointer"] for fault in response.body["errors"]] == [f"/{query.partition('=')[0]}"]

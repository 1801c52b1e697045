"""Every error is a problem document with the request id; no client input causes a 500."""

import json

import pytest
from django.db import OperationalError
from django.test import Client

from keyvault.project.logs import RedactedJSONFormatter

from .conftest import Call

pytestmark = [pytest.mark.django_db]


def refused(response: object) -> tuple[int, str]:
    assert response["Content-Type"] == "application/problem+json"  # type: ignore[index]  # a response
    body = json.loads(response.content)  # type: ignore[attr-defined]  # a response
    assert body["request_id"] == response["X-Request-Id"]  # type: ignore[index]  # a response
    assert body["status"] == response.status_code  # type: ignore[attr-defined]  # a response
    return body["status"], body["code"]


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nowhere", (404, "not_found")),
        ("GET", "/v1/nowhere", (404, "not_found")),
        ("GET", "/sandbox/nowhere", (404, "endpoint_unknown")),
        ("GET", "/production/", (404, "endpoint_unknown")),
        ("GET", "/sandbox/x?k=kv_prv_sbx_" + "a" * 65, (400, "credential_in_url")),
        ("GET", "/sandbox/credentials/acknowledge", (405, "method_not_allowed")),
        ("PUT", "/v1/keys/verify", (405, "method_not_allowed")),
    ],
)
def test_request_without_a_route_is_a_problem(call: Call, method: str, path: str, expected: tuple[int, str]) -> None:
    response = call(method, path)
    assert refused(response) == expected


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        *(
            (method, "/sandbox/credentials/acknowledge", "POST")
            for method in ("GET", "HEAD", "OPTIONS", "TRACE", "BREW")
        ),
        ("OPTIONS", "/v1/keys/verify", "POST"),
        ("OPTIONS", "/v1/credentials", "GET, HEAD"),
        ("TRACE", "/v1/keys/0000000000000000", "GET, HEAD"),
    ],
)
def test_method_not_supported_is_refused_with_allow(call: Call, method: str, path: str, allowed: str) -> None:
    """OPTIONS is refused too: it would reveal the view's name and docstring without a key."""
    response = call(method, path)
    assert response["Allow"] == allowed
    assert response.status_code == 405
    if method != "HEAD":
        assert refused(response) == (405, "method_not_allowed")


@pytest.mark.parametrize("authorization", ["Bearer {0},Bearer {0}", "Bearer {0},", ",Bearer {0}"])
def test_service_token_sent_twice_is_service_token_invalid(call: Call, token: str, authorization: str) -> None:
    response = call("GET", "/v1/credentials", HTTP_AUTHORIZATION=authorization.format(token))
    assert refused(response) == (401, "service_token_invalid")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"a": NaN}',
        b'{"key": "x", "key": "y"}',
        b"\xff\xfe",
        b"[" * 40_000,
        b'{"a":' * 9_000,
        b"1" * 5_000,
    ],
)
def test_body_that_is_not_a_json_object_is_request_invalid(call: Call, body: bytes) -> None:
    assert refused(call("POST", "/v1/keys/verify", body)) == (400, "request_invalid")


def test_body_over_the_limit_is_payload_too_large(call: Call) -> None:
    assert refused(call("POST", "/v1/keys/verify", b'{"key":"' + b"x" * 70_000)) == (413, "payload_too_large")


def test_body_of_another_type_is_media_type_unsupported(client: Client, token: str) -> None:
    response = client.post(
        "/v1/keys/verify", data="key=x", content_type="text/plain", headers={"Authorization": f"Bearer {token}"}
    )
    assert refused(response) == (415, "media_type_unsupported")


@pytest.mark.parametrize("accept", ["text/html", "application/xml", "*/*;q=0", "nonsense"])
def test_answer_is_json_for_any_accept_header(call: Call, accept: str) -> None:
    assert call("GET", "/v1/credentials", HTTP_ACCEPT=accept).status_code == 200


def test_database_outage_is_unavailable_and_not_a_fault(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(key_id: str) -> None:
        raise OperationalError("gone")

    monkeypatch.setattr("keyvault.api.views.keys.get_key", fail)
    response = call("GET", "/v1/keys/0000000000000000")
    assert refused(response) == (503, "dependency_unavailable")
    assert int(response["Retry-After"]) >= 1


def test_internal_fault_discloses_nothing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(key_id: str) -> None:
        raise RuntimeError("the secret is hunter2")

    monkeypatch.setattr("keyvault.api.views.keys.get_key", fail)
    response = call("GET", "/v1/keys/0000000000000000")
    assert refused(response) == (500, "internal_error")
    assert b"hunter2" not in response.content


@pytest.mark.parametrize("host", ["evil.example", "a b", "a,b", ""])
def test_unknown_host_is_refused(client: Client, caplog: pytest.LogCaptureFixture, host: str) -> None:
    """The log gets one plain line and no traceback, so clients cannot flood the error log."""
    caplog.set_level("INFO")
    response = client.get("/healthz", headers={"Host": host})
    assert refused(response) == (400, "request_invalid")
    assert response.json()["detail"] == "Unknown host name."
    assert [(record.name, record.levelname, record.exc_info) for record in caplog.records] == [
        ("keyvault.requests", "INFO", None)
    ]


def test_oversized_form_is_refused_without_an_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    form = b"username=" + b"x" * 70_000
    response = Client().post("/admin/login/", form, "application/x-www-form-urlencoded")
    assert response.status_code == 400
    assert [record for record in caplog.records if record.levelname in {"ERROR", "CRITICAL"}] == []


@pytest.mark.parametrize("place", ["/sandbox/{}", "/v1/keys/{}", "/sandbox/" + "x" * 240 + "/{}"])
def test_path_is_redacted_before_it_is_truncated_and_logged(
    client: Client, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """Redaction comes first: a truncated key would no longer be recognized and would stay readable."""
    caplog.set_level("INFO")
    client.get(place.format("kv_prv_sbx_" + "k" * 16 + "s" * 49))
    paths = [vars(record)["path"] for record in caplog.records if record.name == "keyvault.requests"]
    assert len(paths) == 1
    assert "ss" not in paths[0]
    assert "kv_prv_sbx_" in paths[0]


def test_health_succeeds_without_a_database_and_readiness_names_what_is_missing(
    client: Client, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    ready = client.get("/readyz")
    assert ready.status_code == 200
    assert set(ready.json()["checks"]) == {
        *("database", "disk"),
        *("peppers_sandbox", "peppers_production", "peppers_service"),
    }

    def fail(connection: object) -> set[str]:
        raise OperationalError("gone")

    monkeypatch.setattr("keyvault.services.startup.readiness.missing_triggers", fail)
    assert client.get("/healthz").status_code == 200
    response = client.get("/readyz")
    assert response.status_code == 503
    assert response.json()["checks"] == {**dict.fromkeys(ready.json()["checks"], "failing"), "disk": "ok"}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_is_read_only(client: Client, method: str, path: str) -> None:
    response = Client(enforce_csrf_checks=True).generic(method, path)
    assert refused(response) == (405, "method_not_allowed")
    assert response["Allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/v1/credentials?key=", "/v1/keys/", "/v1/nowhere?x="])
def test_key_in_a_url_of_the_service_plane_is_refused(call: Call, path: str) -> None:
    assert refused(call("GET", path + "kv_prv_sbx_" + "a" * 65)) == (400, "credential_in_url")


def test_query_with_too_many_parameters_is_request_invalid_and_not_logged(
    call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    response = call("GET", "/v1/credentials?" + "&".join(["hunter2=x"] * 1001))
    assert refused(response) == (400, "request_invalid")
    assert response.body["errors"] == [{"pointer": "", "detail": response.body["detail"]}]
    assert [record.name for record in caplog.records] == ["keyvault.requests"]
    assert "hunter2" not in "".join(RedactedJSONFormatter().format(record) for record in caplog.records)


def test_unreadable_request_lists_the_fault(call: Call, client: Client) -> None:
    for response in (call("POST", "/v1/keys/verify", b"{"), client.get("/healthz", headers={"Host": "evil.example"})):
        assert refused(response) == (400, "request_invalid")
        body = response.json()
        assert body["errors"] == [{"pointer": "", "detail": body["detail"]}]

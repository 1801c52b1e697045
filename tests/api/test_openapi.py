"""The OpenAPI page: complete, exact, and equal to the served routes."""

import re
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client, override_settings
from django.urls import URLPattern, URLResolver, get_resolver
from drf_spectacular.generators import SchemaGenerator
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # no stubs

from keyvault.access.catalog import BUILT_IN
from keyvault.access.endpoint_description import authorization_panel
from keyvault.access.permissions import SERVICE_PERMISSIONS, Permission
from keyvault.api.integration import IntegrationView
from keyvault.api.views.docs import CONTENT_SECURITY_POLICY, openapi_page
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode
from keyvault.hotpath.messages.pending_requests import BATCH, GATEWAYS, VERIFY
from keyvault.project.engine_view import verifying_view
from tests.factories import make_token

from .conftest import Call

OPERATION_IDS = """
authorize_envoy authorize_nginx authorize_traefik
changes_confirm changes_list client_configuration
credentials_acknowledge credentials_list credentials_read
credentials_recipient_key credentials_replacement credentials_revoke_self
customer_tokens_create customer_tokens_revoke customers_me
docs endpoints_list healthz
issuance_requests_collect issuance_requests_create issuance_requests_list issuance_requests_read
keys_read keys_revoke keys_verify keys_verify_batch
metrics openapi orders_create orders_retrieve readyz
revocations_read
rotations_abort rotations_create rotations_list rotations_read
snapshot_customers_read snapshot_keys_read snapshot_peppers_read snapshot_read snapshot_tokens_read
usage_reports_create
"""
"""Stable ids: generated clients have methods of these names."""

Operation = dict[str, Any]


def operations() -> Iterator[tuple[str, str, Operation]]:
    for path, item in openapi_page()["paths"].items():
        for method, operation in item.items():
            yield method, path, operation


def responses() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for _, _, operation in operations():
        for status, response in operation["responses"].items():
            yield operation["operationId"], status, response


def codes_of(response: dict[str, Any]) -> set[str]:
    problem = response.get("content", {}).get("application/problem+json")
    return set() if problem is None else set(problem["schema"]["properties"]["code"]["enum"])


def test_page_is_valid_and_generated_without_a_warning() -> None:
    written = StringIO()
    call_command("spectacular", "--validate", "--fail-on-warn", stdout=written)
    assert written.getvalue().startswith("openapi: 3.1.0")


def test_operation_ids_are_stable() -> None:
    ids = [operation["operationId"] for _, _, operation in operations()]
    assert sorted(ids) == OPERATION_IDS.split()


def routed(patterns: list[URLPattern | URLResolver]) -> Iterator[tuple[str, str]]:
    """Yield method and path of every route outside the console."""
    for pattern in patterns:
        if isinstance(pattern, URLResolver):
            if pattern.app_name != "admin":
                yield from routed(pattern.url_patterns)
            continue
        path = "/" + re.sub(r"<(\w+)>", r"{\1}", str(pattern.pattern))
        if pattern.callback is verifying_view:
            continue
        view = getattr(pattern.callback, "cls", None)
        if view is None:
            assert path == "/", "only the root, which leads to the console, is not an operation"
            continue
        if view is not IntegrationView:
            yield from ((method, path) for method in ("get", "post", "put", "patch", "delete") if hasattr(view, method))


def test_page_and_routes_have_the_same_operations() -> None:
    served = set(routed(get_resolver().url_patterns))
    for endpoint in BUILT_IN.endpoints:
        path = re.sub(r"<(\w+)>", r"{\1}", endpoint.path)
        served.add((endpoint.method.lower(), f"/{{environment}}{path}"))
    served |= {("post", VERIFY), ("post", BATCH), ("get", "/v1/authorize/envoy/{path}")}
    served |= {("get", path) for path in GATEWAYS}
    assert {(method, path) for method, path, _ in operations()} == served


def test_ids_in_paths_of_the_service_plane_have_patterns() -> None:
    """The routes accept any segment, so that the token is judged first."""
    ids = [
        parameter
        for _, path, operation in operations()
        if path.startswith("/v1/") and not path.startswith("/v1/authorize/")
        for parameter in operation.get("parameters", ())
        if parameter["in"] == "path"
    ]
    names = {"key_id", "credential_id", "sequence", "issuance_request_id", "rotation_id"}
    assert {each["name"] for each in ids} == names
    assert all("pattern" in each["schema"] for each in ids)


def test_every_error_code_is_documented_at_each_operation_that_returns_it() -> None:
    documented = set().union(*(codes_of(response) for _, _, response in responses()))
    assert documented == set(ErrorCode)


def test_every_response_lists_its_headers() -> None:
    for operation_id, status, response in responses():
        needed = {"X-Request-Id", "Cache-Control"}
        needed |= {"401": {"WWW-Authenticate"}, "405": {"Allow"}}.get(status, set())
        if status == "429":
            needed |= {"Retry-After", "RateLimit", "RateLimit-Policy"}
        assert needed <= response["headers"].keys(), (operation_id, status)
        if status == "503" and codes_of(response):
            assert "Retry-After" in response["headers"], operation_id
    for name, header in openapi_page()["components"]["headers"].items():
        assert header["required"] is True, name


def test_every_refusal_is_a_problem_document() -> None:
    for operation_id, status, response in responses():
        if status >= "400" and (operation_id, status) != ("readyz", "503"):
            (content,) = response["content"].values()
            assert content["schema"]["allOf"] == [{"$ref": "#/components/schemas/Problem"}], (operation_id, status)


def test_bodies_allow_no_unlisted_field() -> None:
    for name, schema in openapi_page()["components"]["schemas"].items():
        assert schema["additionalProperties"] is False, name


def test_endpoints_show_the_authorization_panel_as_text_and_data() -> None:
    found = {operation["operationId"]: operation for _, _, operation in operations()}
    for endpoint in BUILT_IN.endpoints:
        operation = found[endpoint.name.replace(".", "_")]
        panel = authorization_panel(endpoint)
        assert operation["x-authorization"] == dict(panel)
        assert operation["description"].endswith("\n\n" + "\n".join(f"- {label}: {text}" for label, text in panel))


def test_every_operation_has_a_description_and_an_example() -> None:
    for _, path, operation in operations():
        first = operation["description"].partition("\n")[0]
        assert len(first) > 70, path
        assert first != operation["summary"], path
        assert list(examples(operation)), path


def test_every_example_is_one_that_its_schema_accepts() -> None:
    components = openapi_page()["components"]
    for _, path, operation in operations():
        for schema, example in examples(operation):
            faults = Draft202012Validator({**schema, "components": components}).iter_errors(example)
            assert [fault.message for fault in faults] == [], path


def examples(operation: Operation) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield each example of the operation with its schema."""
    bodies = [operation.get("requestBody", {}), *operation["responses"].values()]
    contents = [content for body in bodies for content in body.get("content", {}).values()]
    for each in (*operation.get("parameters", ()), *contents):
        if "example" in each:
            yield each["schema"], each["example"]


@pytest.mark.django_db
def test_permission_of_every_operation_is_the_one_that_it_requires(call: Call) -> None:
    """A token with every other permission is refused, whatever it sends."""
    documented = set()
    for method, path, operation in operations():
        if operation.get("security") != [{"serviceToken": []}]:
            continue
        permission = Permission(operation["x-permission"])
        assert operation["description"].endswith(f"Permission: `{permission}`."), path
        _, token = make_token(*SERVICE_PERMISSIONS - {permission})
        shown = {parameter["name"]: parameter["example"] for parameter in operation.get("parameters", ())}
        refused = call(method.upper(), path.format(**shown), {}, HTTP_AUTHORIZATION=f"Bearer {token.reveal()}")
        assert (refused.status_code, refused.body["code"]) == (403, "permission_missing"), path
        documented.add(permission)
    assert documented == SERVICE_PERMISSIONS


@pytest.mark.parametrize(
    ("operation_id", "security"),
    [
        ("healthz", None),
        ("openapi", None),
        ("keys_verify", [{"serviceToken": []}]),
        ("client_configuration", [{"publicKey": []}]),
        ("orders_create", [{"privateKey": []}]),
        ("orders_retrieve", [{"privateKey": []}, {"privateKey": [], "customerToken": []}]),
        ("customers_me", [{"privateKey": [], "customerToken": []}]),
    ],
)
def test_operation_names_every_credential_that_it_needs(operation_id: str, security: Any) -> None:
    (found,) = (operation for _, _, operation in operations() if operation["operationId"] == operation_id)
    assert found.get("security") == security


def test_environments_on_hosts_of_their_own_are_servers_of_the_integration_plane() -> None:
    with override_settings(BASE_URLS={environment: f"https://{environment}.example" for environment in Environment}):
        page = SchemaGenerator().get_schema(request=None, public=True)  # type: ignore[no-untyped-call]  # untyped package
    urls = [server["url"] for server in page["paths"]["/merchants/orders"]["post"]["servers"]]
    assert sorted(urls) == ["https://production.example", "https://sandbox.example"]
    assert "servers" not in page["paths"]["/v1/keys/verify"]["post"]
    assert "{environment}" not in "".join(page["paths"])


# --- serving ----------------------------------------------------------------------------------------------


def test_page_is_served_without_credentials(client: Client) -> None:
    response = client.get("/v1/openapi.json")
    assert (response.status_code, response["Content-Type"]) == (200, "application/json")
    assert response["Cache-Control"] == "no-store"
    assert response.json() == openapi_page()


def test_docs_load_nothing_from_elsewhere(client: Client) -> None:
    response = client.get("/v1/docs")
    assert (response.status_code, response["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert response["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
    assert "'unsafe-inline'" not in CONTENT_SECURITY_POLICY.replace("style-src 'self' 'unsafe-inline'", "")
    assert response["Cache-Control"] == "no-store"
    text = response.content.decode()
    loaded = re.findall(r'(?:src|href|data-page)="([^"]*)"', text)
    assert len(loaded) == 5
    assert re.search(r"<script>|<style|style=| on\w+=", text) is None
    for address in loaded:
        assert address.startswith("/"), address
        asked = client.get(address)
        assert asked.status_code == 200, address
        b"".join(asked)


@pytest.mark.parametrize("path", ["/v1/openapi.json", "/v1/docs"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_page_and_docs_are_read_only(client: Client, method: str, path: str) -> None:
    response = Client(enforce_csrf_checks=True).generic(method, path)
    assert (response.status_code, response.json()["code"]) == (405, "method_not_allowed")
    assert response["Allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/v1/openapi.json", "/v1/docs", "/healthz"])
def test_key_in_the_url_of_a_public_page_is_refused(client: Client, path: str) -> None:
    response = client.get(f"{path}?key=kv_prv_sbx_{'a' * 65}")
    assert (response.status_code, response.json()["code"]) == (400, "credential_in_url")

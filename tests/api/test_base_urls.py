"""Configured base URLs: each environment answers on its own host and path and nowhere else."""

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.test import Client, RequestFactory

from keyvault.api.middleware import FORWARDED_HOST, RAW_PATH, EnvironmentMiddleware, split_base_url
from keyvault.domain.environments import Environment
from keyvault.project.configuration import find_base_urls, read_settings
from keyvault.services.merchants.merchants import find_account
from tests.factories import issue, make_merchant

SERVED = "served"
NOT_FOUND = "not_found"
UNKNOWN = "endpoint_unknown"

BY_HOST = {"sandbox": "https://sandbox.example", "production": "https://api.example"}
BY_HOST_AND_PATH = {"sandbox": "https://api.example/test", "production": "https://api.example/live"}
ONE_MOVED = {"sandbox": "https://sandbox.example", "production": "https://keys.example/production"}
RENAMED = {"sandbox": "https://keys.example/api/sbx", "production": "https://keys.example/api/prd"}


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("bases", "host", "base", "sandbox", "production"),
    [
        (BY_HOST, "sandbox.example", "", SERVED, "environment_mismatch"),
        (BY_HOST, "SANDBOX.example.", "", SERVED, "environment_mismatch"),
        (BY_HOST, "sandbox.example:443", "", SERVED, "environment_mismatch"),
        (BY_HOST, "api.example", "", "environment_mismatch", SERVED),
        (BY_HOST, "sandbox.example", "/sandbox", UNKNOWN, "environment_mismatch"),
        (BY_HOST, "sandbox.example", "/production", UNKNOWN, "environment_mismatch"),
        (BY_HOST, "api.example", "/sandbox", "environment_mismatch", UNKNOWN),
        (BY_HOST, "keys.example", "/sandbox", UNKNOWN, UNKNOWN),
        (BY_HOST, "keys.example", "/production", UNKNOWN, UNKNOWN),
        (BY_HOST, "keys.example", "", NOT_FOUND, NOT_FOUND),
        (BY_HOST_AND_PATH, "api.example", "/test", SERVED, "environment_mismatch"),
        (BY_HOST_AND_PATH, "api.example", "/live", "environment_mismatch", SERVED),
        (BY_HOST_AND_PATH, "api.example", "/sandbox", UNKNOWN, UNKNOWN),
        (BY_HOST_AND_PATH, "api.example", "", NOT_FOUND, NOT_FOUND),
        (BY_HOST_AND_PATH, "keys.example", "/test", NOT_FOUND, NOT_FOUND),
        (ONE_MOVED, "sandbox.example", "", SERVED, "environment_mismatch"),
        (ONE_MOVED, "sandbox.example", "/production", UNKNOWN, "environment_mismatch"),
        (ONE_MOVED, "keys.example", "/production", "environment_mismatch", SERVED),
        (ONE_MOVED, "127.0.0.1", "/production", "environment_mismatch", SERVED),
        (ONE_MOVED, "keys.example", "/sandbox", UNKNOWN, UNKNOWN),
        (RENAMED, "keys.example", "/api/sbx", SERVED, "environment_mismatch"),
        (RENAMED, "keys.example", "/api/prd", "environment_mismatch", SERVED),
        (RENAMED, "keys.example", "/api/sbxx", NOT_FOUND, NOT_FOUND),
        (RENAMED, "keys.example", "/sandbox", UNKNOWN, UNKNOWN),
    ],
)
def test_environment_answers_on_its_own_base_url_only(
    settings: Any, bases: dict[str, str], host: str, base: str, sandbox: str, production: str
) -> None:
    client = served(settings, bases)
    make_merchant("acme")
    for environment, expected in ((Environment.SANDBOX, sandbox), (Environment.PRODUCTION, production)):
        _, key = issue(find_account("acme", environment))
        response = client.generic(
            "POST", f"{base}/credentials/acknowledge", headers={"Host": host, "X-Api-Key": key.reveal()}
        )
        # A good key that is no replacement: the endpoint itself answered.
        outcome = SERVED if "replacement of a rotation" in response.json()["detail"] else response.json()["code"]
        assert outcome == expected


@pytest.mark.django_db
def test_host_of_an_environment_serves_nothing_else(settings: Any) -> None:
    """Neither the service plane nor the console answers there; a load balancer's health check still does."""
    client = served(settings, BY_HOST)
    for path in ("/v1/credentials", "/admin/login/", "/static/keyvault/console.css"):
        assert client.get(path, headers={"Host": "sandbox.example"}).json()["code"] == UNKNOWN
    assert client.get("/v1/credentials", headers={"Host": "keys.example"}).json()["code"] == "service_token_invalid"
    assert client.get("/admin/login/", headers={"Host": "keys.example"}).status_code == 200
    assert client.get("/healthz", headers={"Host": "sandbox.example"}).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SANDBOX_BASE_URL": "https://a.example", "PRODUCTION_BASE_URL": "https://a.example"}, "another host or path"),
        ({"SANDBOX_BASE_URL": "https://a.example", "PRODUCTION_BASE_URL": "https://A.example/p"}, "another host"),
        (
            {"SANDBOX_BASE_URL": "https://a.example/x", "PRODUCTION_BASE_URL": "https://a.example:8443/x"},
            "another host",
        ),
        ({"SANDBOX_BASE_URL": "https://keys.example"}, "its own path"),
        ({"PRODUCTION_BASE_URL": "https://keys.example/v1/keys"}, "its own path"),
    ],
)
def test_base_urls_that_are_not_distinct_prevent_the_start(environ: dict[str, str], message: str) -> None:
    values = read_settings(
        {"KEYVAULT_ORIGIN": "https://keys.example"} | {f"KEYVAULT_{name}": url for name, url in environ.items()}
    )
    with pytest.raises(ImproperlyConfigured, match=message):
        find_base_urls(values)


ACKNOWLEDGE = "/sandbox/credentials/acknowledge"
KEY = "kv_prv_sbx_" + "a" * 65


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("path", "raw", "code"),
    [
        (ACKNOWLEDGE, ACKNOWLEDGE, "credential_missing"),
        (ACKNOWLEDGE, "/sandbox/credentials%2facknowledge", UNKNOWN),
        (ACKNOWLEDGE, "/sandbox/credentials/%61cknowledge", UNKNOWN),
        (ACKNOWLEDGE, "/%73andbox/credentials/acknowledge", UNKNOWN),
        (f"{ACKNOWLEDGE};x", f"{ACKNOWLEDGE};x", UNKNOWN),
        ("/sandbox/x/../y", "/sandbox/x/../y", UNKNOWN),
        (f"/sandbox/{KEY}", f"/sandbox/{KEY.replace('_', '%5F')}", "credential_in_url"),
        (f"/v1/;{KEY}", f"/v1/;{KEY}", "credential_in_url"),
        ("/v1/credentials", "/v1/credentials", "service_token_invalid"),
        ("/v1/credentials", "/v1%2fcredentials", NOT_FOUND),
        ("/v1/credentials", "/v1/%63redentials", NOT_FOUND),
        ("/nowhere", "/nowhere%2f", NOT_FOUND),
    ],
)
def test_path_sent_escaped_is_not_found(path: str, raw: str, code: str) -> None:
    """Guarantee: the served path equals the path that a gateway compared: no escape is decoded on the way to an
    endpoint.
    """
    sent: dict[str, Any] = {RAW_PATH: raw}
    answer = Client().generic("POST" if path == ACKNOWLEDGE else "GET", path, **sent)
    assert answer.json()["code"] == code


@pytest.mark.django_db
@pytest.mark.parametrize("bases", [BY_HOST, RENAMED], ids=["host", "path"])
def test_environment_not_served_here_is_not_found(settings: Any, bases: dict[str, str]) -> None:
    """Guarantee: a process pinned to one environment does not reveal whether a key of the other exists."""
    settings.ENVIRONMENTS = ("production",)
    client = served(settings, bases)
    for environment, expected in ((Environment.SANDBOX, UNKNOWN), (Environment.PRODUCTION, "credential_missing")):
        host, path = split_base_url(bases[environment])
        answer = client.generic("POST", f"{path}/credentials/acknowledge", headers={"Host": host})
        assert (answer.status_code, answer.json()["code"]) == (404 if expected == UNKNOWN else 401, expected)


@pytest.mark.django_db
def test_authorize_envoy_with_any_client_host_is_served(settings: Any, rf: RequestFactory) -> None:
    seen: list[HttpRequest] = []

    def keep(request: HttpRequest) -> HttpResponse:
        seen.append(request)
        return HttpResponse()

    served(settings, BY_HOST)
    for host in ("shop.example:8443", "sandbox.example", "a b", ""):
        EnvironmentMiddleware(keep)(rf.get("/v1/authorize/envoy/a/../b", headers={"Host": host}))
        request = seen.pop()
        assert (request.get_host(), request.META[FORWARDED_HOST]) == ("keys.example", host)
        assert request.path_info == "/v1/authorize/envoy/a/../b"


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["/admin/?k={}", "/admin/{}/", "/admin/login/?next=/admin/%3Fk%3D{}"])
def test_console_redirect_to_login_repeats_no_key_of_the_url(path: str) -> None:
    answer = Client().get(path.format(KEY))
    assert (answer.status_code, answer.json()["code"]) == (400, "credential_in_url")
    assert KEY not in answer.content.decode()
    assert "Location" not in answer


def served(settings: Any, bases: dict[str, str]) -> Client:
    settings.ORIGIN = "https://keys.example"
    settings.BASE_URLS = bases
    settings.ALLOWED_HOSTS = ["keys.example", "sandbox.example", "api.example", "127.0.0.1"]
    return Client()

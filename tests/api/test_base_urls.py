"""Base URLs on hosts and paths of the operator's choice: each environment answers on its own and nowhere else."""

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import Client

from keyvault.domain.environments import Environment
from keyvault.project.configuration import find_base_urls, read_settings
from keyvault.services.merchants import find_account
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
        (BY_HOST, "sandbox.example", "/sandbox", UNKNOWN, UNKNOWN),
        (BY_HOST, "sandbox.example", "/production", UNKNOWN, UNKNOWN),
        (BY_HOST, "api.example", "/sandbox", UNKNOWN, UNKNOWN),
        (BY_HOST, "keys.example", "/sandbox", UNKNOWN, UNKNOWN),
        (BY_HOST, "keys.example", "/production", UNKNOWN, UNKNOWN),
        (BY_HOST, "keys.example", "", NOT_FOUND, NOT_FOUND),
        (BY_HOST_AND_PATH, "api.example", "/test", SERVED, "environment_mismatch"),
        (BY_HOST_AND_PATH, "api.example", "/live", "environment_mismatch", SERVED),
        (BY_HOST_AND_PATH, "api.example", "/sandbox", UNKNOWN, UNKNOWN),
        (BY_HOST_AND_PATH, "api.example", "", NOT_FOUND, NOT_FOUND),
        (BY_HOST_AND_PATH, "keys.example", "/test", NOT_FOUND, NOT_FOUND),
        (ONE_MOVED, "sandbox.example", "", SERVED, "environment_mismatch"),
        (ONE_MOVED, "sandbox.example", "/production", UNKNOWN, UNKNOWN),
        (ONE_MOVED, "keys.example", "/production", "environment_mismatch", SERVED),
        (ONE_MOVED, "127.0.0.1", "/production", "environment_mismatch", SERVED),
        (ONE_MOVED, "keys.example", "/sandbox", UNKNOWN, UNKNOWN),
        (RENAMED, "keys.example", "/api/sbx", SERVED, "environment_mismatch"),
        (RENAMED, "keys.example", "/api/prd", "environment_mismatch", SERVED),
        (RENAMED, "keys.example", "/api/sbxx", NOT_FOUND, NOT_FOUND),
        (RENAMED, "keys.example", "/sandbox", UNKNOWN, UNKNOWN),
    ],
)
def test_environment_answers_on_its_base_url_and_on_no_other(
    settings: Any, bases: dict[str, str], host: str, base: str, sandbox: str, production: str
) -> None:
    client = served(settings, bases)
    make_merchant("acme")
    for environment, expected in ((Environment.SANDBOX, sandbox), (Environment.PRODUCTION, production)):
        _, key = issue(find_account("acme", environment))
        response = client.post(f"{base}/credentials/acknowledge", headers={"Host": host, "X-Api-Key": key.reveal()})
        # A good key that replaces no other: the endpoint itself has judged it.
        met = SERVED if "replacement of a rotation" in response.json()["detail"] else response.json()["code"]
        assert met == expected


@pytest.mark.django_db
def test_host_of_an_environment_serves_nothing_else(settings: Any) -> None:
    """Neither the service plane nor the console, by whatever name; a load balancer still asks how it is."""
    client = served(settings, BY_HOST)
    for path in ("/v1/credentials", "/admin/login/", "/static/keyvault/console.css"):
        assert client.get(path, headers={"Host": "sandbox.example"}).json()["code"] == UNKNOWN
    assert client.get("/v1/credentials", headers={"Host": "keys.example"}).json()["code"] == "service_token_invalid"
    assert client.get("/admin/login/", headers={"Host": "keys.example"}).status_code == 200
    assert client.get("/healthz", headers={"Host": "sandbox.example"}).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SANDBOX_BASE_URL": "https://a.example", "PRODUCTION_BASE_URL": "https://a.example"}, "another host or path"),
        ({"SANDBOX_BASE_URL": "https://a.example", "PRODUCTION_BASE_URL": "https://A.example/p"}, "another host"),
        (
            {"SANDBOX_BASE_URL": "https://a.example/x", "PRODUCTION_BASE_URL": "https://a.example:8443/x"},
            "another host",
        ),
        ({"SANDBOX_BASE_URL": "https://keys.example"}, "a path of its own"),
        ({"PRODUCTION_BASE_URL": "https://keys.example/v1/keys"}, "a path of its own"),
    ],
)
def test_base_urls_that_cannot_be_told_apart_stop_the_start(environ: dict[str, str], words: str) -> None:
    values = read_settings(
        {"KEYVAULT_ORIGIN": "https://keys.example"} | {f"KEYVAULT_{name}": url for name, url in environ.items()}
    )
    with pytest.raises(ImproperlyConfigured, match=words):
        find_base_urls(values)


def served(settings: Any, bases: dict[str, str]) -> Client:
    settings.ORIGIN = "https://keys.example"
    settings.BASE_URLS = bases
    settings.ALLOWED_HOSTS = ["keys.example", "sandbox.example", "api.example", "127.0.0.1"]
    return Client()

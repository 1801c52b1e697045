"""A process answers the planes of KEYVAULT_PLANES only; metrics and documentation can be elsewhere or closed."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, combinations
from pathlib import Path
from socket import SHUT_WR, create_connection
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import Client

from keyvault.access.permissions import Permission as P
from keyvault.domain.keystring import StringScope
from keyvault.hotpath.adapters.assembly import unrouted
from keyvault.management.service import find_free_port
from keyvault.project.configuration import read_settings
from keyvault.services.startup import metrics
from keyvault.services.startup.metrics import MAX_CONNECTIONS, serve_metrics_or_exit
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.verification.refusals import RefusalLog
from keyvault.wire.planes import Plane
from tests.admin.desk import browser, set_up_desk
from tests.factories import account, issue, make_merchant, make_token
from tests.fuzz.served import Wire, serving

SUBSETS = [*chain.from_iterable(combinations(Plane, size) for size in (1, 2, 3))]
VERIFY = "/v1/keys/verify"
CASES: list[tuple[Plane, str, str, int, str]] = [
    (Plane.INTEGRATION, "GET", "/sandbox/merchants/orders/none", 401, "endpoint_unknown"),
    (Plane.INTEGRATION, "GET", "/production/customers/me", 401, "endpoint_unknown"),
    (Plane.SERVICE, "POST", VERIFY, 401, "not_found"),
    (Plane.SERVICE, "POST", "/v1/keys/verify-batch", 401, "not_found"),
    (Plane.SERVICE, "GET", "/v1/keys/0123456789abcdef", 401, "not_found"),
    (Plane.SERVICE, "GET", "/v1/rotations", 401, "not_found"),
    (Plane.SERVICE, "GET", "/v1/authorize/nginx", 401, "not_found"),
    (Plane.SERVICE, "GET", "/v1/authorize/envoy/sandbox/customers/me", 401, "not_found"),
    (Plane.CONSOLE, "GET", "/admin/login/", 200, ""),
    (Plane.CONSOLE, "GET", "/%61dmin/login/", 200, ""),
]
"""Plane, method, path, the status where the plane is served, and the code of the 404 where it is not."""


def served_settings(**environ: str) -> dict[str, Any]:
    return read_settings(environ)


@pytest.fixture
def quiet_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep usage and refusals in memory: a thread of the process would write between later tests."""
    monkeypatch.setattr(UsageLog, "start", lambda self: None)
    for module in ("keyvault.hotpath.adapters.assembly", "keyvault.api.integration"):
        monkeypatch.setattr(f"{module}.usage_log", UsageLog())
        monkeypatch.setattr(f"{module}.refusal_log", RefusalLog())


@pytest.mark.django_db
@pytest.mark.usefixtures("quiet_logs")
@pytest.mark.parametrize("planes", SUBSETS, ids="+".join)
def test_process_answers_its_planes_and_health_checks_only(
    client: Client, settings: Any, subtests: pytest.Subtests, planes: tuple[Plane, ...]
) -> None:
    """Guarantee: no path of a plane that is not served reaches code of that plane; it is as an unknown path."""
    settings.PLANES = planes
    for plane, method, path, status, code in CASES:
        with subtests.test(path):
            answer = client.generic(method, path)
            if plane in planes:
                assert answer.status_code == status
            elif plane is Plane.CONSOLE:
                assert (answer.status_code, answer["Content-Type"]) == (404, "text/html; charset=utf-8")
                assert not answer.cookies
            else:
                problem = json.loads(answer.content)
                assert (answer.status_code, problem["code"]) == (404, code)
                assert answer["Content-Type"] == "application/problem+json"
                assert problem["request_id"] == answer["X-Request-Id"]
    assert client.get("/healthz").status_code == 200
    assert set(client.get("/readyz").json()["checks"]) >= {"database", "peppers_sandbox"}
    assert client.get("/metrics").status_code == 200


@pytest.mark.django_db
def test_session_cookie_is_not_read_where_the_console_is_not_served(
    settings: Any, django_assert_num_queries: Any
) -> None:
    """Guarantee: a console cookie that reaches another process of the same host costs no query and grants nothing."""
    signed_in = browser(set_up_desk().tam)
    assert signed_in.get("/admin/").status_code == 200
    settings.PLANES = (Plane.INTEGRATION, Plane.SERVICE)
    with django_assert_num_queries(0):
        answer = signed_in.get("/admin/")
    assert answer.status_code == 404
    assert not answer.cookies


@pytest.mark.django_db
def test_static_files_are_served_with_the_console_or_the_documentation(client: Client, settings: Any) -> None:
    path = "/static/admin/css/base.css"
    for planes, docs, status in (
        ((Plane.CONSOLE,), False, 200),
        ((Plane.SERVICE,), True, 200),
        ((Plane.SERVICE, Plane.INTEGRATION), False, 404),
    ):
        settings.PLANES, settings.ARE_DOCS_SERVED = planes, docs
        answer = client.get(path)
        assert answer.status_code == status, planes
        answer.close()


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("KEYVAULT_PLANES", "console,admin", "one or more of integration, service, console"),
        ("KEYVAULT_PLANES", ",", "one or more of"),
        ("KEYVAULT_METRICS", "yes", "on, off, or an address such as 127.0.0.1:9100"),
        ("KEYVAULT_METRICS", "9100", "an address"),
        ("KEYVAULT_METRICS", "127.0.0.1:0", "a port from 1 to 65535"),
        ("KEYVAULT_METRICS", "127.0.0.1:65536", "a port from 1 to 65535"),
        ("KEYVAULT_DOCS", "no", "one of on, off"),
    ],
)
def test_setting_with_another_value_is_refused_by_name(name: str, value: str, accepted: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=name) as refused:
        served_settings(**{name: value})
    assert accepted in str(refused.value)
    assert "\n" not in str(refused.value)


def test_settings_have_their_values_in_a_fixed_order() -> None:
    assert served_settings()["KEYVAULT_PLANES"] == tuple(Plane)
    assert served_settings(KEYVAULT_PLANES="console, service")["KEYVAULT_PLANES"] == ("service", "console")
    assert served_settings(KEYVAULT_METRICS="[::1]:9100")["KEYVAULT_METRICS"] == ("::1", 9100)
    assert served_settings(KEYVAULT_METRICS="metrics.internal:9100")["KEYVAULT_METRICS"] == ("metrics.internal", 9100)


def test_verifier_without_its_plane_does_not_start(settings: Any) -> None:
    settings.PLANES = (Plane.CONSOLE,)
    with pytest.raises(CommandError, match="add service, or do not start it here") as refused:
        call_command("verifier", port=find_free_port())
    assert "\n" not in str(refused.value)


@pytest.mark.long
@pytest.mark.django_db(transaction=True)
def test_console_process_serves_no_verdict_over_its_wire(tmp_path: Path) -> None:
    """Guarantee: on the real server, neither the fast path of verify nor the slow one answers in a console process."""
    make_merchant("acme")
    key, token = issue(account())[1].reveal(), make_token(P.KEYS_VERIFY, scope=StringScope.SANDBOX)[1].reveal()
    body = json.dumps({"key": key, "environment": "sandbox", "endpoint": "orders.retrieve"}).encode()
    head = (
        f"POST {VERIFY} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    for planes, statuses in (("service", {"verify": 200, "login": 404}), ("console", {"verify": 404, "login": 200})):
        with serving(tmp_path, KEYVAULT_PLANES=planes) as port:
            wire = Wire(port)
            # Twice: the second request of a service process is answered from memory.
            assert [wire.send(b"POST", head + body).status for _ in range(2)] == [statuses["verify"]] * 2
            page = wire.send(b"GET", b"GET /admin/login/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert page.status == statuses["login"]
            order = wire.send(b"GET", b"GET /sandbox/customers/me HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert (order.status, json.loads(order.body)["code"]) == (404, "endpoint_unknown")
            wire.close()


# --- metrics and documentation ------------------------------------------------------------------------------


def test_documentation_that_is_off_is_an_unknown_path(client: Client, settings: Any) -> None:
    settings.ARE_DOCS_SERVED = False
    for path in ("/v1/docs", "/v1/openapi.json"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


def test_metrics_that_are_off_are_an_unknown_path_of_server_and_verifier(client: Client, settings: Any) -> None:
    settings.IS_METRICS_PATH_SERVED = False
    answer = client.get("/metrics")
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert unrouted("GET", "/metrics").status == 404
    assert unrouted("POST", "/metrics").status == 404


def test_metrics_at_an_address_of_their_own_are_there_for_every_process(settings: Any) -> None:
    """Guarantee: the processes of one program share the address, and nothing else is served there."""
    address = "127.0.0.1", find_free_port()
    settings.METRICS_ADDRESS = address
    listeners = [serve_metrics_or_exit("server"), serve_metrics_or_exit("server")]
    try:
        url = f"http://{address[0]}:{address[1]}"
        with urlopen(f"{url}/metrics", timeout=20) as answer:  # noqa: S310  the test's own URL
            assert b"keyvault_" in answer.read()
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{url}/readyz", timeout=20)  # noqa: S310  the test's own URL
    finally:
        for listener in listeners:
            assert listener is not None
            listener.shutdown()
            listener.server_close()


@contextmanager
def metrics_listener(settings: Any) -> Iterator[tuple[str, int]]:
    settings.METRICS_ADDRESS = address = "127.0.0.1", find_free_port()
    listener = serve_metrics_or_exit("server")
    assert listener is not None
    try:
        yield address
    finally:
        listener.shutdown()
        listener.server_close()


def test_metrics_listener_closes_a_connection_beyond_its_bound(settings: Any) -> None:
    """Guarantee: clients that send nothing take a bounded number of threads, and a scraper is served after them."""
    with metrics_listener(settings) as address, ExitStack() as stack:
        silent = [stack.enter_context(create_connection(address, timeout=5)) for _ in range(MAX_CONNECTIONS)]
        with create_connection(address, timeout=5) as refused:
            assert refused.recv(1) == b""
        for client in silent:
            client.shutdown(SHUT_WR)
            assert client.recv(1) == b""
        with urlopen(f"http://{address[0]}:{address[1]}/metrics", timeout=5) as answer:
            assert b"keyvault_" in answer.read()


def test_metrics_listener_ends_a_connection_that_lasts_too_long(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: a client that sends a byte now and then does not keep its thread."""
    monkeypatch.setattr(metrics, "_CONNECTION_SECONDS", 0.0)
    with metrics_listener(settings) as address, create_connection(address, timeout=5) as slow:
        slow.sendall(b"GET /metr")
        assert slow.recv(1) == b""


def test_metrics_at_an_address_of_another_machine_refuse_the_start_in_one_line(settings: Any) -> None:
    settings.METRICS_ADDRESS = "192.0.2.1", 9100
    refusal = re.escape("the verifier does not start: KEYVAULT_METRICS: 192.0.2.1:9100 cannot be used")
    with pytest.raises(SystemExit, match=refusal) as end:
        serve_metrics_or_exit("verifier")
    assert "\n" not in str(end.value)

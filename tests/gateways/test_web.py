"""The shipped sample of nginx in front of the ordinary server: every error is a problem document."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.servers.throwaway import Place

from .front import Changes, Gateway, GatewayAnswer, echoing, nginx_sample

pytestmark = pytest.mark.usefixtures("nginx")

SAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "nginx" / "keyvault-web.conf"


@contextmanager
def web_sample(upstream: int) -> Iterator[Gateway]:
    """Run the sample without TLS, at addresses of the test, with a limit of 20 requests for each client."""

    def changes(place: Place) -> Changes:
        return (
            ("server 127.0.0.1:8000;", f"server 127.0.0.1:{upstream};"),
            ("server unix:/run/keyvault/verifier.sock;", f"server 127.0.0.1:{upstream};"),
            ("listen 443 ssl;", f"listen 127.0.0.1:{place.port};"),
            ("ssl_certificate /etc/nginx/keys.example.pem;", ""),
            ("ssl_certificate_key /etc/nginx/keys.example.key;", ""),
            ("rate=200r/s", "rate=1r/m"),
            ("burst=400", "burst=19"),
            ("access_log /var/log/nginx/keyvault-web.log", f"access_log {place.directory}/web.log"),
            ("error_log /var/log/nginx/keyvault-web-error.log", f"error_log {place.directory}/web-error.log"),
        )

    with nginx_sample(SAMPLE, changes) as gateway:
        yield gateway


def refused(answer: GatewayAnswer) -> tuple[int, str]:
    code = answer.code
    assert answer.headers.get_all("X-Request-Id") == [json.loads(answer.body)["request_id"]]
    assert answer.headers["Retry-After"] == ("1" if answer.status in {429, 503} else None)
    return answer.status, code


def test_web_sample_answers_its_own_errors_with_problem_documents() -> None:
    """Guarantee: a client of the contract reads a code and a request id also where nginx refuses its request."""
    with echoing() as upstream, web_sample(upstream.port) as web:
        for lines, path, body, expected in (
            ((), "/admin/", "", (404, "not_found")),
            ((), "/_keyvault_web_problem", "", (404, "not_found")),
            ((), "/sandbox/orders", "a" * 65_537, (413, "payload_too_large")),
            ((), f"/sandbox/{'a' * 9_000}", "", (414, "uri_too_long")),
            ((f"X-Api-Key: {'a' * 9_000}",), "/sandbox/orders", "", (431, "request_invalid")),
            (("Content-Length: x",), "/sandbox/orders", "", (400, "request_invalid")),
            ((), "/sandbox/%", "", (400, "request_invalid")),
            ((), "x", "", (400, "request_invalid")),
        ):
            assert refused(web.send(*lines, path=path, body=body)) == expected, (path[:20], expected)
        assert refused(web.send(method="TRACE", path="/sandbox/orders")) == (405, "method_not_allowed")
        assert refused(web.send("Transfer-Encoding: x", path="/sandbox/orders")) == (501, "request_invalid")
        assert upstream.seen == []
        answers = [web.send(path="/sandbox/orders") for _ in range(21)]
        assert [answer.status for answer in answers[:19]] == [207] * 19
        assert refused(answers[-1]) == (429, "rate_limited")
        assert " /admin/ 404 " in web.read_logs()["web.log"]


def test_web_sample_without_a_server_is_unavailable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with web_sample(unused.getsockname()[1]) as web:
            for path in ("/sandbox/orders", "/v1/keys/verify"):
                assert refused(web.send(path=path)) == (503, "dependency_unavailable")


@pytest.mark.parametrize("status", [404, 408, 431, 500])
def test_web_sample_passes_on_errors_of_the_server_unchanged(status: int) -> None:
    with echoing(status) as upstream, web_sample(upstream.port) as web:
        answer = web.send(path="/sandbox/orders")
        assert (answer.status, answer.body) == (status, b"in")
        assert "Content-Type" not in answer.headers
        assert "X-Request-Id" not in answer.headers

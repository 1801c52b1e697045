"""The shipped sample of nginx in front of a console process: it passes on the console's paths and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.nginx import nginx_server
from tests.servers.throwaway import Place

from .front import Gateway, Upstream, echoing

SAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "nginx" / "keyvault-console.conf"
SECRET = "kv_prv_sbx_" + "0" * 65


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with echoing() as found:
        yield found


@pytest.fixture
def console(nginx: None, upstream: Upstream) -> Iterator[Gateway]:
    """The sample without TLS, at addresses of the test."""
    folders: list[Path] = []

    def http(place: Place) -> str:
        folders.append(Path(place.directory))
        text = SAMPLE.read_text()
        for shipped, ours, count in (
            ("http://127.0.0.1:8001", f"http://127.0.0.1:{upstream.port}", 2),
            ("listen 443 ssl;", f"listen 127.0.0.1:{place.port};", 1),
            ("ssl_certificate /etc/nginx/console.example.pem;", "", 1),
            ("ssl_certificate_key /etc/nginx/console.example.key;", "", 1),
            ("access_log /var/log/nginx/keyvault-console.log", f"access_log {place.directory}/console.log", 1),
            ("error_log /var/log/nginx/keyvault-console-error.log", f"error_log {place.directory}/errors.log", 1),
        ):
            assert text.count(shipped) == count, shipped
            text = text.replace(shipped, ours)
        return text

    with nginx_server(http) as url:
        yield Gateway(url, folders[0])


def test_console_sample_passes_on_the_console_with_one_client_address(console: Gateway, upstream: Upstream) -> None:
    answer = console.send(
        "X-Forwarded-For: 203.0.113.9", method="GET", path=f"/admin/login/?next={SECRET}", host="console.example"
    )
    assert answer.status == 207
    (seen,) = upstream.seen
    assert seen.all("X-Forwarded-For") == ["127.0.0.1"]
    assert seen.all("Host") == ["console.example"]
    assert not [name for name, log in console.read_logs().items() if SECRET in log]


@pytest.mark.parametrize("path", ["/", "/v1/keys/verify", "/sandbox/customers/me", "/metrics", "/readyz"])
def test_console_sample_passes_on_no_other_path(console: Gateway, upstream: Upstream, path: str) -> None:
    assert console.send(method="GET", path=path, host="console.example").status == 404
    assert not upstream.seen

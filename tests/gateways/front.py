"""The surroundings of a gateway under test: a client that sends arbitrary bytes, and an upstream."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPMessage, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from tests.servers.gateways import gateway_server
from tests.servers.nginx import nginx_server
from tests.servers.throwaway import Place

SAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "nginx" / "keyvault-gateway.conf"


@dataclass(frozen=True)
class Seen:
    """A request that reached the upstream: its path as it was sent, every header as it came."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def all(self, name: str) -> list[str]:
        return [value for found, value in self.headers if found.lower() == name.lower()]


@dataclass
class Upstream:
    port: int
    seen: list[Seen] = field(default_factory=list)


@contextmanager
def echoing(status: int = 207) -> Iterator[Upstream]:
    """An upstream that records every request that the gateway lets through, and answers it with this status."""
    seen: list[Seen] = []

    class Echo(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def parse_request(self) -> bool:
            read = super().parse_request()
            # The handler has one method for every HTTP method.
            setattr(self, f"do_{self.command}", self._answer)
            return read

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.requestline.split(" ")[1]
            seen.append(Seen(self.command, path, self.headers.items(), body))
            self.send_response(status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"in")

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  its parent's name for it
            """Suppress the log of the server."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield Upstream(server.server_port, seen)
        finally:
            server.shutdown()
            thread.join()


@dataclass(frozen=True)
class GatewayAnswer:
    status: int
    headers: HTTPMessage
    body: bytes

    @property
    def code(self) -> str:
        """Return the code of a denial, a problem document that no cache may store."""
        problem: dict[str, Any] = json.loads(self.body)
        assert self.headers.get_all("Content-Type") == ["application/problem+json"]
        assert self.headers.get_all("Cache-Control") == ["no-store"]
        assert problem["status"] == self.status
        assert problem["type"] == f"urn:keyvault:problem:{problem['code']}"
        assert problem["request_id"]
        return str(problem["code"])


@dataclass(frozen=True)
class Gateway:
    """The server at the address. `folder`: the folder of its logs."""

    url: str
    folder: Path = Path()

    def read_logs(self) -> dict[str, str]:
        """Return its logs by file name."""
        return {path.name: path.read_text() for path in self.folder.glob("*.log")}

    def send(
        self, *lines: str, method: str = "POST", path: str = "/", body: str = "", host: str = "shop.example"
    ) -> GatewayAnswer:
        """Send the request line and the headers unchanged; characters above 127 as latin-1."""
        address = urlsplit(self.url)
        head = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *lines]
        if body:
            head.append(f"Content-Length: {len(body)}")
        with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
            connection.sendall(("\r\n".join([*head, "", ""]) + body).encode("latin-1"))
            with HTTPResponse(connection, method=method) as response:
                response.begin()
                answer = GatewayAnswer(response.status, response.headers, response.read())
            connection.recv(1)  # It ends the connection once it has logged the request.
            return answer


@contextmanager
def nginx_gateway(token: str, *, keyvault: int, upstream: int) -> Iterator[Gateway]:
    """Run the shipped sample with other addresses, listen line, token file and log paths."""
    line = f'proxy_set_header X-Service-Token "{token}";\n'

    def changes(place: Place) -> Changes:
        return (
            ("server 127.0.0.1:8000;", f"server 127.0.0.1:{keyvault};"),
            ("server 127.0.0.1:9000;", f"server 127.0.0.1:{upstream};"),
            ("listen 8080;", f"listen 127.0.0.1:{place.port};"),
            ("access_log /var/log/nginx/keyvault-gateway.log", f"access_log {place.directory}/gateway.log"),
            ("error_log /var/log/nginx/keyvault-gateway-error.log", f"error_log {place.directory}/gateway-error.log"),
            ("include /etc/nginx/keyvault-service-token.conf;", f"include {place.write('token.conf', line)};"),
        )

    with nginx_sample(SAMPLE, changes) as gateway:
        yield gateway


Changes = tuple[tuple[str, str], ...]
"""Texts of a sample, each with its replacement in a test."""


@contextmanager
def nginx_sample(sample: Path, changes: Callable[[Place], Changes]) -> Iterator[Gateway]:
    """Run a shipped sample of nginx. Each text of `changes` must stand in it exactly once."""
    folders: list[Path] = []

    def http(place: Place) -> str:
        folders.append(Path(place.directory))
        text = sample.read_text()
        for shipped, ours in changes(place):
            assert text.count(shipped) == 1, shipped
            text = text.replace(shipped, ours)
        return text

    with nginx_server(http) as url:
        yield Gateway(url, folders[0])


ENVOY = SAMPLE.parents[1] / "envoy" / "envoy.yaml"
TRAEFIK = SAMPLE.parents[1] / "traefik" / "keyvault.yaml"
TRAEFIK_STATIC = """\
entryPoints:
  websecure:
    address: 127.0.0.1:{port}
    http:
      aliasHeadersStrategy: reject
providers:
  file:
    filename: {file}
"""


def _replaced(text: str, *replacements: tuple[str, str]) -> str:
    for shipped, ours in replacements:
        assert text.count(shipped) == 1, shipped
        text = text.replace(shipped, ours)
    return text


@contextmanager
def envoy_gateway(token: str, *, keyvault: int, upstream: int) -> Iterator[Gateway]:
    """Run the shipped sample with other addresses and the token."""

    def arguments(place: Place) -> list[str]:
        text = _replaced(
            ENVOY.read_text(),
            ("address: 0.0.0.0, port_value: 8080", f"address: 127.0.0.1, port_value: {place.port}"),
            ("address: 127.0.0.1, port_value: 8000", f"address: 127.0.0.1, port_value: {keyvault}"),
            ("uri: http://127.0.0.1:8000", f"uri: http://127.0.0.1:{keyvault}"),
            ("address: 127.0.0.1, port_value: 9000", f"address: 127.0.0.1, port_value: {upstream}"),
            ("kv_svc_REPLACE_ME", token),
        )
        return ["-c", str(place.write("envoy.yaml", text)), "--use-dynamic-base-id", "--concurrency", "1"]

    with gateway_server("envoy", arguments) as url:
        yield Gateway(url)


@contextmanager
def traefik_gateway(token: str, *, keyvault: int, upstream: int) -> Iterator[Gateway]:
    """Run the shipped sample with other addresses, without TLS, and with the token in place of its variable."""

    def arguments(place: Place) -> list[str]:
        text = _replaced(
            TRAEFIK.read_text(),
            ("      tls: {}\n", ""),
            ("http://127.0.0.1:8000/", f"http://127.0.0.1:{keyvault}/"),
            ("url: http://127.0.0.1:9000", f"url: http://127.0.0.1:{upstream}"),
            ('{{ env "KEYVAULT_SERVICE_TOKEN" }}', token),
        )
        static = TRAEFIK_STATIC.format(port=place.port, file=place.write("keyvault.yaml", text))
        return [f"--configFile={place.write('traefik.yaml', static)}"]

    with gateway_server("traefik", arguments) as url:
        yield Gateway(url)

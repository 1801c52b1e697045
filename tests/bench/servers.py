"""The measured servers: their commands and their benchmark cases."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from keyvault.management import service
from tests.servers.nginx import find_nginx
from tests.servers.throwaway import free_port

from . import cases, openbao
from .cases import BenchmarkCase
from .figures import (
    API_KEY,
    BAO_KV,
    BAO_TOKEN,
    BATCH,
    EMBEDDED,
    GRANIAN_HELLO,
    HIT,
    KNOX,
    MISS,
    MISS_SQLITE,
    NEW_REQUESTS,
    NGINX_HELLO,
    OWN_HELLO,
    UVICORN_HELLO,
    WEB_SERVER,
    WSGI_FRONTEND,
)
from .launch import clean_environ
from .testbed import BenchmarkInstallation, NotRunError, Testbed

GRANIAN = ("--host", cases.ADDRESS, "--port", "{port}", "--http", "1", "--no-ws", "--workers", "1")
GRANIAN_QUIET = ("--no-access-log", "--log-level", "warning")
GRANIAN_WSGI = (*GRANIAN, "--interface", "wsgi", "--blocking-threads", "1", *GRANIAN_QUIET)

NGINX = """\
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    default_type application/json;
    keepalive_requests 1000000000;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{ listen {address}:{port} reuseport; location / {{ return 200 '{{"hello":"world"}}'; }} }}
}}
"""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How a server is started.

    Args:
        command: The command; `{port}` in it and in `environ` stands for the port.
        cases_at: Returns the cases, given the port, once the server listens.
        port: The port, if the server reads it from its configuration file; 0: any free port.
    """

    command: list[str]
    environ: dict[str, str]
    cases_at: Callable[[int], list[BenchmarkCase]]
    port: int = 0


@dataclass(frozen=True, slots=True)
class Server:
    """A measured server.

    Args:
        plan: Returns the launch plan. Raises NotRunError if this machine lacks a program.
        is_waiting: As in `figures.Run`.
        is_paced: Whether latency is measured in open loop too.
    """

    name: str
    cases: tuple[str, ...]
    plan: Callable[[Testbed], LaunchPlan] = field(repr=False)
    is_waiting: bool = False
    is_paced: bool = True


def _own_hello(testbed: Testbed) -> LaunchPlan:
    installation = testbed.on_sqlite
    return LaunchPlan(
        [sys.executable, "-m", "tests.bench.own_hello", "{port}"],
        clean_environ(),
        lambda port: [cases.hello(installation, OWN_HELLO)],
    )


def _nginx(testbed: Testbed) -> LaunchPlan:
    binary, installation = find_nginx(), testbed.on_sqlite
    if binary is None:
        raise NotRunError("no nginx on this machine")
    folder, port = testbed.folder / "nginx", free_port()
    folder.mkdir(exist_ok=True)
    settings = folder / "nginx.conf"
    settings.write_text(NGINX.format(folder=folder, address=cases.ADDRESS, port=port))
    return LaunchPlan(
        [str(binary), "-e", "stderr", "-p", str(folder), "-c", str(settings)],
        clean_environ(),
        lambda port: [cases.hello(installation, NGINX_HELLO)],
        port,
    )


def _granian_hello(testbed: Testbed) -> LaunchPlan:
    installation = testbed.on_sqlite
    return LaunchPlan(
        [str(testbed.peers / "granian"), "tests.bench.peers.hello:wsgi", *GRANIAN_WSGI],
        clean_environ(),
        lambda port: [cases.hello(installation, GRANIAN_HELLO)],
    )


def _uvicorn_hello(testbed: Testbed) -> LaunchPlan:
    installation = testbed.on_sqlite
    uvicorn = [
        str(testbed.peers / "uvicorn"),
        "tests.bench.peers.hello:asgi",
        "--host",
        cases.ADDRESS,
        "--port",
        "{port}",
    ]
    return LaunchPlan(
        [*uvicorn, "--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "warning"],
        clean_environ(),
        lambda port: [cases.hello(installation, UVICORN_HELLO)],
    )


def _verifier(testbed: Testbed) -> LaunchPlan:
    installation = testbed.on_postgres
    return LaunchPlan(
        verifier_command(),
        dict(installation.environ),
        lambda port: [cases.verify(installation, HIT), cases.verify_batch(installation, BATCH)],
    )


def _verifier_of_new_requests(testbed: Testbed) -> LaunchPlan:
    """Return the plan of a verifier that caches every key, but too few requests for any of them to be repeated."""
    installation = testbed.on_postgres
    environ = {**installation.environ, "KEYVAULT_VERIFIER_KEYS": str(_PROBED_KEYS + len(installation.keys))}
    return LaunchPlan(
        verifier_command(), environ, lambda port: [cases.verify(installation, NEW_REQUESTS, clients=_CLIENTS)]
    )


_PROBED_KEYS = 10
"""Cache entries for the keys of the probes."""

_CLIENTS = 4
"""Number of different requests for each key; the cache holds as many requests as keys."""


def _embedded_verifier(testbed: Testbed) -> LaunchPlan:
    """Return the plan of a verifier on SQLite that gets one request again and again, under two limits."""
    installation = testbed.on_sqlite_with_two_limits

    def cases_at(port: int) -> list[BenchmarkCase]:
        case = cases.verify(installation, EMBEDDED)
        return [replace(case, requests=case.requests[:1], probes=[*case.probes, cases.probe_limits(installation)])]

    return LaunchPlan(verifier_command(), dict(installation.environ), cases_at)


def _verifier_of_misses(
    installation_of: Callable[[Testbed], BenchmarkInstallation], name: str
) -> Callable[[Testbed], LaunchPlan]:
    """Return the plan of a verifier that caches one key, so that nearly all keys are cache misses: see `Doorkeeper`."""

    def plan(testbed: Testbed) -> LaunchPlan:
        installation = installation_of(testbed)
        environ = {**installation.environ, "KEYVAULT_VERIFIER_KEYS": "1"}
        case = cases.verify(installation, name)
        return LaunchPlan(verifier_command(), environ, lambda port: [replace(case, requests=case.requests[1:])])

    return plan


def _wsgi_frontend(testbed: Testbed) -> LaunchPlan:
    installation = testbed.on_postgres
    return LaunchPlan(
        [str(Path(sys.executable).with_name("granian")), "keyvault.project.wsgi:application", *GRANIAN_WSGI],
        _with_origin(installation),
        lambda port: [cases.verify(installation, WSGI_FRONTEND)],
    )


def _web_server(testbed: Testbed) -> LaunchPlan:
    """Return the plan of the HTTP server of `make run`, with the same command."""
    installation = testbed.on_postgres
    command = list(service.server_program(0).command)
    command[command.index("--port") + 1] = "{port}"
    return LaunchPlan(command, _with_origin(installation), lambda port: [cases.verify(installation, WEB_SERVER)])


def _api_key(testbed: Testbed) -> LaunchPlan:
    credentials = testbed.peer_keys["api_key"]
    unknown = f"{'x' * 8}.{'x' * 32}"
    return _protected(testbed, API_KEY, "/api-key", "Authorization: Api-Key ", credentials, unknown)


def _knox(testbed: Testbed) -> LaunchPlan:
    return _protected(testbed, KNOX, "/knox", "Authorization: Token ", testbed.peer_keys["knox"], "x" * 64)


def _protected(
    testbed: Testbed, name: str, target: str, header: str, credentials: dict[str, list[str]], unknown: str
) -> LaunchPlan:
    case = cases.protected(name, target, header, credentials["keys"], str(credentials["revoked"]), unknown)
    command = [str(testbed.peers / "granian"), "tests.bench.peers.wsgi:application", *GRANIAN_WSGI]
    return LaunchPlan(command, testbed.peers_environ, lambda port: [case])


def _openbao(testbed: Testbed) -> LaunchPlan:
    return LaunchPlan(openbao.command(), clean_environ(**openbao.SETTINGS), openbao.cases_at)


def verifier_command() -> list[str]:
    return [sys.executable, "manage.py", "verifier", "--workers", "1", "--port", "{port}"]


def _with_origin(installation: BenchmarkInstallation) -> dict[str, str]:
    return {**installation.environ, "KEYVAULT_ORIGIN": f"http://{cases.ADDRESS}:{{port}}"}


SERVERS = (
    Server("own hello", (OWN_HELLO,), _own_hello),
    Server("nginx", (NGINX_HELLO,), _nginx),
    Server("Granian WSGI hello", (GRANIAN_HELLO,), _granian_hello),
    Server("uvicorn hello", (UVICORN_HELLO,), _uvicorn_hello),
    Server("verifier", (HIT, BATCH), _verifier),
    Server("verifier, new requests", (NEW_REQUESTS,), _verifier_of_new_requests),
    Server("verifier, embedded default", (EMBEDDED,), _embedded_verifier),
    Server("WSGI frontend", (WSGI_FRONTEND,), _wsgi_frontend),
    Server("server of make run", (WEB_SERVER,), _web_server),
    Server(
        "verifier, cache misses",
        (MISS,),
        _verifier_of_misses(lambda testbed: testbed.on_postgres, MISS),
        is_waiting=True,
    ),
    Server(
        "verifier, cache misses on SQLite",
        (MISS_SQLITE,),
        _verifier_of_misses(lambda testbed: testbed.on_sqlite, MISS_SQLITE),
    ),
    Server("djangorestframework-api-key", (API_KEY,), _api_key, is_waiting=True),
    Server("django-rest-knox", (KNOX,), _knox, is_waiting=True),
    Server("OpenBao", (BAO_TOKEN, BAO_KV), _openbao),
)

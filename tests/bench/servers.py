"""The table of servers: how each is started, and what it is asked."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from keyvault.management import service
from tests.servers.nginx import find_nginx
from tests.servers.throwaway import free_port

from . import cases, openbao
from .cases import Case
from .figures import (
    ANEW,
    API_KEY,
    BAO_KV,
    BAO_TOKEN,
    BATCH,
    GRANIAN_HELLO,
    HIT,
    KNOX,
    MISS,
    MISS_SQLITE,
    NGINX_HELLO,
    OWN_HELLO,
    UVICORN_HELLO,
    WEB_SERVER,
    WSGI_FRONTEND,
)
from .launch import clean_environ
from .site import House, NotRunError, Site

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
class Plan:
    """`{port}` in command and environment is put in at the start; `cases_at` is asked once the server listens.

    `port`: the one that the server knows from elsewhere.
    """

    command: list[str]
    environ: dict[str, str]
    cases_at: Callable[[int], list[Case]]
    port: int = 0


@dataclass(frozen=True, slots=True)
class Server:
    """`plan` raises NotRunError where this machine lacks something. `is_waiting` as in `figures.Run`.

    `is_paced`: its latency is measured in open loop too.
    """

    name: str
    cases: tuple[str, ...]
    plan: Callable[[Site], Plan] = field(repr=False)
    is_waiting: bool = False
    is_paced: bool = True


def _own_hello(site: Site) -> Plan:
    house = site.on_sqlite
    return Plan(
        [sys.executable, "-m", "tests.bench.own_hello", "{port}"],
        clean_environ(),
        lambda port: [cases.hello(house, OWN_HELLO)],
    )


def _nginx(site: Site) -> Plan:
    binary, house = find_nginx(), site.on_sqlite
    if binary is None:
        raise NotRunError("no nginx on this machine")
    folder, port = site.folder / "nginx", free_port()
    folder.mkdir(exist_ok=True)
    settings = folder / "nginx.conf"
    settings.write_text(NGINX.format(folder=folder, address=cases.ADDRESS, port=port))
    return Plan(
        [str(binary), "-e", "stderr", "-p", str(folder), "-c", str(settings)],
        clean_environ(),
        lambda port: [cases.hello(house, NGINX_HELLO)],
        port,
    )


def _granian_hello(site: Site) -> Plan:
    house = site.on_sqlite
    return Plan(
        [str(site.peers / "granian"), "tests.bench.peers.hello:wsgi", *GRANIAN_WSGI],
        clean_environ(),
        lambda port: [cases.hello(house, GRANIAN_HELLO)],
    )


def _uvicorn_hello(site: Site) -> Plan:
    house = site.on_sqlite
    uvicorn = [str(site.peers / "uvicorn"), "tests.bench.peers.hello:asgi", "--host", cases.ADDRESS, "--port", "{port}"]
    return Plan(
        [*uvicorn, "--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "warning"],
        clean_environ(),
        lambda port: [cases.hello(house, UVICORN_HELLO)],
    )


def _verifier(site: Site) -> Plan:
    house = site.on_postgres
    return Plan(
        verifier_command(),
        dict(house.environ),
        lambda port: [cases.verify(house, HIT), cases.verify_batch(house, BATCH)],
    )


def _verifier_asked_anew(site: Site) -> Plan:
    """It knows every key, and room for half as many questions as there are: it never has one that it had before."""
    house = site.on_postgres
    environ = {**house.environ, "KEYVAULT_VERIFIER_KEYS": str(_ROOM_BESIDE + len(house.keys))}
    return Plan(verifier_command(), environ, lambda port: [cases.verify(house, ANEW, clients=_CLIENTS)])


_ROOM_BESIDE = 10
"""For the keys of the probes."""
_CLIENTS = 4


def _missing_verifier(house_of: Callable[[Site], House], name: str) -> Callable[[Site], Plan]:
    """It remembers one key, and is asked for as many others in turn that it knows none of them: see `Doorkeeper`."""

    def plan(site: Site) -> Plan:
        house = house_of(site)
        environ = {**house.environ, "KEYVAULT_VERIFIER_KEYS": "1"}
        case = cases.verify(house, name)
        return Plan(verifier_command(), environ, lambda port: [replace(case, requests=case.requests[1:])])

    return plan


def _wsgi_frontend(site: Site) -> Plan:
    house = site.on_postgres
    return Plan(
        [str(Path(sys.executable).with_name("granian")), "keyvault.project.wsgi:application", *GRANIAN_WSGI],
        _with_origin(house),
        lambda port: [cases.verify(house, WSGI_FRONTEND)],
    )


def _web_server(site: Site) -> Plan:
    """The very command line of `make run`."""
    house = site.on_postgres
    command = list(service.server_program(0).command)
    command[command.index("--port") + 1] = "{port}"
    return Plan(command, _with_origin(house), lambda port: [cases.verify(house, WEB_SERVER)])


def _api_key(site: Site) -> Plan:
    stock = site.peers_stock["api_key"]
    unknown = f"{'x' * 8}.{'x' * 32}"
    return _protected(site, API_KEY, "/api-key", "Authorization: Api-Key ", stock, unknown)


def _knox(site: Site) -> Plan:
    return _protected(site, KNOX, "/knox", "Authorization: Token ", site.peers_stock["knox"], "x" * 64)


def _protected(site: Site, name: str, target: str, header: str, stock: dict[str, list[str]], unknown: str) -> Plan:
    case = cases.protected(name, target, header, stock["keys"], str(stock["revoked"]), unknown)
    command = [str(site.peers / "granian"), "tests.bench.peers.wsgi:application", *GRANIAN_WSGI]
    return Plan(command, site.peers_environ, lambda port: [case])


def _openbao(site: Site) -> Plan:
    return Plan(openbao.command(), clean_environ(**openbao.SETTINGS), openbao.cases_at)


def verifier_command() -> list[str]:
    return [sys.executable, "manage.py", "verifier", "--workers", "1", "--port", "{port}"]


def _with_origin(house: House) -> dict[str, str]:
    return {**house.environ, "KEYVAULT_ORIGIN": f"http://{cases.ADDRESS}:{{port}}"}


SERVERS = (
    Server("own hello", (OWN_HELLO,), _own_hello),
    Server("nginx", (NGINX_HELLO,), _nginx),
    Server("Granian WSGI hello", (GRANIAN_HELLO,), _granian_hello),
    Server("uvicorn hello", (UVICORN_HELLO,), _uvicorn_hello),
    Server("verifier", (HIT, BATCH), _verifier),
    Server("verifier asked anew", (ANEW,), _verifier_asked_anew),
    Server("WSGI frontend", (WSGI_FRONTEND,), _wsgi_frontend),
    Server("server of make run", (WEB_SERVER,), _web_server),
    Server("missing verifier", (MISS,), _missing_verifier(lambda site: site.on_postgres, MISS), is_waiting=True),
    Server("missing verifier on SQLite", (MISS_SQLITE,), _missing_verifier(lambda site: site.on_sqlite, MISS_SQLITE)),
    Server("djangorestframework-api-key", (API_KEY,), _api_key, is_waiting=True),
    Server("django-rest-knox", (KNOX,), _knox, is_waiting=True),
    Server("OpenBao", (BAO_TOKEN, BAO_KV), _openbao),
)

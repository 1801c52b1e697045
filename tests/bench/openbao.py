"""Benchmark cases of OpenBao in dev mode: in memory, without an audit device."""

import http.client
import json
import os
import shutil
from typing import Any

from .cases import ADDRESS, CHECKED_KEYS, BenchmarkCase, Probe, has_status, request
from .figures import BAO_KV, BAO_TOKEN
from .testbed import NotRunError

BINARY = "KEYVAULT_BENCH_BAO"
ROOT_TOKEN = "benchmark-only"
COUNT = 1000

SETTINGS = {"BAO_DEV_ROOT_TOKEN_ID": ROOT_TOKEN, "GOMAXPROCS": "1"}
"""OpenBao uses one core, like the other servers."""


def find_bao() -> str:
    """Return the path of the binary. Raises NotRunError if there is none."""
    found = os.environ.get(BINARY) or shutil.which("bao")
    if not found or not shutil.which(found):
        raise NotRunError(f"no bao on PATH, and {BINARY} names none")
    return found


def command() -> list[str]:
    return [find_bao(), "server", "-dev", "-dev-no-store-token", f"-dev-listen-address={ADDRESS}:{{port}}"]


def cases_at(port: int) -> list[BenchmarkCase]:
    """Create tokens and secrets on a new server, which has no persistent storage; return its cases."""
    connection = http.client.HTTPConnection(ADDRESS, port, timeout=30)
    try:
        _put(connection, "sys/policy/reader", {"policy": 'path "secret/data/*" { capabilities = ["read"] }'})
        tokens = [_new_token(connection) for _ in range(COUNT + 1)]
        for number in range(COUNT):
            _put(connection, f"secret/data/key-{number}", {"data": {"key": f"value {number}"}})
        revoked = tokens.pop()
        _put(connection, "auth/token/revoke", {"token": revoked})
    finally:
        connection.close()
    return [
        _case(BAO_TOKEN, "/v1/auth/token/lookup-self", tokens, revoked),
        _case(BAO_KV, "/v1/secret/data/key-{turn}", tokens, revoked),
    ]


def _case(name: str, target: str, tokens: list[str], revoked: str) -> BenchmarkCase:
    def request_with(turn: int, token: str) -> bytes:
        return request("GET", target.format(turn=turn), {"X-Vault-Token": token})

    return BenchmarkCase(
        name,
        [request_with(turn, token) for turn, token in enumerate(tokens)],
        [
            *(Probe("a valid token", request_with(0, token), has_status(200)) for token in tokens[:CHECKED_KEYS]),
            Probe("the revoked token", request_with(0, revoked), has_status(403)),
            Probe("an unknown token", request_with(0, f"s.{'x' * 24}"), has_status(403)),
        ],
    )


def _new_token(connection: http.client.HTTPConnection) -> str:
    """Create a service token, which can be revoked."""
    body = {"policies": ["default", "reader"], "ttl": "1h", "no_parent": True}
    return str(_put(connection, "auth/token/create", body)["auth"]["client_token"])


def _put(connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> Any:
    connection.request("POST", f"/v1/{path}", json.dumps(body), {"X-Vault-Token": ROOT_TOKEN})
    response = connection.getresponse()
    content = response.read()
    if response.status >= 400:
        raise RuntimeError(f"OpenBao rejected {path}: {response.status} {content[:300]!r}")
    return json.loads(content) if content else None

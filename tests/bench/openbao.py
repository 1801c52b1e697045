"""OpenBao in dev mode, all in memory and without an audit device: tokens and secrets to ask it for."""

import http.client
import json
import os
import shutil
from typing import Any

from .cases import ADDRESS, CHECKED_KEYS, Case, Probe, answers, request
from .figures import BAO_KV, BAO_TOKEN
from .site import NotRunError

BINARY = "KEYVAULT_BENCH_BAO"
ROOT_TOKEN = "benchmark-only"
COUNT = 1000

SETTINGS = {"BAO_DEV_ROOT_TOKEN_ID": ROOT_TOKEN, "GOMAXPROCS": "1"}
"""One core for it, as for the others."""


def find_bao() -> str:
    """Raises NotRunError."""
    found = os.environ.get(BINARY) or shutil.which("bao")
    if not found or not shutil.which(found):
        raise NotRunError(f"no bao on PATH, and {BINARY} names none")
    return found


def command() -> list[str]:
    return [find_bao(), "server", "-dev", "-dev-no-store-token", f"-dev-listen-address={ADDRESS}:{{port}}"]


def cases_at(port: int) -> list[Case]:
    """Return the cases of a fresh server, which stores nothing between its starts."""
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


def _case(name: str, target: str, tokens: list[str], revoked: str) -> Case:
    def ask(turn: int, token: str) -> bytes:
        return request("GET", target.format(turn=turn), {"X-Vault-Token": token})

    return Case(
        name,
        [ask(turn, token) for turn, token in enumerate(tokens)],
        [
            *(Probe("a valid token", ask(0, token), answers(200)) for token in tokens[:CHECKED_KEYS]),
            Probe("the revoked token", ask(0, revoked), answers(403)),
            Probe("an unknown token", ask(0, f"s.{'x' * 24}"), answers(403)),
        ],
    )


def _new_token(connection: http.client.HTTPConnection) -> str:
    """A service token: the kind that can be revoked."""
    asked = {"policies": ["default", "reader"], "ttl": "1h", "no_parent": True}
    return str(_put(connection, "auth/token/create", asked)["auth"]["client_token"])


def _put(connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> Any:
    connection.request("POST", f"/v1/{path}", json.dumps(body), {"X-Vault-Token": ROOT_TOKEN})
    answer = connection.getresponse()
    content = answer.read()
    if answer.status >= 400:
        raise RuntimeError(f"OpenBao refused {path}: {answer.status} {content[:300]!r}")
    return json.loads(content) if content else None

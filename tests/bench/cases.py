"""The requests of each benchmark case as bytes, and the correct responses."""

import http.client
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .figures import BATCH_SIZE
from .site import House

CHECKED_KEYS = 200
"""Number of valid keys that are checked one by one before a server is measured."""

ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Probe:
    """A request whose answer is known."""

    what: str
    request: bytes
    is_right: Callable[[int, bytes], bool]


@dataclass(frozen=True, slots=True)
class Case:
    """`name` as in the results. Every one of `requests` is answered 2xx. `is_remembered`: what is measured is a server
    that has had each of them before."""

    name: str
    requests: list[bytes]
    probes: list[Probe]
    is_remembered: bool = False


def request(method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", f"Host: {ADDRESS}", *(f"{name}: {text}" for name, text in headers.items())]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode() + body


def find_wrong(port: int, probes: Iterable[Probe]) -> str | None:
    """What the server answered wrongly first; None: all is right."""
    connection = http.client.HTTPConnection(ADDRESS, port, timeout=30)
    try:
        for probe in probes:
            status, body = ask(connection, probe.request)
            if not probe.is_right(status, body):
                return f"{probe.what}: {status} {body[:300]!r}"
    except (OSError, http.client.HTTPException) as error:
        return f"{probe.what}: {error!r}"
    finally:
        connection.close()
    return None


def ask(connection: http.client.HTTPConnection, sent: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to exactly these bytes."""
    if connection.sock is None:
        connection.connect()
    connection.sock.sendall(sent)
    with http.client.HTTPResponse(connection.sock) as response:
        response.begin()
        body = response.read()
        closes = response.will_close
    if closes:
        connection.close()
    return response.status, body


def answers(*statuses: int) -> Callable[[int, bytes], bool]:
    return lambda status, body: status in statuses


# --- ours ---------------------------------------------------------------------------------------------------


CLIENTS = 250
"""Addresses that clients of the questions have."""


def verify(house: House, name: str, clients: int = 1) -> Case:
    """One key a request, all of them in rotation; as often as told, each time for another client."""
    revoked, unknown = _body(house.revoked, 0), _body(house.unknown, 0)
    return Case(
        name,
        [_verify(house, _body(key, turn + client)) for client in range(clients) for turn, key in enumerate(house.keys)],
        [
            *(Probe("a valid key", _verify(house, _body(key, 0)), _is_allowed) for key in house.keys[:CHECKED_KEYS]),
            Probe("the revoked key", _verify(house, revoked), _has_code("key_revoked")),
            Probe("an unknown key", _verify(house, unknown), _has_code("credential_invalid")),
        ],
        is_remembered=True,
    )


def verify_batch(house: House, name: str) -> Case:
    """A hundred keys a request, which together are all of them once."""
    turns = [house.keys[start : start + BATCH_SIZE] for start in range(0, len(house.keys), BATCH_SIZE)]
    wrong = [_body(house.revoked, 0), _body(house.unknown, 0)]
    codes = ["key_revoked", "credential_invalid"]
    return Case(
        name,
        [batch_of(house, keys) for keys in turns],
        [
            Probe("a batch of valid keys", batch_of(house, turns[0]), are_allowed),
            Probe("a batch with a revoked and an unknown key", _batch(house, wrong), _have_codes(codes)),
        ],
        is_remembered=True,
    )


def verify_one(house: House, key: str) -> bytes:
    return _verify(house, _body(key, 0))


def batch_of(house: House, keys: list[str]) -> bytes:
    return _batch(house, [_body(key, place) for place, key in enumerate(keys)])


def _body(key: str, turn: int) -> dict[str, str]:
    return {
        "key": key,
        "environment": "production",
        "endpoint": "orders.retrieve",
        "client_ip": f"203.0.113.{turn % CLIENTS + 1}",
        "user_agent": "checkout/2.4",
    }


def _verify(house: House, body: dict[str, str]) -> bytes:
    return request("POST", "/v1/keys/verify", _headers(house), _json(body))


def _batch(house: House, bodies: list[dict[str, str]]) -> bytes:
    return request("POST", "/v1/keys/verify-batch", _headers(house), _json({"requests": bodies}))


def _headers(house: House) -> dict[str, str]:
    return {"Authorization": f"Bearer {house.token}", "Content-Type": "application/json"}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _is_allowed(status: int, body: bytes) -> bool:
    return status == 200 and json.loads(body)["allowed"] is True


def _has_code(code: str) -> Callable[[int, bytes], bool]:
    def is_right(status: int, body: bytes) -> bool:
        answer = json.loads(body) if status == 200 else {}
        return answer.get("allowed") is False and answer["code"] == code

    return is_right


def are_allowed(status: int, body: bytes) -> bool:
    decisions = json.loads(body)["decisions"] if status == 200 else []
    return len(decisions) > 0 and all(each["allowed"] is True for each in decisions)


def _have_codes(codes: list[str]) -> Callable[[int, bytes], bool]:
    return lambda status, body: status == 200 and [each["code"] for each in json.loads(body)["decisions"]] == codes


# --- the peers ----------------------------------------------------------------------------------------------


def hello(house: House, name: str) -> Case:
    """The very bytes of a verification, answered without a look at them."""
    plain = verify(house, name)
    return Case(name, plain.requests, [Probe("a request", plain.requests[0], answers(200))])


def protected(name: str, target: str, header: str, keys: list[str], revoked: str, unknown: str) -> Case:
    """`header` is a name and how the text begins: `Authorization: Token `."""
    field, _, start = header.partition(": ")

    def ask(key: str) -> bytes:
        return request("POST", target, {field: f"{start}{key}", "Content-Type": "application/json"}, b"{}")

    return Case(
        name,
        [ask(key) for key in keys],
        [
            *(Probe("a valid key", ask(key), answers(200)) for key in keys[:CHECKED_KEYS]),
            Probe("the revoked key", ask(revoked), answers(401, 403)),
            Probe("an unknown key", ask(unknown), answers(401, 403)),
        ],
    )

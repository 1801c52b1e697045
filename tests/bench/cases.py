"""The requests of each benchmark case as bytes, and the correct responses."""

import http.client
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .figures import BATCH_SIZE
from .testbed import BenchmarkInstallation

CHECKED_KEYS = 200
"""Number of valid keys that are checked one by one before a server is measured."""

ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Probe:
    """A request with a known correct response."""

    subject: str
    request: bytes
    is_correct: Callable[[int, bytes], bool]


@dataclass(frozen=True, slots=True)
class BenchmarkCase:
    """A benchmark case. `name`: as in the results. Each of `requests` has a 2xx response.

    `is_repeated`: the server has received each request once before the measurement.
    """

    name: str
    requests: list[bytes]
    probes: list[Probe]
    is_repeated: bool = False


def request(method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", f"Host: {ADDRESS}", *(f"{name}: {text}" for name, text in headers.items())]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode() + body


def find_wrong_response(port: int, probes: Iterable[Probe]) -> str | None:
    """Return the first wrong response as text; None if all responses are correct."""
    connection = http.client.HTTPConnection(ADDRESS, port, timeout=30)
    try:
        for probe in probes:
            status, body = send_request(connection, probe.request)
            if not probe.is_correct(status, body):
                return f"{probe.subject}: {status} {body[:300]!r}"
    except (OSError, http.client.HTTPException) as error:
        return f"{probe.subject}: {error!r}"
    finally:
        connection.close()
    return None


def send_request(connection: http.client.HTTPConnection, sent: bytes) -> tuple[int, bytes]:
    """Send exactly these bytes; return status and body of the response."""
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


def has_status(*statuses: int) -> Callable[[int, bytes], bool]:
    return lambda status, body: status in statuses


# --- Keyvault ---------------------------------------------------------------------------------------------------


CLIENTS = 250
"""Number of client addresses in the requests."""


def verify(installation: BenchmarkInstallation, name: str, clients: int = 1) -> BenchmarkCase:
    """Verify one key per request, all keys in rotation; `clients`: number of rotations, each with other addresses."""
    revoked, unknown = _body(installation.revoked, 0), _body(installation.unknown, 0)
    return BenchmarkCase(
        name,
        [
            _verify(installation, _body(key, turn + client))
            for client in range(clients)
            for turn, key in enumerate(installation.keys)
        ],
        [
            *(
                Probe("a valid key", _verify(installation, _body(key, 0)), _is_allowed)
                for key in installation.keys[:CHECKED_KEYS]
            ),
            Probe("the revoked key", _verify(installation, revoked), _has_code("key_revoked")),
            Probe("an unknown key", _verify(installation, unknown), _has_code("credential_invalid")),
        ],
        is_repeated=True,
    )


def probe_limits(installation: BenchmarkInstallation) -> Probe:
    """Return a probe of the first key, whose requests count against the limit of its account and of the endpoint."""

    def is_correct(status: int, body: bytes) -> bool:
        policies = json.loads(body)["headers"]["RateLimit-Policy"] if status == 200 else ""
        return '"account"' in policies and '"endpoint"' in policies

    return Probe("a key under two limits", verify_one(installation, installation.keys[0]), is_correct)


def verify_batch(installation: BenchmarkInstallation, name: str) -> BenchmarkCase:
    """Verify BATCH_SIZE keys per request, each key once."""
    turns = [installation.keys[start : start + BATCH_SIZE] for start in range(0, len(installation.keys), BATCH_SIZE)]
    wrong = [_body(installation.revoked, 0), _body(installation.unknown, 0)]
    codes = ["key_revoked", "credential_invalid"]
    return BenchmarkCase(
        name,
        [batch_of(installation, keys) for keys in turns],
        [
            Probe("a batch of valid keys", batch_of(installation, turns[0]), are_allowed),
            Probe("a batch with a revoked and an unknown key", _batch(installation, wrong), _have_codes(codes)),
        ],
        is_repeated=True,
    )


def verify_one(installation: BenchmarkInstallation, key: str) -> bytes:
    return _verify(installation, _body(key, 0))


def batch_of(installation: BenchmarkInstallation, keys: list[str]) -> bytes:
    return _batch(installation, [_body(key, place) for place, key in enumerate(keys)])


def _body(key: str, turn: int) -> dict[str, str]:
    return {
        "key": key,
        "environment": "production",
        "endpoint": "orders.retrieve",
        "client_ip": f"203.0.113.{turn % CLIENTS + 1}",
        "user_agent": "checkout/2.4",
    }


def _verify(installation: BenchmarkInstallation, body: dict[str, str]) -> bytes:
    return request("POST", "/v1/keys/verify", _headers(installation), _json(body))


def _batch(installation: BenchmarkInstallation, bodies: list[dict[str, str]]) -> bytes:
    return request("POST", "/v1/keys/verify-batch", _headers(installation), _json({"requests": bodies}))


def _headers(installation: BenchmarkInstallation) -> dict[str, str]:
    return {"Authorization": f"Bearer {installation.token}", "Content-Type": "application/json"}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _is_allowed(status: int, body: bytes) -> bool:
    return status == 200 and json.loads(body)["allowed"] is True


def _has_code(code: str) -> Callable[[int, bytes], bool]:
    def is_correct(status: int, body: bytes) -> bool:
        decision = json.loads(body) if status == 200 else {}
        return decision.get("allowed") is False and decision["code"] == code

    return is_correct


def are_allowed(status: int, body: bytes) -> bool:
    decisions = json.loads(body)["decisions"] if status == 200 else []
    return len(decisions) > 0 and all(each["allowed"] is True for each in decisions)


def _have_codes(codes: list[str]) -> Callable[[int, bytes], bool]:
    return lambda status, body: status == 200 and [each["code"] for each in json.loads(body)["decisions"]] == codes


# --- the peers ----------------------------------------------------------------------------------------------


def hello(installation: BenchmarkInstallation, name: str) -> BenchmarkCase:
    """Send the same bytes as `verify`; the server ignores them."""
    plain = verify(installation, name)
    return BenchmarkCase(name, plain.requests, [Probe("a request", plain.requests[0], has_status(200))])


def protected(name: str, target: str, header: str, keys: list[str], revoked: str, unknown: str) -> BenchmarkCase:
    """`header`: the header's name and the prefix of its value, such as `Authorization: Token `."""
    field, _, start = header.partition(": ")

    def request_with(key: str) -> bytes:
        return request("POST", target, {field: f"{start}{key}", "Content-Type": "application/json"}, b"{}")

    return BenchmarkCase(
        name,
        [request_with(key) for key in keys],
        [
            *(Probe("a valid key", request_with(key), has_status(200)) for key in keys[:CHECKED_KEYS]),
            Probe("the revoked key", request_with(revoked), has_status(401, 403)),
            Probe("an unknown key", request_with(unknown), has_status(401, 403)),
        ],
    )

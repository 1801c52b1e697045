"""The expected response to a request, written from the reviewed HTTP contract. It calls nothing of `keyvault`.

A key is identified by its complete string: an unknown string proves nothing.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, unquote_to_bytes

SERVED = (0, "served")
"""The request was allowed: the endpoint itself responds, with anything but a 401, 403, 429 or 5xx."""

BARE = (400, "")
"""The server's own response, without a body, to bytes that are not HTTP."""

Outcome = tuple[int, str]


@dataclass(frozen=True)
class Sent:
    """An HTTP/1.1 request as sent, without Host and framing."""

    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]

    def wire(self, port: int) -> bytes:
        lines = [b"%b %b HTTP/1.1" % (self.method, self.target), b"Host: 127.0.0.1:%d" % port]
        lines += [b"%b: %b" % header for header in self.headers]
        if self.method not in {b"GET", b"HEAD"}:
            lines.append(b"Content-Length: 0")
        return b"\r\n".join([*lines, b"", b""])

    def values(self, name: bytes) -> list[str]:
        return [value.strip(b" \t").decode("latin-1") for sent, value in self.headers if sent.lower() == name]


@dataclass(frozen=True)
class Known:
    """An existing key. `standing`: `good`, `revoked` or `suspended` (its merchant)."""

    kind: str
    environment: str
    standing: str = "good"


@dataclass(frozen=True)
class Rule:
    """A row of the page's table of endpoints."""

    name: str
    method: str
    path: re.Pattern[str]
    kind: str = "private"
    bearer: str = "none"


RULES = (
    Rule("orders.retrieve", "GET", re.compile(r"/merchants/orders/[^/]+"), bearer="optional"),
    Rule("orders.create", "POST", re.compile(r"/merchants/orders")),
    Rule("client.configuration", "GET", re.compile(r"/client/configuration"), kind="public"),
    Rule("customer_tokens.create", "POST", re.compile(r"/customers/[^/]+/access-tokens")),
    Rule("customer_tokens.revoke", "DELETE", re.compile(r"/customers/access-tokens/[^/]+")),
    Rule("customers.me", "GET", re.compile(r"/customers/me"), bearer="required"),
    Rule("credentials.acknowledge", "POST", re.compile(r"/credentials/acknowledge")),
    Rule("credentials.revoke_self", "POST", re.compile(r"/credentials/revoke-self")),
)

_ALLOWED: dict[str, frozenset[Outcome]] = {
    "orders.retrieve": frozenset({(404, "not_found")}),
    "orders.create": frozenset({(400, "idempotency_key_missing")}),
    "customer_tokens.create": frozenset({(400, "idempotency_key_missing")}),
    "credentials.acknowledge": frozenset({(404, "not_found")}),
}
"""The response of the endpoint itself to a generated request: there is no order, token or rotation of that name."""

_PLAIN = re.compile(r"(?:/[A-Za-z0-9._~!$&'()*+,=:@-]+)+")
_SHAPED = re.compile(r"_(?:pub|prv|cat|svc)_(?:sbx|prd|all)_[0-9A-Za-z]{17,}")
_KEY = re.compile(r"kv_(pub|prv)_(sbx|prd)_[0-9A-Za-z]{65}")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ENVIRONMENTS = {"sbx": "sandbox", "prd": "production"}


def predict(sent: Sent, known: Mapping[str, Known]) -> frozenset[Outcome]:
    """Return the outcomes that the contract allows: one, except where it allows several."""
    try:
        target = sent.target.decode("utf-8")
    except UnicodeDecodeError:
        return frozenset({BARE})
    # A fragment concerns only the client, and the server drops it.
    path, _, query = target.partition("#")[0].partition("?")
    if _is_exposed(f"{path}?{query}"):
        return _is(400, "credential_in_url")
    decoded = unquote_to_bytes(path).decode("latin-1")
    environment = next((name for name in ("sandbox", "production") if f"{decoded}/".startswith(f"/{name}/")), None)
    if environment is not None:
        if not f"{path}/".startswith(f"/{environment}/"):
            return _is(404, "endpoint_unknown")
        return _integration(sent, environment, path.removeprefix(f"/{environment}"), known)
    if decoded == "/v1/credentials" and _is_plain(path):
        return _is(401, "service_token_invalid")
    return _is(404, "not_found")


def _integration(sent: Sent, environment: str, path: str, known: Mapping[str, Known]) -> frozenset[Outcome]:
    """The table of verdicts, from `credential_ambiguous` on."""
    method = sent.method.decode()
    at_path = [rule for rule in RULES if _is_plain(path) and rule.path.fullmatch(path)]
    rule = next((rule for rule in at_path if rule.method == method), None)
    keys, bearers = sent.values(b"x-api-key"), sent.values(b"authorization")
    if any(len(values) > 1 or any("," in value for value in values) for values in (keys, bearers)):
        return _is(400, "credential_ambiguous")
    # "Unauthenticated requests to an unknown path answer `endpoint_unknown` too", and so for the row's other half.
    missed = _is(405, "method_not_allowed") if at_path else _is(404, "endpoint_unknown")
    if not keys:
        return missed if rule is None else _is(401, "credential_missing")
    denied = _judge_key(keys[0], environment, known)
    if denied == (401, "key_revoked") and rule is not None and rule.name == "credentials.revoke_self":
        # Repeatable: the revoked key may repeat the request a few times a minute.
        return _is(*denied) | _is(202, "") | _is(429, "rate_limited")
    if denied is not None:
        return _is(*denied)
    if rule is None:
        return missed
    kind = known[keys[0]].kind
    if kind != rule.kind:
        return _is(403, "method_not_supported")
    if bearers and rule.bearer == "none":
        return _is(401, "bearer_not_supported")
    if kind == "private" and sent.values(b"origin"):
        return _is(403, "private_key_in_browser")
    if rule.bearer == "required" and not bearers:
        return _is(401, "customer_token_missing")
    if bearers:
        return _is(401, "customer_token_invalid")  # no token that is sent here was ever issued
    return _ALLOWED.get(rule.name, frozenset({SERVED}))


def _judge_key(text: str, environment: str, known: Mapping[str, Known]) -> Outcome | None:
    match = _KEY.fullmatch(text)
    if match is None or _checksum(text[:-6]) != text[-6:]:
        return 401, "credential_invalid"
    if _ENVIRONMENTS[match[2]] != environment:
        return 401, "environment_mismatch"
    key = known.get(text)
    if key is None:
        return 401, "credential_invalid"
    return {"good": None, "revoked": (401, "key_revoked"), "suspended": (403, "merchant_suspended")}[key.standing]


def _checksum(head: str) -> str:
    number, digits = zlib.crc32(head.encode("ascii")), ""
    for _ in range(6):
        number, digit = divmod(number, 62)
        digits = _DIGITS[digit] + digits
    return digits


def with_checksum(head: str) -> str:
    return head + _checksum(head)


def _is_plain(path: str) -> bool:
    return _PLAIN.fullmatch(path) is not None and not {".", ".."} & set(path.split("/"))


def _is_exposed(url: str) -> bool:
    for _ in range(4):
        if _SHAPED.search(url):
            return True
        url = unquote(url)
    return False


def _is(status: int, code: str) -> frozenset[Outcome]:
    return frozenset({(status, code)})

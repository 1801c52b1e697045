"""Write clients/conformance.json: the cases that the Python, Go and TypeScript clients run.

    python -m tests.clients.conformance

Decisions, problem documents and webhook signatures come from the service's own code. clients/README.md describes the
format. test_conformance.py compares the file with this code, and its decisions with those of a whole service.
"""

import base64
import json
from datetime import UTC, datetime
from typing import Any

from keyvault.access.judgement import deny_stale
from keyvault.domain.errors import ErrorCode as Code
from keyvault.domain.plaintext import Plaintext
from keyvault.hotpath.messages.rendering import decision
from keyvault.wire.problems import CONTENT_TYPE, problem
from keyvault.wire.webhooks import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, TOLERANCE, sign
from tests.clients.service_answers import KEYS, REQUEST_ID, decide
from tests.environment import ROOT

PATH = ROOT / "clients" / "conformance.json"

Json = dict[str, Any]
Header = tuple[str, str]

ORDERS, ORDER, CONFIGURATION = "/merchants/orders", "/merchants/orders/ord_1", "/client/configuration"
AGENT = "shop/1"
KEY: Header = ("X-Api-Key", KEYS["private_sandbox"])
BEARER: Header = ("Authorization", f"Bearer {KEYS['customer_token']}")


def conformance() -> Json:
    return {
        "format": 1,
        "keys": KEYS,
        "verdicts": [*decided(), unnamed(), *undecided()],
        "requests": requests(),
        "refusals": refusals(),
        "webhooks": webhooks(),
        "sealed": sealed(),
    }


def to_text() -> str:
    """Return the file's text, with one case on each line, so that a change is readable."""
    parts = []
    for name, value in conformance().items():
        if isinstance(value, list):
            lines = ",\n".join(f"  {json.dumps(case)}" for case in value)
            parts.append(f" {json.dumps(name)}: [\n{lines}\n ]")
        else:
            parts.append(
                f" {json.dumps(name)}: {json.dumps(value, indent=1)}".replace("\n ", "\n  ").replace("\n}", "\n }")
            )
    return "{\n" + ",\n".join(parts) + "\n}\n"


# --- verdicts: a verifier and its middleware ------------------------------------------------------------------------


def decided() -> list[Json]:
    """Cases in which the service reaches a decision."""
    return [
        _decided("a private key is allowed", "POST", ORDERS, KEY),
        _decided("a customer is identified", "GET", ORDER, KEY, BEARER),
        _decided(
            "the scheme of Authorization has any case",
            "GET",
            ORDER,
            KEY,
            ("Authorization", f"bEARER {KEYS['customer_token']}"),
        ),
        _decided(
            "a public key is allowed, and its origin is sent",
            "GET",
            CONFIGURATION,
            ("X-Api-Key", KEYS["public_sandbox"]),
            ("Origin", "https://shop.example"),
        ),
        _decided("the query is sent with the path, as received", "GET", f"{ORDER}?a=1&b=%2f", KEY),
        _decided("no key", "POST", ORDERS),
        _decided("an empty key", "POST", ORDERS, ("X-Api-Key", "")),
        _decided("a malformed key", "POST", ORDERS, ("X-Api-Key", "nonsense")),
        _decided("an unknown key", "POST", ORDERS, ("X-Api-Key", KEYS["unknown_sandbox"])),
        _decided("a Bearer does not replace the key", "GET", ORDER, BEARER),
        _decided("the key of the other environment", "POST", ORDERS, ("X-Api-Key", KEYS["private_production"])),
        _decided("a revoked key", "POST", ORDERS, ("X-Api-Key", KEYS["revoked_sandbox"])),
        _decided("a suspended key", "POST", ORDERS, ("X-Api-Key", KEYS["suspended_sandbox"])),
        _decided("a key of another network", "POST", ORDERS, ("X-Api-Key", KEYS["restricted_sandbox"])),
        _decided("the key twice", "POST", ORDERS, KEY, KEY),
        _decided("a key in the URL", "POST", f"{ORDERS}?api_key={KEYS['private_sandbox']}", KEY),
        _decided("a public key on a private endpoint", "POST", ORDERS, ("X-Api-Key", KEYS["public_sandbox"])),
        _decided("a private key with an Origin", "POST", ORDERS, KEY, ("Origin", "https://shop.example")),
        _decided("a Bearer on an endpoint without one", "POST", ORDERS, KEY, BEARER),
        _decided("a missing Bearer", "GET", "/customers/me", KEY),
        _decided("another scheme proves no customer", "GET", ORDER, KEY, ("Authorization", "Basic eDp5")),
        _decided("two Bearers", "GET", ORDER, KEY, BEARER, BEARER),
        _decided("an unknown path", "GET", "/nowhere", KEY),
        _decided("an ambiguous path", "GET", "/merchants//orders", KEY),
        _decided("a known path with another method", "DELETE", ORDERS, KEY),
        _decided("an exhausted limit", "POST", ORDERS, KEY, is_exhausted=True),
        _answered(
            "a verifier without current data",
            decision(deny_stale("The data about the key may be outdated."), REQUEST_ID),
        ),
    ]


def _question(method: str, path: str, headers: tuple[Header, ...]) -> Json:
    """Return the verify request that a verifier makes of an incoming request."""
    question: Json = {"key": None, "environment": "sandbox", "method": method, "path": path}
    question |= {"client_ip": "127.0.0.1", "user_agent": AGENT}
    for name, value in headers:
        match name:
            case "X-Api-Key":
                question["key"] = value if question["key"] is None else f"{question['key']},{value}"
            case "Authorization":
                scheme, _, token = value.partition(" ")
                token = token if scheme.lower() == "bearer" else ""
                before = question.get("customer_token")
                question["customer_token"] = token if before is None else f"{before},{value}"
            case "Origin":
                question["origin"] = value
    return question


def _decided(name: str, method: str, path: str, *headers: Header, is_exhausted: bool = False) -> Json:
    question = _question(method, path, headers)
    body = decide(question, is_exhausted=is_exhausted)
    return _answered(name, body, method, path, headers)


def _answered(
    name: str, body: Json, method: str = "POST", path: str = ORDERS, headers: tuple[Header, ...] = (KEY,)
) -> Json:
    expect: Json = {"allowed": body["allowed"], "headers": dict(body["headers"])}
    if body["allowed"]:
        members = ("key_id", "credential_id", "kind", "merchant_id", "environment", "customer_id")
        expect["identity"] = {member: body[member] for member in members}
    else:
        expect |= {"status": body["status"], "problem": body["problem"]}
        expect["headers"] |= {"Content-Type": CONTENT_TYPE, "X-Request-Id": body["request_id"]}
    return {
        "name": name,
        "incoming": _incoming(method, path, headers),
        "asked": _question(method, path, headers),
        "reply": {"status": 200, "headers": {"Content-Type": "application/json"}, "body": body},
        "expect": expect,
    }


def _incoming(method: str, path: str, headers: tuple[Header, ...]) -> Json:
    return {"method": method, "path": path, "headers": [["User-Agent", AGENT], *map(list, headers)]}


def unnamed() -> Json:
    """Return a refusal whose request_id cannot be a header: it is refused without that header."""
    body = decide(_question("POST", ORDERS, ())) | {"request_id": "r1\r\nX-Injected: 1"}
    case = _answered("a refusal with line breaks in its request_id", body, headers=())
    del case["expect"]["headers"]["X-Request-Id"]
    case["expect"]["absent_headers"] = ["X-Request-Id", "X-Injected"]
    return case


def undecided() -> list[Json]:
    """Cases in which the verifier gets no decision that it may rely on: the client gets 503, never a grant."""
    allowed = decide(_question("POST", ORDERS, (KEY,)))
    denied = decide(_question("POST", ORDERS, ()))
    json_type = {"Content-Type": "application/json"}
    busy = problem(Code.DEPENDENCY_UNAVAILABLE, "The server is at capacity.", REQUEST_ID, retry_after_seconds=7)
    token, permission = (
        problem(code, "Send another token.", REQUEST_ID)
        for code in (Code.SERVICE_TOKEN_INVALID, Code.PERMISSION_MISSING)
    )
    without = [
        (f"an allowed decision without {member}", {key: value for key, value in allowed.items() if key != member})
        for member in ("key_id", "credential_id", "merchant_id", "environment", "kind")
    ]
    unreliable = [
        ("a decision that says true as text", allowed | {"allowed": "true"}),
        ("an allowed decision with the status of a refusal", allowed | {"status": 401}),
        ("an allowed decision for the other environment", allowed | {"environment": "production"}),
        ("an allowed decision without a key id", allowed | {"key_id": ""}),
        ("a refusal with the status of a success", denied | {"status": 200}),
        ("a refusal without a problem document", {key: value for key, value in denied.items() if key != "problem"}),
        ("a refusal without a code", {key: value for key, value in denied.items() if key != "code"}),
        ("a body that is no object", [allowed]),
        *(
            (f"an allowed decision with {name}", allowed | {"headers": headers})
            for name, headers in (
                ("line breaks in a header", {"RateLimit": "r=1\r\nX-Injected: 1"}),
                ("a header outside of ASCII", {"RateLimit": "r=\N{EURO SIGN}"}),
                ("a header that is no text", {"RateLimit": 1}),
                ("a header that is too long", {"RateLimit": "r" * 4097}),
                ("a header name that is none", {"Rate Limit": "r=1"}),
            )
        ),
        ("a refusal with line breaks in a header", denied | {"headers": {"Retry-After": "1\r\nX-Injected: 1"}}),
        *without,
    ]
    return [
        *(_undecided(name, {"status": 200, "headers": json_type, "body": body}) for name, body in unreliable),
        _undecided("a body that is no JSON", {"status": 200, "headers": json_type, "text": '{"allowed": true'}),
        _undecided("an empty body", {"status": 200, "headers": json_type, "text": ""}),
        _undecided("an allowed decision with another status", {"status": 201, "headers": json_type, "body": allowed}),
        _undecided("a server error", {"status": 500, "headers": {"Content-Type": "text/html"}, "text": "<h1>no</h1>"}),
        _undecided("a refused service token", _problem_reply(token)),
        _undecided("a service token without the permission", _problem_reply(permission)),
        _undecided("a service at capacity", _problem_reply(busy), retry_after="7"),
        *(
            _undecided(
                f"a request that the service cannot judge: {code}", _problem_reply(problem(code, "No.", REQUEST_ID))
            )
            | {"expect": UNREADABLE}
            for code in (Code.REQUEST_INVALID, Code.PAYLOAD_TOO_LARGE)
        ),
        _undecided("a redirect", {"status": 307, "headers": {"Location": "{other}/v1/keys/verify"}, "text": ""}),
        _undecided("no connection", {"fault": "refuse"}),
        _undecided("a connection that ends without a reply", {"fault": "cut"}),
        _undecided("a connection that ends inside the body", {"fault": "cut_body", "status": 200, "body": allowed}),
        _undecided("no reply before the deadline", {"fault": "silent"}, deadline_seconds=1.5),
        _undecided(
            "a body that is not complete before the deadline",
            {"fault": "slow_body", "status": 200, "body": allowed},
            deadline_seconds=1.5,
        ),
    ]


UNREADABLE: Json = {
    "allowed": False,
    "status": 400,
    "headers": {"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"},
    "absent_headers": ["WWW-Authenticate", "Retry-After"],
    "problem": {"type": "urn:keyvault:problem:request_invalid", "status": 400, "code": "request_invalid"},
}
"""The client sent a method, a path or a header that cannot be part of a question."""


def _problem_reply(found: Any) -> Json:
    return {
        "status": found.status,
        "headers": {"Content-Type": CONTENT_TYPE, **found.headers},
        "body": dict(found.body),
    }


def _undecided(name: str, reply: Json, *, retry_after: str = "1", deadline_seconds: float | None = None) -> Json:
    case = {
        "name": name,
        "incoming": _incoming("POST", ORDERS, (KEY,)),
        "asked": _question("POST", ORDERS, (KEY,)),
        "reply": reply,
        "expect": {
            "allowed": False,
            "status": 503,
            "headers": {"Content-Type": CONTENT_TYPE, "Retry-After": retry_after, "Cache-Control": "no-store"},
            "absent_headers": ["WWW-Authenticate", "Location"],
            "problem": {
                "type": "urn:keyvault:problem:dependency_unavailable",
                "status": 503,
                "code": "dependency_unavailable",
            },
        },
    }
    return case if deadline_seconds is None else {**case, "deadline_seconds": deadline_seconds}


# --- requests: a merchant's backend -------------------------------------------------------------------------------

BASE_SECONDS, CAP_SECONDS = 0.5, 8.0
"""Full jitter: the wait before retry n (from 1) is random between 0 and min(cap, base * 2 ** (n - 1))."""

ORDER_BODY = '{"amount_minor": 1250,  "currency": "EUR"}'
"""A text that no JSON library writes in this form, so that rewritten bytes are noticed."""

CREATED: Json = {"status": 201, "headers": {"Content-Type": "application/json"}, "body": {"order_token": "ord_1"}}
FOUND: Json = {**CREATED, "status": 200}


def _refusal(code: Code, *, retry_after: str | None = None) -> Json:
    reply = _problem_reply(problem(code, "The detail.", REQUEST_ID))
    headers = {name: value for name, value in reply["headers"].items() if name != "Retry-After"}
    return {**reply, "headers": headers if retry_after is None else {**headers, "Retry-After": retry_after}}


def _status(status: int, **headers: str) -> Json:
    return {"status": status, "headers": {"Content-Type": "text/html", **headers}, "text": "<h1>a proxy</h1>"}


def _wait(number: int, at_least: float = 0.0) -> Json:
    backoff = min(CAP_SECONDS, BASE_SECONDS * 2 ** (number - 1))
    return {"at_least": at_least, "at_most": at_least + backoff}


def _error(code: Code, **more: Any) -> Json:
    """Return the expected error. `code`, `check` and `request_id` are those of the problem document."""
    body = problem(code, "", REQUEST_ID).body
    members = {"status": body["status"], "code": code.value, "check": body.get("check"), "request_id": REQUEST_ID}
    return {"error": members | more}


def _call(
    *replies: Json, expect: Json, waits: list[Json] | None = None, attempts: int | None = None, **more: Any
) -> Json:
    """Return one call. `attempts`: how many of the replies are fetched; all of them by default."""
    return {
        "method": "POST",
        "path": ORDERS,
        "body": ORDER_BODY,
        "replies": list(replies),
        "expect": {
            "attempts": len(replies) if attempts is None else attempts,
            "waits": [_wait(number) for number in range(1, len(replies))] if waits is None else waits,
            **expect,
        },
        **more,
    }


def _get(*replies: Json, expect: Json, **more: Any) -> Json:
    return {**_call(*replies, expect=expect, **more), "method": "GET", "path": ORDER, "body": None}


def _case(name: str, *calls: Json, **client: Any) -> Json:
    defaults = {"base_path": "/sandbox", "environment": "sandbox", "keys": ["private_sandbox"]}
    settings = {"max_attempts": 4, "retry_budget": 10, "deadline_seconds": 60}
    return {"name": name, "client": {**defaults, **settings, **client}, "calls": list(calls)}


def requests() -> list[Json]:
    """Cases of one client: its calls in order, each with the server's replies."""
    created, found = (
        {"status": 201, "json": {"order_token": "ord_1"}},
        {"status": 200, "json": {"order_token": "ord_1"}},
    )
    retried = [
        *((f"a {status} of a proxy is retried", _status(status)) for status in (408, 429, 502, 503, 504)),
        ("a rate limit is retried", _refusal(Code.RATE_LIMITED)),
        ("a stale verifier is retried", _refusal(Code.VERIFIER_STALE)),
        ("an unavailable dependency is retried", _refusal(Code.DEPENDENCY_UNAVAILABLE)),
        ("a request in progress is retried", _refusal(Code.IDEMPOTENCY_IN_PROGRESS)),
        ("a request timeout is retried", _refusal(Code.REQUEST_TIMEOUT)),
        ("a connection that ends without a reply is retried", {"fault": "cut"}),
        ("a connection that ends inside the body is retried", {"fault": "cut_body", "status": 201, "body": {"a": 1}}),
    ]
    final = [
        Code.CREDENTIAL_MISSING,
        Code.ENVIRONMENT_MISMATCH,
        Code.MERCHANT_SUSPENDED,
        Code.METHOD_NOT_SUPPORTED,
        Code.IP_NOT_ALLOWED,
        Code.CUSTOMER_TOKEN_EXPIRED,
        Code.NOT_FOUND,
        Code.REQUEST_INVALID,
        Code.STATE_CONFLICT,
        Code.IDEMPOTENCY_BODY_MISMATCH,
        Code.INTERNAL_ERROR,
    ]
    limited = _error(Code.RATE_LIMITED)
    unreadable = {"error": {"status": 500, "code": None, "check": None, "request_id": None}}
    return [
        _case("a success needs one attempt", _call(CREATED, expect=created)),
        *(
            _case(f"{name}, with the same Idempotency-Key and bytes", _call(reply, CREATED, expect=created))
            for name, reply in retried
        ),
        *(_case(f"{name}, for a GET", _get(reply, FOUND, expect=found)) for name, reply in retried[:2]),
        _case(
            "a caller's own Idempotency-Key is sent",
            _call(_status(503), CREATED, expect=created, idempotency_key="order-4711"),
        ),
        _case("two calls have two Idempotency-Keys", _call(CREATED, expect=created), _call(CREATED, expect=created)),
        _case(
            "Retry-After in seconds is the least wait",
            _call(_refusal(Code.RATE_LIMITED, retry_after="3"), CREATED, expect=created, waits=[_wait(1, 3)]),
        ),
        _case(
            "an invalid Retry-After is ignored",
            _call(_status(503, **{"Retry-After": "soon"}), CREATED, expect=created),
        ),
        _case(
            "a Retry-After in the past is no wait",
            _call(_status(503, **{"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}), CREATED, expect=created),
        ),
        _case(
            "a Retry-After beyond the deadline is not waited for",
            _call(
                _refusal(Code.RATE_LIMITED, retry_after="3600"),
                expect=_error(Code.RATE_LIMITED, retry_after_seconds=3600),
            ),
            deadline_seconds=30,
        ),
        _case(
            "a date beyond the deadline is not waited for",
            _call(
                _status(503, **{"Retry-After": "Fri, 01 Jan 2100 00:00:00 GMT"}),
                expect={"error": {"status": 503, "code": None, "check": None, "request_id": None}},
            ),
            deadline_seconds=30,
        ),
        _case(
            "attempts are bounded, and waits double",
            _call(*[_refusal(Code.RATE_LIMITED)] * 4, expect=limited),
        ),
        _case(
            "a budget bounds the retries of all calls",
            _call(
                _refusal(Code.RATE_LIMITED), _refusal(Code.RATE_LIMITED), _refusal(Code.RATE_LIMITED), expect=limited
            ),
            _call(_refusal(Code.RATE_LIMITED), expect=limited),
            retry_budget=2,
        ),
        _case(
            "ten successes earn one retry",
            _call(_status(503), CREATED, expect=created),
            _call(_refusal(Code.RATE_LIMITED), expect=limited),
            *[_call(CREATED, expect=created)] * 10,
            _call(_status(503), CREATED, expect=created),
            retry_budget=1,
        ),
        *(_case(f"{code} is final", _call(_refusal(code), expect=_error(code))) for code in final),
        _case("a server error without a problem document is final", _call(_status(500), expect=unreadable)),
        _case(
            "a success without JSON is an error",
            _call(
                {"status": 201, "headers": {"Content-Type": "application/json"}, "text": "{"},
                expect={"error": {"status": 201}},
            ),
        ),
        _case(
            "a problem document of wrong types is an error without them",
            _call(
                {
                    "status": 403,
                    "headers": {"Content-Type": CONTENT_TYPE},
                    "body": {"code": 7, "check": "x", "request_id": []},
                },
                expect={"error": {"status": 403, "code": None, "check": None, "request_id": None}},
            ),
        ),
        _case(
            "a code with line breaks is an error with it, and with a text of one line",
            _call(
                {
                    "status": 403,
                    "headers": {"Content-Type": CONTENT_TYPE},
                    "body": {"code": "no\nWARNING\u0085\u2028\N{EURO SIGN}\x7f", "request_id": "r1"},
                },
                expect={
                    "error": {
                        "status": 403,
                        "code": "no\nWARNING\u0085\u2028\N{EURO SIGN}\x7f",
                        "request_id": "r1",
                    }
                },
            ),
        ),
        _case(
            "a refused key is reloaded once, and the replacement is sent with the same Idempotency-Key and bytes",
            _call(_refusal(Code.KEY_REVOKED), CREATED, expect=created, waits=[]),
            keys=["private_sandbox", "private_sandbox_2"],
        ),
        _case(
            "a refused replacement is final",
            _call(
                _refusal(Code.KEY_REVOKED),
                _refusal(Code.CREDENTIAL_INVALID),
                expect=_error(Code.CREDENTIAL_INVALID),
                waits=[],
            ),
            keys=["private_sandbox", "private_sandbox_2"],
        ),
        _case(
            "a refused key without a replacement is final",
            _call(_refusal(Code.CREDENTIAL_INVALID), expect=_error(Code.CREDENTIAL_INVALID)),
        ),
        _case(
            "no content is no body",
            _call({"status": 204, "headers": {}, "text": ""}, expect={"status": 204, "json": None}),
        ),
        *(
            _case(
                f"a {status} is not followed",
                _call(
                    {"status": status, "headers": {"Location": location}, "text": ""},
                    expect={"error": {"status": status}, "requests_to_other": 0},
                ),
            )
            for status in (301, 302, 303, 307, 308)
            for location in ("{other}/sandbox/merchants/orders", "{self}/sandbox/merchants/orders")
        ),
        _case(
            "a customer access token is sent as Bearer",
            _get(FOUND, expect={**found, "authorization": "Bearer {customer_token}"}, customer_token="customer_token"),
        ),
        _case(
            "a public key opens the client configuration",
            {**_get(FOUND, expect=found), "path": CONFIGURATION},
            keys=["public_sandbox"],
        ),
    ]


# --- refusals: nothing is sent -----------------------------------------------------------------------------------


def refusals() -> list[Json]:
    """Cases in which a client refuses before it opens a connection."""
    insecure = (
        "http://api.example/sandbox",
        "http://10.0.0.1/sandbox",
        "http://localhost.example/sandbox",
        "http://127.0.0.1.example/sandbox",
        "http://127.0.0.1@api.example/sandbox",
        "http://user@127.0.0.1/sandbox",
        "https://user:password@api.example/sandbox",
        "https://api.example/sandbox?key=1",
        "http://[::2]/sandbox",
        "ftp://127.0.0.1/sandbox",
        "//127.0.0.1/sandbox",
        "127.0.0.1/sandbox",
        "",
    )
    sandbox, production = "https://api.example/sandbox", "https://api.example/production"
    return [
        *(_refused(f"base URL {url!r}", "base_url", base_url=url) for url in insecure),
        *(
            _refused(f"verifier at {url!r}", "base_url", client="verifier", base_url=url, key="service_token")
            for url in insecure
        ),
        _refused("a sandbox key for production", "environment", base_url=production, environment="production"),
        _refused("a sandbox key on the base URL of production", "environment", base_url=production),
        _refused("a production key for the sandbox", "environment", base_url=sandbox, key="private_production"),
        _refused(
            "a production key on the base URL of the sandbox",
            "environment",
            base_url=sandbox,
            environment="production",
            key="private_production",
        ),
        _refused("a customer access token as the key", "key", key="customer_token"),
        _refused("a service token as the key", "key", key="service_token"),
        _refused("a text that is no key", "key", key_text="nonsense"),
        _refused("a key with a line break inside", "key", key_text=f"{KEYS['private_sandbox']}\r\nX-Evil: 1"),
        _refused("an API key as the service token", "key", client="verifier", key="private_sandbox"),
        _refused("a private key as the customer access token", "bearer", customer_token="private_sandbox"),
        _refused("a service token as the customer access token", "bearer", customer_token="service_token"),
        _refused("a public key on a private endpoint", "kind", key="public_sandbox"),
        *(
            _refused(f"path {path!r}", "path", path=path)
            for path in (
                "",
                "merchants/orders",
                "//evil.example/x",
                "https://evil.example/x",
                "@evil.example/x",
                "/a\r\nb",
                "/../x",
                "/a/%2e%2E/b",
                "/a\\b",
            )
        ),
        _refused("a key in the path", "path", path=f"/merchants/orders?key={KEYS['private_sandbox']}"),
        _refused("an Idempotency-Key with a line break", "idempotency_key", idempotency_key="a\nb"),
        _refused("an Idempotency-Key that is too long", "idempotency_key", idempotency_key="a" * 256),
    ]


def _refused(name: str, refusal: str, **changes: Any) -> Json:
    defaults = {
        "client": "merchant",
        "base_url": "https://api.example/sandbox",
        "environment": "sandbox",
        "key": "private_sandbox",
        "method": "POST",
        "path": ORDERS,
    }
    return {"name": name, **defaults, **changes, "refusal": refusal}


# --- webhooks ---------------------------------------------------------------------------------------------------

SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
NEXT_SECRET = "whsec_ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA="
MESSAGE_ID = "ntc_4Zr1mX0bQk8sWd2YcVfA"
AT = datetime(2026, 11, 26, 12, tzinfo=UTC)
BODY = (
    '{"data":{"account":{"environment":"sandbox","merchant_id":"acme"},"credential_id":"crd_1",'
    '"replacement_key_id":"Ab1Cd2Ef3Gh4Ij5K","rotation_id":"rot_1","subject":"rot_1"},'
    '"timestamp":"2026-11-26T12:00:00.000000Z","type":"rotation.replacement_available"}'
)


def webhooks() -> list[Json]:
    now = int(AT.timestamp())
    limit = int(TOLERANCE.total_seconds())
    good, both = _signed(SECRET), _signed(SECRET, NEXT_SECRET)
    signature = good[SIGNATURE_HEADER]
    return [
        _message("a message is verified"),
        _message("header names have any case", {name.title(): value for name, value in good.items()}),
        _message(
            "a body outside of ASCII",
            _signed(SECRET, body='{"a": "\u00fc\u2713\U0001f511"}'),
            body='{"a": "\u00fc\u2713\U0001f511"}',
        ),
        _message("an empty body", _signed(SECRET, body=""), body=""),
        _message("both secrets sign during a rotation, and the receiver has the old one", both),
        _message("both secrets sign during a rotation, and the receiver has the new one", both, secrets=[NEXT_SECRET]),
        _message("the receiver has both secrets, and one signs", _signed(NEXT_SECRET), secrets=[SECRET, NEXT_SECRET]),
        _message("a signature of another version is skipped", {**good, SIGNATURE_HEADER: f"v2,AAAA {signature}"}),
        *(
            _message(f"{shift} s from now", now=now + shift, error=None if abs(shift) <= limit else "signature")
            for shift in (-limit - 1, -limit, limit, limit + 1)
        ),
        _message("another secret", secrets=[NEXT_SECRET], error="signature"),
        _message("a changed body", body=BODY.replace("acme", "acmf"), error="signature"),
        _message("a body with a line break at its end", body=BODY + "\n", error="signature"),
        _message("another id", {**good, ID_HEADER: "ntc_other"}, error="signature"),
        _message("another timestamp", {**good, TIMESTAMP_HEADER: str(now + 1)}, error="signature"),
        *(
            _message(f"no {name}", {other: value for other, value in good.items() if other != name}, error="signature")
            for name in good
        ),
        *(
            _message(f"timestamp {text!r}", {**good, TIMESTAMP_HEADER: text}, error="signature")
            for text in ("", f"+{now}", f"{now}.0", "1e9", f"0x{now:x}", "1" * 13, "-1")
        ),
        *(
            _message(f"signature {text!r}", {**good, SIGNATURE_HEADER: text}, error="signature")
            for text in (
                "v1,",
                "v1",
                signature.removeprefix("v1,"),
                signature.replace("v1,", "v2,"),
                signature[:-1],
                signature + "A",
                signature.lower(),
            )
        ),
        _message("no secret", secrets=[], error="secret"),
        *(
            _message(f"secret {text!r}", secrets=[text], error="secret")
            for text in ("", "whsec_", SECRET.removeprefix("whsec_"), "whsec_c2hvcnQ=", "whsec_!!!!", SECRET[:-1] + "*")
        ),
        _message("an invalid secret beside a valid one", secrets=[SECRET, "whsec_"], error="secret"),
    ]


def _signed(*secrets: str, body: str = BODY) -> dict[str, str]:
    return sign(map(Plaintext, secrets), MESSAGE_ID, AT, body.encode())


def _message(
    name: str,
    headers: dict[str, str] | None = None,
    *,
    secrets: list[str] | None = None,
    body: str = BODY,
    now: int | None = None,
    error: str | None = None,
) -> Json:
    return {
        "name": name,
        "secrets": [SECRET] if secrets is None else secrets,
        "headers": _signed(SECRET) if headers is None else headers,
        "body": body,
        "now": int(AT.timestamp()) if now is None else now,
        "expect": {"id": MESSAGE_ID} if error is None else {"error": error},
    }


# --- sealed keys ------------------------------------------------------------------------------------------------


RECIPIENT = {
    "private_key": base64.urlsafe_b64encode(bytes(range(32))).decode().rstrip("="),
    "public_key": "j0DFrbaPJWJK5bIU6nZ6bslNgp09e14a0bpvPiE4KF8",
}
SEALED = {
    "enc": "uBRcssx9vTF8DEnA74Iu7xTRMAp4Y3eEmIKraei16xA",
    "ciphertext": "61KWfYm8qBYBY3iiIGyGfWWhxbIU2YUBKt-gHK6LceZzUtaMTRVC0794aqjpHKHb9sGxjLgMkNDk9A7U"
    "CSywqrkQ0cU1UrJq0pK7RRTzMz9k8tIbJT7VXpkgfrs",
}
"""The replacement's key string, sealed to RECIPIENT by `seal_to`, which draws a new ephemeral key each time."""

LOW_ORDER = base64.urlsafe_b64encode(bytes(32)).decode().rstrip("=")


def sealed() -> list[Json]:
    enc, ciphertext = SEALED["enc"], SEALED["ciphertext"]
    other = base64.urlsafe_b64encode(bytes(range(1, 33))).decode().rstrip("=")
    return [
        _sealed("a sealed key is opened", expect={"text": KEYS["private_sandbox_2"]}),
        _sealed("another recipient", private_key=other),
        _sealed("a changed ciphertext", ciphertext=("A" if ciphertext[0] != "A" else "B") + ciphertext[1:]),
        _sealed("a shortened ciphertext", ciphertext=ciphertext[:-4]),
        _sealed("an empty ciphertext", ciphertext=""),
        _sealed("another ephemeral key", enc=RECIPIENT["public_key"]),
        _sealed("an ephemeral key of low order", enc=LOW_ORDER),
        _sealed("a shortened ephemeral key", enc=enc[:-4]),
        _sealed("text that is not base64url", ciphertext=f"{ciphertext}!"),
        _sealed("a private key of another length", private_key=RECIPIENT["private_key"][:-4]),
    ]


def _sealed(name: str, *, expect: Json | None = None, **changes: str) -> Json:
    given = {"private_key": RECIPIENT["private_key"], **SEALED, **changes}
    return {
        "name": name,
        "private_key": given["private_key"],
        "sealed": {"enc": given["enc"], "ciphertext": given["ciphertext"]},
        "expect": {"error": "sealed"} if expect is None else expect,
    }


if __name__ == "__main__":
    PATH.write_text(to_text())

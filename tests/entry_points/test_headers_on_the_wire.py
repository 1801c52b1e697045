"""How the real server reads the bytes of headers, paths and bodies, and what it answers.

A server joins, drops, renames and unescapes what a test client passes on unchanged.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from keyvault.access.permissions import SERVICE_PERMISSIONS
from keyvault.domain.environments import Environment
from keyvault.domain.keystring import StringScope
from keyvault.models import KeyUse, UsageReporter
from keyvault.services.merchants.merchants import find_account
from tests.factories import issue, make_merchant, make_token
from tests.fuzz import served
from tests.fuzz.drive import UNLIMITED
from tests.fuzz.served import serving

pytestmark = [pytest.mark.database, pytest.mark.django_db(transaction=True), pytest.mark.long]

ACKNOWLEDGE = b"/sandbox/credentials/acknowledge"
VERIFY = b"/v1/keys/verify"
JUDGED = (404, "not_found")
"""The answer to an accepted key that is not the replacement of a rotation."""
UNKNOWN = (404, "endpoint_unknown")
INVALID = (401, "credential_invalid")
MISSING = (401, "credential_missing")
AMBIGUOUS = (400, "credential_ambiguous")
TOO_LARGE = (431, "request_invalid")
CHUNKED = b"Transfer-Encoding: chunked"


def outcome(answer: served.Answer) -> tuple[int, str]:
    problem: dict[str, Any] = json.loads(answer.body)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["cache-control"] == "no-store"
    assert problem["request_id"] == answer.headers["x-request-id"]
    return answer.status, problem["code"]


def chunks(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


@dataclass(frozen=True)
class ServerWire:
    """The server of `make run` over the test's database, which receives hand-written bytes."""

    port: int
    key: bytes
    token: bytes

    def send(
        self,
        *lines: bytes,
        method: bytes = b"POST",
        path: bytes = ACKNOWLEDGE,
        host: bytes = b"127.0.0.1",
        body: bytes | None = None,
    ) -> served.Answer:
        """Send the head, and then `body` unchanged; without a body, Content-Length is 0."""
        head = [b"%b %b HTTP/1.1" % (method, path), b"Host: " + host, b"Connection: close", *lines]
        if body is None:
            head.append(b"Content-Length: 0")
        wire = served.Wire(self.port)
        try:
            return wire.send(method, b"\r\n".join([*head, b"", b""]) + (body or b""))
        finally:
            wire.close()

    def verify(self, *lines: bytes, body: bytes) -> served.Answer:
        authorization = b"Authorization: Bearer " + self.token
        return self.send(authorization, b"Content-Type: application/json", *lines, path=VERIFY, body=body)


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[ServerWire]:
    make_merchant("acme")
    _, key = issue(find_account("acme", Environment.SANDBOX))
    _, token = make_token(*SERVICE_PERMISSIONS, scope=StringScope.ALL)
    with serving(tmp_path, **UNLIMITED) as port:
        yield ServerWire(port, key.reveal().encode(), token.reveal().encode())
    logged = (tmp_path / "server.log").read_text()
    assert key.reveal() not in logged
    assert token.reveal() not in logged
    assert '"ERROR"' not in logged
    assert "Traceback" not in logged


def credential_headers_get_the_verdict_of_the_contract(wire: ServerWire) -> None:
    """Guarantee: no spelling of a header lets a second or malformed credential through."""
    key, bearer = b"X-Api-Key: " + wire.key, b"Authorization: Bearer x"
    for lines, expected in (
        ((key,), JUDGED),
        ((key.replace(b"X-Api-Key", b"x-aPI-kEY"),), JUDGED),
        ((b"X-Api-Key: \t " + wire.key + b" \t",), JUDGED),
        ((), MISSING),
        ((bearer,), MISSING),
        ((b"X-Service-Token: " + wire.key,), MISSING),
        ((key, bearer), (401, "bearer_not_supported")),
        # Twice: a good key first, last, and repeated.
        ((key, key), AMBIGUOUS),
        ((key, b"X-Api-Key: bad"), AMBIGUOUS),
        ((b"X-Api-Key: bad", key), AMBIGUOUS),
        ((b"X-Api-Key:", key), AMBIGUOUS),
        ((key, b"x-api-key:"), AMBIGUOUS),
        ((b"X-Api-Key: \xc3\xa9", key), AMBIGUOUS),
        ((key + b",",), AMBIGUOUS),
        ((key, bearer, bearer), AMBIGUOUS),
        ((key, b"Authorization:", b"Authorization:"), AMBIGUOUS),
        ((key, b"Authorization: Bearer x, y"), AMBIGUOUS),
        ((bearer, bearer), AMBIGUOUS),
        # An empty or non-ASCII value is malformed, not missing.
        ((b"X-Api-Key:",), INVALID),
        ((b"X-Api-Key:   ",), INVALID),
        ((b"X-Api-Key: \xc3\xa9",), INVALID),
        ((b"X-Api-Key: \xff",), INVALID),
        ((key + b"\xe9",), INVALID),
        ((b"\xe9".join((b"X-Api-Key: ", wire.key)),), INVALID),
        ((b"X-Api-Key: " + wire.token,), INVALID),
        ((b"X-Api-Key: " + b"a" * 16_000,), INVALID),
        ((b"X-Api-Key: " + b"a" * 60_000,), TOO_LARGE),
        ((key, *(b"X-%d: %b" % (number, b"a" * 4_000) for number in range(5))), TOO_LARGE),
        # A name with an underscore is another header, in either order.
        ((b"X_Api_Key: " + wire.key,), MISSING),
        ((b"X-Api_Key: " + wire.key,), MISSING),
        ((b"X_Api_Key: bad", key), JUDGED),
        ((key, b"X_Api_Key: bad"), JUDGED),
        ((b"X_Api_Key: " + wire.key, b"X-Api-Key: bad"), INVALID),
        ((b"X-Api-Key: bad", b"X_Api_Key: " + wire.key), INVALID),
    ):
        answer = wire.send(*lines)
        assert outcome(answer) == expected, lines
        assert ("www-authenticate" in answer.headers) is (answer.status == 401)


def service_token_is_accepted_once_and_in_its_own_header(wire: ServerWire) -> None:
    good = b"Authorization: Bearer " + wire.token
    assert wire.send(good, method=b"GET", path=b"/v1/credentials").status == 200
    for lines in (
        (),
        (good, good),
        (good, b"Authorization: Bearer x"),
        (b"Authorization:", good),
        (good + b",",),
        (good + b"\xe9",),
        (b"Authorization: Bearer",),
        (b"X-Api-Key: " + wire.token,),
    ):
        answer = wire.send(*lines, method=b"GET", path=b"/v1/credentials")
        assert outcome(answer) == (401, "service_token_invalid"), lines
    # The token is judged before the form of an id.
    for path in (b"/v1/keys/short", b"/v1/rotations/rot_missing", b"/v1/revocations/x"):
        assert outcome(wire.send(method=b"GET", path=path)) == (401, "service_token_invalid"), path
        assert outcome(wire.send(good, method=b"GET", path=path)) == (404, "not_found"), path


def paths_match_in_their_canonical_spelling_alone(wire: ServerWire) -> None:
    """Guarantee: no second spelling of a path reaches an endpoint, so a gateway's rule applies to the same path."""
    key = b"X-Api-Key: " + wire.key
    assert outcome(wire.send(key)) == JUDGED
    for path in (
        b"/sandbox/credentials%2facknowledge",
        b"/sandbox/credentials%2Facknowledge",
        b"/sandbox%2fcredentials/acknowledge",
        b"/sandbox/credentials/%61cknowledge",
        b"/sandbox/credentials/acknowledge%20",
        b"/sandbox/credentials/acknowledge%00",
        b"/sandbox/credentials/acknowledge%ff",
        b"/sandbox/credentials/acknowledge%",
        b"/sandbox/credentials/acknowledge%23x",
        b"/sandbox/credentials/acknowledge%3fx",
        b"/sandbox/credentials/acknowledge\xc3\xa9",
        b"/sandbox/credentials/acknowledge;x",
        b"/sandbox/credentials;x/acknowledge",
        b"/sandbox/credentials/acknowledge/",
        b"/sandbox/credentials//acknowledge",
        b"/sandbox//credentials/acknowledge",
        b"/sandbox/./credentials/acknowledge",
        b"/sandbox/x/../credentials/acknowledge",
        b"/sandbox/../sandbox/credentials/acknowledge",
        b"/sandbox/%2e%2e/sandbox/credentials/acknowledge",
        b"/sandbox/Credentials/acknowledge",
        b"/sandbox/credentials/ACKNOWLEDGE",
        b"/%73andbox/credentials/acknowledge",
    ):
        assert outcome(wire.send(key, path=path)) == UNKNOWN, path
    for path in (
        b"//sandbox/credentials/acknowledge",
        b"/Sandbox/credentials/acknowledge",
        b"/./sandbox/x",
        b"*",
        b"x",
    ):
        assert outcome(wire.send(key, path=path)) == (404, "not_found"), path
    token = b"Authorization: Bearer " + wire.token
    for path in (b"/v1/%63redentials", b"/v1//credentials", b"/v1/credentials;x", b"/v1/x/../credentials", b"/%761/x"):
        assert outcome(wire.send(token, method=b"GET", path=path)) == (404, "not_found"), path
    # The server itself refuses what is not HTTP, without a body.
    for path in (b"/sandbox/credentials/acknowledge\xff", b"/sandbox/credentials/<acknowledge"):
        answer = wire.send(key, path=path)
        assert (answer.status, answer.body) == (400, b""), path


def key_in_a_path_is_refused_in_every_encoding(wire: ServerWire) -> None:
    """Guarantee: the response repeats no key from a URL and redirects to no URL with a key."""
    for path in (
        b"/sandbox/%2f" + wire.key,
        b"/sandbox/" + wire.key.replace(b"_", b"%5F"),
        b"/sandbox//" + wire.key.replace(b"_", b"%255f"),
        b"/v1/;" + wire.key,
        b"/admin/?k=" + wire.key,
        b"/admin/" + wire.key + b"/",
        b"/admin/login/?next=/admin/%3Fk=" + wire.key,
    ):
        answer = wire.send(method=b"GET", path=path)
        assert outcome(answer) == (400, "credential_in_url"), path
        assert wire.key not in answer.body
        assert "location" not in answer.headers


def bodies_are_read_completely_or_refused(wire: ServerWire) -> None:
    """Guarantee: no entry point acts on a truncated body, and credentials are judged before the body."""
    question = b'{"key": null, "environment": "sandbox", "endpoint": "credentials.acknowledge"}'
    length = b"Content-Length: %d" % len(question)
    for lines, body in (
        ((length,), question),
        ((CHUNKED,), chunks(question)),
        ((CHUNKED,), chunks(question[:5], question[5:])),
        # Transfer-Encoding takes precedence (RFC 9112, 6.3), and the server closes the connection.
        ((length, CHUNKED), chunks(question)),
    ):
        answer = wire.verify(*lines, body=body)
        assert (answer.status, json.loads(answer.body)["code"]) == (200, "credential_missing"), lines
    for lines, body, expected in (
        ((b"Content-Length: 65537",), b" " * 65_537, (413, "payload_too_large")),
        ((b"Content-Length: 99999999999",), b"", (413, "payload_too_large")),
        ((b"Expect: 100-continue", b"Content-Length: 99999999"), b"", (413, "payload_too_large")),
        ((CHUNKED,), chunks(b" " * 40_000, b" " * 40_000), (413, "payload_too_large")),
        ((b"Content-Length: 65536",), b" " * 65_536, (400, "request_invalid")),
        ((CHUNKED,), b"zz\r\n" + question, (400, "request_invalid")),
        ((b"Transfer-Encoding: gzip, chunked",), chunks(question), (400, "request_invalid")),
    ):
        assert outcome(wire.verify(*lines, body=body)) == expected, lines
    for line in (b"Content-Length: +3", b"Content-Length: 0x3", b"Content-Length: 3, 4", b"Transfer-Encoding: gzip"):
        answer = wire.verify(line, body=b"abc")
        assert (answer.status, answer.body) == (400, b""), line
    too_large = b"Content-Length: 70000"
    assert outcome(wire.send(too_large, path=VERIFY, body=b" " * 70_000)) == (401, "service_token_invalid")
    assert outcome(wire.send(too_large, body=b" " * 70_000)) == MISSING


def oversized_and_unusual_requests_are_refused_without_a_server_error(wire: ServerWire) -> None:
    key = b"X-Api-Key: " + wire.key
    for lines in (
        (b"X-Api-Key: " + b"a" * 1_000_000,),
        tuple(b"X-%d: a" % number for number in range(500)),
        (b"X-Api-Key: a\x00b",),
        (b"X-Api-Key : " + wire.key,),
        (b"no header",),
    ):
        assert 400 <= wire.send(*lines).status < 500, lines[0][:20]
    # With Host, Connection and Content-Length 100 headers, and then 101, which Granian refuses itself.
    assert outcome(wire.send(*(b"X-%d: a" % number for number in range(97)))) == MISSING
    answer = wire.send(*(b"X-%d: a" % number for number in range(98)))
    assert (answer.status, answer.body) == (431, b"")
    for method in (b"GET", b"PUT", b"OPTIONS", b"TRACE", b"BREW"):
        answer = wire.send(key, method=method)
        assert outcome(answer) == (405, "method_not_allowed"), method
        assert answer.headers["allow"] == "POST"
        assert wire.key not in answer.body  # TRACE would return it
    for path in (b"/sandbox/" + b"x" * 8184, b"/healthz?" + b"x" * 60_000, ACKNOWLEDGE + b"?" + b"a&" * 4_090):
        assert outcome(wire.send(key, method=b"GET", path=path)) == (414, "uri_too_long"), path[:20]
    assert outcome(wire.send(key, path=b"/sandbox/" + b"x" * 8183)) == UNKNOWN
    for content_type in (b"a;b*=utf-9''x", b"a;b*=idna''xn--a", b"a;b*=punycode''%ff", b"a;charset=rot13", b";"):
        assert outcome(wire.send(key, b"Content-Type: " + content_type)) == JUDGED, content_type
    head = wire.send(key, method=b"HEAD")
    assert (head.status, head.headers["allow"], head.body) == (405, "POST", b"")
    assert outcome(wire.send(key, method=b"TRACE", path=b"/sandbox/nowhere")) == UNKNOWN
    upgrade = (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: eA==", b"Sec-WebSocket-Version: 13")
    assert wire.send(*upgrade, method=b"GET", path=b"/healthz").status == 200
    for host in (b"evil.example", b"a b", b"127.0.0.1, 127.0.0.1", b"127.0.0.1\r\nHost: 127.0.0.1"):
        answer = wire.send(method=b"GET", path=b"/healthz", host=host)
        assert outcome(answer) == (400, "request_invalid"), host


def envoy_request_keeps_the_host_and_the_path_of_its_client(wire: ServerWire) -> None:
    """The server validates neither: these requests fail because the gateway's own token is missing."""
    for host in (b"shop.example", b"shop.example:8443", b"a b", b"127.0.0.1"):
        for path in (b"/v1/authorize/envoy/a", b"/v1/authorize/envoy/a//b/%2f/../c;x", b"/v1/authorize/envoy/"):
            assert outcome(wire.send(method=b"GET", path=path, host=host))[0] in {401, 404}, (host, path)
    # Another spelling of the path is not the Envoy entry point.
    for path in (b"/v1/authorize//envoy/a", b"/v1/authorize/%65nvoy/a"):
        assert outcome(wire.send(method=b"GET", path=path)) == (404, "not_found")
        assert outcome(wire.send(method=b"GET", path=path, host=b"shop.example")) == (400, "request_invalid")


CHECKS = (
    credential_headers_get_the_verdict_of_the_contract,
    service_token_is_accepted_once_and_in_its_own_header,
    paths_match_in_their_canonical_spelling_alone,
    key_in_a_path_is_refused_in_every_encoding,
    bodies_are_read_completely_or_refused,
    oversized_and_unusual_requests_are_refused_without_a_server_error,
    envoy_request_keeps_the_host_and_the_path_of_its_client,
)


def test_server_on_the_wire(wire: ServerWire, subtests: pytest.Subtests) -> None:
    """One server answers all checks, because its start takes most of the time."""
    for check in CHECKS:
        with subtests.test(check.__name__):
            check(wire)


def test_server_on_sigterm_writes_the_last_use_and_deregisters_its_reporter(tmp_path: Path) -> None:
    """Guarantee: SIGTERM loses no evidence of use, and leaves no live reporter that a quiet period would wait for."""
    make_merchant("acme")
    key, text = issue(find_account("acme", Environment.SANDBOX))
    with serving(tmp_path, **UNLIMITED) as port:
        sender = ServerWire(port, text.reveal().encode(), b"")
        for _ in range(20):
            assert outcome(sender.send(b"X-Api-Key: " + sender.key)) == JUDGED
    assert KeyUse.objects.get(key_id=key.key_id).count == 20
    assert [reporter.stopped_at is None for reporter in UsageReporter.objects.all()] == [False]

"""Headers, paths and bodies on the wire: what the real server makes of them, byte by byte, and what is answered then.

A test client hands a view what it was given. A server joins, drops, renames and unescapes, so these are asked of ours.
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

pytestmark = [pytest.mark.database, pytest.mark.django_db(transaction=True)]

ACKNOWLEDGE = b"/sandbox/credentials/acknowledge"
VERIFY = b"/v1/keys/verify"
JUDGED = (404, "not_found")
"""What a good key gets that is the replacement of no rotation: the key itself was accepted."""
UNKNOWN = (404, "endpoint_unknown")
INVALID = (401, "credential_invalid")
MISSING = (401, "credential_missing")
AMBIGUOUS = (400, "credential_ambiguous")
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
class Wire:
    """The server of `make run` over the test's database; what is sent to it is written out by hand."""

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
        """`body` comes after the head as it is; without one, Content-Length is 0."""
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
def wire(tmp_path: Path) -> Iterator[Wire]:
    make_merchant("acme")
    _, key = issue(find_account("acme", Environment.SANDBOX))
    _, token = make_token(*SERVICE_PERMISSIONS, scope=StringScope.ALL)
    with serving(tmp_path, **UNLIMITED) as port:
        yield Wire(port, key.reveal().encode(), token.reveal().encode())
    logged = (tmp_path / "server.log").read_text()
    assert key.reveal() not in logged
    assert token.reveal() not in logged
    assert '"ERROR"' not in logged
    assert "Traceback" not in logged


def test_headers_of_credentials_on_the_wire_are_answered_as_the_contract_says(wire: Wire) -> None:
    """One server for the whole table: starting it is what takes time."""
    key, bearer = b"X-Api-Key: " + wire.key, b"Authorization: Bearer x"
    for lines, expected in (
        ((key,), JUDGED),
        ((key.replace(b"X-Api-Key", b"x-aPI-kEY"),), JUDGED),
        ((b"X-Api-Key: \t " + wire.key + b" \t",), JUDGED),
        ((), MISSING),
        ((bearer,), MISSING),
        ((b"X-Service-Token: " + wire.key,), MISSING),
        ((key, bearer), (401, "bearer_not_supported")),
        # Twice: the good one first, last, and beside itself.
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
        # Empty, and what is no ASCII: malformed, not missing.
        ((b"X-Api-Key:",), INVALID),
        ((b"X-Api-Key:   ",), INVALID),
        ((b"X-Api-Key: \xc3\xa9",), INVALID),
        ((b"X-Api-Key: \xff",), INVALID),
        ((key + b"\xe9",), INVALID),
        ((b"\xe9".join((b"X-Api-Key: ", wire.key)),), INVALID),
        ((b"X-Api-Key: " + wire.token,), INVALID),
        ((b"X-Api-Key: " + b"a" * 60_000,), INVALID),
        # With an underscore it is another header, whichever comes first.
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


def test_service_token_on_the_wire_is_sent_once_and_in_its_own_header(wire: Wire) -> None:
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


def test_paths_on_the_wire_are_read_in_one_way_or_not_at_all(wire: Wire) -> None:
    """Guarantee: no second spelling of a path reaches an endpoint, so that a gateway's rule is about the same path."""
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
    # No HTTP: the server itself says so, without a body.
    for path in (b"/sandbox/credentials/acknowledge\xff", b"/sandbox/credentials/<acknowledge"):
        answer = wire.send(key, path=path)
        assert (answer.status, answer.body) == (400, b""), path


def test_key_in_a_path_on_the_wire_is_told_so_however_it_is_escaped(wire: Wire) -> None:
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


def test_bodies_on_the_wire_come_whole_or_are_refused(wire: Wire) -> None:
    """Guarantee: nobody takes the beginning of a body for the whole of it, and credentials are judged first."""
    question = b'{"key": null, "environment": "sandbox", "endpoint": "credentials.acknowledge"}'
    length = b"Content-Length: %d" % len(question)
    for lines, body in (
        ((length,), question),
        ((CHUNKED,), chunks(question)),
        ((CHUNKED,), chunks(question[:5], question[5:])),
        # Transfer-Encoding goes first (RFC 9112, 6.3), and the connection is closed after it.
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


def test_requests_on_the_wire_of_any_size_and_method_are_refused_without_a_fault(wire: Wire) -> None:
    key = b"X-Api-Key: " + wire.key
    for lines in (
        (b"X-Api-Key: " + b"a" * 1_000_000,),
        tuple(b"X-%d: a" % number for number in range(500)),
        (b"X-Api-Key: a\x00b",),
        (b"X-Api-Key : " + wire.key,),
        (b"no header",),
    ):
        assert 400 <= wire.send(*lines).status < 500, lines[0][:20]
    for method in (b"GET", b"PUT", b"OPTIONS", b"TRACE", b"BREW"):
        answer = wire.send(key, method=method)
        assert outcome(answer) == (405, "method_not_allowed"), method
        assert answer.headers["allow"] == "POST"
        assert wire.key not in answer.body  # which TRACE would send back
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


def test_envoys_question_on_the_wire_keeps_the_host_and_the_path_of_its_client(wire: Wire) -> None:
    """Neither is ours to judge: whatever they are, what is missing here is the gateway's own token."""
    for host in (b"shop.example", b"shop.example:8443", b"a b", b"127.0.0.1"):
        for path in (b"/v1/authorize/envoy/a", b"/v1/authorize/envoy/a//b/%2f/../c;x", b"/v1/authorize/envoy/"):
            assert outcome(wire.send(method=b"GET", path=path, host=host))[0] in {401, 404}, (host, path)
    # Spelled otherwise it is no question of Envoy's.
    for path in (b"/v1/authorize//envoy/a", b"/v1/authorize/%65nvoy/a"):
        assert outcome(wire.send(method=b"GET", path=path)) == (404, "not_found")
        assert outcome(wire.send(method=b"GET", path=path, host=b"shop.example")) == (400, "request_invalid")


def test_server_that_is_stopped_reports_the_last_use_and_says_farewell(tmp_path: Path) -> None:
    """Guarantee: SIGTERM loses no evidence of use, and leaves no reporter behind that silence would wait for."""
    make_merchant("acme")
    key, text = issue(find_account("acme", Environment.SANDBOX))
    with serving(tmp_path, **UNLIMITED) as port:
        sender = Wire(port, text.reveal().encode(), b"")
        for _ in range(20):
            assert outcome(sender.send(b"X-Api-Key: " + sender.key)) == JUDGED
    assert KeyUse.objects.get(key_id=key.key_id).count == 20
    assert [reporter.stopped_at is None for reporter in UsageReporter.objects.all()] == [False]

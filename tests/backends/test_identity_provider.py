"""The identity provider's metadata and keys: cached, read again after a rotation, and every call bounded."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from keyvault.backends import identity_provider as module
from keyvault.backends.identity_provider import (
    KEYS_SECONDS,
    MAX_REPLY_BYTES,
    METADATA_SECONDS,
    REFETCH_SECONDS,
    IdentityProviderClient,
    IdentityProviderError,
)
from tests.clocks import MonotonicClock
from tests.servers.identity_provider import StubProvider, identity_provider

from .receivers import make_authority, raw_server, receiver

JWKS = "/jwks"
METADATA = "/.well-known/openid-configuration"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.fixture
def stub() -> Iterator[StubProvider]:
    with identity_provider() as provider:
        yield provider


@pytest.fixture
def clock() -> MonotonicClock:
    return MonotonicClock()


@pytest.fixture
def client(stub: StubProvider, clock: MonotonicClock) -> IdentityProviderClient:
    return IdentityProviderClient(stub.issuer, clock)


def test_identity_provider_metadata_is_cached_for_its_time(
    client: IdentityProviderClient, stub: StubProvider, clock: MonotonicClock
) -> None:
    assert [client.metadata()["issuer"] for _ in range(3)] == [stub.issuer] * 3
    assert stub.requests[METADATA] == 1
    clock.seconds += METADATA_SECONDS
    client.metadata()
    assert stub.requests[METADATA] == 2


@pytest.mark.parametrize(
    "metadata",
    [
        {"issuer": "https://evil.example"},
        {"issuer": None},
        {"token_endpoint": "http://id.example.com/token"},
        {"token_endpoint": "http://127.0.0.1.evil.example/token"},
        {"authorization_endpoint": "javascript:alert(1)"},
        {"jwks_uri": None},
        {"jwks_uri": "https:///jwks"},
        {"jwks_uri": "https://[::1/jwks"},
    ],
)
def test_identity_provider_with_other_metadata_is_refused(
    client: IdentityProviderClient, stub: StubProvider, metadata: dict[str, Any]
) -> None:
    stub.metadata = metadata
    with pytest.raises(IdentityProviderError, match="metadata"):
        client.metadata()


def test_identity_provider_keys_after_a_rotation_are_read_once_more(
    client: IdentityProviderClient, stub: StubProvider, clock: MonotonicClock
) -> None:
    assert [key["kid"] for key in client.find_keys("key-1")] == ["key-1"]
    stub.rotate("key-2")
    clock.seconds += REFETCH_SECONDS
    assert [key["kid"] for key in client.find_keys("key-2")] == ["key-2"]
    assert client.find_keys("key-1") == []
    assert stub.requests[JWKS] == 2


def test_identity_provider_unknown_key_ids_cause_one_read_per_interval(
    client: IdentityProviderClient, stub: StubProvider, clock: MonotonicClock
) -> None:
    """A flood of tokens with unknown key ids does not become a flood of requests."""
    for number in range(50):
        assert client.find_keys(f"unknown-{number}") == []
    assert stub.requests[JWKS] == 1
    clock.seconds += REFETCH_SECONDS
    for number in range(50):
        assert client.find_keys(f"unknown-{number}") == []
    assert stub.requests[JWKS] == 2


def test_identity_provider_withdrawn_key_is_forgotten_in_time(
    client: IdentityProviderClient, stub: StubProvider, clock: MonotonicClock
) -> None:
    assert client.find_keys("key-1")
    stub.rotate("key-2")
    clock.seconds += KEYS_SECONDS
    assert client.find_keys("key-1") == []


def test_identity_provider_old_keys_are_not_used_while_new_ones_cannot_be_read(
    client: IdentityProviderClient, stub: StubProvider, clock: MonotonicClock
) -> None:
    assert client.find_keys("key-1")
    stub.metadata = {"jwks_uri": f"{stub.issuer}/gone"}
    clock.seconds += METADATA_SECONDS
    with pytest.raises(IdentityProviderError):
        client.find_keys("key-1")


@pytest.mark.parametrize("keys", [None, {}, "keys"])
def test_identity_provider_without_a_list_of_keys_is_refused(
    client: IdentityProviderClient, monkeypatch: pytest.MonkeyPatch, keys: object
) -> None:
    client.metadata()
    monkeypatch.setattr(IdentityProviderClient, "_get", lambda self, url: {"keys": keys})
    with pytest.raises(IdentityProviderError, match="no signing keys"):
        client.find_keys("key-1")


# ------------------------------------------------------------------------------------------------- the calls


def reply_with(*parts: bytes) -> Any:
    """Return a server that sends these bytes and keeps the connection open."""

    def talk(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65_536)
        for part in parts:
            connection.sendall(part)
        over.wait()

    return raw_server(talk)


@pytest.mark.parametrize(
    "parts",
    [
        (OK + b"Content-Length: 2\r\n\r\n[]",),
        (OK + b"Content-Length: 1\r\n\r\n{",),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nnothing\r\n",),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\n{}",),
        (b"no HTTP\r\n\r\n",),
        (OK + f"Content-Length: {MAX_REPLY_BYTES + 1}\r\n\r\n".encode(), b" " * (MAX_REPLY_BYTES + 1)),
    ],
    ids=["no object", "no JSON", "bad chunks", "redirect", "failure", "no HTTP", "too large"],
)
def test_identity_provider_reply_that_is_no_document_is_refused(parts: tuple[bytes, ...]) -> None:
    with reply_with(*parts) as port, pytest.raises(IdentityProviderError):
        IdentityProviderClient(f"http://127.0.0.1:{port}").metadata()


@pytest.mark.parametrize("parts", [(), (OK + b"Content-Length: 9\r\n\r\n{",)], ids=["silent", "stops midway"])
def test_identity_provider_that_hangs_is_left_and_not_called_again_at_once(
    monkeypatch: pytest.MonkeyPatch, clock: MonotonicClock, parts: tuple[bytes, ...]
) -> None:
    """A provider that accepts connections but does not reply must not occupy the console's threads."""
    monkeypatch.setattr(module, "READ_SECONDS", 0.05)
    with reply_with(*parts) as port:
        client = IdentityProviderClient(f"http://127.0.0.1:{port}", clock)
        with pytest.raises(IdentityProviderError):
            client.metadata()
        monkeypatch.setattr(
            requests.adapters.HTTPAdapter, "send", lambda *args, **kwargs: pytest.fail("it was called again")
        )
        with pytest.raises(requests.ConnectionError):
            client.session().get(f"http://127.0.0.1:{port}/token")
        with pytest.raises(IdentityProviderError):
            client.metadata()


@pytest.mark.parametrize(
    ("begin", "drop"),
    [
        (OK + b"Content-Length: 1000000\r\n\r\n", b" "),
        (OK + b"X-Slow: ", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["body", "header", "continue"],
)
def test_identity_provider_that_drips_is_left_after_the_overall_time(
    monkeypatch: pytest.MonkeyPatch, begin: bytes, drop: bytes
) -> None:
    """Each read is in time, and the whole reply is not: it must not occupy a thread of the console."""

    def talk(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65_536)
        connection.sendall(begin)
        while not over.wait(0.01):
            connection.sendall(drop)

    monkeypatch.setattr(module, "OVERALL_SECONDS", 0.3)
    with raw_server(talk) as port, pytest.raises(IdentityProviderError):
        IdentityProviderClient(f"http://127.0.0.1:{port}").metadata()


def test_identity_provider_certificate_is_verified(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only with the CA in `SSL_CERT_FILE`, and only for the name in the certificate."""
    authority = make_authority(tmp_path_factory.mktemp("ca"))
    with receiver(authority.server("127.0.0.1")) as here:

        def post(host: str) -> int:
            return IdentityProviderClient(here.url()).session().post(here.url("/token", "https", host)).status_code

        with pytest.raises(requests.exceptions.SSLError):
            post("127.0.0.1")
        authority_file = authority.folder / "ca.pem"
        authority_file.write_text(authority.pem())
        monkeypatch.setenv("SSL_CERT_FILE", str(authority_file))
        assert post("127.0.0.1") == 200
        with pytest.raises(requests.exceptions.SSLError):
            post("localhost")


def test_identity_provider_proxies_of_the_environment_are_ignored(
    client: IdentityProviderClient, stub: StubProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert client.metadata()["issuer"] == stub.issuer

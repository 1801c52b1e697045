"""Requests to foreign servers: only to the validated address, and within one time limit."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from keyvault.backends import outbound
from keyvault.backends.outbound import Address, OutboundError, Reply, ResolversBusyError, post
from keyvault.wire.destinations import Destination

from .receivers import LOOPBACK, Authority, Receiver, make_authority, raw_server, receiver

NAME = "hooks.acme.example"
BODY = b'{"type":"webhook.test"}'
TIMEOUT_SECONDS = 30.0


@pytest.fixture
def here() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("ca"))


def to(port: int, *, scheme: str = "http", host: str = NAME, target: str = "/hooks") -> Destination:
    return Destination(scheme, host, port, target)


class Resolver:
    """Returns one list of these addresses per call."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers, self.asked = list(answers), 0

    def __call__(self, host: str, port: int) -> list[Address]:
        self.asked += 1
        return [(address, port, 0, 0) if ":" in address else (address, port) for address in self.answers.pop(0)]


def send(destination: Destination, resolver: Resolver | None = None, **options: Any) -> Reply:
    options.setdefault("own_networks", LOOPBACK)
    options.setdefault("within_seconds", TIMEOUT_SECONDS)
    return post(destination, {"webhook-id": "ntc_1"}, BODY, resolve=resolver or Resolver(["127.0.0.1"]), **options)


@pytest.fixture
def no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every connection attempt fail the test."""

    def connect(self: socket.socket, address: object) -> None:
        raise AssertionError(f"connected to {address}")

    monkeypatch.setattr(socket.socket, "connect", connect)


# --- the request -----------------------------------------------------------------------------------------------


def test_post_arrives_once_and_unchanged(here: Receiver) -> None:
    assert send(to(here.port, target="/hooks?account=1")) == Reply(200, None)
    (received,) = here.received
    assert (received.path, received.body) == ("/hooks?account=1", BODY)
    assert received.headers["host"] == f"{NAME}:{here.port}"
    assert received.headers["webhook-id"] == "ntc_1"
    assert received.headers["content-type"] == "application/json"


@pytest.mark.parametrize("status", [200, 204, 400, 410, 500])
def test_post_returns_the_status(here: Receiver, status: int) -> None:
    here.status = status
    assert send(to(here.port)).status == status


def test_post_returns_retry_after(here: Receiver) -> None:
    here.status, here.headers = 503, {"Retry-After": "120"}
    assert send(to(here.port)) == Reply(503, "120")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_post_redirect_is_not_followed(here: Receiver, status: int) -> None:
    """An endpoint cannot redirect requests to an address that was not validated."""
    with receiver() as elsewhere:
        here.status, here.headers = status, {"Location": elsewhere.url()}
        assert send(to(here.port)).status == status
        assert elsewhere.received == []
    assert len(here.received) == 1


def test_post_ignores_proxies_of_the_environment(here: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would resolve the name itself and bypass the validation."""
    with receiver() as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url("/"))
        assert send(to(here.port)).status == 200
        assert proxy.received == []


# --- the destination -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.1",
        "224.0.0.1",
        "::1",
        "::ffff:127.0.0.1",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::1",
        "fe80::1%lo",
        "fd00::1",
    ],
)
@pytest.mark.usefixtures("no_connection")
def test_post_to_a_non_public_address_is_refused_without_connecting(address: str) -> None:
    """No name chosen by an operator or a merchant reaches internal networks (SSRF)."""
    with pytest.raises(OutboundError, match="not public"):
        send(to(443, scheme="https"), Resolver([address]), own_networks=())


@pytest.mark.usefixtures("no_connection")
@pytest.mark.parametrize("addresses", [["8.8.8.8", "127.0.0.1"], ["127.0.0.1", "8.8.8.8"], ["2606:4700::1", "::1"]])
def test_post_to_a_name_with_an_internal_address_is_refused_without_connecting(addresses: list[str]) -> None:
    """A name with both public and internal addresses is refused: its owner chooses which one is used."""
    with pytest.raises(OutboundError, match="not public"):
        send(to(443, scheme="https"), Resolver(addresses), own_networks=())


def test_post_resolves_once_and_connects_to_that_address(here: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding: the name is not resolved again after validation, not even while connecting."""

    def never(*args: object, **options: object) -> None:
        raise AssertionError(f"resolved again: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    resolver = Resolver(["127.0.0.1"], ["169.254.169.254"])
    assert send(to(here.port), resolver).status == 200
    assert (resolver.asked, len(here.received)) == (1, 1)


def test_post_validates_the_address_at_connection_time(here: Receiver) -> None:
    """A name that was public when saved and now resolves to this machine is refused."""
    resolver = Resolver(["127.0.0.1"])
    with pytest.raises(OutboundError, match="not public"):
        send(to(here.port, scheme="https"), resolver, own_networks=())
    assert here.received == []


@pytest.mark.usefixtures("no_connection")
def test_post_over_plain_http_to_a_public_address_is_refused_without_connecting() -> None:
    """Messages leave the internal network only encrypted."""
    with pytest.raises(OutboundError, match="Plain http"):
        send(to(80), Resolver(["8.8.8.8"]), own_networks=LOOPBACK)


def test_post_to_a_closed_first_address_tries_the_next(here: Receiver) -> None:
    assert send(to(here.port), Resolver(["127.0.0.2", "127.0.0.1"])).status == 200


def test_post_to_a_closed_port_reports_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(OutboundError, match="connection was refused"):
        send(to(port))


def test_post_to_an_unresolvable_name_reports_it() -> None:
    def resolver(host: str, port: int) -> list[Address]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(OutboundError, match="cannot be resolved"):
        post(to(443, scheme="https"), {}, BODY, resolve=resolver)


# --- TLS -------------------------------------------------------------------------------------------------------


def test_post_over_tls_sends_the_name_and_checks_the_certificate(authority: Authority) -> None:
    """The connection goes to an address; SNI and certificate check use the name."""
    with receiver(authority.server(NAME)) as secured:
        assert send(to(secured.port, scheme="https"), trust=authority.trust()).status == 200
        assert secured.names == [NAME]
        assert secured.received[0].headers["host"] == f"{NAME}:{secured.port}"


def test_post_over_tls_to_an_address_checks_the_certificate_for_it(authority: Authority) -> None:
    with receiver(authority.server("127.0.0.1")) as secured:
        destination = to(secured.port, scheme="https", host="127.0.0.1")
        assert send(destination, trust=authority.trust()).status == 200


@pytest.mark.parametrize("names", [("elsewhere.example",), ("127.0.0.1",)])
def test_post_to_a_server_with_another_name_is_refused(authority: Authority, names: tuple[str, ...]) -> None:
    """An attacker who redirects a name has no certificate for it."""
    with receiver(authority.server(*names)) as secured:
        with pytest.raises(OutboundError, match="certificate"):
            send(to(secured.port, scheme="https"), trust=authority.trust())
        assert secured.received == []


def test_post_to_a_server_with_an_expired_certificate_is_refused(authority: Authority) -> None:
    with receiver(authority.server(NAME, days=-1)) as secured:
        with pytest.raises(OutboundError, match="certificate has expired"):
            send(to(secured.port, scheme="https"), trust=authority.trust())
        assert secured.received == []


def test_post_to_a_server_of_an_unknown_authority_is_refused(authority: Authority) -> None:
    """Only the host's own authorities are trusted by default."""
    with receiver(authority.server(NAME)) as secured:
        with pytest.raises(OutboundError, match="certificate"):
            send(to(secured.port, scheme="https"))
        assert secured.received == []


def test_post_over_tls_to_a_plain_server_reports_it(here: Receiver, authority: Authority) -> None:
    with pytest.raises(OutboundError, match="TLS"):
        send(to(here.port, scheme="https"), trust=authority.trust())


# --- slow servers ----------------------------------------------------------------------------------------------

_SHORT_SECONDS = 0.3
"""Time limit in seconds; each of these tests waits for it, and each server below never finishes."""


def _hangs(client: socket.socket, over: threading.Event) -> None:
    over.wait()


def _drips_headers(client: socket.socket, over: threading.Event) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not over.wait(0.01):
        client.sendall(b"x")


def _sends_continue_forever(client: socket.socket, over: threading.Event) -> None:
    while not over.wait(0.01):
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


@pytest.mark.parametrize("talk", [_hangs, _drips_headers, _sends_continue_forever])
def test_post_to_a_slow_server_times_out(
    talk: Callable[[socket.socket, threading.Event], None],
) -> None:
    """One limit covers the whole request: a byte now and then does not keep a worker busy."""
    with raw_server(talk) as port, pytest.raises(OutboundError, match="timed out"):
        send(to(port), within_seconds=_SHORT_SECONDS)


def test_post_to_a_server_that_reads_nothing_times_out() -> None:
    """The limit covers sending too: a body larger than every buffer does not keep a worker busy."""
    with raw_server(_hangs) as port, pytest.raises(OutboundError, match="timed out"):
        post(
            to(port),
            {},
            bytes(50_000_000),
            own_networks=LOOPBACK,
            resolve=Resolver(["127.0.0.1"]),
            within_seconds=_SHORT_SECONDS,
        )


def test_post_to_a_server_that_never_ends_the_handshake_times_out(authority: Authority) -> None:
    with raw_server(_hangs) as port, pytest.raises(OutboundError, match="timed out"):
        send(to(port, scheme="https"), within_seconds=_SHORT_SECONDS, trust=authority.trust())


def test_post_while_the_resolver_hangs_times_out() -> None:
    """The resolver's own time limits belong to its host and exceed this one."""
    over = threading.Event()

    def resolver(host: str, port: int) -> list[Address]:
        over.wait()
        return []

    try:
        with pytest.raises(OutboundError, match="timed out"):
            post(to(443, scheme="https"), {}, BODY, resolve=resolver, within_seconds=_SHORT_SECONDS)
    finally:
        over.set()


def test_post_while_every_resolver_hangs_starts_no_further_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver's threads outlive the attempt, so their number is limited."""
    monkeypatch.setattr(outbound, "_resolvers", threading.BoundedSemaphore(2))
    over, hanging = threading.Event(), []

    def resolver(host: str, port: int) -> list[Address]:
        hanging.append(threading.current_thread())
        over.wait()
        return []

    try:
        for fault in (OutboundError, OutboundError, ResolversBusyError):
            with pytest.raises(fault):
                post(to(443, scheme="https"), {}, BODY, resolve=resolver, within_seconds=4 * _SHORT_SECONDS)
        assert len(hanging) == 2
    finally:
        over.set()
    for thread in hanging:
        thread.join()
    with pytest.raises(OutboundError, match="timed out"):
        post(to(443, scheme="https"), {}, BODY, resolve=resolver, within_seconds=60)
    assert len(hanging) == 3


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_post_returns_the_status_of_an_endless_answer(begin: bytes) -> None:
    """The received status counts; the rest is discarded."""

    def talk(client: socket.socket, over: threading.Event) -> None:
        client.sendall(begin)
        while not over.is_set():
            client.sendall(b"x" * 65_536)

    with raw_server(talk) as port:
        assert send(to(port)).status == 200


def test_post_returns_the_status_of_an_answer_with_a_slow_body() -> None:
    def talk(client: socket.socket, over: threading.Event) -> None:
        client.sendall(b"HTTP/1.1 202 Accepted\r\nContent-Length: 1000000\r\n\r\n")
        while not over.wait(0.01):
            client.sendall(b"x")

    with raw_server(talk) as port:
        assert send(to(port), within_seconds=_SHORT_SECONDS).status == 202


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"HTTP/1.1 999999 What\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5_000,
        b"",
    ],
)
def test_post_malformed_answer_is_an_error(answer: bytes) -> None:
    def talk(client: socket.socket, over: threading.Event) -> None:
        client.recv(65_536)
        client.sendall(answer)

    with raw_server(talk) as port, pytest.raises(OutboundError):
        send(to(port))


def test_post_error_repeats_nothing_of_the_answer() -> None:
    """The stored failure reason is the service's own text, never an attacker's."""

    def talk(client: socket.socket, over: threading.Event) -> None:
        client.recv(65_536)
        client.sendall(b"<script>alert(1)</script>\r\n\r\n")

    with raw_server(talk) as port, pytest.raises(OutboundError) as caught:
        send(to(port))
    assert "script" not in caught.value.detail

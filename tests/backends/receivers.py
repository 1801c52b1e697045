"""Real servers on this machine that receive webhooks and behave as a test requires."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LOOPBACK = (ip_network("127.0.0.0/8"),)


@dataclass(frozen=True)
class Received:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """Answers each request with `status` and `headers` and records it. `names` are the TLS server names requested."""

    port: int
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    before_answer: Callable[[], object] = lambda: None

    def url(self, path: str = "/hooks", scheme: str = "http", host: str = "127.0.0.1") -> str:
        return f"{scheme}://{host}:{self.port}{path}"


class TlsServer(ThreadingHTTPServer):
    """An HTTP server on 127.0.0.1, with TLS if it has a context. Each client has a thread, for its handshake, too."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        super().__init__(("127.0.0.1", 0), handler)

    def handle_error(self, *args: Any) -> None:
        """Ignore clients that disconnect or do not trust the certificate; some tests do so on purpose."""

    def get_request(self) -> tuple[Any, Any]:
        request, address = super().get_request()
        if self._tls is not None:
            request = self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, address


@contextmanager
def receiver(tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """Listen on 127.0.0.1 until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            here.received.append(Received(self.path, headers, body))
            here.before_answer()
            self.send_response(here.status)
            for name, value in here.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *args: Any) -> None:
            pass

    with TlsServer(Handler, tls) as server:
        here = Receiver(server.server_port)
        if tls is not None:
            tls.sni_callback = lambda connection, name, context: here.names.append(name)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield here
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def raw_server(talk: Callable[[socket.socket, threading.Event], None]) -> Iterator[int]:
    """Yield the port of a server that runs `talk` with its one client; the event is set when the test ends."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                client, _ = listener.accept()
                with client:
                    talk(client, over)
            except OSError:
                """The client has disconnected, or none connected."""

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@dataclass(frozen=True)
class Authority:
    """A certificate authority for one test."""

    folder: Path
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    def trust(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        context.load_verify_locations(cadata=self.pem())
        return context

    def pem(self) -> str:
        return _pem(self.certificate).decode()

    def server(self, *names: str, days: int = 1) -> ssl.SSLContext:
        """Return a server context with a certificate for these names; a negative `days` means expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(names[0], key, self.key, self.certificate.subject, names, days)
        chain = self.folder / f"{names[0]}.pem"
        chain.write_bytes(_key_pem(key) + _pem(certificate))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain)
        return context


def make_authority(folder: Path) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test CA")])
    return Authority(folder, key, _certificate("a test CA", key, key, subject, (), 1))


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    names: tuple[str, ...],
    days: int,
) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=10))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=not names, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(each) for each in names]), False)
    else:
        builder = builder.add_extension(_SIGNS_CERTIFICATES, critical=True)
    return builder.sign(signer, hashes.SHA256())


_SIGNS_CERTIFICATES = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)
"""RFC 5280 section 4.2.1.3: a CA certificate states its key usage; Python 3.13 requires it."""


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )

"""An in-process Vault that fails on demand; the contract tests hold it to the real server's behavior.

It has no policies: a logged-in client may do everything. A mount exists once its name has the form of this project's
mounts.
"""

import base64
import json
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from keyvault.backends.private_files import new_master_key

KEPT_VERSIONS = 10
FOREVER = float("inf")

V = TypeVar("V", bound="FakeVault")

Answer = tuple[int, dict[str, Any] | None]


@dataclass(frozen=True)
class Call:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any

    @property
    def token(self) -> str:
        return self.headers.get("x-vault-token", "")


@dataclass
class Fault:
    """What goes wrong with a call.

    `has_effect`: the call takes effect and only the reply is wrong. `status` None: no reply; the connection is closed,
    or reset where `is_reset`. `held` is awaited before anything else happens.
    """

    status: int | None = None
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    has_effect: bool = False
    is_reset: bool = False
    held: threading.Event | None = None
    passes: bool = False


def refused(status: int, message: str = "", **headers: str) -> Fault:
    """Return a fault with the server's own error."""
    body = json.dumps({"errors": [message] if message else []}).encode()
    return Fault(status=status, body=body, headers={name.replace("_", "-"): text for name, text in headers.items()})


def lost_reply() -> Fault:
    return Fault(has_effect=True)


def slow(until: threading.Event) -> Fault:
    """Return a fault that executes the call and replies once the event is set."""
    return Fault(held=until, passes=True)


@dataclass
class _KvVersion:
    data: dict[str, Any] | None
    deleted: str = ""
    is_destroyed: bool = False

    def about(self) -> dict[str, Any]:
        return {"created_time": "", "deletion_time": self.deleted, "destroyed": self.is_destroyed}


@dataclass
class _Token:
    accessor: str
    ends_at: float
    is_renewable: bool = False
    period: int = 0
    lives_until: float = FOREVER
    wrapped: dict[str, Any] | None = None
    creation_path: str = ""


@dataclass
class FakeVault:
    """A fake server; `calls` are the requests that arrived."""

    address: str = ""
    calls: list[Call] = field(default_factory=list)
    is_sealed: bool = False
    lease_seconds: int = 3600
    greatest_seconds: float = FOREVER
    is_renewable: bool = True
    service_accounts: dict[str, str] = field(default_factory=dict)
    _offset: float = 0.0
    _faults: list[tuple[Callable[[Call], bool], Fault, int]] = field(default_factory=list)
    _secrets: dict[str, dict[int, _KvVersion]] = field(default_factory=dict)
    _tokens: dict[str, _Token] = field(default_factory=dict)
    _role_ids: dict[str, str] = field(default_factory=dict)
    _secret_ids: dict[str, str] = field(default_factory=dict)
    _key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # --- control by tests -----------------------------------------------------------------------------------

    def fail(self, fault: Fault, path: str = "", method: str = "", times: int = 1) -> None:
        """Inject the fault into the next calls whose path contains `path`."""
        with self._lock:
            self._faults.append((lambda call: path in call.path and method in ("", call.method), fault, times))

    def clear_faults(self) -> None:
        self._faults.clear()

    def advance(self, seconds: float) -> None:
        """Advance the server's time."""
        self._offset += seconds

    def make_role(self, name: str) -> tuple[str, str]:
        """Create an AppRole and return its role id and a new secret id."""
        role_id = self._role_ids.setdefault(name, f"role-{secrets.token_hex(8)}")
        secret_id = f"secret-{secrets.token_hex(8)}"
        self._secret_ids[secret_id] = name
        return role_id, secret_id

    def delete_role(self, name: str) -> None:
        self._role_ids.pop(name)

    def wrap(self, data: dict[str, Any], creation_path: str, seconds: int = 60) -> str:
        """Return a wrapping token for the data."""
        text = f"s.{secrets.token_hex(12)}"
        ends_at = self._now() + seconds
        self._tokens[text] = _Token(secrets.token_hex(12), ends_at, wrapped=data, creation_path=creation_path)
        return text

    def revoke_all(self) -> None:
        """Revoke every token."""
        self._tokens.clear()

    def calls_to(self, path: str, method: str = "") -> list[Call]:
        """List the calls so far whose path contains `path`."""
        return [call for call in self.calls if path in call.path and method in ("", call.method)]

    # --- handling one call ----------------------------------------------------------------------------------

    def fault_of(self, call: Call) -> Fault | None:
        with self._lock:
            self.calls.append(call)
            for place, (is_meant, fault, times) in enumerate(self._faults):
                if is_meant(call):
                    self._faults[place] = (is_meant, fault, times - 1)
                    if times <= 1:
                        del self._faults[place]
                    return fault
        return None

    def answer(self, call: Call) -> Answer:
        with self._lock:
            if call.path == "sys/health":
                return (503, {"sealed": True}) if self.is_sealed else (200, {"initialized": True, "sealed": False})
            if self.is_sealed:
                return _errors(503, "Vault is sealed")
            return self._public(call) or self._private(call)

    def _public(self, call: Call) -> Answer | None:
        """Answer the calls that need no token."""
        if call.path == "auth/approle/login":
            name = self._secret_ids.get(call.body["secret_id"])
            if name is None or self._role_ids.get(name) != call.body["role_id"]:
                return _errors(400, "invalid role or secret ID")
            return 200, {"auth": self._log_in()}
        if call.path == "auth/kubernetes/login":
            if self.service_accounts.get(call.body["jwt"]) != call.body["role"]:
                return _errors(403, "permission denied")
            return 200, {"auth": self._log_in()}
        if call.path == "sys/wrapping/lookup":
            token = self._alive(call.body["token"])
            if token is None or token.wrapped is None:
                return _errors(400, "wrapping token is not valid or does not exist")
            return 200, {"data": {"creation_path": token.creation_path}}
        if call.path == "sys/wrapping/unwrap":
            token = self._alive(call.token)
            if token is None or token.wrapped is None:
                return _errors(400, "wrapping token is not valid or does not exist")
            del self._tokens[call.token]
            return 200, token.wrapped
        return None

    def _private(self, call: Call) -> Answer:
        token = self._alive(call.token)
        if token is None or token.wrapped is not None:
            return _errors(403, "permission denied")
        if call.path.startswith("auth/token/"):
            return self._token(call, token)
        mount, _, rest = call.path.partition("/")
        kind, _, place = rest.partition("/")
        if "-anchor-" in mount:
            return self._transit(call, kind)
        if "-factors-" in mount or "-wrapping-" in mount:
            return self._encryption(call, kind)
        if not any(f"-{engine}-" in mount for engine in ("keys", "peppers", "evidence")):
            return _errors(404, f'no handler for route "{call.path}". route entry not found.')
        return self._kv(call, f"{mount}/", kind, f"{mount}/{place}")

    def _token(self, call: Call, own: _Token) -> Answer:
        act = call.path.removeprefix("auth/token/")
        if act == "renew-self":
            if not own.is_renewable:
                return _errors(400, "lease is not renewable")
            now = self._now()
            own.ends_at = min(now + own.period, own.lives_until)
            left = round(own.ends_at - now)
            return 200, {"auth": {"client_token": call.token, "lease_duration": left, "renewable": True}}
        if act == "lookup-self":
            return 200, {"data": {"accessor": own.accessor}}
        if act == "revoke-self":
            del self._tokens[call.token]
            return 204, None
        return _errors(404)

    def _transit(self, call: Call, kind: str) -> Answer:
        if kind == "sign":
            made = base64.b64encode(self._key.sign(base64.b64decode(call.body["input"]))).decode()
            return 200, {"data": {"signature": f"vault:v1:{made}"}}
        public = self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return 200, {"data": {"keys": {"1": {"public_key": base64.b64encode(public).decode()}}}}

    def _encryption(self, call: Call, kind: str) -> Answer:
        """Reverse the text, which is enough for what the client does with it."""
        if kind == "encrypt":
            return 200, {"data": {"ciphertext": f"vault:v1:{call.body['plaintext'][::-1]}"}}
        if kind == "datakey":
            return 200, {"data": {"ciphertext": f"vault:v1:{new_master_key()[::-1]}"}}
        if not call.body["ciphertext"].startswith("vault:v1:"):
            return _errors(400, "invalid ciphertext: no prefix")
        return 200, {"data": {"plaintext": call.body["ciphertext"].removeprefix("vault:v1:")[::-1]}}

    def _kv(self, call: Call, mount: str, kind: str, path: str) -> Answer:
        versions = self._secrets.get(path, {})
        if kind == "data" and call.method == "GET":
            return _read(versions, int(parse_qs(call.headers["query"]).get("version", ["0"])[0]))
        if kind == "data":
            return self._write(path, call.body)
        if call.method == "LIST":
            return self._list(path if path.endswith("/") else f"{path}/")
        if kind == "metadata" and call.method == "DELETE":
            self._secrets.pop(path, None)
            return 204, None
        if kind == "metadata":
            if not versions:
                return _errors(404)
            return 200, {"data": {"versions": {str(number): each.about() for number, each in versions.items()}}}
        for number in call.body["versions"]:
            version = versions.get(number)
            if version is None or version.is_destroyed:
                continue
            if kind == "delete":
                version.deleted = version.deleted or "2026-01-01T00:00:00Z"
            elif kind == "undelete":
                version.deleted = ""
            else:
                version.is_destroyed, version.data = True, None
        return 204, None

    def _write(self, path: str, body: Any) -> Answer:
        versions = self._secrets.get(path, {})
        newest = max(versions, default=0)
        if "cas" not in body.get("options", {}):
            return _errors(400, "check-and-set parameter required for this call")
        if body["options"]["cas"] != newest:
            return _errors(400, "check-and-set parameter did not match the current version")
        self._secrets.setdefault(path, {})[newest + 1] = _KvVersion(body["data"])
        self._secrets[path].pop(newest + 1 - KEPT_VERSIONS, None)
        return 200, {"data": {"version": newest + 1}}

    def _list(self, folder: str) -> Answer:
        below = [path.removeprefix(folder) for path in self._secrets if path.startswith(folder)]
        names = {name.partition("/")[0] + ("/" if "/" in name else "") for name in below}
        return (200, {"data": {"keys": sorted(names)}}) if names else _errors(404)

    # --- tokens ---------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() + self._offset

    def _log_in(self) -> dict[str, Any]:
        text, lives_until = f"s.{secrets.token_hex(12)}", self._now() + self.greatest_seconds
        ends_at = min(self._now() + self.lease_seconds, lives_until) if self.lease_seconds else FOREVER
        self._tokens[text] = _Token(
            secrets.token_hex(12), ends_at, self.is_renewable, self.lease_seconds, lives_until=lives_until
        )
        return {"client_token": text, "lease_duration": self.lease_seconds, "renewable": self.is_renewable}

    def _alive(self, text: str) -> _Token | None:
        token = self._tokens.get(text)
        return None if token is None or token.ends_at <= self._now() else token


def _errors(status: int, *messages: str) -> Answer:
    return status, {"errors": list(messages)}


def _read(versions: dict[int, _KvVersion], asked: int) -> Answer:
    number = asked if asked > 0 else max(versions, default=0)
    version = versions.get(number)
    if version is None:
        return _errors(404)
    is_gone = version.is_destroyed or version.deleted != ""
    data = {"data": None if is_gone else version.data, "metadata": {"version": number, **version.about()}}
    return (404 if is_gone else 200), {"data": data}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        parts = urlsplit(self.path)
        length = int(self.headers.get("Content-Length", "0"))
        headers = {name.lower(): text for name, text in self.headers.items()} | {"query": parts.query}
        body = json.loads(self.rfile.read(length) or b"null")
        call = Call(self.command, unquote(parts.path).removeprefix("/v1/"), headers, body)
        fault = server.fake.fault_of(call)
        if fault is not None and fault.held is not None:
            fault.held.wait()
        if fault is None or fault.passes:
            status, reply = server.fake.answer(call)
            self._send(status, b"" if reply is None else json.dumps(reply).encode(), "application/json", {})
            return
        if fault.has_effect:
            server.fake.answer(call)
        if fault.status is None:
            if fault.is_reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        self._send(fault.status, fault.body, fault.content_type, fault.headers)

    do_GET = do_POST = do_PUT = do_DELETE = do_LIST = do_HEAD = _serve  # noqa: N815  the names that http.server calls

    def _send(self, status: int, body: bytes, content_type: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, text in {"Content-Type": content_type, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Log nothing: the calls are recorded."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, fake: FakeVault) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fake = fake

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that gave up waiting."""


@contextmanager
def running_fake(tls: ssl.SSLContext | None = None) -> Iterator[FakeVault]:
    """Run a fake at its address until the block ends."""
    with serving(FakeVault(), tls) as fake:
        yield fake


@contextmanager
def serving(fake: V, tls: ssl.SSLContext | None = None) -> Iterator[V]:
    with _Server(fake) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        fake.address = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()

"""How a client takes up a replacement, from each source, and how the agent brings it."""

import json
import logging
import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from keyvault_client import (
    AsyncMerchantClient,
    AsyncVerifier,
    AuthenticationError,
    CallableKey,
    CommandFailedError,
    EnvironmentKey,
    FileKey,
    KeySourceError,
    KeyvaultError,
    MerchantClient,
    MerchantOptions,
    RateLimitedError,
    RefusedError,
    Response,
    VaultKey,
    Verifier,
    rotate_agent,
    verify_webhook,
)
from keyvault_client.effects import KeySource
from keyvault_client.rotate_agent import Agent
from keyvault_client.sealed import create_recipient_key, open_sealed
from keyvault_client.verifier import ServiceAddress

from .feed_service import key_string
from .scripted_server import ReceivedRequest, ScriptedServer, render, scripted_server

OLD, NEW = key_string(1), key_string(2)
YES = {"status": 200, "body": {"ok": True}}
NO = {"status": 401, "body": {"status": 401, "code": "key_revoked", "check": 4, "request_id": "r1"}}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as found:
        yield found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{OLD}\n")
    return path


class Face:
    """The sync client, or the async one on the event loop of a portal, behind one interface."""

    def __init__(self, client: Any, portal: BlockingPortal | None) -> None:
        self._client = client
        self._portal = portal

    def request(self, method: str, path: str) -> Response:
        return self._call(self._client.request, method, path)  # type: ignore[no-any-return]  # of either client

    def watch_key(self) -> bool:
        return self._call(self._client.watch_key)  # type: ignore[no-any-return]  # of either client

    def close(self) -> None:
        self._call(self._client.close)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments) if self._portal is None else self._portal.call(function, *arguments)


Connect = Callable[[KeySource], Face]


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest, server: ScriptedServer) -> Iterator[Connect]:
    """Return a function that makes a client of a key source."""
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal()) if request.param == "async" else None

        def make(key: KeySource) -> Face:
            kind: Any = MerchantClient if portal is None else AsyncMerchantClient
            face = Face(kind(f"{server.url}/sandbox", "sandbox", key), portal)
            stack.callback(face.close)
            return face

        yield make


class ReplaceableKey:
    """A key in a place of the kind `file`, `function` or `vault`, and the sources that read it there."""

    def __init__(self, kind: str, path: Path, vault: ScriptedServer) -> None:
        self._kind = kind
        self._path = path
        self._vault_url = vault.url
        vault.begin(*[self._answer_as_vault] * 20)
        self.put(OLD)

    def put(self, text: str | None) -> None:
        """Replace the key; None: remove it."""
        self._text = text
        if text is None:
            self._path.unlink()
        else:
            self._path.write_text(text)

    def source(self, watch_seconds: float | None) -> KeySource:
        if self._kind == "file":
            return FileKey(self._path, watch_seconds)
        if self._kind == "function":
            return CallableKey(self._read, watch_seconds)
        token = CallableKey(lambda: "s.token")
        return VaultKey("secret/data/shop", address=self._vault_url, token=token, watch_seconds=watch_seconds)

    def _read(self) -> str:
        if self._text is None:
            raise LookupError("there is no key")
        return self._text

    def _answer_as_vault(self, connection: socket.socket, request: ReceivedRequest) -> None:
        found = {"status": 200, "body": {"data": {"data": {"secret": self._text}}}}
        reply = {"status": 404, "body": {"errors": []}} if self._text is None else found
        connection.sendall(b"".join(render(reply, {})))


@pytest.fixture(params=["file", "function", "vault"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ReplaceableKey]:
    with scripted_server() as vault:
        yield ReplaceableKey(request.param, tmp_path / "stored", vault)


def client_of(server: ScriptedServer, key: Any) -> MerchantClient:
    return MerchantClient(f"{server.url}/sandbox", "sandbox", key)


def sent(server: ScriptedServer) -> list[tuple[str, str]]:
    """Return path and key of each request."""
    return [(request.path.removeprefix("/sandbox"), request.headers["x-api-key"]) for request in server.received]


def test_key_of_a_watched_source_is_acknowledged_before_it_is_used(
    connect: Connect, server: ScriptedServer, stored: ReplaceableKey
) -> None:
    """Guarantee: a replacement is used after the service has accepted it, without a restart, and acknowledged."""
    client = connect(stored.source(watch_seconds=0))
    server.begin(YES, {"status": 204, "text": ""}, YES)
    client.request("GET", "/orders")
    stored.put(NEW)
    client.request("GET", "/orders")
    assert sent(server) == [("/orders", OLD), ("/credentials/acknowledge", NEW), ("/orders", NEW)]


def test_process_without_traffic_acknowledges_its_first_key_and_each_replacement(
    connect: Connect, server: ScriptedServer, stored: ReplaceableKey
) -> None:
    """Guarantee: a process that only watches its key proves each key that its source has, and uses the newest one."""
    client = connect(stored.source(watch_seconds=None))
    server.begin({"status": 404, "body": {}}, {"status": 204, "text": ""}, YES)
    assert [client.watch_key(), client.watch_key()] == [False, False]
    stored.put(NEW)
    assert client.watch_key() is True
    client.request("GET", "/orders")
    assert sent(server) == [("/credentials/acknowledge", OLD), ("/credentials/acknowledge", NEW), ("/orders", NEW)]


@pytest.mark.parametrize("answer", [NO, {"status": 503, "text": ""}, {"fault": "cut"}])
def test_first_key_of_a_process_without_traffic_is_acknowledged_until_the_service_accepts_it(
    connect: Connect, server: ScriptedServer, stored: ReplaceableKey, answer: dict[str, Any]
) -> None:
    """Guarantee: neither a failed source nor a failed acknowledgement of the first key loses it."""
    client = connect(stored.source(watch_seconds=None))
    server.begin(answer, {"status": 204, "text": ""})
    stored.put(None)
    assert client.watch_key() is False
    for text in ("nonsense", OLD, OLD, OLD):
        stored.put(text)
        assert client.watch_key() is False
    assert sent(server) == [("/credentials/acknowledge", OLD)] * 2


def test_key_that_a_call_has_read_is_not_replaced_by_an_older_one(
    connect: Connect, server: ScriptedServer, stored: ReplaceableKey
) -> None:
    """Guarantee: the first key, whose acknowledgement takes long, does not displace a newer key of the source."""
    client = connect(stored.source(watch_seconds=None))

    def answer_after_a_call(connection: socket.socket, request: ReceivedRequest) -> None:
        stored.put(NEW)
        client.request("GET", "/orders")
        connection.sendall(b"".join(render({"status": 404, "body": {}}, {})))

    server.begin(answer_after_a_call, YES, YES)
    assert client.watch_key() is False
    client.request("GET", "/orders")
    assert sent(server) == [("/credentials/acknowledge", OLD), ("/orders", NEW), ("/orders", NEW)]


def test_process_that_is_forked_while_its_parent_reads_the_source_watches_its_key(server: ScriptedServer) -> None:
    """Guarantee: a worker that a server forks takes up replacements, whatever the server was doing then."""
    parent, reading, finish = os.getpid(), threading.Event(), threading.Event()

    def read() -> str:
        if os.getpid() == parent:
            reading.set()
            assert finish.wait(60)
        return OLD

    client = client_of(server, CallableKey(read))
    server.begin({"status": 404, "body": {}}, {"status": 404, "body": {}})
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(client.watch_key)
        try:
            assert reading.wait(60)
            child = os.fork()
            if child == 0:
                try:
                    client.watch_key()
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            assert sent(server) == [("/credentials/acknowledge", OLD)]
        finally:
            finish.set()
        watching.result()
    client.close()


@pytest.mark.parametrize("answer", [NO, {"status": 503, "text": ""}, {"fault": "cut"}])
def test_predecessor_stays_in_use_until_the_replacement_succeeds(
    connect: Connect, server: ScriptedServer, stored: ReplaceableKey, answer: dict[str, Any]
) -> None:
    """Guarantee: a replacement that the service does not accept yet stops no traffic."""
    client = connect(stored.source(watch_seconds=0))
    server.begin(YES, answer, YES, {"status": 404, "body": {}}, YES)
    client.request("GET", "/orders")
    stored.put(NEW)
    client.request("GET", "/orders")
    client.request("GET", "/orders")
    assert [key for path, key in sent(server) if path == "/orders"] == [OLD, OLD, NEW]


def test_source_without_a_valid_key_stops_no_traffic(
    connect: Connect, server: ScriptedServer, stored: ReplaceableKey
) -> None:
    """Guarantee: an empty, foreign or missing key leaves the key in use."""
    client = connect(stored.source(watch_seconds=0))
    server.begin(YES, YES, YES, YES)
    client.request("GET", "/orders")
    for text in ("", "nonsense", NEW.replace("_sbx_", "_prd_")):
        stored.put(text)
        client.request("GET", "/orders")
    stored.put(None)
    assert client.watch_key() is False
    assert {key for _, key in sent(server)} == {OLD}


def test_refused_key_is_read_again_once(connect: Connect, server: ScriptedServer, stored: ReplaceableKey) -> None:
    """Guarantee: after a 401 the source is read once; with the same key the call ends."""
    client = connect(stored.source(watch_seconds=None))
    server.begin(NO, NO, {"status": 204, "text": ""}, YES)
    with pytest.raises(AuthenticationError) as refused:
        client.request("GET", "/orders")
    assert (refused.value.code, refused.value.check, refused.value.request_id) == ("key_revoked", 4, "r1")
    assert len(server.received) == 1
    stored.put(NEW)
    client.request("GET", "/orders")
    assert sent(server)[1:] == [("/orders", OLD), ("/credentials/acknowledge", NEW), ("/orders", NEW)]


@pytest.mark.parametrize(
    ("text", "cause"),
    [(None, KeySourceError), ("nonsense", RefusedError), (NEW.replace("_sbx_", "_prd_"), RefusedError)],
    ids=["missing", "invalid", "foreign"],
)
def test_refusal_of_a_key_is_the_error_when_the_source_has_no_other(
    connect: Connect, server: ScriptedServer, stored: ReplaceableKey, text: str | None, cause: type[KeyvaultError]
) -> None:
    """Guarantee: a source that fails after a 401 is the cause of the error, and does not hide the service's answer."""
    client = connect(stored.source(watch_seconds=None))
    server.begin(YES, NO)
    client.request("GET", "/orders")
    stored.put(text)
    with pytest.raises(AuthenticationError) as refused:
        client.request("GET", "/orders")
    error = refused.value
    assert (error.status, error.code, error.check, error.request_id) == (401, "key_revoked", 4, "r1")
    assert isinstance(error.__cause__, cause)


def test_environment_is_a_source(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_KEY", OLD)
    server.begin(YES)
    with client_of(server, EnvironmentKey("SHOP_KEY")) as client:
        client.request("GET", "/orders")
    assert sent(server) == [("/orders", OLD)]
    with client_of(server, EnvironmentKey("NO_SUCH_KEY")) as client, pytest.raises(KeySourceError):
        client.request("GET", "/orders")


def test_vault_path_is_a_source(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: the default field is the one in which Keyvault keeps a merchant's key."""
    monkeypatch.setenv("VAULT_TOKEN", "s.token")
    entry = {"secret": OLD, "schema": "1", "key_id": "fkz18LADEQXn2E6I", "environment": "sandbox"}
    with scripted_server({"status": 200, "body": {"data": {"data": entry}}}, {"status": 403}) as vault:
        source = VaultKey("secret/data/shop", address=vault.url)
        server.begin(YES)
        with client_of(server, source) as client:
            client.request("GET", "/orders")
        assert (vault.received[0].path, vault.received[0].headers["x-vault-token"]) == (
            "/v1/secret/data/shop",
            "s.token",
        )
        with pytest.raises(LookupError, match="403"):
            source.read(30)
    assert sent(server) == [("/orders", OLD)]


def test_threads_that_read_a_vault_do_not_disturb_each_other() -> None:
    """Guarantee: the end of one read closes no connection of another one."""
    asked, answered = threading.Event(), threading.Event()
    reply = b"".join(render({"status": 200, "body": {"data": {"data": {"secret": OLD}}}}, {}))

    def answer_after_the_other(connection: socket.socket, request: ReceivedRequest) -> None:
        asked.set()
        assert answered.wait(60)
        connection.sendall(reply)

    with scripted_server(answer_after_the_other, lambda connection, _: connection.sendall(reply)) as vault:
        source = VaultKey("secret/data/shop", address=vault.url, token=CallableKey(lambda: "s.token"))
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(source.read, 60)
            try:
                assert asked.wait(60)
                assert source.read(60).reveal() == OLD
            finally:
                answered.set()
            assert first.result().reveal() == OLD


def test_no_key_in_texts_logs_tracebacks_and_pickles(
    server: ScriptedServer, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee: a key is in no text of a client, its source, its errors with local variables, and its log."""
    caplog.set_level(logging.DEBUG)
    client = client_of(server, FileKey(file))
    texts = []
    for answer in (NO, {"status": 429, "body": {"code": "rate_limited"}, "headers": {"Retry-After": "600"}}):
        server.begin(answer)
        with pytest.raises((AuthenticationError, RateLimitedError)) as failed:
            client.request("POST", "/orders", json={"a": 1})
        error = failed.value
        texts.append("".join(traceback.TracebackException.from_exception(error, capture_locals=True).format()))
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
        assert (type(copy), copy.status, copy.code) == (type(error), error.status, error.code)
    texts += [repr(client), repr(vars(client)), repr(vars(client._logic)), caplog.text]
    assert [text for text in texts if OLD[27:] in text] == []
    with pytest.raises(TypeError):
        pickle.dumps(client)
    client.close()


FOREIGN, SERVICE_TOKEN, CUSTOMER = OLD.replace("_sbx_", "_prd_"), key_string(1, "svc"), key_string(1, "cat")
PRIVATE, SIGNING = "cHBw" * 10 + "cHA", f"whsec_{'d2hv' * 8}"
SECRET_PARTS = (OLD[27:], PRIVATE, SIGNING)
"""The end of each secret: all key strings of `key_string` have the same."""

URL, SERVICE = "https://api.example/sandbox", "https://keyvault.internal"
FAILING: dict[str, Callable[[], object]] = {
    "merchant": lambda: MerchantClient("http://api.example", "sandbox", OLD),
    "merchant, async": lambda: AsyncMerchantClient("http://api.example", "sandbox", OLD),
    "merchant's key": lambda: MerchantClient(URL, "sandbox", FOREIGN).request("GET", "/orders"),
    "verifier": lambda: Verifier(f"{SERVICE}/production", "sandbox", SERVICE_TOKEN),
    "verifier, async": lambda: AsyncVerifier(f"{SERVICE}/production", "sandbox", SERVICE_TOKEN),
    "verifier's token": lambda: Verifier(SERVICE, "sandbox", OLD),
    "service's address": lambda: ServiceAddress("unix://relative", "sandbox", SERVICE_TOKEN),
    "request refused": lambda: MerchantClient(URL, "sandbox", OLD).request("GET", "/", customer_token=FOREIGN),
    "request refused, async": lambda: anyio.run(
        lambda: AsyncMerchantClient(URL, "sandbox", OLD).request("GET", "/", customer_token=FOREIGN)
    ),
    "request without an answer": lambda: MerchantClient(
        "http://127.0.0.1:1/sandbox", "sandbox", OLD, MerchantOptions(max_attempts=1)
    ).request("GET", "/", customer_token=CUSTOMER),
    "order": lambda: MerchantClient(URL, "sandbox", OLD).retrieve_order("ord_1", customer_token=FOREIGN),
    "customer": lambda: MerchantClient(URL, "sandbox", OLD).retrieve_customer(FOREIGN),
    "sealed": lambda: open_sealed(PRIVATE, {}),
    "sealed with a key": lambda: open_sealed(OLD, {"enc": "", "ciphertext": ""}),
    "webhook": lambda: verify_webhook({}, b"", [SIGNING]),
    "webhook's id": lambda: verify_webhook(
        {"webhook-id": "\udcff", "webhook-timestamp": str(int(time.time())), "webhook-signature": "v1,"}, b"", [SIGNING]
    ),
    "webhook's secret": lambda: verify_webhook({}, b"", [OLD]),
}


@pytest.mark.parametrize("name", FAILING)
def test_no_secret_argument_in_the_frames_of_the_library(name: str) -> None:
    """Guarantee: an error report with local variables has no key, token or secret from a frame of the library."""
    with pytest.raises(KeyvaultError) as failed:
        FAILING[name]()
    seen: list[object] = []
    errors: list[BaseException | None] = [failed.value]
    while errors:
        error = errors.pop()
        if error is None:
            continue
        errors += [error.__cause__, error.__context__]
        for frame, _ in traceback.walk_tb(error.__traceback__):
            # The caller's own frames have what the caller gave.
            if frame.f_globals["__name__"].partition(".")[0] in {"keyvault", "keyvault_client"}:
                seen += frame.f_locals.values()
    assert seen
    texts = [f"{value!r} {getattr(value, '__dict__', '')!r}" for value in seen]
    assert [text for text in texts if any(part in text for part in SECRET_PARTS)] == []


def test_refused_before_sending_has_no_key_in_its_traceback(file: Path) -> None:
    file.write_text(OLD.replace("_sbx_", "_prd_"))
    with pytest.raises(RefusedError) as refused:
        MerchantClient("https://api.example/sandbox", "sandbox", FileKey(file)).request("GET", "/orders")
    text = "".join(traceback.TracebackException.from_exception(refused.value, capture_locals=True).format())
    assert OLD[27:] not in text


# --- the agent --------------------------------------------------------------------------------------------------


def sealed_to(public_key: str, text: str) -> dict[str, str]:
    """Seal as the service does, with the same library."""
    hpke = pytest.importorskip("cryptography.hazmat.primitives.hpke")
    x25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.x25519")
    sealed = pytest.importorskip("keyvault_client.sealed")
    recipient = x25519.X25519PublicKey.from_public_bytes(sealed._decode(public_key))
    suite = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
    raw = suite.encrypt(text.encode(), recipient)
    return {"enc": sealed._encode(raw[:32]), "ciphertext": sealed._encode(raw[32:])}


@pytest.fixture
def replacement(tmp_path: Path) -> dict[str, Any]:
    private, public = create_recipient_key()
    (tmp_path / "recipient").write_text(private.reveal())
    body = {"rotation_id": "rot_1", "key_id": NEW[11:27], "sealed": sealed_to(public, NEW)}
    return {"status": 200, "body": body}


def agent_of(server: ScriptedServer, file: Path, *command: str) -> Agent:
    return Agent(f"{server.url}/sandbox", "sandbox", file, file.parent / "recipient", command)


def test_agent_replaces_the_file_runs_the_command_and_acknowledges(
    server: ScriptedServer, file: Path, replacement: dict[str, Any]
) -> None:
    """Guarantee: the replacement is in the file, whole, before the command runs; it is acknowledged after it."""
    file.chmod(0o640)
    copy = file.parent / "copy"
    server.begin(replacement, {"status": 204, "text": ""}, {"status": 404, "body": {}})
    agent = agent_of(server, file, "cp", str(file), str(copy))
    assert agent.run_once() is True
    assert (copy.read_text(), file.read_text(), file.stat().st_mode & 0o777) == (NEW, NEW, 0o640)
    assert sent(server) == [("/credentials/replacement", OLD), ("/credentials/acknowledge", NEW)]
    assert agent.run_once() is False
    assert sorted(path.name for path in file.parent.iterdir()) == ["copy", "key", "recipient"]


def test_agent_repeats_a_failed_command_before_it_acknowledges(
    server: ScriptedServer, file: Path, replacement: dict[str, Any]
) -> None:
    """Guarantee: without a successful command nothing is acknowledged, and an agent that starts again goes on."""
    server.begin(replacement, {"status": 204, "text": ""})
    with pytest.raises(CommandFailedError, match="status 1"):
        agent_of(server, file, "false").run_once()
    assert sent(server) == [("/credentials/replacement", OLD)]
    assert agent_of(server, file, "true").run_once() is True
    assert sent(server)[1:] == [("/credentials/acknowledge", NEW)]


def test_agent_leaves_the_file_when_the_seal_is_another_recipients(
    server: ScriptedServer, file: Path, replacement: dict[str, Any]
) -> None:
    (file.parent / "recipient").write_text(create_recipient_key()[0].reveal())
    server.begin(replacement)
    with pytest.raises(KeyvaultError):
        agent_of(server, file).run_once()
    assert file.read_text().strip() == OLD


def agent_arguments(server: ScriptedServer, file: Path, *more: str) -> list[str]:
    """Return the arguments of `rotate-agent`."""
    place = ["--base-url", f"{server.url}/sandbox", "--environment", "sandbox"]
    return [*place, "--file", str(file), "--recipient-key", str(file.parent / "recipient"), *more]


@pytest.fixture
def log_level() -> Iterator[None]:
    """Restore what the agent's command sets for the whole process."""
    level = logging.getLogger("httpx").level
    yield
    logging.getLogger("httpx").setLevel(level)


class LoopEndedError(Exception):
    """Ends the loop of the agent in a test."""


@pytest.mark.usefixtures("log_level")
def test_agent_registers_the_same_key_again_after_a_failure(server: ScriptedServer, file: Path) -> None:
    """Guarantee: a registration that failed is repeated with the key of the file, also after it succeeded."""
    server.begin(
        {"status": 403, "body": {"code": "permission_missing"}},
        {"status": 200, "body": {}},
        {"status": 404, "body": {}},
        {"status": 200, "body": {}},
        {"status": 404, "body": {}},
    )
    register = agent_arguments(server, file, "--register", "--once")
    assert rotate_agent.main(register) == 1
    private = (file.parent / "recipient").read_text()
    assert (file.parent / "recipient").stat().st_mode & 0o777 == 0o600
    assert [rotate_agent.main(register), rotate_agent.main(register)] == [0, 0]
    assert (file.parent / "recipient").read_text() == private
    puts = [request for request in server.received if request.method == "PUT"]
    assert [request.path for request in puts] == ["/sandbox/credentials/recipient-key"] * 3
    registered = {json.loads(request.body)["recipient_public_key"] for request in puts}
    # What is sealed to the registered key opens with the key of the file.
    (public,) = registered
    assert open_sealed(private, sealed_to(public, NEW)).reveal() == NEW


@pytest.mark.usefixtures("log_level")
def test_agent_registers_no_key_of_a_broken_file(
    server: ScriptedServer, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (file.parent / "recipient").write_text("no-private-key")
    assert rotate_agent.main(agent_arguments(server, file, "--register")) == 1
    assert server.received == []
    assert "no-private-key" not in caplog.text


@pytest.mark.usefixtures("log_level")
def test_agent_polls_on_after_each_failure(
    server: ScriptedServer, file: Path, replacement: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee: neither a refused key, a cut connection, an invalid answer nor a failed command ends the agent."""
    copy = file.parent / "copy"
    # The command fails while `copy` is a folder.
    copy.mkdir()
    broken = {"status": 200, "body": {"key_id": NEW[11:27]}}
    server.begin(NO, {"status": 409, "body": {}}, broken, replacement, {"status": 204, "text": ""}, NO)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 4:
            copy.rmdir()
        if len(waits) == 6:
            raise LoopEndedError

    command = ["--every", "7", "--exec", "cp", "-T", str(file), str(copy)]
    with pytest.raises(LoopEndedError):
        rotate_agent.main(agent_arguments(server, file, *command), sleep)
    assert (waits, copy.read_text()) == ([7.0] * 6, NEW)
    assert [path.rpartition("/")[2] for path, _ in sent(server)] == [*["replacement"] * 4, "acknowledge", "replacement"]
    assert OLD[27:] not in caplog.text


@pytest.mark.usefixtures("log_level")
@pytest.mark.parametrize("answer", [NO, {"status": 409, "body": {}}, {"status": 200, "body": []}])
def test_agent_that_polls_once_tells_a_failure(server: ScriptedServer, file: Path, answer: dict[str, Any]) -> None:
    """Guarantee: with `--once` the exit status tells whether a replacement could be missing."""
    server.begin(answer, {"status": 404, "body": {}})
    assert rotate_agent.main(agent_arguments(server, file, "--once")) == 1
    assert rotate_agent.main(agent_arguments(server, file, "--once")) == 0


def test_agent_passes_what_follows_exec_to_the_command(server: ScriptedServer, file: Path) -> None:
    """Guarantee: all after `--exec` is the command, also what looks like the agent's own options."""
    command = ["sh", "-c", "exit 0", "--once", "--every", "1", "--", "--file", "x"]
    options = rotate_agent.parse(agent_arguments(server, file, "--once", "--exec", *command))
    assert (options.exec, options.once, options.every, options.file) == (command, True, 30, file)
    assert rotate_agent.parse(agent_arguments(server, file)).exec is None


def test_agent_command_that_does_not_end_fails(
    server: ScriptedServer, file: Path, replacement: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a command that hangs is stopped, is an error of the package, and does not end the agent."""
    monkeypatch.setattr(rotate_agent, "_COMMAND_SECONDS", 0.2)
    server.begin(replacement)
    with pytest.raises(CommandFailedError, match="did not end"):
        agent_of(server, file, "sleep", "600").run_once()


def test_threads_share_a_client(server: ScriptedServer, file: Path) -> None:
    server.begin(*[YES] * 40)
    with client_of(server, FileKey(file, watch_seconds=0)) as client:
        threads = [threading.Thread(target=lambda: [client.request("GET", "/o") for _ in range(10)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(server.received) == 40

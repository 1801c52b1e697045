"""How each reply of a server, and each missing reply, is classified."""

import json
import logging
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import requests
from cryptography.hazmat.primitives.serialization import Encoding

from keyvault.backends.base import (
    BackendConflictError,
    BackendDeniedError,
    BackendError,
    BackendInvalidError,
    BackendMissingError,
    BackendUnavailableError,
    Mount,
)
from keyvault.backends.vault.breaker import TRIPS_AFTER
from keyvault.backends.vault.client import VaultClient, VaultServer, open_client
from keyvault.backends.vault.kv import VaultBackend, read_health
from keyvault.backends.vault.replies import read_failure
from keyvault.domain.plaintext import Plaintext
from keyvault.wire.trace_context import traced
from tests.backends.receivers import make_authority

from .conftest import LONG_TIMEOUTS, SHORT_TIMEOUTS
from .fake import FakeVault, Fault, lost_reply, refused, running_fake, slow

BOX = Mount.SANDBOX
DATA = "/data/"
HTML = b"<html>Bad gateway</html>"


def put(store: VaultBackend, text: str = "hunter2-the-secret", after: int = 0) -> int:
    return store.put(BOX, "1/crd_a", Plaintext(text), {"key_id": "k"}, expected_version=after)


def failure(act: Callable[[], object]) -> BackendError:
    with pytest.raises(BackendError) as raised:
        act()
    return raised.value


# --- statuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (400, "check-and-set parameter did not match the current version", BackendConflictError),
        (400, "invalid role or secret ID", BackendDeniedError),
        (400, "something is wrong with the request", BackendInvalidError),
        (401, "", BackendDeniedError),
        (403, "permission denied", BackendDeniedError),
        (403, "token not found", BackendDeniedError),
        (404, "", BackendMissingError),
        (404, 'no handler for route "x/data/a". route entry not found.', BackendDeniedError),
        (405, "unsupported operation", BackendInvalidError),
        (412, "required index state not present", BackendUnavailableError),
        (429, "request path: rate limit quota exceeded", BackendUnavailableError),
        (472, "", BackendInvalidError),
        (500, "internal error", BackendUnavailableError),
        (501, "not initialized", BackendUnavailableError),
        (502, "", BackendUnavailableError),
        (503, "Vault is sealed", BackendUnavailableError),
        (504, "", BackendUnavailableError),
    ],
)
def test_reply_of_each_status_is_mapped_to_a_backend_error_with_the_status(
    fake: FakeVault, store: VaultBackend, status: int, message: str, expected: type[BackendError]
) -> None:
    # Twice: a denial is answered by a login and one retry.
    fake.fail(refused(status, message), DATA, times=2)
    error = failure(lambda: store.read(BOX, "1/crd_a"))
    assert type(error) is expected
    assert error.status == status
    assert " ".join(message.split())[:20] in " ".join(error.internal.split())
    assert not message or message not in error.detail


@pytest.mark.parametrize(
    ("header", "seconds"), [("7", 7), ("0", 1), ("", 1), ("-3", 1), ("soon", 1), ("9" * 20, 1), ("1.5", 1)]
)
def test_reply_with_retry_after_carries_the_delay(
    fake: FakeVault, store: VaultBackend, header: str, seconds: int
) -> None:
    fake.fail(refused(429, "quota exceeded", Retry_After=header), DATA)
    error = failure(lambda: store.read(BOX, "1/crd_a"))
    assert isinstance(error, BackendUnavailableError)
    assert error.retry_after_seconds == seconds


@pytest.mark.parametrize("status", [403, 404, 429, 500, 502, 503])
def test_reply_from_a_proxy_keeps_its_status_and_not_its_text(
    fake: FakeVault, store: VaultBackend, status: int
) -> None:
    page = b"<html>You sent hunter2</html>"
    fake.fail(Fault(status, page, "text/html"), DATA, times=2)
    error = failure(lambda: store.read(BOX, "1/crd_a"))
    assert error.status == status
    assert not isinstance(error, BackendMissingError)
    assert "hunter2" not in error.internal


@pytest.mark.parametrize("body", [b"", b"{not json", b"[]", b'"text"', b"null", HTML, b"\xff\xfe"])
@pytest.mark.parametrize("content_type", ["application/json", "text/html"])
def test_reply_of_success_without_an_object_is_unavailable(
    fake: FakeVault, store: VaultBackend, body: bytes, content_type: str
) -> None:
    """A write whose reply a proxy replaced may have succeeded: the writer reads back."""
    fake.fail(Fault(200, body, content_type, has_effect=True), DATA)
    assert isinstance(failure(lambda: put(store)), BackendUnavailableError)
    assert store.read(BOX, "1/crd_a").version == 1


@pytest.mark.parametrize("body", [{}, {"data": None}, {"data": []}, {"data": {"version": "x"}}, {"data": {"keys": 1}}])
def test_reply_with_a_malformed_body_is_unavailable(
    fake: FakeVault, store: VaultBackend, body: dict[str, object]
) -> None:
    acts: list[Callable[[], object]] = [
        lambda: put(store),
        lambda: store.read(BOX, "1/crd_a"),
        lambda: store.versions(BOX, "1/crd_a"),
        lambda: list(store.list_paths(BOX)),
    ]
    fake.fail(Fault(200, json.dumps(body).encode()), "-keys-", times=len(acts))
    for act in acts:
        assert isinstance(failure(act), BackendUnavailableError)


# --- missing replies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault(), Fault(is_reset=True), lost_reply(), Fault(is_reset=True, has_effect=True)])
def test_reply_that_never_comes_is_unavailable(fake: FakeVault, store: VaultBackend, fault: Fault) -> None:
    store.versions(BOX, "1/crd_a")
    fake.fail(fault, DATA)
    error = failure(lambda: put(store))
    assert isinstance(error, BackendUnavailableError)
    assert error.status is None


def test_trace_of_the_request_is_passed_on(fake: FakeVault) -> None:
    client = open_client(VaultServer(fake.address, timeout=LONG_TIMEOUTS), Plaintext("s.mine"))
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    for value in (trace, "nonsense"):
        with traced(value), suppress(BackendError):
            client.auth.token.lookup_self()
    first, second = fake.calls
    assert first.headers.get("traceparent") == trace
    assert "traceparent" not in second.headers
    assert first.token == second.token == "s.mine"


def test_reply_that_takes_too_long_is_unavailable(fake: FakeVault) -> None:
    until = threading.Event()
    fake.fail(slow(until), "lookup-self")
    client = open_client(VaultServer(fake.address, timeout=SHORT_TIMEOUTS))
    error = failure(lambda: client.auth.token.lookup_self())
    until.set()
    assert isinstance(error, BackendUnavailableError)
    assert "Timeout" in error.internal


def test_reply_from_a_closed_port_is_unavailable() -> None:
    client = open_client(VaultServer("http://127.0.0.1:1", timeout=LONG_TIMEOUTS))
    assert isinstance(failure(lambda: client.auth.token.lookup_self()), BackendUnavailableError)


def test_reply_of_a_server_without_tls_is_unavailable(fake: FakeVault) -> None:
    """Nothing is sent to a server that cannot prove its name by TLS."""
    client = open_client(
        VaultServer(fake.address.replace("http://", "https://"), timeout=LONG_TIMEOUTS), Plaintext("s.mine")
    )
    error = failure(lambda: client.auth.token.lookup_self())
    assert isinstance(error, BackendUnavailableError)
    assert error.internal.startswith("TLS: ")
    assert fake.calls == []


def test_reply_over_tls_requires_the_ca_and_the_name(tmp_path: Path) -> None:
    """The certificate is checked with the configured CA, and no token is sent to another server."""
    authority, other = make_authority(tmp_path), make_authority(tmp_path)
    files = []
    for number, each in enumerate((authority, other)):
        files.append(tmp_path / f"ca{number}.pem")
        files[-1].write_bytes(each.certificate.public_bytes(Encoding.PEM))
    with running_fake(authority.server("127.0.0.1")) as fake:
        assert open_client(VaultServer(fake.address, files[0])).sys.read_health_status(method="GET")["initialized"]
        fake.calls.clear()
        for wrong in (VaultServer(fake.address, files[1]), VaultServer(fake.address)):
            error = failure(open_client(wrong, Plaintext("s.mine")).auth.token.lookup_self)
            assert isinstance(error, BackendUnavailableError)
            assert error.internal.startswith("TLS: ")
        assert fake.calls == []
    with running_fake(authority.server("elsewhere.test")) as fake:
        error = failure(lambda: open_client(VaultServer(fake.address, files[0])).auth.token.lookup_self())
        assert error.internal.startswith("TLS: ")


def test_reply_with_a_missing_ca_file_is_unavailable(fake: FakeVault, tmp_path: Path) -> None:
    address = fake.address.replace("http://", "https://")
    error = failure(lambda: open_client(VaultServer(address, tmp_path / "none.pem")).auth.token.lookup_self())
    assert isinstance(error, BackendUnavailableError)
    assert "none.pem" in error.internal


# --- writes without a known outcome -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "may_be_applied"),
    [
        (refused(412, "required index state not present"), False),
        (refused(429, "request path: rate limit quota exceeded"), False),
        (refused(503, "Vault is sealed"), False),
        (refused(500, "internal error"), True),
        (Fault(307, headers={"Location": "https://standby.test/"}), True),
        (Fault(502, HTML, "text/html"), True),
        (Fault(503, HTML, "text/html"), True),
        (Fault(504, HTML, "text/html"), True),
        (Fault(200, HTML, "text/html"), True),
        (Fault(200, b"{}"), True),
        (Fault(), True),
        (Fault(is_reset=True), True),
    ],
    ids=lambda each: f"{each.status}-{each.content_type}-{each.is_reset}" if isinstance(each, Fault) else "",
)
def test_failed_write_tells_whether_it_may_still_be_applied(
    fake: FakeVault, store: VaultBackend, fault: Fault, *, may_be_applied: bool
) -> None:
    """Guarantee: no write that a server or a proxy may have received counts as refused. A read changes nothing."""
    store.versions(BOX, "1/crd_a")
    fake.fail(fault, DATA)
    assert failure(lambda: put(store)).may_be_applied is may_be_applied
    fake.fail(fault, DATA)
    assert not failure(lambda: store.read(BOX, "1/crd_a")).may_be_applied


def test_write_that_takes_too_long_may_still_be_applied(fake: FakeVault) -> None:
    until = threading.Event()
    fake.fail(slow(until), "sys/seal")
    error = failure(open_client(VaultServer(fake.address, timeout=SHORT_TIMEOUTS)).sys.seal)
    until.set()
    assert error.may_be_applied


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "https://vault.invalid:8200"])
def test_write_without_a_connection_is_not_applied(address: str) -> None:
    client = open_client(VaultServer(address, timeout=LONG_TIMEOUTS))
    assert not failure(client.sys.seal).may_be_applied


def test_write_to_a_server_with_an_untrusted_certificate_is_not_applied(tmp_path: Path) -> None:
    with running_fake(make_authority(tmp_path).server("127.0.0.1")) as fake:
        assert not failure(open_client(VaultServer(fake.address, timeout=LONG_TIMEOUTS)).sys.seal).may_be_applied


def test_write_whose_login_gets_no_reply_is_not_applied(fake: FakeVault, store: VaultBackend) -> None:
    fake.fail(Fault(), "login")
    assert not failure(lambda: put(store)).may_be_applied
    assert fake.calls_to(DATA) == []


# --- redirects, repetition, secrets -----------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_redirect_is_not_followed_and_the_token_not_sent_on(
    fake: FakeVault, store: VaultBackend, status: int, method: str
) -> None:
    """Another host gets neither the token nor the secret to be written."""
    store.versions(BOX, "1/crd_a")
    with running_fake() as elsewhere:
        fake.fail(Fault(status, headers={"Location": f"{elsewhere.address}/v1/anything"}), DATA)
        error = failure(lambda: store.read(BOX, "1/crd_a") if method == "GET" else put(store))
        assert isinstance(error, BackendUnavailableError)
        assert error.status == status
        assert elsewhere.calls == []


@pytest.mark.parametrize(
    "fault",
    [
        *[refused(status, "no") for status in (400, 404, 412, 429, 500, 502, 503)],
        Fault(),
        lost_reply(),
        Fault(is_reset=True),
        Fault(200, b"garbage", has_effect=True),
    ],
    ids=lambda fault: f"{fault.status}-{fault.has_effect}-{fault.is_reset}",
)
def test_failed_call_is_not_repeated(fake: FakeVault, store: VaultBackend, fault: Fault) -> None:
    """The first call may have taken effect: only the writer can find out, by reading back."""
    acts: list[Callable[[], object]] = [
        lambda: put(store),
        lambda: store.soft_delete(BOX, "1/crd_a", 1),
        lambda: store.destroy(BOX, "1/crd_a", 1),
        lambda: store.forget(BOX, "1/crd_a"),
    ]
    for act in acts:
        fake.calls.clear()
        fake.fail(fault, "-keys-")
        with suppress(BackendError):
            act()
        assert len(fake.calls_to("-keys-")) == 1
        fake.clear_faults()


def test_write_with_a_lost_reply_is_resolved_by_reading_back(fake: FakeVault, store: VaultBackend) -> None:
    fake.fail(lost_reply(), DATA, "POST")
    assert isinstance(failure(lambda: put(store)), BackendUnavailableError)
    assert store.read(BOX, "1/crd_a").labels == {"key_id": "k"}
    assert isinstance(failure(lambda: put(store)), BackendConflictError)


SECRET, OTHER = "hunter2-the-secret", "hunter3-of-a-label"


@pytest.mark.parametrize("status", [400, 403, 404, 429, 500])
def test_error_contains_neither_the_token_nor_the_secret(
    fake: FakeVault, store: VaultBackend, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """This holds even where the server's text repeats the request."""
    caplog.set_level(logging.DEBUG)
    store.versions(BOX, "1/crd_a")

    def act() -> None:
        store.put(BOX, "1/crd_a", Plaintext(SECRET), {"label": OTHER}, expected_version=0)

    act()
    token = fake.calls_to(DATA)[-1].token
    # A denial is retried with another token, which no text could contain.
    fake.fail(refused(status, f"you sent {token} and {SECRET}, {OTHER}"), DATA, times=2)
    error = failure(act)
    shown = all_text_of(error) + caplog.text
    # The refused token is no longer valid.
    planted = [SECRET, OTHER] if status == 403 else [SECRET, OTHER, token]
    assert [text for text in planted if text in shown] == []
    assert "you sent" in error.internal


def all_text_of(error: BackendError) -> str:
    """Return everything that a program may print of an error."""
    trace = "".join(traceback.format_exception(error))
    return f"{trace} {error!r} {error} {error.detail} {error.internal} {vars(error)}"


@pytest.mark.parametrize("act", ["put", "log in"])
@pytest.mark.parametrize("fault", [Fault(), Fault(is_reset=True), Fault(500, HTML, "text/html"), Fault(200, HTML)])
def test_error_without_a_reply_contains_neither_the_token_nor_the_secret(
    fake: FakeVault, store: VaultBackend, fault: Fault, act: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    fake.fail(fault, DATA if act == "put" else "login")
    error = failure(lambda: put(store))
    planted = ["hunter2-the-secret", *fake._tokens, *fake._secret_ids]
    assert [text for text in planted if text in all_text_of(error) + caplog.text] == []


# --- health, breaker, metrics -----------------------------------------------------------------------------


def test_health_reports_the_state_of_the_server(fake: FakeVault) -> None:
    server = VaultServer(fake.address, timeout=LONG_TIMEOUTS)
    assert read_health(server).ready
    fake.is_sealed = True
    assert (read_health(server).ready, read_health(server).detail) == (False, "the secrets manager is sealed")
    fake.is_sealed = False
    for status, expected in [
        (429, "standby"),
        (472, "recovery"),
        (473, "performance"),
        (501, "initialized"),
        (418, "418"),
    ]:
        fake.fail(Fault(status, b"{}"), "sys/health")
        health = read_health(server)
        assert not health.ready
        assert expected in health.detail


@pytest.mark.parametrize("fault", [Fault(), Fault(200, HTML, "text/html"), Fault(307), Fault(is_reset=True)])
def test_health_of_a_server_that_is_no_vault_is_not_ready(fake: FakeVault, fault: Fault) -> None:
    fake.fail(fault, "sys/health")
    health = read_health(VaultServer(fake.address, timeout=LONG_TIMEOUTS))
    assert not health.ready
    assert health.detail


def test_breaker_blocks_calls_of_a_scope_to_an_unresponsive_server(fake: FakeVault, store: VaultBackend) -> None:
    """The other environment has its own breaker."""
    store.versions(BOX, "1/crd_a")
    fake.fail(refused(503, "Vault is sealed"), "-keys-sandbox", times=TRIPS_AFTER)
    for _ in range(TRIPS_AFTER):
        assert failure(lambda: put(store)).status == 503
    asked = len(fake.calls)
    error = failure(lambda: put(store))
    assert isinstance(error, BackendUnavailableError)
    assert error.status is None
    assert error.retry_after_seconds >= 1
    assert len(fake.calls) == asked
    assert store.versions(Mount.PRODUCTION, "1/crd_a") == []


def test_breaker_counts_a_denial_as_an_answer(fake: FakeVault, store: VaultBackend) -> None:
    for _ in range(3 * TRIPS_AFTER):
        assert isinstance(failure(lambda: store.read(BOX, "1/crd_a")), BackendMissingError)


def test_calls_are_counted_by_outcome(fake: FakeVault, client: VaultClient) -> None:
    from prometheus_client import REGISTRY

    def count(outcome: str) -> float:
        labels = {"login": client.name, "outcome": outcome}
        return REGISTRY.get_sample_value("keyvault_vault_calls_total", labels) or 0

    def read() -> object:
        return client.call(lambda hvac: hvac.secrets.kv.v2.read_secret_metadata("a", mount_point="kv-keys-sandbox"))

    before = {outcome: count(outcome) for outcome in ("ok", "missing", "unavailable", "not_asked")}
    failure(read)
    fake.fail(refused(500), "metadata", times=TRIPS_AFTER)
    for _ in range(TRIPS_AFTER + 1):
        failure(read)
    found = {outcome: count(outcome) - before[outcome] for outcome in before}
    assert found == {"ok": 1, "missing": 1, "unavailable": TRIPS_AFTER, "not_asked": 1}


def test_failure_read_of_a_response_without_a_request_body_is_described() -> None:
    response = requests.Response()
    response.status_code, response._content = 500, b'{"errors": ["boom"]}'
    response.request = requests.Request("GET", "http://vault/v1/a?version=1").prepare()
    assert read_failure("get", "http://vault/v1/a?version=1", response).internal == "GET /v1/a: 500 boom"

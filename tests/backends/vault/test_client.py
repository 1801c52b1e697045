"""One role's client: when it logs in, renews and retries, and that it uses no ambient configuration."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from keyvault.backends import meters
from keyvault.backends.base import BackendDeniedError, BackendError, BackendUnavailableError, Mount
from keyvault.backends.vault.client import REFUSED_SECONDS, RENEW_AFTER, RENEW_AGAIN_SECONDS, VaultClient, VaultServer
from keyvault.backends.vault.kv import VaultBackend
from keyvault.backends.vault.logins import AppRoleLogin, KubernetesLogin, TokenFileLogin
from tests.environment import ROOT

from .conftest import ROLE, VaultClock, make_client
from .fake import FakeVault, Fault, refused, slow

LEASE = 3600


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The lifetime of each token, as reported to the metrics; None: it does not expire."""
    reported: list[float | None] = []
    monkeypatch.setattr(meters, "note_lease", lambda login, seconds: reported.append(seconds))
    return reported


def lookup_self(client: VaultClient) -> Any:
    return client.call(lambda hvac: hvac.auth.token.lookup_self())


def count(fake: FakeVault, path: str = "approle/login") -> int:
    return len(fake.calls_to(path))


# --- login ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["http://vault.example:8200", "vault.example:8200", "https://", "ftp://127.0.0.1", "", "http:///v1"]
)
def test_server_without_tls_on_another_machine_is_refused(address: str) -> None:
    """Keys and tokens cross a network only under TLS."""
    with pytest.raises(ImproperlyConfigured, match="https"):
        VaultServer(address)


@pytest.mark.parametrize("address", ["https://vault.example:8200", "http://127.0.0.1:8200", "http://[::1]:8200"])
def test_server_with_tls_or_on_this_machine_is_accepted(address: str) -> None:
    assert VaultServer(address).address == address


def test_client_logs_in_when_first_needed_and_once(
    fake: FakeVault, client: VaultClient, leases: list[float | None]
) -> None:
    assert fake.calls == []
    for _ in range(3):
        lookup_self(client)
    assert count(fake) == 1
    assert leases[-1] == LEASE


def test_client_of_many_threads_logs_in_once(fake: FakeVault, client: VaultClient) -> None:
    """A process that starts with 20 threads logs in once, however long that takes."""
    until = threading.Event()
    fake.fail(slow(until), "login")
    barrier = threading.Barrier(21)

    def work(_: int) -> None:
        barrier.wait()
        lookup_self(client)

    with ThreadPoolExecutor(20) as pool:
        done = pool.map(work, range(20))
        barrier.wait()
        until.set()
        list(done)
    assert count(fake) == 1
    assert count(fake, "lookup-self") == 20


def test_client_of_many_threads_whose_token_was_revoked_logs_in_once(fake: FakeVault, client: VaultClient) -> None:
    lookup_self(client)
    fake.revoke_all()
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda _: lookup_self(client), range(20)))
    assert count(fake) == 2


@pytest.mark.parametrize("status", [401, 403])
def test_client_refused_once_logs_in_and_retries_once(fake: FakeVault, client: VaultClient, status: int) -> None:
    lookup_self(client)
    fake.fail(refused(status, "permission denied"), "lookup-self")
    lookup_self(client)
    assert (count(fake), count(fake, "lookup-self")) == (2, 3)
    first, second = (call.token for call in fake.calls_to("lookup-self")[1:])
    assert first != second


def test_client_refused_twice_is_denied_without_a_third_attempt(fake: FakeVault, client: VaultClient) -> None:
    """A wrong policy stays wrong, so the client does not retry its login repeatedly."""
    lookup_self(client)
    fake.fail(refused(403, "permission denied"), "lookup-self", times=9)
    with pytest.raises(BackendDeniedError) as raised:
        lookup_self(client)
    assert raised.value.status == 403
    assert (count(fake), count(fake, "lookup-self")) == (2, 3)


def test_client_refused_repeatedly_creates_no_more_tokens(
    fake: FakeVault, client: VaultClient, clock: VaultClock
) -> None:
    """Many refused calls do not cause many logins, and the replaced token is revoked."""
    lookup_self(client)
    fake.fail(refused(403, "permission denied"), "lookup-self", times=11)
    for _ in range(10):
        with pytest.raises(BackendDeniedError):
            lookup_self(client)
    assert (count(fake), count(fake, "revoke-self"), count(fake, "lookup-self")) == (2, 1, 12)
    clock.advance(REFUSED_SECONDS + 1)
    fake.fail(refused(403, "permission denied"), "lookup-self")
    lookup_self(client)
    assert count(fake) == 3


@pytest.mark.parametrize(("status", "message"), [(400, "invalid role or secret ID"), (403, "permission denied")])
def test_client_whose_login_is_refused_is_denied_immediately(
    fake: FakeVault, client: VaultClient, status: int, message: str
) -> None:
    fake.fail(refused(status, message), "login", times=9)
    with pytest.raises(BackendDeniedError) as raised:
        lookup_self(client)
    assert raised.value.status == status
    assert len(fake.calls) == 1


def test_client_whose_role_was_deleted_is_denied(fake: FakeVault, client: VaultClient) -> None:
    lookup_self(client)
    fake.delete_role(ROLE)
    fake.revoke_all()
    with pytest.raises(BackendDeniedError):
        lookup_self(client)


def test_client_logs_in_again_after_an_outage(fake: FakeVault, client: VaultClient) -> None:
    fake.is_sealed = True
    with pytest.raises(BackendUnavailableError):
        lookup_self(client)
    fake.is_sealed = False
    lookup_self(client)


def test_client_login_with_a_malformed_answer_is_unavailable(fake: FakeVault, client: VaultClient) -> None:
    fake.fail(Fault(200, json.dumps({"auth": None}).encode()), "login")
    with pytest.raises(BackendUnavailableError):
        lookup_self(client)


# --- the lease --------------------------------------------------------------------------------------------


def test_client_renews_at_two_thirds_of_the_lease_and_not_before(
    fake: FakeVault, client: VaultClient, clock: VaultClock, leases: list[float | None]
) -> None:
    lookup_self(client)
    clock.advance(LEASE * (RENEW_AFTER - 0.1) - 1)
    lookup_self(client)
    assert count(fake, "renew-self") == 0
    clock.advance(LEASE * 0.1 + 1)
    lookup_self(client)
    assert (count(fake), count(fake, "renew-self")) == (1, 1)
    assert leases[-1] == LEASE


def test_client_renewals_of_processes_that_started_together_are_spread(
    fake: FakeVault, logins: Path, clock: VaultClock
) -> None:
    """Renewals are spread by up to a tenth of the lease."""
    pauses = []
    for _ in range(40):
        client = make_client(fake, AppRoleLogin(logins, ROLE), clock)
        lookup_self(client)
        assert client._held is not None
        assert client._held.renew_at is not None
        pauses.append(client._held.renew_at - clock.now)
    assert len(set(pauses)) > 20
    assert all(LEASE * (RENEW_AFTER - 0.1) < pause <= LEASE * RENEW_AFTER for pause in pauses)


def test_client_renewed_in_time_never_logs_in_again(fake: FakeVault, client: VaultClient, clock: VaultClock) -> None:
    for _ in range(20):
        lookup_self(client)
        clock.advance(LEASE * 0.7)
    assert count(fake) == 1
    assert count(fake, "renew-self") == 19


def test_client_near_the_maximum_lifetime_logs_in(
    fake: FakeVault, client: VaultClient, clock: VaultClock, leases: list[float | None]
) -> None:
    """The token is near its maximum lifetime; the client logs in before it ends."""
    fake.greatest_seconds = 1.2 * LEASE
    lookup_self(client)
    clock.advance(LEASE * 0.7)
    lookup_self(client)
    assert (count(fake), count(fake, "renew-self")) == (2, 1)
    assert leases[-1] == LEASE


def test_client_whose_token_expired_logs_in(fake: FakeVault, client: VaultClient, clock: VaultClock) -> None:
    lookup_self(client)
    clock.advance(LEASE + 1)
    lookup_self(client)
    assert (count(fake), count(fake, "renew-self"), count(fake, "lookup-self")) == (2, 0, 2)


def test_client_whose_token_is_not_renewable_uses_it_until_expiry(
    fake: FakeVault, client: VaultClient, clock: VaultClock
) -> None:
    fake.is_renewable = False
    lookup_self(client)
    clock.advance(LEASE - 1)
    lookup_self(client)
    assert count(fake) == 1
    clock.advance(2)
    lookup_self(client)
    assert (count(fake), count(fake, "renew-self")) == (2, 0)


def test_client_whose_renewal_is_refused_logs_in(fake: FakeVault, client: VaultClient, clock: VaultClock) -> None:
    lookup_self(client)
    fake.fail(refused(403, "permission denied"), "renew-self")
    clock.advance(LEASE * 0.7)
    lookup_self(client)
    assert (count(fake), count(fake, "renew-self")) == (2, 1)


@pytest.mark.parametrize("fault", [refused(503, "Vault is sealed"), Fault(200, b"{}"), Fault(200, b"garbage")])
def test_client_whose_renewal_fails_continues_and_retries(
    fake: FakeVault, client: VaultClient, clock: VaultClock, fault: Fault
) -> None:
    """The token remains valid for another third of its lease."""
    lookup_self(client)
    fake.fail(fault, "renew-self")
    clock.advance(LEASE * 0.7)
    for _ in range(3):
        lookup_self(client)
    assert (count(fake), count(fake, "renew-self")) == (1, 1)
    clock.advance(RENEW_AGAIN_SECONDS)
    lookup_self(client)
    assert (count(fake), count(fake, "renew-self")) == (1, 2)


def test_client_renewal_blocks_no_other_thread(fake: FakeVault, client: VaultClient, clock: VaultClock) -> None:
    lookup_self(client)
    until = threading.Event()
    fake.fail(slow(until), "renew-self")
    clock.advance(LEASE * 0.7)
    with ThreadPoolExecutor(1) as pool:
        renewing = pool.submit(lookup_self, client)
        try:
            while not fake.calls_to("renew-self"):
                assert not renewing.done()
            lookup_self(client)
        finally:
            until.set()
        renewing.result()
    assert (count(fake), count(fake, "renew-self")) == (1, 1)


# --- an agent's token, Kubernetes -------------------------------------------------------------------------


def test_client_with_an_agents_token_rereads_the_file_when_refused(
    fake: FakeVault, logins: Path, clock: VaultClock, leases: list[float | None]
) -> None:
    file = logins / f"{ROLE}.token"
    file.write_text(f"{fake._log_in()['client_token']}\n")
    client = make_client(fake, TokenFileLogin(logins, ROLE), clock)
    lookup_self(client)
    clock.advance(100 * LEASE)
    file.write_text(fake._log_in()["client_token"])
    lookup_self(client)
    assert count(fake, "lookup-self") == 3
    assert leases[-1] is None
    # The token belongs to the agent, which may use it elsewhere too.
    assert count(fake, "revoke-self") == 0


@pytest.mark.parametrize("text", [None, "", "\n", "ä"])
def test_client_without_an_agents_token_is_denied(
    fake: FakeVault, logins: Path, clock: VaultClock, text: str | None
) -> None:
    if text is not None:
        (logins / f"{ROLE}.token").write_text(text)
    client = make_client(fake, TokenFileLogin(logins, ROLE), clock)
    with pytest.raises(BackendDeniedError) as raised:
        lookup_self(client)
    assert f"{ROLE}.token" in raised.value.internal
    assert fake.calls == []


def test_client_in_kubernetes_rereads_its_service_account_token(
    fake: FakeVault, tmp_path: Path, clock: VaultClock
) -> None:
    file = tmp_path / "jwt"
    file.write_text("first")
    fake.service_accounts = {"first": ROLE}
    client = make_client(fake, KubernetesLogin(ROLE, file), clock)
    lookup_self(client)
    fake.service_accounts = {"second": ROLE}
    fake.revoke_all()
    file.write_text("second")
    lookup_self(client)
    assert [call.body for call in fake.calls_to("kubernetes/login")] == [
        {"role": ROLE, "jwt": jwt} for jwt in ("first", "second")
    ]


def test_client_in_kubernetes_of_another_role_is_denied(fake: FakeVault, tmp_path: Path, clock: VaultClock) -> None:
    (tmp_path / "jwt").write_text("mine")
    fake.service_accounts = {"mine": "kv-lookup-sandbox"}
    with pytest.raises(BackendDeniedError):
        lookup_self(make_client(fake, KubernetesLogin(ROLE, tmp_path / "jwt"), clock))


# --- processes --------------------------------------------------------------------------------------------


def _child(store: VaultBackend, pipe: Any) -> None:
    store.versions(Mount.SANDBOX, "1/crd_a")
    pipe.send(os.getpid())


def test_backend_forked_while_a_thread_holds_its_locks_logs_in_itself(fake: FakeVault, store: VaultBackend) -> None:
    """The child shares neither token nor connection with its parent and does not wait for a thread it does not have."""
    store.versions(Mount.SANDBOX, "1/crd_a")
    (client,) = store._clients.values()
    here, there = multiprocessing.Pipe()
    with client._lock, client.breaker._lock:
        child = multiprocessing.get_context("fork").Process(target=_child, args=(store, there))
        child.start()
        assert here.poll(30)
        here.recv()
        child.join(30)
    assert child.exitcode == 0
    store.versions(Mount.SANDBOX, "1/crd_a")
    assert count(fake) == 2
    first, second, third = (call.token for call in fake.calls_to("metadata"))
    assert first == third != second


ENVIRONMENT = {
    "VAULT_TOKEN": "s.planted",
    "VAULT_NAMESPACE": "planted",
    "VAULT_CLIENT_CERT": "/planted/cert.pem",
    "VAULT_CLIENT_KEY": "/planted/key.pem",
    "VAULT_CACERT": "/planted/ca.pem",
    "VAULT_CAPATH": "/planted",
    "REQUESTS_CA_BUNDLE": "/planted/ca.pem",
    "http_proxy": "http://127.0.0.1:1",
    "HTTP_PROXY": "http://127.0.0.1:1",
    "all_proxy": "http://127.0.0.1:1",
}
PROBE = """
import sys
from keyvault.backends.base import BackendDeniedError
from keyvault.backends.vault.client import VaultServer, open_client
client = open_client(VaultServer(sys.argv[1]))
try:
    client.auth.token.lookup_self()
except BackendDeniedError as error:
    print(error.status, client.session.cert, client.adapter.namespace)
"""


def test_client_ignores_ambient_configuration(fake: FakeVault, tmp_path: Path) -> None:
    """The client uses only its own configuration: no ambient token, proxy, certificate or password."""
    (tmp_path / ".vault-token").write_text("s.planted")
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login planted password planted\n")
    (tmp_path / ".netrc").chmod(0o600)
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE, fake.address],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.split() == ["403", "None", "None"], found.stderr
    (call,) = fake.calls
    assert "planted" not in str(call)
    assert "authorization" not in call.headers


def test_client_without_the_roles_login_is_denied_without_a_request(
    fake: FakeVault, store: VaultBackend, logins: Path
) -> None:
    """A verifying host has only the logins for verification."""
    (logins / f"{ROLE}.role_id").unlink()
    with pytest.raises(BackendError) as raised:
        store.read(Mount.SANDBOX, "1/crd_a")
    assert isinstance(raised.value, BackendDeniedError)
    assert ROLE in raised.value.internal
    assert fake.calls == []

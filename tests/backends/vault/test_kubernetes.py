"""Login with a service account's token on the real server, beside a stub of the cluster's token review."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from keyvault.backends.base import BackendDeniedError, Mount
from keyvault.backends.vault.kv import VaultBackend
from keyvault.backends.vault.layout import VaultRole
from keyvault.backends.vault.logins import KubernetesLogin
from tests.backends.receivers import make_authority

from .installation import InstalledVault

NAMESPACE = "payments"


@dataclass
class Cluster:
    """The service accounts' tokens that the cluster knows, as `name`."""

    address: str = ""
    known: dict[str, str] = field(default_factory=dict)

    def make_token(self, name: str, number: int = 1) -> str:
        """Return a token that the cluster accepts; only the cluster can check its signature."""
        account = {"name": name, "uid": f"uid-{name}"}
        claims = {
            "iss": "https://kubernetes.default.svc",
            "sub": f"system:serviceaccount:{NAMESPACE}:{name}",
            "exp": 4_000_000_000,
            "iat": number,
            "nbf": 1,
            "kubernetes.io": {"namespace": NAMESPACE, "serviceaccount": account},
        }
        parts = [json.dumps(part).encode() for part in ({"alg": "RS256", "typ": "JWT"}, claims)] + [b"signature" * 20]
        token = ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)
        self.known[token] = name
        return token

    def review(self, token: str) -> dict[str, Any]:
        name = self.known.get(token)
        if name is None:
            return {"authenticated": False, "error": "unknown"}
        user = {"username": f"system:serviceaccount:{NAMESPACE}:{name}", "uid": f"uid-{name}"}
        return {"authenticated": True, "user": {**user, "groups": ["system:serviceaccounts"]}}


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    cluster = Cluster()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = cluster.review(asked["spec"]["token"])
            body = json.dumps({"kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1", "status": status})
            self.send_response(201)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        cluster.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield cluster
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def cluster(installed_vault: InstalledVault, tmp_path: Path) -> Iterator[Cluster]:
    """Bind the reader's role to the service account `web`."""
    admin, name = installed_vault.admin, installed_vault.layout.login(VaultRole.READER, "sandbox")
    method = f"{installed_vault.layout.prefix}-kubernetes"
    with running_cluster() as made:
        admin.write_data(f"sys/auth/{method}", data={"type": "kubernetes"})
        try:
            # The server requires a CA, though the stub speaks plain HTTP.
            ca = make_authority(tmp_path).certificate.public_bytes(Encoding.PEM).decode()
            about = {"kubernetes_host": made.address, "token_reviewer_jwt": made.make_token("vault")}
            about |= {"kubernetes_ca_cert": ca}
            admin.write_data(f"auth/{method}/config", data={**about, "disable_local_ca_jwt": True})
            role = {
                "bound_service_account_names": ["web"],
                "bound_service_account_namespaces": [NAMESPACE],
                "token_policies": [name],
                "token_ttl": 600,
            }
            admin.write_data(f"auth/{method}/role/{name}", data=role)
            yield made
        finally:
            admin.delete(f"sys/auth/{method}")


def store_of(made: InstalledVault, jwt_file: Path) -> VaultBackend:
    mount = f"{made.layout.prefix}-kubernetes"
    return VaultBackend(made.server, lambda name: KubernetesLogin(name, jwt_file, mount), made.layout)


def test_kubernetes_service_account_logs_in_and_its_token_is_reread(
    installed_vault: InstalledVault, cluster: Cluster, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(cluster.make_token("web"))
    store = store_of(installed_vault, file)
    assert store.versions(Mount.SANDBOX, "1/crd_a") == []
    held = store.client(VaultRole.READER, "sandbox")._held
    assert held is not None
    installed_vault.admin.auth.token.revoke(held.token.text.reveal())
    cluster.known.clear()
    file.write_text(cluster.make_token("web", 2))
    assert store.versions(Mount.SANDBOX, "1/crd_a") == []


@pytest.mark.parametrize("text", ["of another account", "unknown to the cluster", "no token at all"])
def test_kubernetes_service_account_of_another_role_is_denied(
    installed_vault: InstalledVault, cluster: Cluster, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "token"
    file.write_text(text if text == "no token at all" else cluster.make_token("worker" if "account" in text else "web"))
    if "unknown" in text:
        cluster.known.clear()
    with pytest.raises(BackendDeniedError) as raised:
        store_of(installed_vault, file).versions(Mount.SANDBOX, "1/crd_a")
    assert file.read_text() not in f"{raised.value!r} {raised.value.internal}"

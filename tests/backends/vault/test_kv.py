"""What a Vault adds to the contract: foreign payloads and signatures, on the fake and on the real server."""

from collections.abc import Callable
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from keyvault.backends.base import (
    BackendDeniedError,
    BackendUnavailableError,
    Mount,
)
from keyvault.backends.vault import transit
from keyvault.backends.vault.kv import VaultBackend
from keyvault.backends.vault.layout import SIGNING_KEY, SecretsEngine, VaultRole
from keyvault.domain.plaintext import Plaintext

from .fake import FakeVault, Fault
from .installation import InstalledVault

BOX = Mount.SANDBOX
PATH = "1/crd_a"
BOTH = pytest.mark.parametrize(
    "backend_name", ["fake", pytest.param("openbao", marks=pytest.mark.openbao)], indirect=True
)


def filled(backend: VaultBackend, path: str = PATH) -> VaultBackend:
    for after, text in enumerate(("one", "two", "three")):
        backend.put(BOX, path, Plaintext(text), {"key_id": f"k{after}"}, expected_version=after)
    return backend


# --- foreign payloads ---------------------------------------------------------------------------------------


def write_foreign(backend: VaultBackend, body: dict[str, Any]) -> None:
    mount = backend.layout.mount(SecretsEngine.KEYS, "sandbox")
    backend.client(VaultRole.ISSUER, "sandbox").call(
        lambda client: client.secrets.kv.v2.create_or_update_secret(PATH, secret=body, cas=0, mount_point=mount)
    )


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"secret": "theirs", "key_id": "k"},
        {"secret": "theirs", "key_id": "k", "schema": "2"},
        {"secret": "theirs", "key_id": "k", "schema": 1},
        {"key_id": "k", "schema": "1"},
        {"secret": None, "key_id": "k", "schema": "1"},
        {"secret": 5, "key_id": "k", "schema": "1"},
        {"secret": {"deep": "theirs"}, "key_id": "k", "schema": "1"},
    ],
)
def test_read_of_a_foreign_payload_has_no_labels(backend: VaultBackend, body: dict[str, Any]) -> None:
    """A foreign payload has no labels, so the service never adopts, hands over or destroys it."""
    write_foreign(backend, body)
    stored = backend.read(BOX, PATH)
    assert (stored.version, stored.secret.reveal(), stored.labels) == (1, "", {})


@BOTH
def test_read_omits_labels_that_are_not_text(backend: VaultBackend) -> None:
    write_foreign(backend, {"secret": "x", "schema": "1", "a": 5, "b": None, "c": ["d"], "key_id": "k"})
    assert backend.read(BOX, PATH).labels == {"key_id": "k"}


@pytest.mark.parametrize("label", ["secret", "schema"])
def test_put_with_a_label_that_would_hide_the_secret_is_refused(
    store: VaultBackend, fake: FakeVault, label: str
) -> None:
    with pytest.raises(ValueError, match="a label has"):
        store.put(BOX, PATH, Plaintext("x"), {label: "y"}, expected_version=0)
    assert fake.calls == []


# --- logins by kind of call -------------------------------------------------------------------------------


def test_each_kind_of_call_uses_its_own_login(store: VaultBackend, fake: FakeVault) -> None:
    """A stolen login allows one kind of call in one environment."""
    filled(store).put(Mount.PEPPERS, "service", Plaintext("p"), {}, expected_version=0)
    acts: dict[str, Callable[[], object]] = {
        "issuer-sandbox": lambda: store.put(BOX, PATH, Plaintext("x"), {}, expected_version=3),
        "reader-sandbox": lambda: (store.read(BOX, PATH), store.versions(BOX, PATH)),
        "retirer-sandbox": lambda: store.soft_delete(BOX, PATH, 1),
        "destroyer-sandbox": lambda: store.destroy(BOX, PATH, 2),
        "offboarder-sandbox": lambda: store.forget(BOX, "1/other"),
        "reconciler-sandbox": lambda: list(store.list_paths(BOX)),
        "lookup-service": lambda: (
            store.read(Mount.PEPPERS, "service"),
            store.versions(Mount.PEPPERS, "service"),
            transit.read_public_keys(store, "service"),
        ),
        "keeper-service": lambda: store.destroy(Mount.PEPPERS, "service", 1),
        "anchor-service": lambda: transit.sign(store, "service", b"head"),
    }
    for name, act in acts.items():
        store._clients.clear()
        fake.calls.clear()
        act()
        roles = {fake._secret_ids[call.body["secret_id"]] for call in fake.calls_to("approle/login")}
        assert roles == {f"kv-{name}"}


# --- signatures -------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("message", [b"", b"head 1", bytes(range(256)) * 40])
def test_signature_is_verifiable_with_the_public_key_alone(backend: VaultBackend, message: bytes) -> None:
    made = transit.sign(backend, "service", message)
    key = Ed25519PublicKey.from_public_bytes(transit.read_public_keys(backend, "service")[made.key_version])
    key.verify(made.signature, message)
    with pytest.raises(InvalidSignature):
        key.verify(made.signature, message + b"!")


def test_sign_after_the_key_was_rotated_names_its_version(shared_vault: InstalledVault) -> None:
    backend, mount = shared_vault.backend, shared_vault.layout.mount(SecretsEngine.SIGNING, "production")
    before = transit.sign(backend, "production", b"head")
    shared_vault.admin.write_data(f"{mount}/keys/{SIGNING_KEY}/rotate", data={})
    after = transit.sign(backend, "production", b"head")
    keys = transit.read_public_keys(backend, "production")
    assert (before.key_version, after.key_version, sorted(keys)) == (1, 2, [1, 2])
    for made in (before, after):
        Ed25519PublicKey.from_public_bytes(keys[made.key_version]).verify(made.signature, b"head")


@pytest.mark.parametrize("text", ["", "vault:v1", "vault:vx:AAAA", "vault:v1:%%%", None])
def test_sign_with_a_malformed_answer_is_unavailable(store: VaultBackend, fake: FakeVault, text: str | None) -> None:
    import json

    fake.fail(Fault(200, json.dumps({"data": {"signature": text}}).encode()), "/sign/")
    with pytest.raises(BackendUnavailableError):
        transit.sign(store, "service", b"head")


def test_sign_in_a_scope_without_a_login_is_denied(store: VaultBackend) -> None:
    with pytest.raises(BackendDeniedError):
        transit.sign(store, "nowhere", b"head")

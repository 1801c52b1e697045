"""The secret backend's copies of key strings: written with check-and-set, read, destroyed as steps of their own.

No call here is made inside a database transaction. Every write may be repeated after it was killed in the
middle: the labels of what is stored say whose it is.
"""

from django.conf import settings

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.backends.base import BackendConflictError, BackendMissingError, BackendUnavailableError, StoredSecret
from keyvault.domain.environments import Environment
from keyvault.domain.errors import NotFoundError, StateConflictError
from keyvault.domain.keys import KeyKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Credential, Key, Material
from keyvault.services.recording import recorded
from keyvault.services.secret_backends import MOUNT, secret_backend


class ForeignWriterError(StateConflictError):
    """Something that is not ours stands at the credential's path; it is never overwritten."""

    def __init__(self, path: str, version: int) -> None:
        super().__init__(
            "The secret backend holds something at this credential's place that Keyvault did not write.",
            internal=f"version {version} at {path} was written by somebody else",
        )


def require_served(environment: Environment) -> None:
    """Raises NotFoundError when this process is not for the environment (KEYVAULT_ENVIRONMENTS)."""
    if environment not in settings.ENVIRONMENTS:
        raise NotFoundError(f"This process does not serve {environment}.")


def newest_version(credential: Credential) -> int:
    """The number of the newest version of a credential's string, readable or not; 0: there was none."""
    versions = secret_backend().versions(MOUNT[credential.environment], credential.backend_path)
    return max((version.version for version in versions), default=0)


def store_string(key: Key, text: Plaintext, *, purpose: str, after: int | None = None, again: bool = False) -> int:
    """Writes the key's string as the newest version of its credential, and returns the version's number.

    `after`: the newest version when the key was staged. A worker that was overtaken since then writes nothing,
    instead of putting a burned key over the good one; None knows no such moment. `again`: a new version even where
    the newest one is the key's already, so that nobody can write after that one any more.

    Safe after any ambiguous answer: what is stored is read back and decided by key id. Raises
    BackendUnavailableError (nothing is known: try again), BackendConflictError, ForeignWriterError.
    """
    credential = key.credential
    mount, path = MOUNT[credential.environment], credential.backend_path
    labels = {
        "key_id": key.key_id,
        "credential_id": credential.credential_id,
        "environment": credential.environment.value,
        "purpose": purpose,
    }
    newest = find_stored(credential)
    if newest is not None and newest.labels.get("key_id") == key.key_id and not again:
        return newest.version
    known = newest_version(credential) if after is None else after
    try:
        return secret_backend().put(mount, path, text, labels, expected_version=known)
    except (BackendConflictError, BackendUnavailableError):
        stored = find_stored(credential)
        is_ours = stored is not None and stored.labels.get("key_id") == key.key_id
        if stored is not None and is_ours and (not again or stored.version > known):
            return stored.version
        raise


def find_stored(credential: Credential) -> StoredSecret | None:
    """The newest readable version of a credential's string, or None. Raises ForeignWriterError."""
    mount, path = MOUNT[credential.environment], credential.backend_path
    try:
        stored = secret_backend().read(mount, path)
    except BackendMissingError:
        return None
    if stored.labels.get("credential_id") != credential.credential_id:
        raise ForeignWriterError(f"{mount}/{path}", stored.version)
    return stored


def read_string(key: Key) -> Plaintext:
    """The key's own string. Raises BackendMissingError when the backend no longer holds it."""
    if key.material != Material.HELD or key.backend_version is None:
        raise BackendMissingError("The secret is no longer stored.")
    credential = key.credential
    stored = secret_backend().read(MOUNT[credential.environment], credential.backend_path, key.backend_version)
    if stored.labels.get("key_id") != key.key_id:
        raise ForeignWriterError(credential.backend_path, stored.version)
    return stored.secret


def read_public_string(key: Key) -> Plaintext:
    """A public key's string, which may be shown again.

    Raises NotFoundError where this process is not for its environment, StateConflictError for a private key.
    """
    require_served(key.credential.environment)
    if key.credential.kind != KeyKind.PUBLIC:
        raise StateConflictError("Only a public key is shown again.", internal=f"{key.key_id} is private")
    return read_string(key)


def destroy_string(grant: Grant, key: Key) -> None:
    """Destroys the backend's copy of a key whose copy is due, then says so. Killed between: done again."""
    if key.material != Material.DESTROY_DUE or key.backend_version is None:
        return
    credential = key.credential
    secret_backend().destroy(MOUNT[credential.environment], credential.backend_path, key.backend_version)
    with recorded(
        grant,
        frozenset({Permission.ISSUANCE_EXECUTE, Permission.ROTATIONS_ADVANCE}),
        "key.material_destroyed",
        account=credential.account,
        key_id=key.key_id,
        backend_version=key.backend_version,
    ):
        key.compare_and_swap(material=Material.DESTROYED)


def forget_string(key: Key) -> None:
    """Destroys the copy that the key's row names, because a newer one takes its place. Repeatable."""
    credential = key.credential
    if key.backend_version is not None:
        secret_backend().destroy(MOUNT[credential.environment], credential.backend_path, key.backend_version)


def list_to_destroy() -> list[Key]:
    """Of the environments that this process serves."""
    due = Key.objects.select_related("credential__account__merchant").filter(
        material=Material.DESTROY_DUE, credential__account__environment__in=settings.ENVIRONMENTS
    )
    return list(due.order_by("created_at")[:100])

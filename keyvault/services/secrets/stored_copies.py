"""The secret backend's copies of key strings: check-and-set write, read, soft-delete, undelete, destroy.

The copy of a key in quarantine is soft-deleted, so that it cannot be read but can be restored. The copy of a revoked
or expired key is destroyed. The key's row first records what is due, and a separate step does it. No function here may
run inside a database transaction. Each one is safe to repeat after a crash, because labels identify the key of a
stored version.

A `fence` is called directly before a call that changes the backend. It raises if another worker has taken over, so that
a worker that slept past its lease changes nothing there.
"""

from collections.abc import Callable
from datetime import datetime

from django.conf import settings
from django.db.models import QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.backends.base import (
    BackendConflictError,
    BackendDeniedError,
    BackendError,
    BackendInvalidError,
    BackendMissingError,
    BackendUnavailableError,
    Mount,
    StoredSecret,
)
from keyvault.domain.environments import Environment
from keyvault.domain.errors import NotFoundError, StateConflictError
from keyvault.domain.keys import KeyKind
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Account, Credential, Key, Material
from keyvault.services.recording.notifications import alarm_due, announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.backend import MOUNT, secret_backend
from keyvault.services.work.clock import host_time
from keyvault.services.work.leases import Lease, hold, renew
from keyvault.services.work.row_turns import batch_after

Fence = Callable[[], None]


def _no_fence() -> None:
    """Check no lease: the change is safe without one."""


_STEPS = frozenset({Permission.ISSUANCE_EXECUTE, Permission.ROTATIONS_ADVANCE, Permission.BACKEND_RECONCILE})

_PURPOSE_LABELS = {"rot": "rotation_id", "req": "issuance_request_id"}
"""Label that names the purpose of a version, by the prefix of the purpose's id."""


class ForeignWriterError(StateConflictError):
    """The credential's path holds a version that Keyvault did not write. It is never overwritten."""

    def __init__(self, mount: Mount, path: str, version: int) -> None:
        super().__init__(
            "The secret backend holds a value at this credential's path that Keyvault did not write.",
            internal=f"version {version} at {mount}/{path} was not written by Keyvault",
        )


def require_served(environment: Environment) -> None:
    """Require an environment that this process serves (KEYVAULT_ENVIRONMENTS). Raises NotFoundError."""
    if environment not in settings.ENVIRONMENTS:
        raise NotFoundError(f"This process does not serve {environment}.")


def newest_version(credential: Credential) -> int:
    """Return the number of the credential's newest version, readable or not; 0 without one."""
    versions = secret_backend().versions(MOUNT[credential.environment], credential.backend_path)
    return max((version.version for version in versions), default=0)


def store_string(
    key: Key,
    text: Plaintext,
    *,
    purpose: str,
    after: int | None = None,
    again: bool = False,
    fence: Fence,
) -> int:
    """Write the key's string as the newest version of its credential and return the version's number.

    Args:
        after: The newest version when the key was staged. If another worker has written a newer one since then, the
            write fails, because the key may have been discarded. None: the newest version at the time of the call.
        again: Write a new version even if the newest one is already the key's. Pending writes that expect that version
            to be the newest then fail.
        fence: Called after the newest version was read: a write by another worker between the two makes this one fail.

    Safe to repeat after an ambiguous response: the stored version is read back and identified by its key id.

    Raises:
        BackendUnavailableError: try again. If `may_be_applied`, the string may be stored, even after this error.
        BackendConflictError: another version was written.
        ForeignWriterError: Keyvault did not write the newest version.
    """
    credential = key.credential
    mount, path = MOUNT[credential.environment], credential.backend_path
    labels = {
        "key_id": key.key_id,
        "credential_id": credential.credential_id,
        "environment": credential.environment.value,
        _PURPOSE_LABELS.get(purpose.partition("_")[0], "purpose"): purpose,
    }
    newest = find_stored(credential)
    if newest is not None and newest.labels.get("key_id") == key.key_id and not again:
        return newest.version
    known = newest_version(credential) if after is None else after
    fence()
    try:
        return secret_backend().put(mount, path, text, labels, expected_version=known)
    except (BackendConflictError, BackendUnavailableError) as error:
        try:
            stored = find_stored(credential)
        except BackendError:
            if error.may_be_applied:
                raise error from None
            raise
        is_ours = stored is not None and stored.labels.get("key_id") == key.key_id
        if stored is not None and is_ours and (not again or stored.version > known):
            return stored.version
        raise


def find_stored(credential: Credential) -> StoredSecret | None:
    """Return the newest version of a credential's string; None when not readable. Raises ForeignWriterError."""
    mount, path = MOUNT[credential.environment], credential.backend_path
    try:
        stored = secret_backend().read(mount, path)
    except BackendMissingError:
        return None
    if stored.labels.get("credential_id") != credential.credential_id:
        raise ForeignWriterError(mount, path, stored.version)
    return stored


def read_string(key: Key) -> Plaintext:
    """Return the key's string. Raises BackendMissingError when it is gone or unreadable, ForeignWriterError."""
    if key.material == Material.DELETED:
        raise BackendMissingError("The key is in quarantine. Its secret cannot be read until it is resumed.")
    if key.material not in {Material.HELD, Material.DELETE_DUE, Material.RESTORE_DUE} or key.backend_version is None:
        raise BackendMissingError("The secret is no longer stored.")
    mount, path = _location(key)
    stored = secret_backend().read(mount, path, key.backend_version)
    if stored.labels.get("key_id") != key.key_id:
        raise ForeignWriterError(mount, path, stored.version)
    return stored.secret


def is_in_backend(key: Key) -> bool:
    """Whether the backend has the key's string, readable now or after a pending undelete."""
    return key.material in {Material.HELD, Material.RESTORE_DUE}


def recover_string(key: Key, *, fence: Fence) -> Plaintext:
    """Read the string of a key that has just left quarantine, and undelete it first if that is still due."""
    try:
        return read_string(key)
    except BackendMissingError:
        if not is_in_backend(key) or key.backend_version is None:
            raise
    fence()
    secret_backend().undelete(*_location(key), key.backend_version)
    return read_string(key)


def read_public_string(grant: Grant, key: Key) -> Plaintext:
    """Return a public key's string, which may be shown again. The audit entry is committed before it returns.

    Raises NotFoundError when this process does not serve its environment. Raises StateConflictError for a private key,
    and for a key in quarantine or whose copy is not undeleted yet.
    """
    require_served(key.credential.environment)
    if key.credential.kind != KeyKind.PUBLIC:
        raise StateConflictError("Only a public key can be shown again.", internal=f"{key.key_id} is private")
    if key.material in {Material.DELETE_DUE, Material.DELETED}:
        raise StateConflictError("The key is in quarantine. It can be shown after it is resumed.")
    try:
        text = read_string(key)
    except BackendMissingError as error:
        if key.material != Material.RESTORE_DUE:
            raise
        raise StateConflictError("The key has just left quarantine. Try again in a moment.") from error
    names = {"credential_id": key.credential_id, "key_id": key.key_id}
    with recorded(grant, Permission.KEYS_READ, "key.shown", account=key.credential.account, **names):
        pass
    return text


def destroy_string(grant: Grant, key: Key, *, fence: Fence = _no_fence) -> None:
    """Destroy the backend's copy of a key if that is due, then record it. Idempotent after a crash between the two.

    If another string has the key's version number, the key's own is lost: raise an alarm and leave the other string.
    """
    if key.material != Material.DESTROY_DUE or key.backend_version is None:
        return
    if _holds_other_string(key):
        _record_material(grant, key, Material.DESTROYED, "key.material_lost")
        return
    fence()
    secret_backend().destroy(*_location(key), key.backend_version)
    _record_material(grant, key, Material.DESTROYED, "key.material_destroyed")


def settle_string(grant: Grant, key: Key, lease: Lease, clock: Callable[[], datetime] = host_time) -> None:
    """Soft-delete the copy of a key that entered quarantine, or undelete that of a key that left it; then record it.

    Requires a lease on the key, because two such calls in the wrong order would leave the wrong state. Renews it before
    the call, so that a worker that was overtaken changes nothing. Idempotent after a crash. Raises an alarm if the copy
    cannot be undeleted or another string replaced it; the key itself stays valid.
    """
    if key.material not in {Material.DELETE_DUE, Material.RESTORE_DUE} or key.backend_version is None:
        return
    if _holds_other_string(key):
        _record_material(grant, key, Material.DESTROYED, "key.material_lost", lease)
    elif key.material == Material.DELETE_DUE:
        renew(lease, clock())
        secret_backend().soft_delete(*_location(key), key.backend_version)
        _record_material(grant, key, Material.DELETED, "key.material_deleted", lease)
    else:
        renew(lease, clock())
        try:
            secret_backend().undelete(*_location(key), key.backend_version)
        except BackendMissingError:
            _record_material(grant, key, Material.DESTROYED, "key.material_lost", lease)
        else:
            _record_material(grant, key, Material.HELD, "key.material_restored", lease)


def _holds_other_string(key: Key) -> bool:
    """Whether the version in the key's row holds another string.

    Version numbers are reused when the backend's storage is restored from a backup. An unreadable version counts as
    the key's own, unless another key's row names the same number.
    """
    if key.backend_version is None:
        return False
    try:
        stored = secret_backend().read(*_location(key), key.backend_version)
    except (BackendMissingError, BackendInvalidError):
        others = Key.objects.filter(credential_id=key.credential_id, backend_version=key.backend_version)
        return others.exclude(pk=key.pk).exclude(material__in=[Material.NONE, Material.DESTROYED]).exists()
    return stored.labels.get("key_id") != key.key_id


def _location(key: Key) -> tuple[Mount, str]:
    return MOUNT[key.credential.environment], key.credential.backend_path


def _record_material(grant: Grant, key: Key, material: Material, event: str, lease: Lease | None = None) -> None:
    """Record the new state of a copy."""
    account, version = key.credential.account, key.backend_version
    with recorded(grant, _STEPS, event, account=account, key_id=key.key_id, backend_version=version):
        if lease is not None:
            hold(lease)
        key.compare_and_swap(material=material)
        if event == "key.material_lost":
            announce_missing(grant, key)


def announce_missing(grant: Grant, key: Key) -> None:
    """Raise an alarm about a copy that is gone although Keyvault did not destroy it, inside a `recorded` block."""
    announce(
        grant,
        NoticeKind.BACKEND_UNATTRIBUTED,
        key.credential.account,
        key.key_id,
        why="a copy that the service did not destroy is gone",
        credential_id=key.credential_id,
        key_id=key.key_id,
        backend_version=key.backend_version,
    )


def forget_string(key: Key, *, fence: Fence) -> None:
    """Destroy the copy that the key's row names, because a newer copy replaces it. Idempotent."""
    if key.backend_version is not None and not _holds_other_string(key):
        fence()
        secret_backend().destroy(*_location(key), key.backend_version)


def report_refusal(grant: Grant, account: Account, what: str, error: BackendDeniedError) -> None:
    """Raise an alarm that the backend denied access; one per environment until an operator marks it as seen.

    No backend work succeeds until the access is restored. `account`: the one whose work was denied.
    """
    with alarm_due(NoticeKind.BACKEND_DENIED, account.environment, grant.at) as is_due:
        if is_due:
            with recorded(grant, _STEPS, "backend.refused", account=account, what=what, why=error.detail):
                announce(grant, NoticeKind.BACKEND_DENIED, account, account.environment, what=what, why=error.detail)


def list_to_destroy(environment: Environment, after: Key | None = None) -> list[Key]:
    """Return a batch of keys whose copies are due for destruction."""
    return batch_after(_due(environment, Material.DESTROY_DUE), "created_at", after)


def list_unsettled(environment: Environment, after: Key | None = None) -> list[Key]:
    """Return a batch of keys whose copies are due for `settle_string`."""
    return batch_after(_due(environment, Material.DELETE_DUE, Material.RESTORE_DUE), "created_at", after)


def copy_subject(key: Key) -> str:
    """Return the subject of the lease on a key's copy."""
    return f"copy:{key.key_id}"


def _due(environment: Environment, *due: Material) -> QuerySet[Key]:
    keys = Key.objects.select_related("credential__account__merchant").filter(material__in=due)
    rows: QuerySet[Key] = keys.filter(credential__account__environment=environment)
    return rows

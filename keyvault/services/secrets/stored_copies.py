"""The secret backend's copies of key strings: written with check-and-set, read, hidden, brought back, destroyed.

A key in quarantine has its copy soft-deleted, so that nobody reads it and it can come back; a dead one's is
destroyed. What is due stands in the key's row first, and is done as a step of its own. No call here is made inside a
database transaction. Every one may be repeated after it was killed in the middle: the labels of what is stored say
whose it is.
"""

from django.conf import settings
from django.db.models import QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.backends.base import (
    BackendConflictError,
    BackendDeniedError,
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
from keyvault.models import Account, Credential, Key, Material, Notice
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.backend import MOUNT, secret_backend
from keyvault.services.work.leases import Lease, hold

_STEPS = frozenset({Permission.ISSUANCE_EXECUTE, Permission.ROTATIONS_ADVANCE, Permission.BACKEND_RECONCILE})

_IS_FOR = {"rot": "rotation_id", "req": "request_id"}
"""The label that says what a version was written for, by the prefix of that id."""


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
        _IS_FOR.get(purpose.partition("_")[0], "purpose"): purpose,
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
    """The key's own string. Raises BackendMissingError when the backend no longer holds it, or not readably."""
    if key.material == Material.DELETED:
        raise BackendMissingError("The key is in quarantine; its secret cannot be read while it is.")
    if key.material not in {Material.HELD, Material.DELETE_DUE, Material.RESTORE_DUE} or key.backend_version is None:
        raise BackendMissingError("The secret is no longer stored.")
    credential = key.credential
    stored = secret_backend().read(MOUNT[credential.environment], credential.backend_path, key.backend_version)
    if stored.labels.get("key_id") != key.key_id:
        raise ForeignWriterError(credential.backend_path, stored.version)
    return stored.secret


def is_in_backend(key: Key) -> bool:
    """Whether the backend has the key's string, readable now or as soon as it was brought back."""
    return key.material in {Material.HELD, Material.RESTORE_DUE}


def recover_string(key: Key) -> Plaintext:
    """`read_string` of a key that has just left its quarantine: brought back first where that was not done yet."""
    try:
        return read_string(key)
    except BackendMissingError:
        if not is_in_backend(key) or key.backend_version is None:
            raise
    secret_backend().undelete(*_place(key), key.backend_version)
    return read_string(key)


def read_public_string(key: Key) -> Plaintext:
    """A public key's string, which may be shown again.

    Raises NotFoundError where this process is not for its environment, StateConflictError for a private key and for
    one whose copy is hidden, because it is in quarantine or has only just left it.
    """
    require_served(key.credential.environment)
    if key.credential.kind != KeyKind.PUBLIC:
        raise StateConflictError("Only a public key is shown again.", internal=f"{key.key_id} is private")
    if key.material in {Material.DELETE_DUE, Material.DELETED}:
        raise StateConflictError("The key is in quarantine. It is shown again once it is good again.")
    try:
        return read_string(key)
    except BackendMissingError as error:
        if key.material != Material.RESTORE_DUE:
            raise
        raise StateConflictError("The key has just left its quarantine. Look again in a moment.") from error


def destroy_string(grant: Grant, key: Key) -> None:
    """Destroys the backend's copy of a key whose copy is due, then says so. Killed between: done again.

    Where another string stands at its number, ours is gone, and the other one is left as it is; an alarm.
    """
    if key.material != Material.DESTROY_DUE or key.backend_version is None:
        return
    if _is_anothers(key):
        _note(grant, key, Material.DESTROYED, "key.material_lost")
        return
    secret_backend().destroy(*_place(key), key.backend_version)
    _note(grant, key, Material.DESTROYED, "key.material_destroyed")


def settle_string(grant: Grant, key: Key, lease: Lease) -> None:
    """Hides the copy of a key that went into quarantine, or brings back that of one that left it; then says so.

    Under a lease of the key: two such calls that overtook each other would leave it the wrong way round. Killed
    between: done again. A copy that cannot come back, or that another string has taken the place of, is an alarm;
    the key itself is as good as before.
    """
    if key.material not in {Material.DELETE_DUE, Material.RESTORE_DUE} or key.backend_version is None:
        return
    if _is_anothers(key):
        _note(grant, key, Material.DESTROYED, "key.material_lost", lease)
    elif key.material == Material.DELETE_DUE:
        secret_backend().soft_delete(*_place(key), key.backend_version)
        _note(grant, key, Material.DELETED, "key.material_deleted", lease)
    else:
        try:
            secret_backend().undelete(*_place(key), key.backend_version)
        except BackendMissingError:
            _note(grant, key, Material.DESTROYED, "key.material_lost", lease)
        else:
            _note(grant, key, Material.HELD, "key.material_restored", lease)


def _is_anothers(key: Key) -> bool:
    """Whether the version that the key's row names holds somebody else's string.

    Numbers are used again when the backend's storage is set back. What cannot be read is taken for ours, unless
    another key's row names the same number.
    """
    if key.backend_version is None:
        return False
    try:
        stored = secret_backend().read(*_place(key), key.backend_version)
    except (BackendMissingError, BackendInvalidError):
        others = Key.objects.filter(credential_id=key.credential_id, backend_version=key.backend_version)
        return others.exclude(pk=key.pk).exclude(material__in=[Material.NONE, Material.DESTROYED]).exists()
    return stored.labels.get("key_id") != key.key_id


def _place(key: Key) -> tuple[Mount, str]:
    return MOUNT[key.credential.environment], key.credential.backend_path


def _note(grant: Grant, key: Key, material: Material, event: str, lease: Lease | None = None) -> None:
    """What became of a copy."""
    account, version = key.credential.account, key.backend_version
    with recorded(grant, _STEPS, event, account=account, key_id=key.key_id, backend_version=version):
        if lease is not None:
            hold(lease)
        key.compare_and_swap(material=material)
        if event == "key.material_lost":
            announce_missing(grant, key)


def announce_missing(grant: Grant, key: Key) -> None:
    """Inside a `recorded` block: the backend lacks a copy that nobody of ours destroyed."""
    announce(
        grant,
        NoticeKind.BACKEND_STRANGER,
        key.credential.account,
        key.key_id,
        why="a copy that the service did not destroy is gone",
        credential_id=key.credential_id,
        key_id=key.key_id,
        backend_version=key.backend_version,
    )


def forget_string(key: Key) -> None:
    """Destroys the copy that the key's row names, because a newer one takes its place. Repeatable."""
    if key.backend_version is not None and not _is_anothers(key):
        secret_backend().destroy(*_place(key), key.backend_version)


def report_refusal(grant: Grant, account: Account, what: str, error: BackendDeniedError) -> None:
    """An alarm, one for each environment until somebody has seen it: nothing goes on until our access is mended.

    The account is any of that environment, for whose sake it was asked.
    """
    unseen = Notice.objects.filter(kind=NoticeKind.BACKEND_DENIED, subject=account.environment, seen_at__isnull=True)
    if unseen.exists():
        return
    with recorded(grant, _STEPS, "backend.refused", account=account, what=what, why=error.detail):
        announce(grant, NoticeKind.BACKEND_DENIED, account, account.environment, what=what, why=error.detail)


def list_to_destroy() -> list[Key]:
    """Of the environments that this process serves, so many of each: one whose backend is away holds up no other."""
    served = map(Environment, settings.ENVIRONMENTS)
    return [key for environment in served for key in _list(environment, Material.DESTROY_DUE)[:100]]


def list_unsettled(environment: Environment) -> list[Key]:
    """Whose copies `settle_string` is owed."""
    return list(_list(environment, Material.DELETE_DUE, Material.RESTORE_DUE)[:500])


def copy_subject(key: Key) -> str:
    """What the lease on a key's copy is called."""
    return f"copy:{key.key_id}"


def _list(environment: Environment, *due: Material) -> QuerySet[Key]:
    keys = Key.objects.select_related("credential__account__merchant").filter(material__in=due)
    rows: QuerySet[Key] = keys.filter(credential__account__environment=environment)
    return rows.order_by("created_at")

"""Pending copies: the string of a staged key until it is delivered.

A staged key waits until every verifier accepts it. Meanwhile the secret backend holds its string at a separate path
that no merchant can read, so that any worker can deliver it. A worker erases the path once the key is delivered or
discarded.
No function here may run inside a database transaction.
"""

from dataclasses import dataclass

from keyvault.backends.base import BackendConflictError, BackendMissingError
from keyvault.domain.environments import Environment
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Key
from keyvault.services.secrets.backend import MOUNT, secret_backend

_FOLDER = "pending/"


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A staged key's string. `after`: the credential's newest version when it was staged; None: it was unknown."""

    text: Plaintext
    after: int | None


def keep_pending(key: Key, pending: PendingCopy) -> None:
    """Write the string of a staged key. Repeatable: a key has one string."""
    labels = {
        "key_id": key.key_id,
        "credential_id": key.credential_id,
        "environment": key.credential.environment.value,
        "after": "" if pending.after is None else str(pending.after),
    }
    try:
        secret_backend().put(
            MOUNT[key.credential.environment], path_of(key.key_id), pending.text, labels, expected_version=0
        )
    except BackendConflictError:
        if find_pending(key) is None:
            raise


def find_pending(key: Key) -> PendingCopy | None:
    try:
        stored = secret_backend().read(MOUNT[key.credential.environment], path_of(key.key_id))
    except BackendMissingError:
        return None
    if stored.labels.get("key_id") != key.key_id:
        return None
    after = stored.labels.get("after", "")
    return PendingCopy(stored.secret, int(after) if after.isdecimal() else None)


def forget_pending(environment: Environment, key_id: str) -> None:
    """Erase the pending copy permanently. Repeatable."""
    secret_backend().forget(MOUNT[environment], path_of(key_id))


def path_of(key_id: str) -> str:
    return f"{_FOLDER}{key_id}"


def find_key_id(path: str) -> str | None:
    """Return the key whose pending copy has this path; None for any other path."""
    return path.removeprefix(_FOLDER) if path.startswith(_FOLDER) else None

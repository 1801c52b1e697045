"""Provider connections of an account: the credentials for its payments, kept in the secret backend.

This module writes, replaces and removes them and never returns them, so no frontend can show them. A merchant's own
backend, or the payment service that acts for the account, reads them from the secret backend. It uses the policy with
which it reads private keys. The local keystore has no such readers, because only Keyvault's processes can open it: use
it for development, and Vault or OpenBao for payments.

The row with the backend path is written first, so that a crash leaves no credentials at an unknown path. No backend
call runs inside a database transaction. Labels name the connection and the write that a version belongs to. After a
lost response, reading the version back therefore shows whether the write succeeded.
"""

import secrets
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import IntegrityError
from django.db.models import OuterRef, Q, QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.backends.base import (
    BackendConflictError,
    BackendMissingError,
    BackendUnavailableError,
    Mount,
    StoredSecret,
    StoredVersion,
    VersionState,
)
from keyvault.domain.canonical import JsonValue
from keyvault.domain.environments import CONNECTION_MODE, Environment
from keyvault.domain.errors import NotFoundError, StateConflictError
from keyvault.domain.ids import find_account_id, mint_id
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.provider_connections import connection_path, read_credentials, read_provider
from keyvault.models import Account, ProviderConnection
from keyvault.services.merchants.merchants import require_not_offboarded
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.backend import MOUNT, find_backend_location, secret_backend
from keyvault.services.secrets.stored_copies import ForeignWriterError, require_served
from keyvault.services.work.row_turns import batch_after

WRITE_WITHIN = timedelta(seconds=60)
"""Maximum duration of a write, with a margin. Afterwards the worker checks its result."""

_REMOVE = frozenset({P.CONNECTIONS_WRITE, P.MERCHANTS_OFFBOARD})
_SETTLE = P.BACKEND_RECONCILE
_WRITE = frozenset({P.CONNECTIONS_WRITE, _SETTLE})


def set_connection(grant: Grant, account: Account, provider: str, credentials: Plaintext) -> ProviderConnection:
    """Store or replace the account's credentials for a provider. Idempotent.

    The environment decides the mode (test or live). The worker destroys the previous version once the new one is
    stored.

    Raises:
        RequestInvalidError: the provider or the credentials are invalid.
        NotFoundError: this process does not serve the environment.
        StateConflictError: the merchant is offboarded, another write is under way, or the path holds an unattributed
            version.
        BackendUnavailableError: the outcome is unknown; set the credentials again.
    """
    name, text = read_provider(provider), _read_valid(account, credentials)
    connection = find_connection(account, name)
    if connection is None:
        connection = _add(grant, account, name)
    else:
        _begin(grant, connection)
    return _write(grant, connection, text)


def replace_connection(grant: Grant, connection: ProviderConnection, credentials: Plaintext) -> ProviderConnection:
    """Replace the credentials of this connection. Raises as `set_connection`.

    Raises StateConflictError also when the connection is removed.
    """
    text = _read_valid(connection.account, credentials)
    if connection.removed_at is not None:
        raise StateConflictError("The connection is removed. Add a new one.")
    _begin(grant, connection)
    return _write(grant, connection, text)


def remove_connection(grant: Grant, connection: ProviderConnection) -> None:
    """Remove a connection; the worker erases its credentials. A new one for the same provider may be set."""
    if connection.removed_at is not None:
        raise StateConflictError("The connection is already removed.")
    with recorded(grant, _REMOVE, "connection.removed", account=connection.account, **_about(connection)):
        connection.compare_and_swap(removed_at=grant.at)


def settle_connection(grant: Grant, connection: ProviderConnection) -> None:
    """Reconcile row and backend: record a version that was written but not recorded, and destroy older ones.

    Idempotent. The worker calls this for connections that are not removed. Raises ForeignWriterError, also when the
    backend's newest version is older than the row's.
    """
    stored = _find_stored(connection)
    if stored is not None and stored.version < (connection.backend_version or 0):
        # The backend was restored from a backup: its old credentials must not become current.
        raise ForeignWriterError(*_location(connection), stored.version)
    if stored is not None and stored.version != connection.backend_version:
        _note_stored(grant, connection, stored.version)
    destroyed = [] if stored is None else _destroy_before(connection, stored.version)
    if connection.settle_due_at is None and not destroyed:
        return
    details = {**_about(connection), "destroyed": destroyed}
    with recorded(grant, _SETTLE, "connection.settled", account=connection.account, **details):
        connection.compare_and_swap(settle_due_at=None)


def forget_connection(grant: Grant, connection: ProviderConnection) -> None:
    """Erase everything at a removed connection's path permanently. Idempotent; the worker calls this.

    Raises ForeignWriterError if the path also holds versions that Keyvault did not write. Then it destroys only
    Keyvault's versions and keeps the path.
    """
    if connection.removed_at is None:
        raise StateConflictError("Only a removed connection can be erased.")
    mount, path = _location(connection)
    foreign: ForeignWriterError | None = None
    ours = []
    for version in secret_backend().versions(mount, path):
        try:
            if _is_ours(connection, version):
                ours.append(version.version)
        except ForeignWriterError as error:
            foreign = error
    if foreign is not None:
        for number in ours:
            secret_backend().destroy(mount, path, number)
        raise foreign
    secret_backend().forget(mount, path)
    with recorded(grant, _SETTLE, "connection.forgotten", account=connection.account, **_about(connection)):
        connection.compare_and_swap(forgotten_at=grant.at)


def list_unsettled(now: datetime, after: ProviderConnection | None = None) -> list[ProviderConnection]:
    """Return a batch of connections to settle, in the environments that this process serves."""
    return batch_after(_served().filter(removed_at__isnull=True, settle_due_at__lte=now), "settle_due_at", after)


def list_to_forget(now: datetime, after: ProviderConnection | None = None) -> list[ProviderConnection]:
    """Return a batch of removed connections to erase, in the environments that this process serves.

    Excludes a connection with a write under way.
    """
    quiet = Q(settle_due_at__isnull=True) | Q(settle_due_at__lte=now)
    due = _served().filter(quiet, removed_at__isnull=False, forgotten_at__isnull=True)
    return batch_after(due, "removed_at", after)


def list_connections(account: Account | OuterRef) -> QuerySet[ProviderConnection]:
    """Return the account's connections that are not removed."""
    return _rows().filter(account=account, removed_at__isnull=True).order_by("provider")


def find_connection(account: Account, provider: str) -> ProviderConnection | None:
    return list_connections(account).filter(provider=provider).first()


def get_connection(account: Account, provider: str) -> ProviderConnection:
    """Return the account's connection to a provider. Raises NotFoundError."""
    found = find_connection(account, provider)
    if found is None:
        raise NotFoundError(f"{account} has no connection to that provider.")
    return found


def find_by_path(environment: Environment, path: str) -> ProviderConnection | None:
    """Return the connection that owns a path of the environment's keys mount, even if it is removed."""
    account_id = find_account_id(path)
    if account_id is None:
        return None
    # The path has no index, and an account has few connections.
    return _rows().filter(account_id=account_id, account__environment=environment, backend_path=path).first()


def describe_connection(connection: ProviderConnection) -> dict[str, Any]:
    """Return the public fields of a connection, never its credentials. With Vault, include the path to read them."""
    return {
        "connection_id": connection_id(connection),
        "provider": connection.provider,
        "mode": connection.mode,
        "stored_at": connection.stored_at,
        "stored_by": connection.stored_by,
        "backend_version": connection.backend_version,
        **find_backend_location(Environment(connection.account.environment), connection.backend_path),
    }


def connection_id(connection: ProviderConnection) -> str:
    return connection.backend_path.rpartition("/")[2]


# --- one write ----------------------------------------------------------------------------------------------


def _read_valid(account: Account, credentials: Plaintext) -> Plaintext:
    environment = Environment(account.environment)
    require_served(environment)
    return read_credentials(credentials, CONNECTION_MODE[environment])


def _add(grant: Grant, account: Account, provider: str) -> ProviderConnection:
    """Create the row with the backend path, before anything is stored there."""
    connection = ProviderConnection(
        account=account,
        provider=provider,
        mode=CONNECTION_MODE[Environment(account.environment)],
        backend_path=connection_path(account.pk, mint_id("con", secrets.token_bytes)),
        created_at=grant.at,
        settle_due_at=grant.at + WRITE_WITHIN,
    )
    try:
        with recorded(grant, P.CONNECTIONS_WRITE, "connection.added", account=account, **_about(connection)):
            require_not_offboarded(account)
            connection.save()
    except IntegrityError as error:
        raise StateConflictError(
            "Another request added this connection at the same time. Check it and try again."
        ) from error
    return connection


def _begin(grant: Grant, connection: ProviderConnection) -> None:
    """Record that a write begins, so that the worker checks its result if this process dies."""
    account = connection.account
    with recorded(grant, P.CONNECTIONS_WRITE, "connection.write_began", account=account, **_about(connection)):
        require_not_offboarded(account)
        connection.compare_and_swap(settle_due_at=grant.at + WRITE_WITHIN)


def _write(grant: Grant, connection: ProviderConnection, text: Plaintext) -> ProviderConnection:
    _note_stored(grant, connection, _store(connection, text))
    return connection


def _store(connection: ProviderConnection, text: Plaintext) -> int:
    """Write the credentials as the next version and return its number. Never overwrites a concurrent write."""
    mount, path = _location(connection)
    write_id = secrets.token_hex(16)
    labels = {
        "connection_id": connection_id(connection),
        "provider": connection.provider,
        "environment": connection.account.environment,
        "mode": str(connection.mode),
        "write_id": write_id,
    }
    newest = max((version.version for version in secret_backend().versions(mount, path)), default=0)
    _find_stored(connection)
    try:
        return secret_backend().put(mount, path, text, labels, expected_version=newest)
    except (BackendConflictError, BackendUnavailableError) as error:
        stored = _find_stored(connection)
        if stored is not None and stored.labels.get("write_id") == write_id:
            return stored.version
        if isinstance(error, BackendConflictError):
            raise StateConflictError(
                "Another request stored credentials for this connection at the same time. Check it and try again.",
                internal=error.internal,
            ) from error
        raise


def _note_stored(grant: Grant, connection: ProviderConnection, version: int) -> None:
    """Record the stored version in the locked row. Raises StateConflictError when it is no longer the current one."""
    details = {**_about(connection), "backend_version": version}
    known = connection.backend_version
    with recorded(grant, _WRITE, "connection.stored", account=connection.account, **details):
        connection.refresh_from_db(from_queryset=_rows().select_for_update(of=("self",)))
        if connection.removed_at is not None:
            raise StateConflictError("The connection has been removed in the meantime.")
        if connection.backend_version != known and version < (connection.backend_version or 0):
            raise StateConflictError("Another request has already replaced these credentials.")
        connection.compare_and_swap(
            backend_version=version,
            stored_at=grant.at,
            stored_by=grant.principal.actor,
            settle_due_at=grant.at,
        )


# --- stored versions ----------------------------------------------------------------------------------------


def _find_stored(connection: ProviderConnection, version: int | None = None) -> StoredSecret | None:
    """Return the newest version or the given one; None when it is not readable. Raises ForeignWriterError."""
    mount, path = _location(connection)
    try:
        stored = secret_backend().read(mount, path, version)
    except BackendMissingError:
        return None
    if stored.labels.get("connection_id") != connection_id(connection):
        raise ForeignWriterError(mount, path, stored.version)
    return stored


def _is_ours(connection: ProviderConnection, version: StoredVersion) -> bool:
    """Whether a version holds credentials that Keyvault wrote.

    Raises ForeignWriterError, also for an unreadable version that the row does not name: its writer is unknown.
    """
    if version.state is VersionState.DESTROYED:
        return False
    if _find_stored(connection, version.version) is not None:
        return True
    if version.version != connection.backend_version:
        raise ForeignWriterError(*_location(connection), version.version)
    return True


def _destroy_before(connection: ProviderConnection, newest: int) -> list[JsonValue]:
    """Destroy every version of this connection before `newest` and return their numbers."""
    mount, path = _location(connection)
    destroyed: list[JsonValue] = []
    for version in secret_backend().versions(mount, path):
        is_older = version.version < newest and version.state is not VersionState.DESTROYED
        if is_older and _find_stored(connection, version.version) is not None:
            secret_backend().destroy(mount, path, version.version)
            destroyed.append(version.version)
    return destroyed


def _location(connection: ProviderConnection) -> tuple[Mount, str]:
    return MOUNT[Environment(connection.account.environment)], connection.backend_path


def _rows() -> QuerySet[ProviderConnection]:
    return ProviderConnection.objects.select_related("account__merchant")


def _served() -> QuerySet[ProviderConnection]:
    return _rows().filter(account__environment__in=settings.ENVIRONMENTS)


def _about(connection: ProviderConnection) -> dict[str, JsonValue]:
    return {
        "connection_id": connection_id(connection),
        "provider": connection.provider,
        "mode": str(connection.mode),
    }

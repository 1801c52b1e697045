"""Provider connections of an account: credentials that its payments need, kept in the secret backend.

They are written, replaced and removed here and never read: no function of ours returns them, so no door shows them.
Who reads them does so in the backend, with the policy that a merchant's own backend (or the platform's payment service
that acts for the account) reads private keys with. With the local keystore nobody does, since only our own processes
open that file: it is for development, and a Vault or OpenBao for whoever has payments to make.

The row comes first, and says where: whatever dies from there on leaves nothing at a place that nobody knows. No call
to the backend is made inside a database transaction. What is stored says by its labels whose it is and which write put
it there, so that an answer that was lost is settled by reading back.
"""

import secrets
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import IntegrityError
from django.db.models import Q, QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.backends.base import (
    BackendConflictError,
    BackendMissingError,
    BackendUnavailableError,
    StoredSecret,
    StoredVersion,
    VersionState,
)
from keyvault.domain.canonical import JsonValue
from keyvault.domain.connections import connection_path, read_credentials, read_provider
from keyvault.domain.environments import CONNECTION_MODE, Environment
from keyvault.domain.errors import NotFoundError, StateConflictError
from keyvault.domain.ids import mint_id
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Account, ProviderConnection
from keyvault.services.merchants.merchants import require_staying
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.backend import MOUNT, find_place, secret_backend
from keyvault.services.secrets.stored_copies import ForeignWriterError, require_served

WRITE_WITHIN = timedelta(seconds=60)
"""Longer than whoever writes may take. Afterwards a worker looks at what became of it."""

_REMOVE = frozenset({P.CONNECTIONS_WRITE, P.MERCHANTS_OFFBOARD})
_SETTLE = P.BACKEND_RECONCILE
_WRITE = frozenset({P.CONNECTIONS_WRITE, _SETTLE})


def set_connection(grant: Grant, account: Account, provider: str, credentials: Plaintext) -> ProviderConnection:
    """Stores the credentials as the account's connection to the provider, in place of those it had. Repeatable.

    The mode is the environment's (D11, D12), and is not chosen. What was stored before is destroyed by a worker, once
    the new one stands. Raises RequestInvalidError (what was given does not fit), NotFoundError (another process serves
    the environment), StateConflictError (the merchant has left, somebody else writes at the same moment, or a stranger
    wrote there), BackendUnavailableError (it may have been stored: set it again).
    """
    name, text = read_provider(provider), _read(account, credentials)
    connection = find_connection(account, name)
    if connection is None:
        connection = _add(grant, account, name)
    else:
        _begin(grant, connection)
    return _write(grant, connection, text)


def replace_connection(grant: Grant, connection: ProviderConnection, credentials: Plaintext) -> ProviderConnection:
    """The same for this very connection, as long as it is not removed."""
    text = _read(connection.account, credentials)
    if connection.removed_at is not None:
        raise StateConflictError("The connection is removed. Add a new one.")
    _begin(grant, connection)
    return _write(grant, connection, text)


def remove_connection(grant: Grant, connection: ProviderConnection) -> None:
    """It counts no longer, and its credentials are erased by a worker. Another may be set in its place."""
    if connection.removed_at is not None:
        raise StateConflictError("The connection is removed already.")
    with recorded(grant, _REMOVE, "connection.removed", account=connection.account, **_about(connection)):
        connection.compare_and_swap(removed_at=grant.at)


def settle_connection(grant: Grant, connection: ProviderConnection) -> None:
    """Brings row and backend together: a version that was written and not noted is noted, what came before the newest
    is destroyed. Repeatable; a worker's, for a connection that is not removed. Raises ForeignWriterError, also where
    the backend's newest is older than the row's.
    """
    stored = _find_stored(connection)
    if stored is not None and stored.version < (connection.backend_version or 0):
        # The backend was set back: last year's credentials must not come into use as if somebody had stored them.
        raise ForeignWriterError(connection.backend_path, stored.version)
    if stored is not None and stored.version != connection.backend_version:
        _note_stored(grant, connection, stored.version)
    destroyed = [] if stored is None else _destroy_before(connection, stored.version)
    if connection.settle_due_at is None and not destroyed:
        return
    details = {**_about(connection), "destroyed": destroyed}
    with recorded(grant, _SETTLE, "connection.settled", account=connection.account, **details):
        connection.compare_and_swap(settle_due_at=None)


def forget_connection(grant: Grant, connection: ProviderConnection) -> None:
    """Erases what stands at a removed connection's path, for ever. Repeatable; a worker's.

    Raises ForeignWriterError where not all of it is ours: what is, is destroyed, and the path stays.
    """
    if connection.removed_at is None:
        raise StateConflictError("Only a removed connection is forgotten.")
    mount, path = MOUNT[Environment(connection.account.environment)], connection.backend_path
    stranger: ForeignWriterError | None = None
    ours = []
    for version in secret_backend().versions(mount, path):
        try:
            if _is_ours(connection, version):
                ours.append(version.version)
        except ForeignWriterError as error:
            stranger = error
    if stranger is not None:
        for number in ours:
            secret_backend().destroy(mount, path, number)
        raise stranger
    secret_backend().forget(mount, path)
    with recorded(grant, _SETTLE, "connection.forgotten", account=connection.account, **_about(connection)):
        connection.compare_and_swap(forgotten_at=grant.at)


def list_unsettled(now: datetime) -> list[ProviderConnection]:
    """Of the environments that this process serves."""
    return list(_served().filter(removed_at__isnull=True, settle_due_at__lte=now).order_by("settle_due_at")[:100])


def list_to_forget(now: datetime) -> list[ProviderConnection]:
    """Of the environments that this process serves. One that is just being written to waits until that is over."""
    quiet = Q(settle_due_at__isnull=True) | Q(settle_due_at__lte=now)
    due = _served().filter(quiet, removed_at__isnull=False, forgotten_at__isnull=True)
    return list(due.order_by("removed_at")[:100])


def list_connections(account: Account) -> QuerySet[ProviderConnection]:
    """Those that the account has."""
    return _rows().filter(account=account, removed_at__isnull=True).order_by("provider")


def find_connection(account: Account, provider: str) -> ProviderConnection | None:
    return list_connections(account).filter(provider=provider).first()


def get_connection(account: Account, provider: str) -> ProviderConnection:
    """Raises NotFoundError."""
    found = find_connection(account, provider)
    if found is None:
        raise NotFoundError(f"{account} has no connection of that name.")
    return found


def find_by_path(environment: Environment, path: str) -> ProviderConnection | None:
    """Whose path of that environment's keys mount it is, removed or not; None: no connection's."""
    return _rows().filter(account__environment=environment, backend_path=path).first()


def describe_connection(connection: ProviderConnection) -> dict[str, Any]:
    """What every door tells of it: never what is stored. With a Vault, where it is read."""
    return {
        "connection_id": connection_id(connection),
        "provider": connection.provider,
        "mode": connection.mode,
        "stored_at": connection.stored_at,
        "stored_by": connection.stored_by,
        "backend_version": connection.backend_version,
        **find_place(Environment(connection.account.environment), connection.backend_path),
    }


def connection_id(connection: ProviderConnection) -> str:
    return connection.backend_path.rpartition("/")[2]


# --- one write ----------------------------------------------------------------------------------------------


def _read(account: Account, credentials: Plaintext) -> Plaintext:
    environment = Environment(account.environment)
    require_served(environment)
    return read_credentials(credentials, CONNECTION_MODE[environment])


def _add(grant: Grant, account: Account, provider: str) -> ProviderConnection:
    """The row that says where; nothing stands there yet."""
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
            require_staying(account)
            connection.save()
    except IntegrityError as error:
        raise StateConflictError("Somebody else adds this connection at the same moment.") from error
    return connection


def _begin(grant: Grant, connection: ProviderConnection) -> None:
    """Says that something is about to be written there, so that a worker looks if nobody tells what became of it."""
    account = connection.account
    with recorded(grant, P.CONNECTIONS_WRITE, "connection.write_began", account=account, **_about(connection)):
        require_staying(account)
        connection.compare_and_swap(settle_due_at=grant.at + WRITE_WITHIN)


def _write(grant: Grant, connection: ProviderConnection, text: Plaintext) -> ProviderConnection:
    _note_stored(grant, connection, _store(connection, text))
    return connection


def _store(connection: ProviderConnection, text: Plaintext) -> int:
    """Writes it after what is there now, and returns the version. Nobody else's write is overwritten."""
    environment = Environment(connection.account.environment)
    mount, path = MOUNT[environment], connection.backend_path
    write_id = secrets.token_hex(16)
    labels = {
        "connection_id": connection_id(connection),
        "provider": connection.provider,
        "environment": environment.value,
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
                "Somebody else stored credentials for this connection at the same moment. Look at it again.",
                internal=error.internal,
            ) from error
        raise


def _note_stored(grant: Grant, connection: ProviderConnection, version: int) -> None:
    """In the row as it is by now. Raises StateConflictError when what was stored is not what counts any more."""
    details = {**_about(connection), "backend_version": version}
    known = connection.backend_version
    with recorded(grant, _WRITE, "connection.stored", account=connection.account, **details):
        connection.refresh_from_db(from_queryset=_rows().select_for_update(of=("self",)))
        if connection.removed_at is not None:
            raise StateConflictError("The connection was removed meanwhile.")
        if connection.backend_version != known and version < (connection.backend_version or 0):
            raise StateConflictError("Somebody else replaced these credentials already.")
        connection.compare_and_swap(
            backend_version=version,
            stored_at=grant.at,
            stored_by=grant.principal.actor,
            settle_due_at=grant.at,
        )


# --- what stands there --------------------------------------------------------------------------------------


def _find_stored(connection: ProviderConnection, version: int | None = None) -> StoredSecret | None:
    """The newest version, or the named one, where it can be read. Raises ForeignWriterError."""
    mount, path = MOUNT[Environment(connection.account.environment)], connection.backend_path
    try:
        stored = secret_backend().read(mount, path, version)
    except BackendMissingError:
        return None
    if stored.labels.get("connection_id") != connection_id(connection):
        raise ForeignWriterError(f"{mount}/{path}", stored.version)
    return stored


def _is_ours(connection: ProviderConnection, version: StoredVersion) -> bool:
    """Whether there is anything of ours left in that version. Raises ForeignWriterError, also for what somebody else
    has hidden: nobody can say whose it is."""
    if version.state is VersionState.DESTROYED:
        return False
    if _find_stored(connection, version.version) is not None:
        return True
    if version.version != connection.backend_version:
        raise ForeignWriterError(connection.backend_path, version.version)
    return True


def _destroy_before(connection: ProviderConnection, newest: int) -> list[JsonValue]:
    """Every version of ours before that one; which those were."""
    mount, path = MOUNT[Environment(connection.account.environment)], connection.backend_path
    destroyed: list[JsonValue] = []
    for version in secret_backend().versions(mount, path):
        is_older = version.version < newest and version.state is not VersionState.DESTROYED
        if is_older and _find_stored(connection, version.version) is not None:
            secret_backend().destroy(mount, path, version.version)
            destroyed.append(version.version)
    return destroyed


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

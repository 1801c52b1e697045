"""Compare everything in the secret backend with the database every night.

A copy of a dead key is destroyed: a stopped worker may complete its write long after the key was discarded. A copy of a
living key that differs from its row is corrected, or reported if that is impossible. A copy that cannot be attributed
is reported and never touched.

Issuances and rotations in progress are unaffected. A key's row is written before its string, so the reconciler reads a
version's labels first and the row afterwards. Triggers ensure that a dead key stays dead, so its copy is useless. The
run may be killed at any point and run again.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, time, timedelta
from functools import partial

from django.conf import settings

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, System
from keyvault.backends.base import (
    BackendDeniedError,
    BackendInvalidError,
    BackendMissingError,
    StoredVersion,
    VersionState,
)
from keyvault.domain.environments import Environment
from keyvault.domain.errors import DependencyUnavailableError, KeyvaultError, StateConflictError
from keyvault.domain.keys import DEAD_STATES
from keyvault.models import Credential, Key, Material, ProviderConnection
from keyvault.services import offboarding
from keyvault.services.keys.lifecycle import get_key
from keyvault.services.reconciliation.report import FindingReporter, ReconciliationReport
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets import pending_copies, provider_connections
from keyvault.services.secrets.backend import MOUNT, secret_backend
from keyvault.services.secrets.stored_copies import copy_subject, destroy_string, settle_string
from keyvault.services.work import leases
from keyvault.services.work.leases import Lease

_log = logging.getLogger(__name__)

NIGHT = time(2, tzinfo=UTC)

_MAX_UNANSWERED = 3
"""Consecutive paths without a reply after which the backend counts as unavailable and the run ends."""

_BATCH = 200


def reconcile_due() -> None:
    """Reconcile the environments that are due. An unfinished run is retried soon."""
    for environment in map(Environment, settings.ENVIRONMENTS):
        now = datetime.now(UTC)
        lease = leases.claim(f"reconcile:{environment}", now)
        if lease is None:
            continue
        try:
            report = reconcile(environment, renew=partial(_renew, lease))
        except KeyvaultError as error:
            leases.postpone(lease, now, error.internal or error.detail)
            _log.warning("reconciliation postponed", extra={"environment": environment, "why": error.internal})
        else:
            if report.is_complete:
                leases.release(lease, due_at=next_night(datetime.now(UTC)))
            else:
                leases.postpone(lease, datetime.now(UTC), "the secret backend was unavailable or denied access")


def _renew(lease: Lease) -> None:
    leases.renew(lease, datetime.now(UTC))


def next_night(now: datetime) -> datetime:
    night = datetime.combine(now.astimezone(UTC), NIGHT)
    return night if night > now else night + timedelta(days=1)


def reconcile(
    environment: Environment,
    *,
    is_dry_run: bool = False,
    principal: System = WORKER,
    renew: Callable[[], None] = lambda: None,
) -> ReconciliationReport:
    """Reconcile one environment. `renew` is called repeatedly, and may raise to end the run.

    Errors are isolated per path and counted. A backend that is unavailable or denies access ends the run; the report is
    then incomplete.
    """
    run = _ReconciliationRun(environment, is_dry_run, principal, renew)
    try:
        run.check_backend()
        run.check_rows()
        run.report.is_complete = True
    except DependencyUnavailableError as error:
        _log.warning("reconciliation ended early", extra={"environment": environment, "why": error.internal})
    except BackendDeniedError as error:
        _log.error(
            "the secret backend denied the reconciliation", extra={"environment": environment, "why": error.internal}
        )
        run.report_refusal(error)
    if not is_dry_run:
        grant = authorize(principal, P.BACKEND_RECONCILE, now=datetime.now(UTC))
        with recorded(grant, P.BACKEND_RECONCILE, "backend.reconciled", account=None, **run.report.counts()):
            pass
    _log.info("backend reconciled", extra=run.report.counts())
    return run.report


class _ReconciliationRun(FindingReporter):
    """One run over one environment."""

    def __init__(
        self, environment: Environment, is_dry_run: bool, principal: System, renew: Callable[[], None]
    ) -> None:
        super().__init__(environment, is_dry_run, principal)
        self.mount, self.renew = MOUNT[environment], renew
        self._unanswered = 0

    # --- from the backend to the rows -----------------------------------------------------------------------

    def check_backend(self) -> None:
        for path in secret_backend().list_paths(self.mount):
            self.renew()
            self.report.paths += 1
            with self._isolated(path):
                self._check_path(path)

    def _check_path(self, path: str) -> None:
        if (credential := self._find_credential(path)) is not None:
            for version in self._versions(path):
                self._check_version(credential, version)
            if offboarding.may_be_forgotten(credential):
                self._forget(credential)
        elif (connection := provider_connections.find_by_path(self.environment, path)) is not None:
            self._check_connection(connection)
        elif (key := get_key(pending_copies.find_key_id(path) or "")) is not None:
            self._check_pending(path, key)
        else:
            self.report_unattributed(path, None, "no credential or connection of this service has this path")

    def _check_pending(self, path: str, key: Key) -> None:
        """Erase the late pending copy of a key that ended or was delivered; its rotation erases any other."""
        if key.state not in DEAD_STATES and key.backend_version is None:
            return
        if not self.report.is_dry_run:
            pending_copies.forget_pending(self.environment, key.key_id)
        self.report.forgotten += 1
        self.report.add_finding("forgotten", path, None, key_id=key.key_id)

    def _versions(self, path: str) -> Iterator[StoredVersion]:
        """Yield the versions that are not destroyed."""
        for version in secret_backend().versions(self.mount, path):
            self.report.versions += 1
            if version.state is not VersionState.DESTROYED:
                yield version

    def _labels(self, path: str, number: int) -> Mapping[str, str] | None:
        """Return a version's labels. None: it was just deleted. Unreadable data has no labels and is unattributed."""
        try:
            return secret_backend().read(self.mount, path, number).labels
        except BackendMissingError:
            return None
        except BackendInvalidError:
            return {}

    def _check_version(self, credential: Credential, version: StoredVersion) -> None:
        path, number = credential.backend_path, version.version
        if version.state is VersionState.DELETED:
            if not credential.keys.filter(backend_version=number).exists():
                self.report_unattributed(path, number, "it is deleted, and no key refers to it")
            return
        labels = self._labels(path, number)
        if labels is None:
            return
        key = self._attribute(credential, labels)
        if isinstance(key, str):
            self.report_unattributed(path, number, key)
            return
        for other in credential.keys.filter(backend_version=number, material=Material.HELD).exclude(pk=key.pk):
            self.report_missing(other)  # the version number was reused: the storage was set back
        if key.state in DEAD_STATES:
            self._destroy_orphan(key, number)

    def _attribute(self, credential: Credential, labels: Mapping[str, str]) -> Key | str:
        """Return the key that the string belongs to, or why it cannot be attributed."""
        if labels.get("credential_id") != credential.credential_id:
            return "it was not written for this credential"
        if labels.get("environment") != self.environment:
            return "it was written for another environment"
        key = get_key(labels.get("key_id", ""))
        if key is None or key.credential_id != credential.credential_id:
            return "no key of this credential has its id"
        return key

    def _destroy_orphan(self, key: Key, number: int) -> None:
        """Destroy a dead key's copy. The row records that it is due first, as for every destroyed copy."""

        def destroy(grant: Grant, fresh: Key, lease: Lease) -> None:
            if fresh.state not in DEAD_STATES:
                raise StateConflictError("The key is not dead.", internal=f"{fresh!r} was dead a moment ago")
            if fresh.backend_version != number or fresh.material != Material.DESTROY_DUE:
                destroy_string(grant, fresh)  # another version that is still due
                self._mark(grant, fresh, lease, "key.orphan_found", Material.DESTROY_DUE, number)
            destroy_string(grant, fresh)

        if self._with_copy(key, destroy):
            self.report.destroyed += 1
            self.report.add_finding("orphan destroyed", key.credential.backend_path, number, key_id=key.key_id)

    def _check_connection(self, connection: ProviderConnection) -> None:
        """Settle or forget a connection's path. Report it instead if any version is not this connection's."""
        path, own = connection.backend_path, provider_connections.connection_id(connection)
        found = list(self._versions(path))
        unattributed = [each.version for each in found if not self._is_of(own, path, each)]
        for number in unattributed:
            self.report_unattributed(path, number, "it was not written for this connection, or is deleted")
        if unattributed or self.report.is_dry_run:
            return
        grant = self.grant(connection.account)
        if connection.removed_at is None:
            if max((each.version for each in found), default=0) >= (connection.backend_version or 0):
                provider_connections.settle_connection(grant, connection)
        else:
            # Repeated even if it was forgotten before: a write may have arrived late.
            provider_connections.forget_connection(grant, connection)
            self.report.forgotten += 1
            self.report.add_finding("forgotten", path, None)

    def _is_of(self, connection_id: str, path: str, version: StoredVersion) -> bool:
        """Whether a version was written for the connection. The service never soft-deletes one."""
        if version.state is not VersionState.LIVE:
            return False
        labels = self._labels(path, version.version)
        return labels is None or labels.get("connection_id") == connection_id

    def _forget(self, credential: Credential) -> None:
        if self.report.is_dry_run or offboarding.forget_path(self.grant(credential.account), credential):
            self.report.forgotten += 1
            self.report.add_finding("forgotten", credential.backend_path, None)

    # --- from the rows to the backend -----------------------------------------------------------------------

    def check_rows(self) -> None:
        """Check that the copies of living keys exist, in order of key id."""
        last = ""
        rows = Key.objects.select_related("credential__account__merchant").filter(
            material__in=[Material.HELD, Material.DELETED], credential__account__environment=self.environment
        )
        while batch := list(rows.filter(key_id__gt=last).order_by("key_id")[:_BATCH]):
            for key in batch:
                self.renew()
                with self._isolated(key.credential.backend_path):
                    self._check_row(key)
            last = batch[-1].key_id

        self._check_connections()

    def _check_connections(self) -> None:
        """Check that the credentials of provider connections exist."""
        rows = ProviderConnection.objects.select_related("account__merchant").filter(
            account__environment=self.environment, removed_at=None, settle_due_at=None, backend_version__isnull=False
        )
        last = 0
        while batch := list(rows.filter(pk__gt=last).order_by("pk")[:_BATCH]):
            for row in batch:
                self.renew()
                with self._isolated(row.backend_path):
                    if self._state_of(row.backend_path, row.backend_version) is not VersionState.LIVE:
                        self.report_missing_connection(row)
            last = batch[-1].pk

    def _check_row(self, key: Key) -> None:
        state = self._state_of(key.credential.backend_path, key.backend_version)
        if state is (VersionState.LIVE if key.material == Material.HELD else VersionState.DELETED):
            return
        fresh = get_key(key.key_id)
        if fresh is None or fresh.version != key.version:
            self.report.left += 1  # another worker changed it meanwhile
        elif state is VersionState.DELETED:
            self._correct(key, Material.RESTORE_DUE)
        elif state is VersionState.LIVE:
            self._correct(key, Material.DELETE_DUE)
        else:
            self.report_missing(key)

    def _state_of(self, path: str, number: int | None) -> VersionState | None:
        found = secret_backend().versions(self.mount, path)
        return next((each.state for each in found if each.version == number), None)

    def _correct(self, key: Key, material: Material) -> None:
        """Correct a copy's visibility. It is wrong when a backend call arrives after a newer one."""

        def settle(grant: Grant, fresh: Key, lease: Lease) -> None:
            if fresh.version != key.version:
                raise StateConflictError("Another worker changed the key first.", internal=key.key_id)
            self._mark(grant, fresh, lease, "key.material_differs", material, fresh.backend_version)
            settle_string(grant, fresh, lease)

        if self._with_copy(key, settle):
            self.report.put_right += 1
            self.report.add_finding(material.value, key.credential.backend_path, key.backend_version, key_id=key.key_id)

    # --- rows -----------------------------------------------------------------------------------------------

    def _find_credential(self, path: str) -> Credential | None:
        rows = Credential.objects.select_related("account__merchant").filter(credential_id=path.rpartition("/")[2][:32])
        row = rows.filter(account__environment=self.environment).first()
        return row if row is not None and row.backend_path == path else None

    # --- changes --------------------------------------------------------------------------------------------

    def _with_copy(self, key: Key, change: Callable[[Grant, Key, Lease], None]) -> bool:
        """Run `change` under the copy's lease, on the key's current row. False: another worker holds the lease."""
        if self.report.is_dry_run:
            return True
        lease = leases.claim(copy_subject(key), datetime.now(UTC), ignore_due_at=True)
        fresh = get_key(key.key_id)
        if lease is None or fresh is None:
            self.report.left += 1
            return False
        try:
            change(self.grant(key.credential.account), fresh, lease)
        finally:
            leases.release(lease)
        return True

    def _mark(self, grant: Grant, key: Key, lease: Lease, event: str, material: Material, number: int | None) -> None:
        """Record in the row what is due before the backend is called."""
        account = key.credential.account
        with recorded(
            grant,
            P.BACKEND_RECONCILE,
            event,
            account=account,
            key_id=key.key_id,
            backend_version=number,
            was=key.material,
        ):
            leases.hold(lease)
            key.compare_and_swap(material=material, backend_version=number)

    @contextmanager
    def _isolated(self, path: str) -> Iterator[None]:
        """Isolate errors per path: count them, and end the run after _MAX_UNANSWERED without a reply."""
        try:
            yield
        except BackendDeniedError:
            raise
        except StateConflictError:
            self.report.left += 1  # another worker came first; the next run checks it again
        except KeyvaultError as error:
            self.report.failed += 1
            self._unanswered += isinstance(error, DependencyUnavailableError)
            self.report.add_finding("failed", path, None, why=error.internal or error.detail)
            if self._unanswered >= _MAX_UNANSWERED:
                raise
        else:
            self._unanswered = 0

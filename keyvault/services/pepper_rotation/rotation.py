"""Create new pepper versions and retire old ones. Runs on the host only: the service itself can only read peppers.

rotate_pepper        creates a version, which makes the digests once every live process has loaded it, see
                     `services.pepper_rotation.propagation`
(rehashing)          each key moves to the new version when it is next used, see `services.keys.rehashing`
retire_pepper        ends the use of an old version; refused while anything live depends on it
destroy_pepper       erases a retired version's material, manually, once no backup that needs it will be restored
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from django.db import IntegrityError as DatabaseIntegrityError
from django.db import OperationalError, connection
from django.db.models import QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.backends.base import BackendConflictError, Mount, VersionState
from keyvault.domain.digests import PEPPER_SET, Peppers, PepperSet
from keyvault.domain.environments import Environment
from keyvault.domain.errors import IntegrityError, NotFoundError, StateConflictError
from keyvault.domain.keys import DEAD_STATES
from keyvault.domain.sealing import sealed_with
from keyvault.models import CustomerToken, Key, PepperVersion, ServiceToken, WebhookEndpoint
from keyvault.models.idempotency import IdempotentRequest
from keyvault.services.pepper_rotation.propagation import PROPAGATION, list_lagging
from keyvault.services.peppers.ring import list_served_sets, put_pepper, read_pepper, require_own_pepper
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.webhooks.endpoints import sealed_versions

KEPT_AFTER_RETIREMENT: Final = timedelta(days=30)
"""Retention of a retired version's material. A database restored from before the retirement needs it again."""

MAX_VERSION_SPAN: Final = 90
"""Maximum span from the oldest version in use to the newest. Vault erases the oldest beyond 100 (`max_versions`)."""


# --- creation -------------------------------------------------------------------------------------------------


def rotate_pepper(grant: Grant, pepper_set: PepperSet) -> PepperVersion:
    """Create a new version and return its row. Safe to kill and run again: a version without a row is adopted.

    Raises StateConflictError while the previous version is still propagating, or when too many versions are in use.
    Raises BackendUnavailableError, and IntegrityError if the set's newest version belongs to another installation.
    """
    _require_served(pepper_set)
    rows = list(PepperVersion.objects.filter(pepper_set=pepper_set).order_by("number"))
    if not rows:
        raise IntegrityError("The service was not set up.", internal=f"no {pepper_set} pepper; run manage.py setup")
    newest, oldest = rows[-1], next(row for row in rows if row.retired_at is None)
    if newest.is_staged:
        raise StateConflictError(
            f"Version {newest.number} is not in use by every process yet. {_describe_lagging(newest)}"
        )
    if newest.number - oldest.number >= MAX_VERSION_SPAN:
        raise StateConflictError(
            f"Version {oldest.number} is still in use, {MAX_VERSION_SPAN} or more behind the newest. "
            "Retire old versions first."
        )
    number = _adopt(pepper_set, newest.number) or _make(pepper_set, newest.number)
    check_value = Peppers(pepper_set, {number: read_pepper(pepper_set, number)}).check_value(number)
    row = PepperVersion(pepper_set=pepper_set, number=number, check_value=check_value, created_at=datetime.now(UTC))
    try:
        with recorded(grant, Permission.PEPPERS_WRITE, "pepper.rotated", pepper_set=pepper_set, number=number):
            # Lock the previous version, so that the second of two concurrent runs sees the first one's row.
            PepperVersion.objects.select_for_update(no_key=True).get(pk=newest.pk)
            if PepperVersion.objects.filter(pepper_set=pepper_set, number__gt=newest.number).exists():
                raise StateConflictError("Another run has created a new version concurrently. Check show_peppers.")
            row.save()
    except DatabaseIntegrityError as error:
        raise StateConflictError("Another run is creating a new version concurrently. Check show_peppers.") from error
    return row


def _describe_lagging(row: PepperVersion) -> str:
    lagging = ", ".join(list_lagging(row))
    return (
        f"Not loaded yet by: {lagging}. Can they reach the secret backend?"
        if lagging
        else "The worker activates it automatically."
    )


def _adopt(pepper_set: PepperSet, newest: int) -> int | None:
    """Return the version that an earlier run left without a row.

    Raises IntegrityError if it is not this installation's.
    """
    beyond = [
        stored.version
        for stored in secret_backend().versions(Mount.PEPPERS, pepper_set)
        if stored.version > newest and stored.state is VersionState.LIVE
    ]
    if not beyond:
        return None
    labels = secret_backend().read(Mount.PEPPERS, pepper_set, beyond[0]).labels
    if (labels.get("pepper_set"), labels.get("number")) != (pepper_set.value, str(beyond[0])):
        raise IntegrityError(
            "Another program has written to the pepper storage.",
            internal=f"{pepper_set} pepper {beyond[0]} is foreign: find out who wrote it, and have it destroyed",
        )
    require_own_pepper(pepper_set, beyond[0])
    return beyond[0]


def _make(pepper_set: PepperSet, newest: int) -> int:
    """Store a version numbered after all existing ones, including destroyed ones."""
    known = [stored.version for stored in secret_backend().versions(Mount.PEPPERS, pepper_set)]
    number = max([newest, *known]) + 1
    try:
        put_pepper(pepper_set, number)
    except BackendConflictError as error:
        raise StateConflictError(
            "Another run is creating a new version concurrently. Run the command again."
        ) from error
    return number


# --- retirement and destruction -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PepperUsage:
    """The rows that still depend on a version, for digests or sealed values."""

    keys: QuerySet[Key]
    service_tokens: QuerySet[ServiceToken]
    customer_tokens: QuerySet[CustomerToken]
    webhook_endpoints: Sequence[int]
    sealed_answers: int

    def format_counts(self) -> str:
        """Format the counts, such as "2 keys, 1 service token"; empty if nothing depends on it."""
        counts = [
            (self.keys.count(), "key", "keys"),
            (self.service_tokens.count(), "service token", "service tokens"),
            (self.customer_tokens.count(), "customer access token", "customer access tokens"),
            (len(self.webhook_endpoints), "sealed webhook secret", "sealed webhook secrets"),
            (self.sealed_answers, "sealed reply", "sealed replies"),
        ]
        return ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in counts if count)


class PepperInUseError(StateConflictError):
    """Something live still depends on the version."""


def find_pepper_usage(pepper_set: PepperSet, number: int, now: datetime) -> PepperUsage:
    environment = _environment(pepper_set)
    living = Key.objects.filter(pepper_version=number).exclude(state__in=DEAD_STATES)
    valid = {"pepper_version": number, "revoked_at__isnull": True, "expires_at__gt": now}
    tokens = ServiceToken.objects.filter(**valid) if environment is None else ServiceToken.objects.none()
    endpoints = WebhookEndpoint.objects.filter(account__environment=environment).order_by("pk")
    return PepperUsage(
        living.filter(credential__account__environment=environment).order_by("key_id"),
        tokens.order_by("token_id"),
        CustomerToken.objects.filter(account__environment=environment, **valid).order_by("token_id"),
        [row.pk for row in endpoints.iterator() if number in sealed_versions(row)],
        _count_sealed_answers(environment, number, now),
    )


def retire_pepper(grant: Grant, pepper_set: PepperSet, number: int) -> PepperVersion:
    """Retire a version: no key is verified with it any more, and its dead keys become `credential_invalid`.

    Repeatable. Raises PepperInUseError, with what to do, while anything live depends on it. Raises StateConflictError
    for the newest version, and until a newer one has made the digests for long enough. Raises NotFoundError.
    """
    _require_served(pepper_set)
    row = _find_version(pepper_set, number)
    if row.retired_at is not None:
        return row
    _require_succeeded(row, grant.at)
    try:
        with recorded(grant, Permission.PEPPERS_WRITE, "pepper.retired", pepper_set=pepper_set, number=number):
            _block_writers()
            _require_unused(row, grant.at)
            row.compare_and_swap(retired_at=grant.at)
    except OperationalError as error:
        raise StateConflictError(
            "Keys are being written right now. Run the command again.", internal=str(error)
        ) from error
    return row


def destroyable_from(row: PepperVersion) -> datetime | None:
    """Return when the version's material may be destroyed; None unless it is retired."""
    return None if row.retired_at is None else row.retired_at + KEPT_AFTER_RETIREMENT


def destroy_pepper(grant: Grant, pepper_set: PepperSet, number: int) -> PepperVersion:
    """Erase a retired version in the secret backend, permanently.

    Database backups from before its retirement become unusable. Repeatable, also after a restored Vault brought the
    version back.

    Raises StateConflictError, with the earliest time, within 30 days of retirement. Raises NotFoundError,
    IntegrityError if another installation wrote the version, and BackendUnavailableError: run it again.
    """
    _require_served(pepper_set)
    row = _find_version(pepper_set, number)
    destroyable_at = destroyable_from(row)
    if destroyable_at is None:
        raise StateConflictError("Only a retired version can be destroyed. Retire it first.")
    if grant.at < destroyable_at:
        raise StateConflictError(
            f"The version may be destroyed from {destroyable_at:%Y-%m-%d %H:%M} UTC. Until then a database restored "
            "from a backup made before its retirement needs it."
        )
    require_own_pepper(pepper_set, number)
    secret_backend().destroy(Mount.PEPPERS, row.pepper_set, row.number)
    if row.destroyed_at is not None:
        return row
    details = {"pepper_set": row.pepper_set, "number": row.number}
    with recorded(grant, Permission.PEPPERS_WRITE, "pepper.destroyed", **details):
        row.compare_and_swap(destroyed_at=grant.at)
    return row


def _require_succeeded(row: PepperVersion, now: datetime) -> None:
    """Raise StateConflictError unless a newer version makes the digests everywhere.

    A process may hash with the old version until it learns of the new one, and then finishes what it began.
    """
    newer = list(
        PepperVersion.objects.filter(
            pepper_set=row.pepper_set, number__gt=row.number, retired_at__isnull=True
        ).order_by("hashes_from_at")
    )
    if not newer:
        raise StateConflictError(
            f"This is the newest {row.pepper_set} pepper. Create a new one first: rotate_pepper --set {row.pepper_set}."
        )
    successor = next((each for each in newer if not each.is_staged), None)
    if successor is None:
        raise StateConflictError(
            f"This version still makes the digests: version {newer[0].number} is not in use yet. "
            f"{_describe_lagging(newer[0])}"
        )
    settled_at = successor.hashes_from_at + PROPAGATION
    if now < settled_at:
        raise StateConflictError(f"Processes may still need it. Run the command again after {settled_at:%H:%M:%S} UTC.")


def _require_unused(row: PepperVersion, now: datetime) -> None:
    usage = find_pepper_usage(PepperSet(row.pepper_set), row.number, now).format_counts()
    if usage:
        raise PepperInUseError(
            f"The version is in use: {usage}. A key moves to the newest pepper when it is used; rotate or revoke "
            "unused keys (show_peppers --list). The worker reseals webhook secrets. Customer access tokens and sealed "
            "replies expire."
        )


def _block_writers() -> None:
    """Block writers inside the transaction, so that the count sees every digest and no new one is written.

    The first lock does not block writers. It waits longer than PostgreSQL's deadlock check, which cancels an autovacuum
    that holds a table, and it prevents the next one. The second lock times out before that check, so this transaction
    is the one that fails. SQLite has one writer at a time.
    """
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            for timeout, mode in (("5s", "SHARE UPDATE EXCLUSIVE"), ("500ms", "SHARE ROW EXCLUSIVE")):
                cursor.execute(f"SET LOCAL lock_timeout = '{timeout}'")
                cursor.execute(f"LOCK TABLE {_WITH_DIGESTS} IN {mode} MODE")
            cursor.execute("SET LOCAL lock_timeout = DEFAULT")


_WITH_DIGESTS = (
    "keyvault_key, keyvault_servicetoken, keyvault_customertoken, keyvault_webhookendpoint, keyvault_idempotentrequest"
)


def _count_sealed_answers(environment: Environment | None, number: int, now: datetime) -> int:
    """Count sealed replies under this version number.

    A reply does not record its environment, so another environment's replies count too. They live for 15 minutes.
    """
    if environment is None:
        return 0
    rows = IdempotentRequest.objects.filter(sealed__isnull=False, sealed_until__gt=now)
    return sum(row.sealed is not None and sealed_with(bytes(row.sealed)) == number for row in rows.iterator())


def _find_version(pepper_set: PepperSet, number: int) -> PepperVersion:
    row: PepperVersion | None = PepperVersion.objects.filter(pepper_set=pepper_set, number=number).first()
    if row is None:
        raise NotFoundError(f"Unknown {pepper_set} pepper version {number}. Use one that show_peppers lists.")
    return row


def _environment(pepper_set: PepperSet) -> Environment | None:
    return next((environment for environment, each in PEPPER_SET.items() if each is pepper_set), None)


def _require_served(pepper_set: PepperSet) -> None:
    if pepper_set not in list_served_sets():
        raise NotFoundError(f"This process does not serve {pepper_set}. Check KEYVAULT_ENVIRONMENTS.")

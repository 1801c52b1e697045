"""Report the pepper versions: what depends on each, and whether this process has loaded it. Reads only."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Q, QuerySet

from keyvault.backends.base import BackendError, Mount, VersionState
from keyvault.domain.digests import PEPPER_SET, PepperSet
from keyvault.domain.errors import KeyvaultError
from keyvault.domain.keys import DEAD_STATES
from keyvault.models import Key, PepperVersion, ServiceToken
from keyvault.services.pepper_rotation.propagation import list_lagging
from keyvault.services.pepper_rotation.rotation import destroyable_from, find_pepper_usage
from keyvault.services.peppers.ring import list_served_sets, load_peppers, read_checked, require_own_pepper
from keyvault.services.secrets.backend import secret_backend

DORMANT_DAYS = 30


@dataclass(frozen=True, slots=True)
class PepperState:
    """One version.

    `stored`: whether the secret backend has it; None if the backend did not answer. `is_loaded`: whether this process
    has it and checked it. `lagging`: live reporters that have not loaded a new version, which until then only checks
    digests. `fault`: what is wrong and what to do, or empty.
    """

    pepper_set: PepperSet
    number: int
    created_at: datetime
    hashes_from_at: datetime | None
    is_hashing: bool
    lagging: list[str]
    is_loaded: bool
    stored: bool | None
    retired_at: datetime | None
    destroyable_from: datetime | None
    destroyed_at: datetime | None
    fault: str


@dataclass(frozen=True, slots=True)
class PepperCounts:
    """Counts of the keys, or service tokens, that depend on one version.

    `living` includes `dormant`. `usage`: the same for each kind, as text.
    """

    living: int
    dormant: int
    dead: int
    usage: str


@dataclass(frozen=True, slots=True)
class UnrecordedVersion:
    """A version that the secret backend has and the database does not.

    An interrupted rotation left it, or the database was restored from an earlier backup, or another installation wrote
    it. In the last case `fault` states the owner.
    """

    pepper_set: PepperSet
    number: int
    fault: str


@dataclass(frozen=True, slots=True)
class DormantKey:
    """A living key unused for so long that it will not move to a newer pepper by itself."""

    pepper_set: PepperSet
    number: int
    key_id: str
    merchant_id: str
    credential_id: str
    last_used_at: datetime | None

    def format_line(self) -> str:
        used = "never used" if self.last_used_at is None else f"last used {self.last_used_at:%Y-%m-%d %H:%M} UTC"
        return f"key {self.key_id} of {self.merchant_id}, credential {self.credential_id}, {used}"


def list_pepper_states() -> list[PepperState]:
    """Return the versions of the sets that this process serves, oldest first."""
    return [
        _describe(row, stored)
        for pepper_set in list_served_sets()
        for stored in [_find_stored(pepper_set)]
        for row in PepperVersion.objects.filter(pepper_set=pepper_set).order_by("number")
    ]


def list_unrecorded() -> list[UnrecordedVersion]:
    """Return the served sets' versions without a database row; none of a set whose backend does not answer."""
    found = []
    for pepper_set in list_served_sets():
        known = set(PepperVersion.objects.filter(pepper_set=pepper_set).values_list("number", flat=True))
        for number, state in (_find_stored(pepper_set) or {}).items():
            if number not in known and state is not VersionState.DESTROYED:
                found.append(UnrecordedVersion(pepper_set, number, _find_owner_fault(pepper_set, number)))
    return found


def _find_owner_fault(pepper_set: PepperSet, number: int) -> str:
    try:
        require_own_pepper(pepper_set, number)
    except (KeyvaultError, BackendError) as error:
        return f"{error.detail} ({error.internal})"
    return ""


def describe_version(row: PepperVersion) -> PepperState:
    """Describe one version of a set that this process serves."""
    return _describe(row, _find_stored(PepperSet(row.pepper_set)))


def count_usage(pepper_set: PepperSet, number: int, now: datetime, dormant_days: int = DORMANT_DAYS) -> PepperCounts:
    """Count what depends on a version. Reads every key of the environment, so no page and no job calls it."""
    usage = find_pepper_usage(pepper_set, number, now)
    return PepperCounts(
        living=usage.keys.count() + usage.service_tokens.count(),
        dormant=_dormant(usage.keys, now, dormant_days).count(),
        dead=_count_dead(pepper_set, number, now),
        usage=usage.format_counts(),
    )


def list_dormant_keys(pepper_set: PepperSet, number: int, now: datetime, dormant_days: int) -> Iterator[DormantKey]:
    """Yield the keys that must be rotated or revoked before the version can be retired."""
    rows = _dormant(find_pepper_usage(pepper_set, number, now).keys, now, dormant_days)
    for key in rows.select_related("credential__account", "use").iterator():
        use = getattr(key, "use", None)
        yield DormantKey(
            pepper_set,
            number,
            key.key_id,
            key.credential.account.merchant_id,
            key.credential_id,
            None if use is None else use.last_at,
        )


def _dormant(keys: QuerySet[Key], now: datetime, dormant_days: int) -> QuerySet[Key]:
    """Select keys unused for `dormant_days`. A key that was never used counts from its creation."""
    since = now - timedelta(days=dormant_days)
    return keys.filter(Q(use__last_at__lt=since) | Q(use__isnull=True, created_at__lt=since))


def _describe(row: PepperVersion, stored: Mapping[int, VersionState] | None) -> PepperState:
    pepper_set = PepperSet(row.pepper_set)
    is_loaded, is_hashing, fault = _check(row)
    is_stored = None if stored is None else stored.get(row.number) is VersionState.LIVE
    if row.destroyed_at is not None and is_stored:
        command = f"retire_pepper --set {pepper_set} --version {row.number} --destroy"
        fault = f"It was destroyed but is in the secret backend again (a restored Vault?). Run {command}."
    elif row.retired_at is None and is_stored is False and not fault:
        fault = "The secret backend lacks it. Only running processes have it, in memory: restore it before they stop."
    return PepperState(
        pepper_set=pepper_set,
        number=row.number,
        created_at=row.created_at,
        hashes_from_at=row.hashes_from_at,
        is_hashing=is_hashing,
        lagging=list_lagging(row) if row.is_staged and row.retired_at is None else [],
        is_loaded=is_loaded,
        stored=is_stored,
        retired_at=row.retired_at,
        destroyable_from=destroyable_from(row),
        destroyed_at=row.destroyed_at,
        fault=fault,
    )


def _check(row: PepperVersion) -> tuple[bool, bool, str]:
    """Return whether this process has loaded the version, whether it hashes with it, and the version's fault."""
    if row.retired_at is not None:
        return False, False, ""
    try:
        peppers = load_peppers(PepperSet(row.pepper_set))
        if row.number not in peppers.versions:
            read_checked(row)
            return False, False, ""
    except KeyvaultError:
        return False, False, _fault_of(row)
    return True, row.number == peppers.current_version, ""


def _fault_of(row: PepperVersion) -> str:
    """Return the version's own fault when its set does not load; empty if another version is the cause."""
    try:
        read_checked(row)
    except KeyvaultError as error:
        return f"{error.detail} ({error.internal})"
    return ""


def _find_stored(pepper_set: PepperSet) -> Mapping[int, VersionState] | None:
    try:
        return {stored.version: stored.state for stored in secret_backend().versions(Mount.PEPPERS, pepper_set)}
    except BackendError:
        return None


def _count_dead(pepper_set: PepperSet, number: int, now: datetime) -> int:
    """Count the keys, or service tokens, that have ended: they cannot authenticate, with or without the pepper."""
    if pepper_set is PepperSet.SERVICE:
        ended = Q(revoked_at__isnull=False) | Q(expires_at__lte=now)
        return ServiceToken.objects.filter(ended, pepper_version=number).count()
    environment = next(environment for environment, each in PEPPER_SET.items() if each is pepper_set)
    dead = Key.objects.filter(pepper_version=number, state__in=DEAD_STATES)
    return dead.filter(credential__account__environment=environment).count()

"""The pepper ring: peppers created once, kept in the secret backend, loaded into memory and checked by the database.

Verification never calls the backend: loaded peppers stay usable while the backend is unavailable. New versions are
loaded off the request path (`load_peppers.refresh`): by the thread that reports usage, by the worker's maintenance, and
before new digests are computed.
"""

import base64
import binascii
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from django.conf import settings
from django.db import IntegrityError as DatabaseIntegrityError
from django.db import connections

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.backends import meters
from keyvault.backends.base import BackendConflictError, BackendMissingError, Mount
from keyvault.domain.digests import PEPPER_BYTES, PEPPER_SET, Peppers, PepperSet
from keyvault.domain.errors import IntegrityError, KeyvaultError, NotFoundError, VerifierStaleError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import PepperVersion
from keyvault.services.peppers.installation import LABEL, ensure_installation, installation_id, require_ours
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.work.background_thread import forget_at_fork, log_failure

_log = logging.getLogger(__name__)

REFRESH_SECONDS: Final = 5.0
"""Interval in seconds at which a process that verifies or creates keys checks for new versions."""

PAUSE_SECONDS: Final = 1.0
"""Minimum pause in seconds between two refreshes that requests have scheduled."""


def list_served_sets() -> list[PepperSet]:
    """Return the pepper sets of the served environments (KEYVAULT_ENVIRONMENTS) and of the service tokens."""
    others = {peppers for environment, peppers in PEPPER_SET.items() if environment not in settings.ENVIRONMENTS}
    return [pepper_set for pepper_set in PepperSet if pepper_set not in others]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The loaded versions of one set.

    `phases`: for each version, newest first, the time from which it computes new digests, and the peppers for then.
    `staged`: the versions without such a time, which only check digests.
    """

    pepper_set: PepperSet
    versions: Mapping[int, bytes]
    staged: frozenset[int]
    phases: tuple[tuple[datetime, Peppers], ...]

    def now(self) -> Peppers:
        if len(self.phases) == 1:  # the common case
            return self.phases[0][1]
        at = _utc_now()
        return next((peppers for since, peppers in self.phases if since <= at), self.phases[-1][1])


def _rows_of_database(pepper_set: PepperSet) -> list[PepperVersion]:
    return list(PepperVersion.objects.filter(pepper_set=pepper_set).order_by("number"))


class PepperRing:
    """The loaded peppers of one process. Threads share them; a forked child inherits its parent's."""

    def __init__(self) -> None:
        self.read_rows: Callable[[PepperSet], list[PepperVersion]] = _rows_of_database
        """Reads the versions of a set, oldest first. A regional verifier, which has no database, replaces it."""
        self._loaded: dict[PepperSet, _Loaded] = {}
        self._refreshing = threading.Lock()
        self._refreshed_at = 0.0
        self._paused_until = 0.0
        self._thread: threading.Thread | None = None

    def __call__(self, pepper_set: PepperSet) -> Peppers:
        """Return the set's current peppers. Only the first call reads the database and the backend.

        Raises IntegrityError when a version is missing or fails its check value. Raises NotFoundError, before any
        read, when this process does not serve the set's environment.
        """
        loaded = self._loaded.get(pepper_set)
        if loaded is None:
            loaded = self._loaded.setdefault(pepper_set, _load(pepper_set))
            self._note_versions()
        return loaded.now()

    def loaded(self, pepper_set: PepperSet) -> Peppers:
        """Return the set's current peppers without I/O.

        Raises VerifierStaleError while they are not loaded, and schedules a refresh in a thread.
        """
        loaded = self._loaded.get(pepper_set)
        if loaded is None:
            self.schedule_refresh()
            raise VerifierStaleError(
                "The key cannot be verified right now. Try again.",
                internal=f"the {pepper_set} peppers are not loaded yet: is the secret backend unavailable?",
            )
        return loaded.now()

    def cache_clear(self) -> None:
        """Reset the ring to the state of a new process."""
        self._loaded.clear()
        self._refreshed_at = self._paused_until = 0.0

    def refresh(self) -> None:
        """Load new versions of the loaded sets, and drop retired ones.

        Reads only new versions from the backend. A version that cannot be read is tried again at the next refresh, and
        loaded ones stay. Raises database errors.
        """
        # A concurrent caller continues with the loaded peppers instead of waiting for this one's I/O.
        if not self._refreshing.acquire(blocking=False):
            return
        try:
            for pepper_set, loaded in list(self._loaded.items()):
                self._loaded[pepper_set] = _renew(loaded)
            self._refreshed_at = time.monotonic()
        finally:
            self._refreshing.release()
        self._note_versions()

    def refresh_if_due(self) -> None:
        if self._is_due():
            self.refresh()

    def poll(self) -> None:
        """Check for new versions or unloaded sets without waiting for the backend; schedule a refresh if there are any.

        Reads the database. Call this from a thread that must not block on the backend.
        """
        if time.monotonic() - self._refreshed_at < REFRESH_SECONDS:
            return
        if self._missing() or any(_is_behind(loaded) for loaded in list(self._loaded.values())):
            self.schedule_refresh()
        self._refreshed_at = time.monotonic()
        self._note_versions()

    def schedule_refresh(self) -> None:
        """Start a refresh in a thread, for a request that must not wait. One at a time, with a pause after each."""
        if self._thread is not None and self._thread.is_alive():
            return
        if time.monotonic() >= self._paused_until:
            self._thread = threading.Thread(target=self._try_refresh, name="peppers", daemon=True)
            self._thread.start()

    def newest_versions(self) -> dict[str, int]:
        """Return the newest loaded version of each served set; 0: none is loaded. No I/O.

        All earlier versions are loaded too, unless retired.
        """
        loaded = {pepper_set: self._loaded.get(pepper_set) for pepper_set in list_served_sets()}
        return {pepper_set.value: 0 if each is None else max(each.versions) for pepper_set, each in loaded.items()}

    def forget(self) -> None:
        """Reset locks and threads in a forked child; loaded peppers stay."""
        self._refreshing, self._thread = threading.Lock(), None

    def _note_versions(self) -> None:
        """Update the gauge of current versions. They change with time alone, so every refresh and poll updates it."""
        for pepper_set, loaded in list(self._loaded.items()):
            meters.note_pepper(pepper_set, loaded.now().current_version)

    def _is_due(self) -> bool:
        return bool(self._loaded) and time.monotonic() - self._refreshed_at >= REFRESH_SECONDS

    def _missing(self) -> list[PepperSet]:
        return [pepper_set for pepper_set in list_served_sets() if pepper_set not in self._loaded]

    def _try_refresh(self) -> None:
        try:
            with log_failure(_log, "the peppers could not be refreshed"):  # the next refresh tries again
                for pepper_set in self._missing():
                    self(pepper_set)
                self.refresh()
        finally:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            connections.close_all()  # this thread's own


load_peppers = PepperRing()
"""The pepper ring of this process."""

forget_at_fork(load_peppers)


def refresh_peppers(pepper_set: PepperSet) -> None:
    """Refresh a set before a transaction that computes digests, so that an idle process uses the current version.

    Raises what `load_peppers` raises. An unavailable backend does not affect loaded peppers.
    """
    load_peppers(pepper_set)
    load_peppers.refresh_if_due()


def take_pepper(peppers: Peppers, version: int) -> Peppers:
    """Return these peppers, or the process's newest if `version` was loaded after they were taken.

    Raises VerifierStaleError when this process has not loaded that version yet, and schedules a refresh. Without the
    pepper the key cannot be judged, so it must not be denied as wrong.
    """
    if not peppers.lacks(version):
        return peppers
    newest = load_peppers(peppers.pepper_set)
    if newest.lacks(version):
        load_peppers.schedule_refresh()
        raise VerifierStaleError(
            "The key cannot be verified right now. Try again.",
            internal=f"{peppers.pepper_set} pepper {version} is not loaded yet: is the secret backend unavailable?",
        )
    return newest


def ensure_peppers(now: datetime) -> None:
    """Create version 1 of each served set at the first run. Idempotent and safe for concurrent first runs.

    Raises IntegrityError when the backend holds another installation's peppers.
    """
    ensure_installation(now)
    for pepper_set in list_served_sets():
        if not PepperVersion.objects.filter(pepper_set=pepper_set).exists():
            _make_first(pepper_set, now)
        load_peppers(pepper_set)


def _make_first(pepper_set: PepperSet, now: datetime) -> None:
    # On a conflict, a run that died before it wrote its row, or a concurrent run, has written the pepper.
    with suppress(BackendConflictError):
        put_pepper(pepper_set, 1)
    require_own_pepper(pepper_set, 1)
    check_value = Peppers(pepper_set, {1: read_pepper(pepper_set, 1)}).check_value(1)
    grant = authorize(HOST, Permission.OPERATORS_WRITE, now=now)
    with (
        suppress(DatabaseIntegrityError),  # A concurrent first run wrote the same row.
        recorded(grant, Permission.OPERATORS_WRITE, "pepper.created", pepper_set=pepper_set),
    ):
        PepperVersion(pepper_set=pepper_set, number=1, check_value=check_value, created_at=now).save()


def put_pepper(pepper_set: PepperSet, number: int) -> None:
    """Write a new random pepper to the backend as that version. Raises BackendConflictError if the version exists."""
    pepper_text = Plaintext(base64.b64encode(secrets.token_bytes(PEPPER_BYTES)).decode())
    labels = {"pepper_set": pepper_set.value, "number": str(number), LABEL: installation_id()}
    secret_backend().put(Mount.PEPPERS, pepper_set, pepper_text, labels, expected_version=number - 1)


def read_pepper(pepper_set: PepperSet, number: int) -> bytes:
    """Return one version from the backend, without a check value. Raises IntegrityError if missing or malformed."""
    try:
        stored = secret_backend().read(Mount.PEPPERS, pepper_set, number)
        pepper = base64.b64decode(stored.secret.reveal(), validate=True)
    except BackendMissingError as error:
        raise IntegrityError(
            "A pepper is missing from the secret backend.",
            internal=f"{pepper_set} pepper {number} is gone: restore the keystore or the Vault storage that belongs"
            " to this database",
        ) from error
    except binascii.Error:
        pepper = b""
    if len(pepper) != PEPPER_BYTES:
        raise IntegrityError(
            "The value in the secret backend is not a pepper.",
            internal=f"{pepper_set} pepper {number} was not written by Keyvault: find out who wrote it, and"
            " restore the pepper",
        )
    return pepper


def require_own_pepper(pepper_set: PepperSet, number: int) -> None:
    """Require that this installation wrote that version, or that the backend has none. Raises IntegrityError."""
    try:
        labels = secret_backend().read(Mount.PEPPERS, pepper_set, number).labels
    except BackendMissingError:
        return
    require_ours(labels, f"{pepper_set} pepper {number}")


def read_checked(row: PepperVersion) -> bytes:
    """Return the pepper of that row. Raises IntegrityError when it is missing or fails its check value."""
    pepper_set = PepperSet(row.pepper_set)
    pepper = read_pepper(pepper_set, row.number)
    if Peppers(pepper_set, {row.number: pepper}).check_value(row.number) != bytes(row.check_value):
        raise IntegrityError(
            "A pepper differs from the one that the keys were hashed with.",
            internal=f"{pepper_set} pepper {row.number} fails its check: {_diagnose(pepper)}",
        )
    return pepper


def _diagnose(pepper: bytes) -> str:
    """Return what is known of a pepper that failed its check, and what to do."""
    for row in (row for pepper_set in PepperSet for row in _rows(pepper_set)):
        if Peppers(PepperSet(row.pepper_set), {row.number: pepper}).check_value(row.number) == bytes(row.check_value):
            return (
                f"it is {row.pepper_set} pepper {row.number}; the environments were swapped (KEYVAULT_VAULT_PREFIX, the"
                " mounts, or a restore): put each back into its own place"
            )
    return (
        "wrong or swapped keystore; point the service (KEYVAULT_BACKEND, KEYVAULT_DATA_DIR, VAULT_ADDR,"
        " KEYVAULT_VAULT_PREFIX) at the one that belongs to this database, or restore it"
    )


def _load(pepper_set: PepperSet) -> _Loaded:
    if pepper_set not in list_served_sets():
        raise NotFoundError(f"This process does not serve {pepper_set}.")
    rows = _rows(pepper_set)
    if not rows:
        raise IntegrityError("The service was not set up.", internal=f"no {pepper_set} pepper; run manage.py setup")
    versions = {}
    for row in rows:
        if row.retired_at is not None:
            continue
        try:
            versions[row.number] = read_checked(row)
        except IntegrityError:
            # Not missing if it was retired and destroyed after the rows were read.
            if row.number not in {each.number for each in _rows(pepper_set) if each.retired_at is not None}:
                raise
    return _arrange(pepper_set, versions, rows)


def _renew(loaded: _Loaded) -> _Loaded:
    rows = _rows(loaded.pepper_set)
    retired = {row.number for row in rows if row.retired_at is not None}
    versions = {number: pepper for number, pepper in loaded.versions.items() if number not in retired}
    for row in rows:
        if row.number in versions or row.number in retired:
            continue
        try:
            versions[row.number] = read_checked(row)
        except KeyvaultError as error:
            _log.warning(
                "a new pepper cannot be loaded yet",
                extra={"pepper_set": row.pepper_set, "number": row.number, "why": error.internal or error.detail},
            )
            # Load no later version either, so that every version above the newest loaded one is known to be missing.
            break
    return _arrange(loaded.pepper_set, versions, rows)


def _is_behind(loaded: _Loaded) -> bool:
    """Whether a version has to be loaded, activated or dropped."""
    return any(
        (row.number in loaded.versions) is (row.retired_at is not None)
        or (row.number in loaded.staged and not row.is_staged)
        for row in _rows(loaded.pepper_set)
    )


def _arrange(pepper_set: PepperSet, versions: Mapping[int, bytes], rows: list[PepperVersion]) -> _Loaded:
    since = {row.number: row.hashes_from_at or _ALWAYS for row in rows if not row.is_staged}
    newest_first = sorted(versions, reverse=True)
    phases = tuple((since.get(number, _NEVER), Peppers(pepper_set, versions, number)) for number in newest_first)
    return _Loaded(pepper_set, versions, frozenset(versions) - frozenset(since), phases)


_ALWAYS, _NEVER = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def _rows(pepper_set: PepperSet) -> list[PepperVersion]:
    return load_peppers.read_rows(pepper_set)


def _utc_now() -> datetime:
    return datetime.now(UTC)


def pepper_health() -> Mapping[PepperSet, bool]:
    """Return whether each served set is loaded, after trying to load those that are not. Never raises."""
    health = {}
    for pepper_set in list_served_sets():
        try:
            load_peppers(pepper_set)
        except Exception:  # noqa: BLE001  any failure means "not ready"
            health[pepper_set] = False
        else:
            health[pepper_set] = True
    return health

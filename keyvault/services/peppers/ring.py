"""The peppers: made once, kept in the secret backend, loaded into memory, checked against the database.

Verification never asks the backend: what a process has loaded stays, whatever becomes of the backend. Versions that
came since are taken in off the request path (`load_peppers.refresh`), by the thread that reports usage, by the worker's
upkeep, and by whoever is about to make digests.
"""

import base64
import binascii
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
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

_log = logging.getLogger(__name__)

REFRESH_SECONDS: Final = 5.0
"""So often a process that judges or makes keys looks for new versions."""

PAUSE_SECONDS: Final = 1.0
"""Between two tries that requests have asked for, however many they are."""


def list_served_sets() -> list[PepperSet]:
    """Those of the environments that this process serves (KEYVAULT_ENVIRONMENTS), and that of the service tokens."""
    others = {peppers for environment, peppers in PEPPER_SET.items() if environment not in settings.ENVIRONMENTS}
    return [pepper_set for pepper_set in PepperSet if pepper_set not in others]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One set's versions, and since when each makes the digests, the newest first; those `staged` only prove yet."""

    pepper_set: PepperSet
    versions: Mapping[int, bytes]
    staged: frozenset[int]
    phases: tuple[tuple[datetime, Peppers], ...]

    def now(self) -> Peppers:
        if len(self.phases) == 1:  # as nearly always
            return self.phases[0][1]
        at = _utc_now()
        return next((peppers for since, peppers in self.phases if since <= at), self.phases[-1][1])


class PepperRing:
    """The peppers that one process has loaded. Threads share it; a forked child starts with its parent's."""

    def __init__(self) -> None:
        self._loaded: dict[PepperSet, _Loaded] = {}
        self._refreshing = threading.Lock()
        self._refreshed_at = 0.0
        self._rests_until = 0.0
        self._thread: threading.Thread | None = None

    def __call__(self, pepper_set: PepperSet) -> Peppers:
        """The set's peppers as of this moment. Asks the database and the backend at the first call, and then never.

        Raises IntegrityError when a version is missing or is not the one that the digests were made with, and
        NotFoundError, before anything is read, when this process does not serve the set's environment.
        """
        loaded = self._loaded.get(pepper_set)
        if loaded is None:
            loaded = self._loaded.setdefault(pepper_set, _load(pepper_set))
            self._note_versions()
        return loaded.now()

    def loaded(self, pepper_set: PepperSet) -> Peppers:
        """The same for whoever must not wait: asks nobody. Raises VerifierStaleError while they are not loaded, which
        is then tried by a thread."""
        loaded = self._loaded.get(pepper_set)
        if loaded is None:
            self.schedule_refresh()
            raise VerifierStaleError(
                "The key cannot be judged right now. Try again.",
                internal=f"the {pepper_set} peppers are not loaded yet: is the secret backend away?",
            )
        return loaded.now()

    def cache_clear(self) -> None:
        """As a new process begins."""
        self._loaded.clear()
        self._refreshed_at = self._rests_until = 0.0

    def refresh(self) -> None:
        """Takes in the versions that came since, and lets go of the retired ones; of what is loaded already.

        The backend is only asked for what is new. What it does not give is tried again next time, and what is loaded
        stays. Raises what the database raises.
        """
        # Whoever comes meanwhile goes on with what there is: nobody waits for another's database or backend.
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

    def look(self) -> None:
        """For a thread that must not wait for the backend: has another one refresh, when there is something new, or a
        served set that the backend did not give yet."""
        if time.monotonic() - self._refreshed_at < REFRESH_SECONDS:
            return
        if self._missing() or any(_is_behind(loaded) for loaded in list(self._loaded.values())):
            self.schedule_refresh()
        self._refreshed_at = time.monotonic()
        self._note_versions()

    def schedule_refresh(self) -> None:
        """By a thread of its own, one at a time and with a pause after each: for a request that must not wait."""
        if self._thread is not None and self._thread.is_alive():
            return
        if time.monotonic() >= self._rests_until:
            self._thread = threading.Thread(target=self._try_refresh, name="peppers", daemon=True)
            self._thread.start()

    def newest_versions(self) -> dict[str, int]:
        """Of each served set the newest version that is loaded, with all before it; 0: none yet. Asks nobody."""
        loaded = {pepper_set: self._loaded.get(pepper_set) for pepper_set in list_served_sets()}
        return {pepper_set.value: 0 if each is None else max(each.versions) for pepper_set, each in loaded.items()}

    def restart(self) -> None:
        """In a forked child, which has no thread but its own: what is loaded stays."""
        self._refreshing, self._thread = threading.Lock(), None

    def _note_versions(self) -> None:
        """For the gauge: a version comes into use by the clock alone."""
        for pepper_set, loaded in list(self._loaded.items()):
            meters.note_pepper(pepper_set, loaded.now().current_version)

    def _is_due(self) -> bool:
        return bool(self._loaded) and time.monotonic() - self._refreshed_at >= REFRESH_SECONDS

    def _missing(self) -> list[PepperSet]:
        return [pepper_set for pepper_set in list_served_sets() if pepper_set not in self._loaded]

    def _try_refresh(self) -> None:
        try:
            for pepper_set in self._missing():
                self(pepper_set)
            self.refresh()
        except Exception:  # noqa: BLE001  whatever it was, the next try may do better
            _log.exception("the peppers could not be refreshed")
        finally:
            self._rests_until = time.monotonic() + PAUSE_SECONDS
            connections.close_all()  # this thread's own


load_peppers = PepperRing()
"""This process's own."""

os.register_at_fork(after_in_child=load_peppers.restart)


def freshen_peppers(pepper_set: PepperSet) -> None:
    """For whoever makes digests, before the transaction: a process that was idle learns which version to use.

    Raises what `load_peppers` raises; a backend that is away is no hindrance to what is loaded already.
    """
    load_peppers(pepper_set)
    load_peppers.refresh_if_due()


def take_pepper(peppers: Peppers, version: int) -> Peppers:
    """These peppers, or the process's newest where that version came after they were taken.

    Raises VerifierStaleError when this process has not loaded it yet, which it then does off the request path: that
    a key is wrong can only be said by who has its pepper.
    """
    if not peppers.lacks(version):
        return peppers
    newest = load_peppers(peppers.pepper_set)
    if newest.lacks(version):
        load_peppers.schedule_refresh()
        raise VerifierStaleError(
            "The key cannot be judged right now. Try again.",
            internal=f"{peppers.pepper_set} pepper {version} is not loaded yet: is the secret backend away?",
        )
    return newest


def ensure_peppers(now: datetime) -> None:
    """Makes version 1 of each served set at the first run; repeatable, and safe when two first runs meet.

    Raises IntegrityError where another installation's peppers are in the place of ours.
    """
    ensure_installation(now)
    for pepper_set in list_served_sets():
        if not PepperVersion.objects.filter(pepper_set=pepper_set).exists():
            _make_first(pepper_set, now)
        load_peppers(pepper_set)


def _make_first(pepper_set: PepperSet, now: datetime) -> None:
    # A conflict: made by a run that died before its row was written, or by one that goes on beside us.
    with suppress(BackendConflictError):
        put_pepper(pepper_set, 1)
    require_own_pepper(pepper_set, 1)
    check_value = Peppers(pepper_set, {1: read_pepper(pepper_set, 1)}).check_value(1)
    grant = authorize(HOST, Permission.OPERATORS_WRITE, now=now)
    with (
        suppress(DatabaseIntegrityError),  # The one beside us was first: its row says the same.
        recorded(grant, Permission.OPERATORS_WRITE, "pepper.created", pepper_set=pepper_set),
    ):
        PepperVersion(pepper_set=pepper_set, number=1, check_value=check_value, created_at=now).save()


def put_pepper(pepper_set: PepperSet, number: int) -> None:
    """A new random one into the backend, as that version. Raises BackendConflictError, having written nothing."""
    made = Plaintext(base64.b64encode(secrets.token_bytes(PEPPER_BYTES)).decode())
    labels = {"pepper_set": pepper_set.value, "number": str(number), LABEL: installation_id()}
    secret_backend().put(Mount.PEPPERS, pepper_set, made, labels, expected_version=number - 1)


def read_pepper(pepper_set: PepperSet, number: int) -> bytes:
    """One version as the backend has it, checked against nothing. Raises IntegrityError where it has none."""
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
            "What the secret backend has is not a pepper.",
            internal=f"{pepper_set} pepper {number} was not written by us: find out who wrote it, and restore it",
        )
    return pepper


def require_own_pepper(pepper_set: PepperSet, number: int) -> None:
    """Raises IntegrityError unless this installation wrote that version, or the backend has none (any more).

    One without a label, of before there were labels, is ours where it is what our row says.
    """
    try:
        labels = secret_backend().read(Mount.PEPPERS, pepper_set, number).labels
    except BackendMissingError:
        return
    row = PepperVersion.objects.filter(pepper_set=pepper_set, number=number).first()
    if LABEL not in labels and row is not None:
        read_checked(row)
    else:
        require_ours(labels, f"{pepper_set} pepper {number}")


def read_checked(row: PepperVersion) -> bytes:
    """The pepper of that row. Raises IntegrityError when it is missing, or not the one that keys are hashed with."""
    pepper_set = PepperSet(row.pepper_set)
    pepper = read_pepper(pepper_set, row.number)
    if Peppers(pepper_set, {row.number: pepper}).check_value(row.number) != bytes(row.check_value):
        raise IntegrityError(
            "A pepper is not the one that the keys were hashed with.",
            internal=f"{pepper_set} pepper {row.number} fails its check: {_whose(pepper)}",
        )
    return pepper


def _whose(pepper: bytes) -> str:
    """What to do about one that is in the wrong place."""
    for row in PepperVersion.objects.all():
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
            # Retired, and destroyed, since the rows were read: then nothing is missing.
            if not PepperVersion.objects.filter(pk=row.pk, retired_at__isnull=False).exists():
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
            # None after it either: whatever is newer than what is loaded is known to be lacking.
            break
    return _arrange(loaded.pepper_set, versions, rows)


def _is_behind(loaded: _Loaded) -> bool:
    """Whether there is a version to take in, one that makes digests by now, or one to let go of."""
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
    return list(PepperVersion.objects.filter(pepper_set=pepper_set).order_by("number"))


def _utc_now() -> datetime:
    return datetime.now(UTC)


def pepper_health() -> Mapping[PepperSet, bool]:
    """Which of the served sets are loaded; loads those that are not yet. Never raises."""
    health = {}
    for pepper_set in list_served_sets():
        try:
            load_peppers(pepper_set)
        except Exception:  # noqa: BLE001  whatever the fault, the answer is "not ready"
            health[pepper_set] = False
        else:
            health[pepper_set] = True
    return health

"""An in-memory secret backend that fails as servers do: unavailable, denying, losing replies, delaying writes."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from keyvault.backends.base import (
    BackendConflictError,
    BackendDeniedError,
    BackendMissingError,
    BackendUnavailableError,
    Health,
    Mount,
    StoredSecret,
    StoredVersion,
    VersionState,
)
from keyvault.domain.plaintext import Plaintext

Place = tuple[Mount, str]
T = TypeVar("T")


class BackendFault(StrEnum):
    """The effect on one call.

    `lost`: executed, and the reply lost. `late`: a write that executes after the next answered call. `stuck`: a write
    that executes when the faults end, possibly long after the rotation.
    """

    UNAVAILABLE = "unavailable"
    LOST = "lost"
    LATE = "late"
    STUCK = "stuck"
    DENIED = "denied"


@dataclass(frozen=True)
class _Version:
    number: int
    secret: Plaintext
    labels: Mapping[str, str]
    state: VersionState = VersionState.LIVE


@dataclass
class MemoryBackend:
    """An in-memory backend with injected faults.

    `faults`: for the next calls, one each. `late`, `stuck`: pending writes. `on_call` is called before each call with
    its name, and after it with `after` and its name; it may raise. `delivered`: ids of keys that a reader could have
    read here.
    """

    versions_at: dict[Place, tuple[_Version, ...]] = field(default_factory=dict)
    is_down: bool = False
    faults: list[BackendFault] = field(default_factory=list)
    late: list[Callable[[], object]] = field(default_factory=list)
    stuck: list[Callable[[], object]] = field(default_factory=list)
    delivered: set[str] = field(default_factory=set)
    arrived_late: set[str] = field(default_factory=set)
    on_call: Callable[[str], None] | None = None
    counts: Counter[str] = field(default_factory=Counter)

    def copied(self) -> "MemoryBackend":
        again = copy(self)
        again.versions_at = dict(self.versions_at)
        again.faults, again.late, again.stuck = list(self.faults), list(self.late), list(self.stuck)
        again.delivered, again.arrived_late = set(self.delivered), set(self.arrived_late)
        return again

    def restore_from(self, other: "MemoryBackend") -> None:
        """Take over the other backend's state in place."""
        self.__dict__.update(other.copied().__dict__)

    def clear_faults(self) -> None:
        self.is_down = False
        self.faults.clear()
        self.late += self.stuck
        self.stuck.clear()
        self._arrive()

    def newest(self, mount: Mount, path: str) -> _Version | None:
        """Return the version that the merchant reads now, if it is live."""
        versions = self.versions_at.get((mount, path), ())
        return versions[-1] if versions else None

    def state_of(self, mount: Mount, path: str, number: int | None) -> VersionState | None:
        """Return the state of one version; None: it does not exist."""
        found = (each.state for each in self.versions_at.get((mount, path), ()) if each.number == number)
        return next(found, None)

    # --- the contract -------------------------------------------------------------------------------------------

    def put(
        self, mount: Mount, path: str, secret: Plaintext, labels: Mapping[str, str], *, expected_version: int
    ) -> int:
        def write() -> int:
            versions = self.versions_at.get((mount, path), ())
            if (versions[-1].number if versions else 0) != expected_version:
                raise BackendConflictError("Another writer was faster.")
            self.versions_at[mount, path] = (*versions, _Version(expected_version + 1, secret, dict(labels)))
            self.delivered.add(labels.get("key_id", ""))
            return expected_version + 1

        def write_late() -> None:
            with suppress(BackendConflictError):
                write()
                self.arrived_late.add(labels.get("key_id", ""))

        return self._called("put", mount, write, write_late)

    def read(self, mount: Mount, path: str, version: int | None = None) -> StoredSecret:
        def find() -> StoredSecret:
            versions = self.versions_at.get((mount, path), ())
            found = [each for each in versions if version in {None, each.number}][-1:]
            if not found or found[0].state is not VersionState.LIVE:
                raise BackendMissingError("Nothing readable there.")
            return StoredSecret(found[0].number, found[0].secret, found[0].labels)

        return self._called("read", mount, find)

    def soft_delete(self, mount: Mount, path: str, version: int) -> None:
        self._called("soft_delete", mount, lambda: self._mark(mount, path, version, VersionState.DELETED))

    def undelete(self, mount: Mount, path: str, version: int) -> None:
        def restore() -> None:
            self._mark(mount, path, version, VersionState.LIVE)
            if self.state_of(mount, path, version) is not VersionState.LIVE:
                raise BackendMissingError("The version was destroyed.")

        self._called("undelete", mount, restore)

    def destroy(self, mount: Mount, path: str, version: int) -> None:
        self._called("destroy", mount, lambda: self._mark(mount, path, version, VersionState.DESTROYED))

    def versions(self, mount: Mount, path: str) -> Sequence[StoredVersion]:
        return self._called(
            "versions",
            mount,
            lambda: [StoredVersion(each.number, each.state) for each in self.versions_at.get((mount, path), ())],
        )

    def forget(self, mount: Mount, path: str) -> None:
        self._called("forget", mount, lambda: self.versions_at.pop((mount, path), None))

    def list_paths(self, mount: Mount) -> Iterator[str]:
        yield from self._called("list", mount, lambda: [path for place, path in self.versions_at if place is mount])

    def health(self) -> Health:
        return Health(ready=not self.is_down, detail="down" if self.is_down else "ready")

    # --- injected faults ----------------------------------------------------------------------------------------

    def _called(self, name: str, mount: Mount, act: Callable[[], T], late: Callable[[], None] | None = None) -> T:
        if mount is Mount.PEPPERS:
            return act()
        self.counts[name] += 1
        if self.on_call is not None:
            self.on_call(name)
        if self.is_down:
            raise BackendUnavailableError("The backend is sealed.")
        fault = self.faults.pop(0) if self.faults else None
        if fault in {BackendFault.LATE, BackendFault.STUCK} and late is not None:
            (self.late if fault is BackendFault.LATE else self.stuck).append(late)
            raise BackendUnavailableError("No answer.", may_be_applied=True)
        if fault is BackendFault.DENIED:
            raise BackendDeniedError("The backend denies access.")
        if fault in {BackendFault.UNAVAILABLE, BackendFault.LATE, BackendFault.STUCK}:
            raise BackendUnavailableError("No answer.")
        answer = act()
        if late is None:
            self._arrive()
        if self.on_call is not None:
            self.on_call(f"after {name}")
        if fault is BackendFault.LOST:
            raise BackendUnavailableError("The reply was lost.", may_be_applied=late is not None)
        return answer

    def _arrive(self) -> None:
        """A delayed write executes after the next answered call, so a read-back does not find it."""
        late, self.late = self.late, []
        for write in late:
            write()

    def _mark(self, mount: Mount, path: str, number: int, state: VersionState) -> None:
        self.versions_at[mount, path] = tuple(
            replace(each, state=state) if each.number == number and each.state is not VersionState.DESTROYED else each
            for each in self.versions_at.get((mount, path), ())
        )

"""The invariants of a rotation, checked after every step against rows, audit log and backend."""

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from keyvault.backends.base import Mount, VersionState
from keyvault.domain.environments import Environment
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyState
from keyvault.domain.sources import network_of
from keyvault.models import AuditEntry, Key, Material, WorkLease
from keyvault.models.usage import UseOutcome
from keyvault.services.usage.recorder import observe
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import AtDeadline
from rotation.domain.states import CLOSED, TRANSITIONS
from rotation.models import LedgerEntry, LedgerState, Rotation
from rotation.services.rotations.facts import list_waived
from rotation.services.rotations.reports import subject_of

if TYPE_CHECKING:
    from tests.rotation.machine.world import MachineWorld

S, K = RotationState, KeyState
LIVING = frozenset(KeyState) - DEAD_STATES
ALTERING = frozenset({"put", "destroy", "soft_delete", "undelete"})
STATE_AFTER = {
    "key.activated": K.ACTIVE,
    "key.resumed": K.ACTIVE,
    "key.suspended": K.SUSPENDED,
    "key.burned": K.DEACTIVATED,
    "key.revoked": K.DEACTIVATED,
    "key.expired": K.DEACTIVATED,
    "key.compromised": K.COMPROMISED,
}


IN_BACKEND = {
    Material.HELD: VersionState.LIVE,
    Material.DELETED: VersionState.DELETED,
    Material.DESTROYED: VersionState.DESTROYED,
}
"""The backend state of a copy by its row's state; any other combination is temporary."""


class ViolationError(BaseException):
    """A violated invariant; the text begins with its number."""


@dataclass(frozen=True)
class KeyRow:
    state: KeyState
    expires_at: datetime | None


@dataclass(frozen=True)
class RotationRow:
    state: RotationState
    stalled_from: str | None
    version: int
    key_ids: list[str]
    quarantined_at: datetime | None


class Watcher:
    """Knows the state at the last check and what has changed since."""

    def __init__(self, world: "MachineWorld") -> None:
        self.world = world
        self.keys: dict[str, KeyRow] = {}
        self.rotations: dict[str, RotationRow] = {}
        self.in_engine = False
        self.last_entry = 0
        self.dead: set[str] = set()
        self.counts: Counter[str] = Counter()

    def take_over(self, other: "Watcher") -> None:
        self.keys, self.rotations = dict(other.keys), dict(other.rotations)
        self.last_entry, self.dead = other.last_entry, set(other.dead)

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            raise ViolationError(what)

    # --- queries ------------------------------------------------------------------------------------------------

    def is_living(self, state: str) -> bool:
        return state in LIVING

    def state_of(self, key_id: str) -> KeyState:
        return self.keys[key_id].state

    def is_good(self, key_id: str) -> bool:
        return _is_good(self.keys.get(key_id), self.world.now)

    def is_suspended_by_people(self, which: int) -> bool:
        row = self.rotations[self.world.rotation_ids[-1]]
        if which >= len(row.key_ids) or self.keys[row.key_ids[which]].state is not K.SUSPENDED:
            return False
        retiring = 1 if row.state is S.ROLLING_BACK else 0
        return not (row.quarantined_at is not None and which == retiring)

    # --- checking -----------------------------------------------------------------------------------------------

    def check(self, by: str) -> None:
        """Check everything. `by`: who acted since the last check, `engine` or `people`."""
        world = self.world
        keys = {
            key_id: KeyRow(K(state), expires_at)
            for key_id, state, expires_at in Key.objects.filter(credential_id=world.credential_id).values_list(
                "key_id", "state", "expires_at"
            )
        }
        rotations = {
            row[0]: RotationRow(S(row[1]), row[2], row[3], [key_id for key_id in row[4:6] if key_id], row[6])
            for row in Rotation.objects.filter(credential_id=world.credential_id)
            .order_by("created_at", "pk")
            .values_list("pk", "state", "stalled_from", "version", "predecessor_id", "replacement_id", "quarantined_at")
        }
        entries = self._new_entries()
        self._check_keys(keys)
        if by == "engine":
            self._check_engine(keys, entries)
        self._check_recorded(keys, rotations, entries)
        self._check_moves(rotations, entries)
        self.keys, self.rotations = keys, rotations

    def _new_entries(self) -> list[tuple[str, dict[str, Any]]]:
        found = AuditEntry.objects.filter(pk__gt=self.last_entry).order_by("pk").values_list("pk", "event", "body")
        entries = []
        for pk, event, body in found:
            self.last_entry = pk
            entries.append((event, json.loads(bytes(body))["details"]))
            self.counts[event] += 1
        return entries

    # --- invariants ---------------------------------------------------------------------------------------------

    def _check_keys(self, keys: dict[str, KeyRow]) -> None:
        now = self.world.now
        self.require(sum(_is_good(key, now) for key in keys.values()) <= 2, "1: more than two keys verify")
        for key_id, row in keys.items():
            before = self.keys.get(key_id)
            self.require(before is None or before.expires_at == row.expires_at, "6: an expiry has changed")
            if row.state in DEAD_STATES:
                self.dead.add(key_id)
            self.require(key_id not in self.dead or row.state in DEAD_STATES, "6: a dead key lives again")
        self.require(self.keys.keys() <= keys.keys(), "a key is gone")

    def _check_engine(self, keys: dict[str, KeyRow], entries: list[tuple[str, dict[str, Any]]]) -> None:
        """Check the engine's own changes since the last check, at the current time."""
        delivered = self.world.backend.delivered
        self._check_each_transaction(keys, entries)
        for event, details in entries:
            if event == "key.burned":
                key_id = details["key_id"]
                held = key_id in delivered and key_id not in self.world.backend.arrived_late
                self.require(not held, "6: a discarded key was readable by the merchant")
            if event == "rotation.quarantine":
                self._check_silence(details)
            if event == "rotation.revoking":
                self._check_untried(details)

    def _check_each_transaction(self, keys: dict[str, KeyRow], entries: list[tuple[str, dict[str, Any]]]) -> None:
        """1: holds even between two transactions of one step. Each transaction's entries begin with a rotation's."""
        now, delivered = self.world.now, self.world.backend.delivered
        rows = {key_id: row for key_id, row in self.keys.items() if key_id in delivered}
        has_had_key = any(_is_good(row, now) for row in rows.values())
        for event, details in [*entries, ("rotation.", {})]:
            if event.startswith("rotation."):
                has_one = any(_is_good(row, now) for row in rows.values())
                self.require(has_one or not has_had_key, "1: the engine left the merchant without a key")
                has_had_key = has_one
            key_id = details.get("key_id")
            if event in STATE_AFTER and key_id in delivered:
                rows[key_id] = KeyRow(STATE_AFTER[event], keys[key_id].expires_at)
        fits = all(keys[key_id].state is row.state for key_id, row in rows.items())
        self.require(fits, "7: the entries name other states than the rows")

    def _check_recorded(
        self,
        keys: dict[str, KeyRow],
        rotations: dict[str, RotationRow],
        entries: list[tuple[str, dict[str, Any]]],
    ) -> None:
        named = {details.get("key_id") for event, details in entries if event.startswith("key.")}
        for key_id, row in keys.items():
            before = self.keys.get(key_id)
            changed = before is None or before.state is not row.state
            self.require(not changed or key_id in named, f"7: a key became {row.state} without an audit entry")
        recorded_ids = {details.get("rotation_id") for event, details in entries if event.startswith("rotation.")}
        for rotation_id, rotation in rotations.items():
            known = self.rotations.get(rotation_id)
            changed = known is None or known.version != rotation.version
            self.require(
                not changed or rotation_id in recorded_ids, f"7: a rotation became {rotation.state} unrecorded"
            )
            self.require(known is None or known.version <= rotation.version, "2: a version went back")
            is_reopened = known is not None and known.state in CLOSED and known.state is not rotation.state
            self.require(not is_reopened, "2: a closed rotation was opened")
        is_open = [rotation for rotation in rotations.values() if rotation.state not in CLOSED]
        self.require(len(is_open) <= 1, "2: two rotations of one credential are open")

    def _check_moves(self, rotations: dict[str, RotationRow], entries: list[tuple[str, dict[str, Any]]]) -> None:
        """Check that the states in the audit log follow the machine's transitions."""
        at = {rotation_id: row.state for rotation_id, row in self.rotations.items()}
        for event, details in entries:
            noun, _, verb = event.partition(".")
            if noun != "rotation" or verb not in S._value2member_map_:
                continue
            to, rotation_id = S(verb), details["rotation_id"]
            was = str(details.get("was"))
            if was in S._value2member_map_:
                self.require(to in TRANSITIONS[S(was)], f"2: {was} to {to} is not permitted")
            at[rotation_id] = to
            self.counts[f"state {to}"] += 1
            if details.get("happened"):
                self.counts[f"event {details['happened']}"] += 1
        asked = {
            "rotation.requested",
            "rotation.approved",
            "rotation.bypassed",
            "rotation.resumed",
            "rotation.extended",
        }
        moved_by_people = {details.get("rotation_id") for event, details in entries if event in asked}
        for rotation_id, row in rotations.items():
            fits = at.get(rotation_id) is row.state or rotation_id in moved_by_people
            self.require(fits, f"7: a rotation is {row.state}, and by the audit log {at.get(rotation_id)}")

    # --- evidence against the truth -----------------------------------------------------------------------------

    def _check_silence(self, details: dict[str, Any]) -> None:
        """4: the predecessor was suspended after silence, or on an approved date."""
        rotation = Rotation.objects.get(pk=details["rotation_id"])
        plan = rotation.approved_plan
        self.require(rotation.used_at is not None, "4: quarantine without proof")
        if self.world.variant.kind is KeyKind.PUBLIC:
            self.require(rotation.retire_at is not None, "4: a public key retired without a date")
            return
        if details.get("happened") == "deadline":
            self.require(plan.at_deadline is AtDeadline.REVOKE, "4: a deadline took a key away")
            return
        period = timedelta(seconds=plan.quiet_seconds)
        has_all_moved = self._check_sources(rotation)
        self._check_quiet(
            rotation.predecessor_id,
            {UseOutcome.ALLOWED},
            period,
            began_at=rotation.used_at,
            waived=self._waived(rotation),
            ignores_losses=has_all_moved,
        )

    def _check_sources(self, rotation: Rotation) -> bool:
        """4: each network was seen on the replacement or, in production, silent for two of its gaps.

        Return whether all have moved or are waived; then a lost verifier does not matter.
        """
        through = observe(LATEST, "acme", self.world.variant.environment).through
        waived = self._waived(rotation)
        used: dict[str, dict[str, list[datetime]]] = {rotation.predecessor_id: {}, rotation.replacement_id or "": {}}
        for use in self.world.uses:
            if use.key_id in used and use.outcome is UseOutcome.ALLOWED and use.is_reported:
                used[use.key_id].setdefault(network_of(use.source), []).append(use.at)
        old, new = used.values()
        moved = {
            network: network in waived or max(times) <= max(new.get(network, [EARLIEST]))
            for network, times in old.items()
        }
        for network in [network for network, has_moved in moved.items() if not has_moved]:
            minutes = sorted({at.replace(second=0, microsecond=0) for at in old[network]})
            gaps = [after - before for before, after in pairwise(minutes)]
            if self.world.variant.environment is Environment.PRODUCTION:
                has_habit = minutes[-1] - minutes[0] > timedelta(days=1)
                self.require(has_habit, "4: a source that was seen only once neither moved nor was waived")
                is_silent = through is not None and max(old[network]) + 2 * max(gaps) <= through
                self.require(is_silent, "4: a source was not silent for two of its gaps")
        return bool(moved) and all(moved.values())

    def _waived(self, rotation: Rotation) -> set[str]:
        """The networks of the sources of the predecessor that operators have waived."""
        return {name.split()[0] for name in list_waived(rotation, rotation.predecessor)}

    def _check_untried(self, details: dict[str, Any]) -> None:
        rotation = Rotation.objects.get(pk=details["rotation_id"])
        since = self.rotations[rotation.rotation_id].quarantined_at
        self.require(since is not None, "4: revoked without a quarantine")
        assert since is not None
        self.require(rotation.evidence.exists(), "4: revoked without evidence")
        if rotation.waived_at is not None or self.world.variant.kind is KeyKind.PUBLIC:
            return
        period = timedelta(seconds=rotation.approved_plan.quarantine_seconds)
        known = {
            use.source
            for use in self.world.uses
            if use.outcome is UseOutcome.ALLOWED and use.at < since and use.is_reported
            if network_of(use.source) not in self._waived(rotation)
        }
        self._check_quiet(rotation.predecessor_id, {UseOutcome.REFUSED}, period, began_at=since, sources=known)

    def _check_quiet(
        self,
        key_id: str,
        outcomes: set[UseOutcome],
        period: timedelta,
        *,
        began_at: datetime,
        sources: set[str] | None = None,
        waived: Collection[str] = (),
        ignores_losses: bool = False,
    ) -> None:
        """Every reported use and the start are a whole period older than the observation.

        `sources`: of attempts; only those since the start count.
        """
        seen = observe(LATEST, "acme", self.world.variant.environment)
        self.require(seen.through is not None, "4: silence without an observation")
        assert seen.through is not None
        self.require(began_at + period <= seen.through, "4: not a whole period was observed")
        resumed = [self.world.resumed[name] for name in ("merchant", key_id) if name in self.world.resumed]
        is_served = not self.world.is_suspended and all(at + period <= seen.through for at in resumed)
        self.require(is_served, "4: the silence of a suspended merchant or key was counted")
        is_past = ignores_losses or seen.lost_at is None or seen.lost_at + period <= seen.through
        self.require(is_past, "4: a lost verifier was passed over")
        for use in self.world.uses:
            is_reported = use.is_reported and network_of(use.source) not in waived
            counts = use.key_id == key_id and use.outcome in outcomes and is_reported
            if counts and (sources is None or (use.source in sources and use.at >= began_at)):
                self.require(use.at + period <= seen.through, f"4: used at {use.at}, observed to {seen.through}")

    # --- the backend --------------------------------------------------------------------------------------------

    def on_backend_call(self, name: str) -> None:
        """3: a ledger row exists before anything changes the backend."""
        if self.in_engine and name in ALTERING:
            started = LedgerEntry.objects.filter(
                rotation_id=self.world.rotation_ids[-1], state=LedgerState.STARTED
            ).exists()
            self.require(started, f"3: {name} without a ledger row before it")

    # --- after a turn and at the end ----------------------------------------------------------------------------

    def require_predecessor_reinstated(self) -> None:
        """After a whole turn no predecessor stays in quarantine beside a replacement that is not good.

        This holds whatever the backend does, but not while a dead worker holds the lease or a failure's pause lasts.
        """
        row = self.rotations[self.world.rotation_ids[-1]]
        lease = WorkLease.objects.filter(subject=subject_of(self.world.rotation_ids[-1])).first()
        if row.state in CLOSED or row.state is S.ROLLING_BACK or lease is None or lease.token:
            return
        if lease.last_error and lease.due_at is not None and lease.due_at > self.world.now:
            return
        is_kept = row.quarantined_at is not None and self.state_of(row.key_ids[0]) is K.SUSPENDED
        self.require(
            not is_kept or self.is_good(row.key_ids[1]), "1: the predecessor is kept, with no good replacement"
        )

    def require_nothing_hangs(self) -> None:
        """After the faults have ended, the rotation is closed or names what it waits for, without an error."""
        world = self.world
        if not world.is_open:
            self._check_what_is_read()
            return
        lease = WorkLease.objects.get(subject=subject_of(world.rotation_ids[-1]))
        self.require(not lease.token and not lease.last_error, f"eventually: {world.state}: {lease.last_error}")
        waits = world.last_wait
        self.require(waits is not None and bool(waits.waiting_for), "eventually: it does not say what it waits for")
        self._check_restored()

    def require_copies_as_the_rows_say(self) -> None:
        """After maintenance each key's copy is readable, hidden or destroyed as its row says."""
        mount, path = Mount(self.world.variant.environment.value), self.world.credential().backend_path
        for key in Key.objects.filter(credential_id=self.world.credential_id).exclude(material=Material.NONE):
            state = self.world.backend.state_of(mount, path, key.backend_version)
            self.require(state is IN_BACKEND.get(Material(key.material)), f"8: {key.material}, and its copy is {state}")
            self.counts[f"copy {key.material}, key {key.state}"] += 1
            hidden = key.material == Material.DELETED
            self.require(not hidden or key.state == K.SUSPENDED, f"8: the copy of a key that is {key.state} is hidden")

        named = set(Key.objects.filter(credential_id=self.world.credential_id).values_list("key_id", "backend_version"))
        for each in self.world.backend.versions_at.get((mount, path), ()):
            is_named = (each.labels.get("key_id"), each.number) in named
            is_gone = each.state is VersionState.DESTROYED
            self.require(is_named or is_gone, f"8: no row names version {each.number}, which is {each.state}")

    def _check_restored(self) -> None:
        """A replacement that ended reinstates the suspended predecessor."""
        row = self.rotations[self.world.rotation_ids[-1]]
        if row.state is S.QUARANTINE:
            self.require(self.is_good(row.key_ids[1]), "1: in quarantine with no good replacement")

    def _check_what_is_read(self) -> None:
        """A closed rotation leaves a good key, not a dead one and not nothing, where the merchant reads, if there is
        one.
        """
        mount = Mount(self.world.variant.environment.value)
        newest = self.world.backend.newest(mount, self.world.credential().backend_path)
        if newest is None:
            return
        key_id = newest.labels.get("key_id")
        good = [key_id for key_id in self.keys if self.is_good(key_id)]
        is_read = newest.state is VersionState.LIVE and key_id in good
        self.require(
            is_read or not good, "eventually: the merchant reads a key that is not good, and there is a good one"
        )


EARLIEST, LATEST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def _is_good(row: KeyRow | None, now: datetime) -> bool:
    return row is not None and row.state is K.ACTIVE and (row.expires_at is None or now < row.expires_at)

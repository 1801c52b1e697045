"""Maintenance windows of rotations: weekly hours in a time zone, less the periods of a blackout calendar. PURE.

Hours are local time, daylight saving time included: an hour that a clock change skips does not open, and one that it
repeats opens twice.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import Fault, RequestInvalidError
from keyvault.domain.free_text import find_text_fault
from keyvault.domain.timestamps import format_timestamp

LOOK_AHEAD = timedelta(days=2 * 366)
"""Maximum time ahead in which an opening is searched; a window without one counts as never open."""

MAX_BLACKOUTS = 400
_DAY = timedelta(days=1)
_DAY_MINUTES = 24 * 60
_CLOCK = re.compile(r"([0-9]{2}):([0-9]{2})", re.ASCII)
_HOST_ZONES = frozenset({"localtime", "posixrules"})
"""Zone files whose meaning depends on the host."""


@dataclass(frozen=True, slots=True)
class Blackout:
    """A period in which no rotation begins: `begins_at` (inclusive) to `ends_at` (exclusive), aware UTC."""

    begins_at: datetime
    ends_at: datetime
    why: str = ""

    def as_json(self) -> dict[str, JsonValue]:
        return {
            "begins_at": format_timestamp(self.begins_at),
            "ends_at": format_timestamp(self.ends_at),
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class Window:
    """Weekly hours in which a rotation may begin, never in a blackout.

    `weekdays`: 0 is Monday; empty: always open. `opens`, `closes`: minutes of the local day; `closes` less than
    `opens` means the next day. `time_zone`: an IANA name.
    """

    time_zone: str = "UTC"
    weekdays: tuple[int, ...] = ()
    opens: int = 0
    closes: int = _DAY_MINUTES
    blackouts: tuple[Blackout, ...] = ()

    def next_opening(self, after: datetime) -> datetime | None:
        """Return `after` while the window is open, else its next opening, in UTC; None: not within `LOOK_AHEAD`."""
        zone = ZoneInfo(self.time_zone)
        at = after.astimezone(UTC)
        last = at + LOOK_AHEAD
        while at <= last:
            ends_at = max((each.ends_at for each in self.blackouts if each.begins_at <= at < each.ends_at), default=at)
            if ends_at > at:
                at = ends_at.astimezone(UTC)
            elif self._is_open(_wall(at, zone)):
                return at
            else:
                at = self._step(at, zone)
        return None

    def as_json(self) -> dict[str, JsonValue]:
        return {
            "time_zone": self.time_zone,
            "weekdays": list(self.weekdays),
            "opens": clock_text(self.opens),
            "closes": clock_text(self.closes),
            "blackouts": [each.as_json() for each in self.blackouts],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> "Window":
        """Read what `as_json` writes; all but the zone is optional. Raises RequestInvalidError."""
        faults: list[Fault] = []
        if not isinstance(values, Mapping):
            raise RequestInvalidError("The window is not a JSON object.", [Fault("", "an object")])
        faults += [Fault(f"/{name}", "not a field of a window") for name in values if name not in cls.__slots__]
        weekdays = values.get("weekdays", [])
        if not isinstance(weekdays, list | tuple) or not all(type(day) is int for day in weekdays):
            faults.append(Fault("/weekdays", "a list of numbers, 0 is Monday"))
            weekdays = []
        zone = values.get("time_zone")
        if not isinstance(zone, str):
            faults.append(Fault("/time_zone", "the name of an IANA time zone, such as Europe/Berlin"))
        minutes = {"opens": 0, "closes": _DAY_MINUTES}
        for name in minutes:
            if name in values:
                read = read_clock(values[name])
                if read is None:
                    faults.append(Fault(f"/{name}", "a time of day, 00:00 to 24:00"))
                else:
                    minutes[name] = read
        blackouts = _read_blackouts(values.get("blackouts", []), "/blackouts", faults)
        window = cls(str(zone), tuple(weekdays), minutes["opens"], minutes["closes"], blackouts)
        faults = faults or list(_shape_faults(window))
        if faults:
            raise RequestInvalidError("The window is invalid.", faults)
        return window

    def _is_open(self, wall: datetime) -> bool:
        if not self.weekdays:
            return True
        minute = wall.hour * 60 + wall.minute
        if self.opens < self.closes:
            return wall.weekday() in self.weekdays and self.opens <= minute < self.closes
        since_yesterday = (wall.weekday() - 1) % 7 in self.weekdays and minute < self.closes
        return since_yesterday or (wall.weekday() in self.weekdays and self.opens <= minute)

    def _step(self, at: datetime, zone: ZoneInfo) -> datetime:
        """Return a time after `at` and not after the next opening, at most a day ahead; the window is closed at `at`.

        The zone's offset changes at most once in a day. Such a change ends the step, since it may skip into an open
        hour or back into one.
        """
        wall = _wall(at, zone)
        midnight = wall.replace(hour=0, minute=0, second=0, microsecond=0)
        days = (midnight + _DAY * ahead for ahead in range(8))
        openings = (day + timedelta(minutes=self.opens) for day in days if day.weekday() in self.weekdays)
        opens = next((opening for opening in openings if opening > wall), wall + _DAY)
        then = at + min(opens - wall, _DAY)
        offset = at.astimezone(zone).utcoffset()
        if then.astimezone(zone).utcoffset() == offset:
            return then
        before, changed = at, then.replace(microsecond=0) + timedelta(seconds=then.microsecond > 0)
        while changed - before > timedelta(seconds=1):
            middle = (before + (changed - before) / 2).replace(microsecond=0)
            if middle.astimezone(zone).utcoffset() == offset:
                before = middle
            else:
                changed = middle
        return changed


def coming_blackouts(window: Window | None, now: datetime) -> Window | None:
    """Return the window with those of its blackouts that are not over and that an opening's search can reach."""
    if window is None:
        return None
    coming = tuple(each for each in window.blackouts if each.ends_at > now and each.begins_at < now + LOOK_AHEAD)
    return replace(window, blackouts=coming) if coming or window.weekdays else None


def read_blackouts(values: object, pointer: str = "") -> tuple[Blackout, ...]:
    """Read periods from JSON, sorted. Each is {"begins_at", "ends_at", "why"} with times in ISO 8601 with an offset.

    Raises RequestInvalidError.
    """
    faults: list[Fault] = []
    blackouts = _read_blackouts(values, pointer, faults)
    if faults:
        raise RequestInvalidError("The blackout periods are invalid.", faults)
    return tuple(sorted(blackouts, key=lambda each: (each.begins_at, each.ends_at)))


def read_clock(value: object) -> int | None:
    """Read `HH:MM`, 00:00 to 24:00, as minutes of a day; None for anything else."""
    match = _CLOCK.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[2]) > 59:
        return None
    minutes = int(match[1]) * 60 + int(match[2])
    return minutes if minutes <= _DAY_MINUTES else None


def clock_text(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"


def _wall(at: datetime, zone: ZoneInfo) -> datetime:
    return at.astimezone(zone).replace(tzinfo=None)


def _shape_faults(window: Window) -> Iterator[Fault]:
    if not _is_zone(window.time_zone):
        yield Fault("/time_zone", "the name of an IANA time zone, such as Europe/Berlin")
    if not set(window.weekdays) <= set(range(7)) or len(set(window.weekdays)) < len(window.weekdays):
        yield Fault("/weekdays", "each of 0 (Monday) to 6 (Sunday) once at most")
    if not 0 <= window.opens < _DAY_MINUTES:
        yield Fault("/opens", "a time of day, 00:00 to 23:59")
    if not 0 < window.closes <= _DAY_MINUTES:
        yield Fault("/closes", "a time of day, 00:01 to 24:00")
    if window.opens == window.closes:
        yield Fault("/closes", "a time other than opens; the whole day is 00:00 to 24:00")
    if not window.weekdays and (window.opens, window.closes) != (0, _DAY_MINUTES):
        yield Fault("/weekdays", "the weekdays on which these hours apply")


def _is_zone(name: str) -> bool:
    if name in _HOST_ZONES:
        return False
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        return False
    return True


def _read_blackouts(values: object, pointer: str, faults: list[Fault]) -> tuple[Blackout, ...]:
    if not isinstance(values, list | tuple):
        faults.append(Fault(pointer, "a list of periods"))
        return ()
    if len(values) > MAX_BLACKOUTS:
        faults.append(Fault(pointer, f"at most {MAX_BLACKOUTS}"))
        return ()
    read = [_read_blackout(value, f"{pointer}/{place}", faults) for place, value in enumerate(values)]
    return tuple(each for each in read if each is not None)


def _read_blackout(value: object, pointer: str, faults: list[Fault]) -> Blackout | None:
    if not isinstance(value, Mapping) or not {"begins_at", "ends_at"} <= value.keys() <= {
        "begins_at",
        "ends_at",
        "why",
    }:
        faults.append(Fault(pointer, "an object with begins_at, ends_at and optionally why"))
        return None
    begins_at, ends_at = (_read_time(value[name]) for name in ("begins_at", "ends_at"))
    why = value.get("why", "")
    if begins_at is None:
        faults.append(Fault(f"{pointer}/begins_at", "a time in ISO 8601 with an offset"))
    if ends_at is None:
        faults.append(Fault(f"{pointer}/ends_at", "a time in ISO 8601 with an offset"))
    fault = "a text" if not isinstance(why, str) else find_text_fault(why, 100) if why else None
    if fault is not None:
        faults.append(Fault(f"{pointer}/why", fault))
        return None
    if begins_at is None or ends_at is None:
        return None
    if ends_at <= begins_at:
        faults.append(Fault(f"{pointer}/ends_at", "later than begins_at"))
        return None
    return Blackout(begins_at, ends_at, str(why))


def _read_time(value: object) -> datetime | None:
    """Read a time as aware UTC; None for anything else, also for one outside the range of datetime."""
    try:
        read = datetime.fromisoformat(value) if isinstance(value, str) else None
        return None if read is None or read.tzinfo is None else read.astimezone(UTC)
    except (ValueError, OverflowError):
        return None

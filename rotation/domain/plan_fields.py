"""The table of a plan's fields: type, bounds, default, label and help. PURE.

`PlanOverrides` is the table: each of its fields carries a `PlanField`. The plan, the services and all entry points
derive from it, so that they have the same bounds and the same refusals.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from keyvault.domain.canonical import JsonValue
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault
from keyvault.domain.issuance import MAX_EXPIRES_IN_DAYS
from keyvault.domain.keys import KeyKind
from keyvault.domain.timestamps import format_timestamp
from rotation.domain.windows import Window


class Proof(StrEnum):
    """The proof that the replacement is in use. `confirmation`: an operator confirms it for the merchant."""

    ACK = "ack"
    TRAFFIC = "traffic"
    BOTH = "both"
    CONFIRMATION = "confirmation"


class AtDeadline(StrEnum):
    """The action at the deadline while the predecessor is in use. An unproved rotation always stalls."""

    STALL = "stall"
    REVOKE = "revoke"


class Reinstatement(StrEnum):
    """The number of times that an attempt by a known source reinstates the quarantined predecessor."""

    ONCE = "once"
    NEVER = "never"


class DeliveryChannel(StrEnum):
    """Where the replacement is written, or announced, before it counts as delivered."""

    SECRET_BACKEND = "secret_backend"  # noqa: S105  a name
    WEBHOOK = "webhook"


class FieldType(StrEnum):
    """Type of a plan's field. Numbers are whole; the value of NAMES or CHANNELS is a tuple."""

    TEXT = "text"
    COUNT = "count"
    SECONDS = "seconds"
    DAYS = "days"
    FLAG = "flag"
    CHOICE = "choice"
    CHANNELS = "channels"
    NAMES = "names"
    INSTANT = "instant"
    WINDOW = "window"


class PlanSection(StrEnum):
    """Group of fields on a form."""

    PROOF = "Proof"
    RETIRING = "Retiring the old key"
    TIMING = "Timing"
    WINDOW = "Window"
    REPLACEMENT = "Replacement"


class Condition(StrEnum):
    """A condition under which a field has an effect. The value is the text of a page where the condition is not met."""

    OLD_KEY = "no effect: the old key has ended"
    PRIVATE_KEY = "no effect for a public key"
    TRAFFIC = "not required for this proof"


NUMBERS = frozenset({FieldType.COUNT, FieldType.SECONDS, FieldType.DAYS})
LONGEST_SECONDS = 366 * 86_400
"""Maximum period of a plan, in seconds."""

FARTHEST = timedelta(days=2 * 366)
"""Maximum distance of a plan's times from now."""

_SANDBOX, _PRODUCTION = Environment.SANDBOX, Environment.PRODUCTION


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanField:
    """One row of the table.

    Args:
        label: the name on forms and pages.
        help: what the value means, as one sentence.
        unit: the unit of a number, or of what a text or a list of names is measured in.
        least: the minimum in each environment, in `unit`. `most`: the maximum.
        defaults: the value of an omitted number, or for the deadline its distance from the start, in seconds.
        omitted: what an omitted value means; `{}` is replaced by the defaults.
        production_rule: the rule by which production computes another default.
        absent: how a page shows a value of None.
        choices: the accepted values, each with its text.
        flag_label, flag_help: the name and the meaning of a single option, where a form or a command has one for the
            only optional channel.
        section: the group on a form; None: on top of the form.
        is_shared: offered for schedules and campaigns, whose plans cover several credentials.
        needs: the conditions without which the field has no effect.
    """

    name: str = ""
    type: FieldType
    label: str
    help: str = ""
    unit: str = ""
    least: Mapping[Environment, int] = field(default_factory=lambda: dict.fromkeys(Environment, 0))
    most: int = 0
    defaults: Mapping[Environment, int] = field(default_factory=dict)
    omitted: str = "{}"
    production_rule: str = ""
    absent: str = "none"
    choices: Mapping[StrEnum, str] = field(default_factory=dict)
    flag_label: str = ""
    flag_help: str = ""
    section: PlanSection | None = None
    is_shared: bool = False
    needs: frozenset[Condition] = frozenset()

    def describe(self) -> str:
        """Return what the value means, what is accepted, and the default."""
        accepted = f" Accepted: {self.describe_bounds()}." if self.type in NUMBERS else ""
        default = "" if self.type is FieldType.TEXT else f" Default: {self.describe_omitted()}."
        return f"{self.help}{accepted}{default}"

    def describe_bounds(self, environment: Environment | None = None, show: Callable[[int], str] | None = None) -> str:
        """Return the accepted numbers, of both environments if they differ and none is named.

        `show` formats a number with its unit; without it, both bounds share the unit of the field.
        """
        if environment is None and len(set(self.least.values())) > 1:
            return "; ".join(f"{self.describe_bounds(each, show)} in {each}" for each in Environment)
        least = self.least[environment or _SANDBOX]
        return f"{least} to {self.most} {self.unit}" if show is None else f"{show(least)} to {show(self.most)}"

    def describe_omitted(
        self, show: Callable[[int], str] | None = None, environments: Iterable[Environment] = tuple(Environment)
    ) -> str:
        """Return what an omitted value means. `show` formats a default; without it, periods are in seconds."""
        show = show or self._show_default
        among = list(environments)
        shown = []
        for each in among:
            rule = self.production_rule if each is _PRODUCTION else ""
            where = f" in {each}" if len(among) > 1 else ""
            shown.append(f"{show(self.defaults[each])}{where}{rule}" if self.defaults else "")
        return self.omitted.format("; ".join(shown))

    def _show_default(self, number: int) -> str:
        return str(number) if self.type is FieldType.COUNT else f"{number} seconds"

    def find_fault(
        self, value: Any, environment: Environment, now: datetime, show: Callable[[int], str] | None = None
    ) -> str | None:
        """Return what is wrong with the value, and what is accepted; None: nothing is.

        `show` formats a number with its unit; without it, a period is in seconds.
        """
        if value is None:
            return None
        if self.type in NUMBERS and not self.least[environment] <= value <= self.most:
            where = f" in {environment}" if len(set(self.least.values())) > 1 else ""
            given = (show or _quote)(value)
            return f"{given} is out of range. Use {self.describe_bounds(environment, show)}{where}."
        if self.type is FieldType.TEXT and len(value) > self.most:
            return f"The text has {len(value)} {self.unit}. Use at most {self.most}."
        if self.type is FieldType.NAMES and (len(value) > self.most or len(set(value)) < len(value)):
            return f"{len(value)} {self.unit} are given. Use at most {self.most}, each once."
        if self.type is FieldType.INSTANT:
            return find_far_fault(value, now)
        if self.type is FieldType.CHANNELS and DeliveryChannel.SECRET_BACKEND not in value:
            return "secret_backend is missing. Add it: the merchant reads the replacement there."
        return None

    def read_json(self, value: Any) -> Any:
        """Read what `to_json` wrote. An unknown value raises the error of the field's type."""
        if self.type is FieldType.CHOICE:
            return self.read_choice(value)
        if self.type is FieldType.CHANNELS:
            return tuple(map(self.read_choice, value))
        if self.type is FieldType.NAMES:
            return tuple(map(str, value))
        if self.type is FieldType.INSTANT:
            return None if value is None else datetime.fromisoformat(str(value))
        if self.type is FieldType.WINDOW:
            return None if value is None else Window.from_json(value)
        return value

    def read_choice(self, value: Any) -> StrEnum:
        """Return the member of `choices`. Raises ValueError for another value."""
        for member in self.choices:
            if member == value:
                return member
        raise ValueError(f"{value!r} is none of {', '.join(self.choices)}")


def _quote(number: int) -> str:
    text = str(number)
    return text if len(text) <= 20 else f"A number of {len(text)} digits"


def find_far_fault(at: datetime, now: datetime) -> str | None:
    """Return why nothing can be computed from a time that is too far away; None: it is near enough."""
    if now - FARTHEST <= at <= now + FARTHEST:
        return None
    return f"{format_timestamp(at)} is too far away. Use a time in the next {FARTHEST.days} days."


def _plan(type_: FieldType, **columns: Any) -> dict[str, PlanField]:
    """Return a row of the table as the metadata of a dataclass field, whose name and default belong to it."""
    return {"plan": PlanField(type=type_, **columns)}


def _each(sandbox: int, production: int) -> dict[Environment, int]:
    return {_SANDBOX: sandbox, _PRODUCTION: production}


_OLD = frozenset({Condition.OLD_KEY})
_OLD_PRIVATE = _OLD | {Condition.PRIVATE_KEY}
_BY_TRAFFIC = _OLD | {Condition.TRAFFIC}


@dataclass(frozen=True, slots=True)
class PlanOverrides:
    """The requested values of a plan; None takes the environment's default."""

    reason: str = field(
        default="",
        metadata=_plan(
            FieldType.TEXT,
            label="Reason",
            help="Part of the plan; the approver sees it.",
            unit="characters",
            most=300,
        ),
    )
    not_before: datetime | None = field(
        default=None,
        metadata=_plan(
            FieldType.INSTANT,
            label="Not before",
            help="The rotation does not start earlier.",
            omitted="immediately",
            section=PlanSection.TIMING,
        ),
    )
    window: Window | None = field(
        default=None,
        metadata=_plan(
            FieldType.WINDOW,
            label="Window",
            help="Hours of the week in which the rotation may start.",
            omitted="at any time",
            absent="at any time",
            section=PlanSection.WINDOW,
            needs=_OLD,
        ),
    )
    deadline: datetime | None = field(
        default=None,
        metadata=_plan(
            FieldType.INSTANT,
            label="Deadline",
            help="When an unfinished rotation stalls.",
            defaults=_each(7 * 86_400, 45 * 86_400),
            omitted="{}, counted from the start, or when the old key expires; none for a public key",
            section=PlanSection.TIMING,
            needs=_OLD,
        ),
    )
    at_deadline: AtDeadline = field(
        default=AtDeadline.STALL,
        metadata=_plan(
            FieldType.CHOICE,
            label="When the deadline passes",
            help="What happens if the old key is still in use.",
            omitted="stall",
            choices={
                AtDeadline.STALL: "stall: both keys stay, and an operator is paged",
                AtDeadline.REVOKE: "revoke: the old key is quarantined and revoked, if the replacement is proved",
            },
            section=PlanSection.TIMING,
            needs=_OLD_PRIVATE,
        ),
    )
    proof: Proof | None = field(
        default=None,
        metadata=_plan(
            FieldType.CHOICE,
            label="Proof",
            help="How use of the replacement is proved. An unused credential always accepts an acknowledgement or a "
            "confirmation too.",
            omitted="traffic, or an operator's confirmation for a public key",
            choices={
                Proof.TRAFFIC: "traffic: real authentications with the replacement",
                Proof.ACK: "acknowledgement: the merchant presents the replacement to credentials/acknowledge",
                Proof.BOTH: "both: traffic and the acknowledgement",
                Proof.CONFIRMATION: "confirmation: an operator confirms it for the merchant",
            },
            section=PlanSection.PROOF,
            is_shared=True,
            needs=_OLD,
        ),
    )
    proof_count: int | None = field(
        default=None,
        metadata=_plan(
            FieldType.COUNT,
            label="Authentications",
            help="Authentications with the replacement that prove its use.",
            unit="authentications",
            least=_each(1, 1),
            most=1_000_000,
            defaults=_each(5, 100),
            section=PlanSection.PROOF,
            is_shared=True,
            needs=_BY_TRAFFIC,
        ),
    )
    proof_sources: int | None = field(
        default=None,
        metadata=_plan(
            FieldType.COUNT,
            label="Sources",
            help="Distinct sources of these authentications. A source is a client's network (/24, /64), else a calling "
            "token, with the product that its user agent names.",
            unit="sources",
            least=_each(1, 1),
            most=10_000,
            defaults=_each(1, 2),
            section=PlanSection.PROOF,
            is_shared=True,
            needs=_BY_TRAFFIC,
        ),
    )
    soak_seconds: int | None = field(
        default=None,
        metadata=_plan(
            FieldType.SECONDS,
            label="Soak time",
            help="Minimum age of the first authentication that counts. The authentications must lie in as many "
            "distinct minutes, up to 10.",
            unit="seconds",
            most=LONGEST_SECONDS,
            defaults=_each(0, 600),
            section=PlanSection.PROOF,
            is_shared=True,
            needs=_BY_TRAFFIC,
        ),
    )
    quiet_seconds: int | None = field(
        default=None,
        metadata=_plan(
            FieldType.SECONDS,
            label="Quiet period",
            help="How long the old key must be unused.",
            unit="seconds",
            least=_each(1, 3_600),
            most=LONGEST_SECONDS,
            defaults=_each(3_600, 7 * 86_400),
            production_rule=", or twice the longest gap of each source, if that is longer",
            section=PlanSection.RETIRING,
            is_shared=True,
            needs=_OLD_PRIVATE,
        ),
    )
    waived_sources: tuple[str, ...] = field(
        default=(),
        metadata=_plan(
            FieldType.NAMES,
            label="Waived sources",
            help="Sources of the old key that the rotation does not wait for; they may be refused.",
            unit="sources",
            most=50,
            omitted="none",
            section=PlanSection.RETIRING,
            needs=_OLD_PRIVATE,
        ),
    )
    quarantine_seconds: int | None = field(
        default=None,
        metadata=_plan(
            FieldType.SECONDS,
            label="Quarantine",
            help="How long the old key is suspended before it is revoked.",
            unit="seconds",
            least=_each(1, 600),
            most=LONGEST_SECONDS,
            defaults=_each(600, 86_400),
            section=PlanSection.RETIRING,
            is_shared=True,
            needs=_OLD,
        ),
    )
    reinstatement: Reinstatement = field(
        default=Reinstatement.ONCE,
        metadata=_plan(
            FieldType.CHOICE,
            label="Old key used in quarantine",
            help="Whether an attempt in quarantine reinstates the old key.",
            omitted="once",
            choices={
                Reinstatement.ONCE: "reinstated once, for a source that used it before",
                Reinstatement.NEVER: "never reinstated: attempts only raise an alarm",
            },
            section=PlanSection.RETIRING,
            needs=_OLD_PRIVATE,
        ),
    )
    retire_at: datetime | None = field(
        default=None,
        metadata=_plan(
            FieldType.INSTANT,
            label="Retired at",
            help="Public keys only: the old key is refused from this time.",
            omitted="the date is set later",
            absent="no date in the plan",
            section=PlanSection.RETIRING,
            needs=_OLD,
        ),
    )
    predecessor_may_expire: bool = field(
        default=False,
        metadata=_plan(
            FieldType.FLAG,
            label="Old key may expire meanwhile",
            help="Whether the old key may expire before the deadline. Otherwise such a deadline is refused.",
            omitted="no",
            section=PlanSection.TIMING,
            needs=_OLD,
        ),
    )
    expires_in_days: int | None = field(
        default=None,
        metadata=_plan(
            FieldType.DAYS,
            label="Replacement lifetime in days",
            help="Lifetime of the replacement.",
            unit="days",
            least=_each(1, 1),
            most=MAX_EXPIRES_IN_DAYS,
            omitted="no expiry",
            absent="no expiry",
            section=PlanSection.REPLACEMENT,
            is_shared=True,
        ),
    )
    channels: tuple[DeliveryChannel, ...] = field(
        default=(DeliveryChannel.SECRET_BACKEND,),
        metadata=_plan(
            FieldType.CHANNELS,
            label="Delivered to",
            help="Where the replacement is written, or announced, before it counts as delivered.",
            omitted="secret_backend",
            choices={
                DeliveryChannel.SECRET_BACKEND: "the secret backend",
                DeliveryChannel.WEBHOOK: "the merchant's webhook endpoint, which must accept the notification",
            },
            flag_label="Require webhook notification",
            flag_help="The replacement counts as delivered only after the merchant's endpoint has accepted the "
            "notification. The key itself is always read from the secret backend.",
            section=PlanSection.REPLACEMENT,
        ),
    )

    def as_json(self) -> dict[str, JsonValue]:
        """Return the values that differ from the defaults, which a schedule or a campaign stores."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: to_json(value) for name, value in values.items() if value != getattr(_NO_OVERRIDE, name)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "PlanOverrides":
        """Read what `as_json` wrote."""
        return cls(**{name: read_json(name, value) for name, value in values.items()})


_NO_OVERRIDE = PlanOverrides()
FIELDS: Mapping[str, PlanField] = {
    each.name: replace(each.metadata["plan"], name=each.name) for each in fields(PlanOverrides)
}
"""The table, by name."""

SHARED_FIELDS = tuple(each for each in FIELDS.values() if each.is_shared)
"""The fields that schedules and campaigns offer. They compute the other values or leave them out."""


def default_of(name: str, environment: Environment) -> int:
    """Return the default of a number; for the deadline its distance from the start, in seconds."""
    return FIELDS[name].defaults[environment]


def default_proof(kind: KeyKind) -> Proof:
    """Return the default proof. Shipped apps hold a public key, so traffic cannot prove its replacement."""
    return Proof.CONFIRMATION if kind is KeyKind.PUBLIC else Proof.TRAFFIC


def with_defaults(overrides: PlanOverrides, environment: Environment) -> dict[str, Any]:
    """Return every value, an omitted number replaced by its default; other values have rules of their own."""
    values = {name: getattr(overrides, name) for name in FIELDS}
    return {
        name: default_of(name, environment)
        if value is None and FIELDS[name].type in NUMBERS and FIELDS[name].defaults
        else value
        for name, value in values.items()
    }


def find_value_faults(
    values: object, environment: Environment, now: datetime, types: Container[FieldType] = frozenset(FieldType)
) -> Iterator[Fault]:
    """Yield a fault for each value of these types out of its bounds. `values`: a plan or its overrides."""
    for name, each in FIELDS.items():
        detail = each.find_fault(getattr(values, name), environment, now) if each.type in types else None
        if detail is not None:
            yield Fault(f"/{name}", detail)


def has_excess(values: object) -> bool:
    """Return whether a number is above its maximum, so that time arithmetic could overflow."""
    numbers = [(each.most, getattr(values, name)) for name, each in FIELDS.items() if each.type in NUMBERS]
    return any(value is not None and value > most for most, value in numbers)


def to_json(value: Any) -> JsonValue:
    """Return a plan's value as JSON."""
    if isinstance(value, datetime):
        return format_timestamp(value)
    if isinstance(value, Window):
        return value.as_json()
    if isinstance(value, tuple):
        return [str(each) for each in value]
    return value.value if isinstance(value, StrEnum) else value


def read_json(name: str, value: Any) -> Any:
    """Read a value that `to_json` wrote. Under an unknown name, which the caller refuses, it is returned unchanged."""
    return FIELDS[name].read_json(value) if name in FIELDS else value

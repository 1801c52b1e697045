"""Form fields and page texts for a plan, from the table in `rotation.domain.plan_fields`."""

import re
from collections.abc import Container, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, ClassVar

from django import forms
from django.utils.html import format_html

from keyvault.admin.framework.actions import ActionForm, ActionGroup, Cleaned, UtcField
from keyvault.admin.framework.widgets import NOTHING, Difference, moment, seconds
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, RequestInvalidError
from keyvault.domain.keys import KeyKind
from rotation.domain.plan_fields import (
    FIELDS,
    NUMBERS,
    SHARED_FIELDS,
    Condition,
    DeliveryChannel,
    FieldType,
    PlanField,
    PlanOverrides,
    PlanSection,
    Proof,
    default_proof,
)
from rotation.domain.windows import Window, clock_text, read_clock

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_MINUTES_PER_DAY = 24 * 60
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_PERIOD = re.compile(r"\s*([0-9]{1,8})\s*([smhd]?)\s*")
_SECONDS = re.compile(r"\b([0-9]+) seconds\b")
_WINDOW_NAMES = ("weekdays", "opens", "closes", "time_zone")


class PeriodField(forms.CharField):
    """Period such as `90`, `30m`, `1h` or `7d`. The cleaned value is in whole seconds, or None if empty."""

    def to_python(self, value: Any) -> Any:
        text = super().to_python(value)
        if not text:
            return None
        match = _PERIOD.fullmatch(text)
        if match is None:
            raise forms.ValidationError("Invalid period. Enter a number with s, m, h or d, such as 30m or 7d.")
        return int(match[1]) * _UNITS[match[2]]


class ClockField(forms.CharField):
    """Time of day as `HH:MM` up to 24:00. The cleaned value is in minutes, or None if empty."""

    def to_python(self, value: Any) -> Any:
        text = super().to_python(value)
        if not text:
            return None
        minutes = read_clock(text)
        if minutes is None:
            raise forms.ValidationError("Invalid time of day. Use HH:MM up to 24:00, such as 22:00.")
        return minutes


class LinesField(forms.CharField):
    """Names, one per line. The cleaned value is a tuple."""

    widget = forms.Textarea(attrs={"rows": 3})

    def clean(self, value: Any) -> Any:
        return tuple(filter(None, map(str.strip, super().clean(value).splitlines())))


# --- form fields --------------------------------------------------------------------------------------------


def form_field(field: PlanField, *, without: Container[Any] = ()) -> forms.Field:
    """Return the form's field. The service checks the bounds. `without`: choices that are not offered."""
    label, help_text = field.label, _help(field)
    if field.type is FieldType.TEXT:
        widget = forms.Textarea(attrs={"rows": 3, "maxlength": field.most})
        return forms.CharField(label=label, help_text=help_text, widget=widget)
    if field.type is FieldType.NAMES:
        return LinesField(required=False, label=label, help_text=f"{field.help} One per line. Empty: {field.omitted}.")
    if field.type is FieldType.SECONDS:
        return PeriodField(required=False, label=label, help_text=help_text)
    if field.type in NUMBERS:
        limits = {"min": min(field.least.values()), "max": field.most}
        number = forms.NumberInput(attrs=limits)
        return forms.IntegerField(required=False, label=label, help_text=help_text, widget=number)
    if field.type is FieldType.INSTANT:
        return UtcField(required=False, label=f"{label} (UTC)", help_text=help_text)
    if field.type is FieldType.FLAG:
        return forms.BooleanField(required=False, label=label, help_text=field.help)
    choices = [(choice.value, text) for choice, text in field.choices.items() if choice not in without]
    if has_fixed_default(field):
        return forms.ChoiceField(label=label, help_text=field.help, choices=choices)
    return forms.ChoiceField(required=False, label=label, help_text=help_text, choices=[("", "default"), *choices])


def has_fixed_default(field: PlanField) -> bool:
    """Whether the default is a fixed value, which the form preselects, and not a rule for an empty field."""
    return getattr(PlanOverrides(), field.name) is not None


def _help(field: PlanField) -> str:
    if has_fixed_default(field):
        return field.help
    example = " Enter a period such as 30m, 2h or 7d." if field.type is FieldType.SECONDS else ""
    if example and field.least[Environment.PRODUCTION] > field.least[Environment.SANDBOX]:
        example = f"{example} In production at least {seconds(field.least[Environment.PRODUCTION])}."
    return f"{field.help}{example} Empty: {field.describe_omitted(_show_number(field))}."


def show_period(count: int) -> str:
    return seconds(count) if count else "0 seconds"


def _show_number(field: PlanField) -> Any:
    return seconds if field.type in {FieldType.SECONDS, FieldType.INSTANT} else str


def window_fields(help_text: str) -> dict[str, forms.Field]:
    """Return the fields of a window. `help_text`: what no weekday means."""
    return {
        "weekdays": forms.TypedMultipleChoiceField(
            required=False,
            coerce=int,
            choices=list(enumerate(WEEKDAYS)),
            widget=forms.CheckboxSelectMultiple,
            help_text=help_text,
        ),
        "opens": ClockField(required=False, label="Opens at", help_text="HH:MM, such as 22:00. Empty: 00:00."),
        "closes": ClockField(
            required=False,
            label="Closes at",
            help_text="A time before the opening time is on the next day. Empty: 24:00.",
        ),
        "time_zone": forms.CharField(
            required=False,
            max_length=64,
            initial="UTC",
            label="Time zone",
            help_text="An IANA name such as Europe/Berlin.",
        ),
    }


def _form_fields(field: PlanField, without: Container[Any]) -> dict[str, forms.Field]:
    """Return the form's fields for one of the plan: several for a window, a box for the webhook."""
    if field.type is FieldType.WINDOW:
        return window_fields("No selection: the rotation may start at any time.")
    if field.type is FieldType.CHANNELS:
        return {"webhook": forms.BooleanField(required=False, label=field.flag_label, help_text=field.flag_help)}
    return {field.name: form_field(field, without=without)}


def _form_names(field: PlanField) -> tuple[str, ...]:
    special = {FieldType.WINDOW: _WINDOW_NAMES, FieldType.CHANNELS: ("webhook",)}
    return special.get(field.type, (field.name,))


SECTION_NOTES = {
    PlanSection.PROOF: "how use of the replacement is proved",
    PlanSection.RETIRING: "quiet period, quarantine, and the date for a public key",
    PlanSection.TIMING: "start and deadline",
    PlanSection.WINDOW: "hours of the week in which the rotation may start",
    PlanSection.REPLACEMENT: "expiry and notification",
}
WINDOW_GROUP = ActionGroup("Window", _WINDOW_NAMES, "hours of the week in which rotations may start")
SHARED_GROUP = ActionGroup("Plan", tuple(field.name for field in SHARED_FIELDS), "changes to the default plan")


def section_groups() -> tuple[ActionGroup, ...]:
    """Return the groups of a form with every field."""
    return tuple(
        ActionGroup(
            section.value,
            tuple(name for field in FIELDS.values() if field.section is section for name in _form_names(field)),
            note,
        )
        for section, note in SECTION_NOTES.items()
    )


class PlanForm(ActionForm):
    """Form with `plan_fields`; an empty field takes its default. `without`: choices that are not offered."""

    plan_fields: ClassVar[tuple[PlanField, ...]] = SHARED_FIELDS
    without: ClassVar[Container[Any]] = frozenset({Proof.CONFIRMATION})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for field in self.plan_fields:
            self.fields.update(_form_fields(field, self.without))

    def show_faults(self, error: RequestInvalidError) -> None:
        """Show a fault beside the form's field for it, with its periods in the units in which they are typed."""
        named = [(self.form_name(fault.pointer), fault.detail) for fault in error.faults]
        faults = [Fault(f"/{name}", self._in_units(name, detail)) for name, detail in named]
        super().show_faults(RequestInvalidError(error.detail, faults))

    def _in_units(self, name: str, detail: str) -> str:
        """Return the fault of the form's field with periods such as `5 minutes`; the service has numbers of seconds."""
        field, value, now = FIELDS.get(name), self.cleaned_data.get(name), datetime.now(UTC)
        if field is not None and field.type is FieldType.SECONDS:
            for environment in Environment:
                if field.find_fault(value, environment, now) == detail:
                    return str(field.find_fault(value, environment, now, show_period))
        return _SECONDS.sub(lambda found: show_period(int(found[1])), detail)

    def form_name(self, pointer: str) -> str:
        """Return the name of the form's field for a fault of the service."""
        name = pointer.strip("/")
        return _form_names(FIELDS[name])[0] if name in FIELDS else name


def overrides_in(cleaned: Cleaned, fields: Iterable[PlanField], previous: PlanOverrides | None = None) -> PlanOverrides:
    """Return the chosen values, the others from `previous`. Raises RequestInvalidError for an invalid window."""
    values = {field.name: _read(cleaned, field) for field in fields}
    return replace(previous or PlanOverrides(), **values)


def _read(cleaned: Cleaned, field: PlanField) -> Any:
    if field.type is FieldType.WINDOW:
        return window_in(cleaned)
    if field.type is FieldType.CHANNELS:
        return (DeliveryChannel.SECRET_BACKEND, *([DeliveryChannel.WEBHOOK] if cleaned["webhook"] else []))
    value = cleaned[field.name]
    if field.type is FieldType.CHOICE:
        return field.read_choice(value) if value else None
    return value


def window_in(cleaned: Cleaned) -> Window | None:
    """Return the window; None: no weekday and no time. Raises RequestInvalidError for an invalid one."""
    weekdays, opens, closes = cleaned["weekdays"], cleaned["opens"], cleaned["closes"]
    if not weekdays and opens is None and closes is None:
        return None
    opens, closes = 0 if opens is None else opens, _MINUTES_PER_DAY if closes is None else closes
    window = Window(cleaned["time_zone"] or "UTC", tuple(weekdays), opens, closes)
    return Window.from_json(window.as_json())


# --- page texts ---------------------------------------------------------------------------------------------


def show_value(field: PlanField, value: Any) -> Any:
    """Format the value of a plan for a page."""
    if field.type is FieldType.INSTANT:
        return moment(value, missing=field.absent)
    if value is None:
        return field.absent
    if field.type is FieldType.SECONDS:
        return seconds(value)
    if field.type is FieldType.FLAG:
        return "yes" if value else "no"
    if field.type is FieldType.CHOICE:
        return field.choices[value]
    if field.type is FieldType.CHANNELS:
        return "; ".join(field.choices[channel] for channel in value)
    if field.type is FieldType.WINDOW:
        return format_window(value)
    if field.type is FieldType.NAMES:
        return "; ".join(value) or field.omitted
    return value or NOTHING


def show_override(field: PlanField, value: Any, environment: Environment) -> Any:
    """Format a chosen value, or what it means that none was chosen."""
    if value is not None:
        return show_value(field, value)
    return f"default: {field.describe_omitted(_show_number(field), [environment])}"


def show_default(field: PlanField, environment: Environment) -> Any:
    """Format the default of a field in this environment."""
    if has_fixed_default(field):
        return show_value(field, getattr(PlanOverrides(), field.name))
    return field.describe_omitted(_show_number(field), [environment])


def chosen_changes(overrides: PlanOverrides, environment: Environment) -> Iterable[Difference]:
    """Yield the values of future plans that are not the default."""
    for name, field in FIELDS.items():
        value = getattr(overrides, name)
        if value is not None and field.type is not FieldType.TEXT and value != getattr(PlanOverrides(), name):
            yield Difference(field.label, show_default(field, environment), show_value(field, value), is_unusual=True)


def show_plan_field(field: PlanField, value: Any, unmet: Container[Condition]) -> Any:
    """Format the value of a plan, with the reason if it has no effect. `unmet`: conditions that do not hold."""
    reason = next((condition for condition in Condition if condition in unmet and condition in field.needs), None)
    shown = show_value(field, value)
    return shown if reason is None else format_html("{} · {}", shown, reason.value)


def is_deviation(field: PlanField, value: Any, environment: Environment, kind: KeyKind) -> bool:
    """Whether the plan has another value than the default, where the default is one value for such a key."""
    if field.type in NUMBERS and environment in field.defaults:
        return bool(value != field.defaults[environment])
    if field.name == "proof":
        return value is not default_proof(kind)
    if field.type is FieldType.TEXT or not has_fixed_default(field):
        return False
    return bool(value != getattr(PlanOverrides(), field.name))


def format_window(window: Window) -> str:
    days = ", ".join(WEEKDAYS[day] for day in sorted(window.weekdays)) or "every day"
    hours = f"{clock_text(window.opens)} to {clock_text(window.closes)}"
    blackouts = f"; {len(window.blackouts)} blackouts" if window.blackouts else ""
    return f"{days}, {hours} ({window.time_zone}){blackouts}"

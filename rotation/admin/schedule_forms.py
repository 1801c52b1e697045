"""Forms of schedules and blackout calendars, and the conversion of their values."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from django import forms

from keyvault.admin.framework.accounts import environment_field, merchant_field
from keyvault.admin.framework.actions import ActionForm, Cleaned, RowLookup, VersionedForm
from keyvault.admin.framework.choices import ComboboxInput
from keyvault.domain.environments import Environment
from keyvault.domain.errors import RequestInvalidError
from keyvault.models import Credential
from rotation.admin.plan_fields import SHARED_GROUP, WINDOW_GROUP, PlanForm, overrides_in, window_fields, window_in
from rotation.domain.plan_fields import FIELDS, SHARED_FIELDS, PlanOverrides, to_json
from rotation.domain.windows import clock_text
from rotation.models import BlackoutCalendar, RotationSchedule
from rotation.services.schedules.schedules import ScheduleDraft, ScheduleScope, find_draft, find_scope, partial_draft


class TermsForm(PlanForm):
    """Form with the terms of a schedule; an empty field takes its default."""

    groups = (
        WINDOW_GROUP,
        replace(SHARED_GROUP, names=(*SHARED_GROUP.names, "reason")),
    )

    cryptoperiod_days = forms.IntegerField(
        min_value=1, max_value=3_650, label="Cryptoperiod in days", help_text="Maximum time that a key is in use."
    )
    jitter_days = forms.IntegerField(
        min_value=0,
        max_value=3_650,
        initial=0,
        label="Jitter in days",
        help_text="Each key is replaced up to this many days earlier, which spreads the rotations.",
    )
    lead_days = forms.IntegerField(
        min_value=0,
        max_value=3_650,
        initial=0,
        label="Lead time in days",
        help_text="Time for a second person to approve. An undecided request expires after 7 days.",
    )
    calendar = forms.ModelChoiceField(
        BlackoutCalendar.objects.all(),
        required=False,
        widget=ComboboxInput("calendars"),
        label="Blackout calendar",
        help_text="By name. No rotation starts in its periods. Empty: no calendar.",
    )
    reason = forms.CharField(
        required=False, max_length=FIELDS["reason"].most, help_text="Reason of the plans. Empty: the cryptoperiod."
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fields.update(window_fields("No selection: rotations may start at any time."))

    def form_name(self, pointer: str) -> str:
        name = pointer.removeprefix("/overrides").strip("/")
        return _FORM_NAMES.get(name, name)


_FORM_NAMES = {"account": "merchant", "window": "weekdays", "deadline": "quiet_seconds"}
"""Form field for a service field of another name."""


class ScheduleForm(TermsForm):
    field_order = ("environment", "merchant", "credential")

    environment = environment_field()
    merchant = merchant_field(
        "Merchant id. Empty: every merchant of the environment without its own schedule.", required=False
    )
    credential = RowLookup(
        Credential.objects.all(),
        account="account",
        unknown="not the id of a credential",
        required=False,
        widget=ComboboxInput("credentials"),
        label="Credential id",
        help_text="Schedule for this credential only; it overrides all others.",
    )


class EditForm(VersionedForm, TermsForm):
    @classmethod
    def initial_for(cls, row: RotationSchedule) -> dict[str, Any]:
        saved = find_draft(row) or partial_draft(row)
        window, overrides = saved.window, saved.overrides
        hours = {} if window is None else {name: clock_text(getattr(window, name)) for name in ("opens", "closes")}
        chosen = {field.name: to_json(getattr(overrides, field.name)) for field in SHARED_FIELDS}
        return {
            "version": row.version,
            "cryptoperiod_days": saved.cryptoperiod_days,
            "jitter_days": saved.jitter_days,
            "lead_days": saved.lead_days,
            "calendar": row.calendar_id,
            "weekdays": [] if window is None else list(window.weekdays),
            "time_zone": "UTC" if window is None else window.time_zone,
            "reason": overrides.reason,
            **hours,
            **chosen,
        }


class PeriodsForm(ActionForm):
    periods = forms.CharField(
        required=False,
        strip=False,
        max_length=60_000,
        widget=forms.Textarea(attrs={"rows": 12}),
        help_text="One per line: begin, end and reason, such as 2026-12-20 2027-01-07 Christmas. A date means midnight "
        "UTC; 2026-12-20T18:00+01:00 is exact. The end is exclusive.",
    )

    def show_faults(self, error: RequestInvalidError) -> None:
        """Add each fault with its one-based line number."""
        for fault in error.faults:
            name, _, place = fault.pointer.strip("/").partition("/")
            line, _, _ = place.partition("/")
            self.add_error(
                name if name in self.fields else None,
                f"Period {int(line) + 1}: {fault.detail}" if line.isdecimal() else fault.detail,
            )


class CalendarForm(PeriodsForm):
    field_order = ("name",)

    name = forms.CharField(max_length=64, help_text="a-z, 0-9 and inner hyphens. The name cannot be changed later.")


class EditCalendarForm(VersionedForm, PeriodsForm):
    @classmethod
    def initial_for(cls, row: BlackoutCalendar) -> dict[str, Any]:
        lines = (f"{each['begins_at']} {each['ends_at']} {each['why']}".rstrip() for each in row.periods)
        return {"version": row.version, "periods": "\n".join(lines)}


# --- conversion ------------------------------------------------------------------------------------------------


def scope_from(cleaned: Cleaned) -> ScheduleScope:
    """Build the scope from the form.

    Raises:
        NotFoundError: the account does not exist.
        RequestInvalidError: the credential is not the account's.
    """
    credential = cleaned["credential"]
    credential_id = None if credential is None else credential.pk
    return find_scope(Environment(cleaned["environment"]), cleaned["merchant"], credential_id)


def terms_from(cleaned: Cleaned, previous: PlanOverrides | None = None) -> ScheduleDraft:
    """Build the terms of a schedule from the form. Raises RequestInvalidError for an invalid window."""
    overrides = replace(overrides_in(cleaned, SHARED_FIELDS, previous), reason=cleaned["reason"])
    numbers = (cleaned["cryptoperiod_days"], cleaned["jitter_days"], cleaned["lead_days"])
    return ScheduleDraft(*numbers, window_in(cleaned), cleaned["calendar"], overrides)


def periods_from(text: str) -> list[dict[str, str]]:
    """Split each line into begin, end and reason; `windows.read_blackouts` validates them."""
    lines = [line.split(None, 2) for line in text.splitlines() if line.strip()]
    names = ("begins_at", "ends_at", "why")
    return [{name: _with_utc(part) for name, part in zip(names, parts, strict=False)} for parts in lines]


def _with_utc(text: str) -> str:
    """Add the UTC offset to a time without one; return other text unchanged."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return text
    return at.replace(tzinfo=at.tzinfo or UTC).isoformat()

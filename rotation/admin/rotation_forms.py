"""Forms to request a rotation and to act on one."""

from datetime import UTC
from typing import Any

from django import forms

from keyvault.admin.framework.actions import ActionForm, ActionGroup, Cleaned, ReasonForm, RowChoice, VersionedForm
from keyvault.admin.framework.four_eyes import ApproveForm
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, RequestInvalidError
from keyvault.domain.keys import KeyState
from keyvault.models import Credential
from rotation.admin.plan_fields import PeriodField, by_default
from rotation.domain.policy import DEFAULTS, LONGEST_SECONDS, AtDeadline, DeliveryChannel, Plan, Proof, Reinstatement
from rotation.domain.windows import Window, read_clock
from rotation.models import Rotation
from rotation.services.rotations.planning import PlanOverrides

PROOFS = {
    Proof.TRAFFIC: "traffic: real authentications with the replacement",
    Proof.ACK: "acknowledgement: the merchant presents the replacement to credentials/acknowledge",
    Proof.BOTH: "both: traffic and the acknowledgement",
    Proof.CONFIRMATION: "confirmation: an operator confirms it for the merchant",
}
AT_DEADLINE = {
    AtDeadline.STALL: "stall: both keys stay, and an operator is paged",
    AtDeadline.REVOKE: "revoke: the old key is quarantined and revoked, if the replacement is proven",
}
REINSTATEMENT = {
    Reinstatement.ONCE: "reinstated once, for a source that used it before",
    Reinstatement.NEVER: "never reinstated: attempts only raise an alarm",
}
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_MINUTES_PER_DAY = 24 * 60
_DEFAULT = [("", "default")]


class UtcField(forms.DateTimeField):
    """Time in UTC, in the format of a `datetime-local` input."""

    def __init__(self, **options: Any) -> None:
        widget = forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M")
        super().__init__(widget=widget, **options)

    def to_python(self, value: Any) -> Any:
        at = super().to_python(value)
        try:
            return None if at is None else at.astimezone(UTC)
        except OverflowError as error:
            raise forms.ValidationError("The time is out of range.") from error


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


def weekdays_field(help_text: str) -> forms.TypedMultipleChoiceField:
    return forms.TypedMultipleChoiceField(
        required=False,
        coerce=int,
        choices=list(enumerate(WEEKDAYS)),
        widget=forms.CheckboxSelectMultiple,
        help_text=help_text,
    )


def opens_field() -> ClockField:
    return ClockField(required=False, label="Opens at", help_text="HH:MM, such as 22:00. Empty: 00:00.")


def closes_field() -> ClockField:
    return ClockField(
        required=False, label="Closes at", help_text="A time before the opening time is on the next day. Empty: 24:00."
    )


def time_zone_field() -> forms.CharField:
    return forms.CharField(
        required=False,
        max_length=64,
        initial="UTC",
        label="Time zone",
        help_text="An IANA name such as Europe/Berlin.",
    )


def _credential_label(credential: Credential) -> str:
    return f"{credential.account} · {credential.label} · {credential.kind} ({credential.credential_id})"


def _default_numbers(name: str) -> str:
    return "; ".join(f"{getattr(DEFAULTS[env], name)} in {env}" for env in Environment)


class RotationForm(ActionForm):
    """Form with every field of a plan; an empty field takes the default of the environment."""

    groups = (
        ActionGroup(
            "Proof",
            ("proof", "proof_count", "proof_sources", "soak_seconds"),
            "how use of the replacement is proven",
        ),
        ActionGroup(
            "Retiring the old key",
            ("quiet_seconds", "quarantine_seconds", "reinstatement", "retire_at"),
            "quiet period, quarantine, and the date for a public key",
        ),
        ActionGroup(
            "Timing", ("not_before", "deadline", "at_deadline", "predecessor_may_expire"), "start and deadline"
        ),
        ActionGroup(
            "Window", ("weekdays", "opens", "closes", "time_zone"), "hours of the week in which the rotation may start"
        ),
        ActionGroup("Replacement", ("expires_in_days", "webhook"), "expiry and notification"),
    )

    credential_id = RowChoice(
        Credential.objects.select_related("account__merchant")
        .filter(keys__state=KeyState.ACTIVE)
        .distinct()
        .order_by("account__merchant_id", "account__environment", "label"),
        label_for=_credential_label,
        label="Credential",
    )
    reason = forms.CharField(
        max_length=300,
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text="Part of the plan; the approver sees it. All further fields are optional.",
    )
    proof = forms.ChoiceField(
        required=False,
        choices=_DEFAULT + [(proof.value, label) for proof, label in PROOFS.items()],
        help_text="Default: traffic, or an operator's confirmation for a public key. An unused credential always "
        "accepts an acknowledgement or a confirmation too.",
    )
    proof_count = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=LONGEST_SECONDS,
        label="Authentications",
        help_text=f"Authentications required as proof by traffic. Empty: {_default_numbers('proof_count')}.",
    )
    proof_sources = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=LONGEST_SECONDS,
        label="Sources",
        help_text=f"A source is a client address, else a calling token. Empty: {_default_numbers('proof_sources')}.",
    )
    soak_seconds = PeriodField(
        required=False,
        label="Soak time",
        help_text=f"Minimum age of the first authentication, such as 30s or 10m. Empty: {by_default('soak_seconds')}.",
    )
    quiet_seconds = PeriodField(
        required=False,
        label="Quiet period",
        help_text=f"How long the old key must be unused, such as 30m or 7d. Empty: {by_default('quiet_seconds')} "
        "or, if longer, twice the longest gap observed.",
    )
    quarantine_seconds = PeriodField(
        required=False,
        label="Quarantine",
        help_text=f"How long the old key is suspended before it is revoked. Empty: {by_default('quarantine_seconds')}.",
    )
    reinstatement = forms.ChoiceField(
        choices=[(choice.value, label) for choice, label in REINSTATEMENT.items()],
        label="Old key used in quarantine",
    )
    retire_at = UtcField(
        required=False,
        label="Retired at (UTC)",
        help_text="Public keys only. Empty: the date is set later.",
    )
    not_before = UtcField(required=False, label="Not before (UTC)", help_text="Empty: immediately.")
    deadline = UtcField(
        required=False,
        label="Deadline (UTC)",
        help_text=f"Empty: {by_default('deadline_seconds')} after the start, or when the old key expires; none for a "
        "public key.",
    )
    at_deadline = forms.ChoiceField(
        choices=[(choice.value, label) for choice, label in AT_DEADLINE.items()],
        label="When the deadline passes",
    )
    predecessor_may_expire = forms.BooleanField(
        required=False,
        label="Allow the old key to expire meanwhile",
        help_text="Otherwise a deadline after its expiry is refused.",
    )
    weekdays = weekdays_field("No selection: the rotation may start at any time.")
    opens, closes, time_zone = opens_field(), closes_field(), time_zone_field()
    expires_in_days = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=3650,
        label="Replacement lifetime in days",
        help_text="Empty: the replacement does not expire.",
    )
    webhook = forms.BooleanField(
        required=False,
        label="Require webhook notification",
        help_text="The replacement counts as delivered only after the merchant's endpoint has accepted the "
        "notification. The key itself is always read from the secret backend.",
    )

    def show_faults(self, error: RequestInvalidError) -> None:
        super().show_faults(RequestInvalidError(error.detail, [_by_field(fault) for fault in error.faults]))


_FIELDS = {"/channels": "/webhook", "/window": "/weekdays"}
"""Form field for a plan field of another name."""


def _by_field(fault: Fault) -> Fault:
    return Fault(_FIELDS.get(fault.pointer, fault.pointer), fault.detail)


def overrides_from(cleaned: Cleaned) -> PlanOverrides:
    """Build the plan overrides from the form. Raises RequestInvalidError for an invalid window."""
    channels = (DeliveryChannel.SECRET_BACKEND, *([DeliveryChannel.WEBHOOK] if cleaned["webhook"] else []))
    unchanged = (
        *("reason", "not_before", "deadline", "proof_count", "proof_sources", "soak_seconds", "quiet_seconds"),
        *("quarantine_seconds", "expires_in_days", "predecessor_may_expire", "retire_at"),
    )
    return PlanOverrides(
        proof=Proof(cleaned["proof"]) if cleaned["proof"] else None,
        at_deadline=AtDeadline(cleaned["at_deadline"]),
        reinstatement=Reinstatement(cleaned["reinstatement"]),
        channels=channels,
        window=_window(cleaned),
        **{name: cleaned[name] for name in unchanged},
    )


def _window(cleaned: Cleaned) -> Window | None:
    weekdays, opens, closes = cleaned["weekdays"], cleaned["opens"], cleaned["closes"]
    if not weekdays and opens is None and closes is None:
        return None
    window = Window(
        cleaned["time_zone"] or "UTC",
        tuple(weekdays),
        0 if opens is None else opens,
        _MINUTES_PER_DAY if closes is None else closes,
    )
    return Window.from_json(window.as_json())


# --- forms of actions ---------------------------------------------------------------------------------------


class ApprovePlanForm(ApproveForm):
    @classmethod
    def plan_of(cls, row: Rotation) -> Plan:
        return row.approved_plan


class BypassForm(ApprovePlanForm):
    reason = forms.CharField(
        label="Why it cannot wait",
        max_length=300,
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text="Recorded in the audit log and shown to the reviewer.",
    )


class ExtendForm(VersionedForm):
    deadline = UtcField(label="New deadline (UTC)", help_text="Later than now and than the current deadline.")

    @classmethod
    def initial_for(cls, row: Rotation) -> dict[str, Any]:
        return {"version": row.version, "deadline": row.deadline_at}


class ConfirmForm(ReasonForm):
    why = forms.CharField(
        label="Who confirmed it, and how",
        max_length=300,
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text="Recorded as evidence with your name.",
    )


class RetireForm(VersionedForm):
    retire_at = UtcField(label="Retired at (UTC)", help_text="The old key is refused from this time.")

    @classmethod
    def initial_for(cls, row: Rotation) -> dict[str, Any]:
        return {"version": row.version, "retire_at": row.retire_at}

"""Form fields for plans, shared by the forms of rotations, schedules and campaigns."""

import re
from typing import Any

from django import forms

from keyvault.admin.framework.widgets import seconds
from keyvault.domain.environments import Environment
from rotation.domain.policy import DEFAULTS, LONGEST_SECONDS, Proof

PRIVATE_PROOFS = {
    Proof.TRAFFIC: "traffic: real authentications with the replacement",
    Proof.ACK: "acknowledgement: the merchant presents the replacement to credentials/acknowledge",
    Proof.BOTH: "both",
}
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_PERIOD = re.compile(r"\s*([0-9]{1,8})\s*([smhd]?)\s*")


class PeriodField(forms.CharField):
    """Period such as `90`, `30m`, `1h` or `7d`. The cleaned value is in whole seconds, or None if empty."""

    def to_python(self, value: Any) -> Any:
        text = super().to_python(value)
        if not text:
            return None
        match = _PERIOD.fullmatch(text)
        if match is None or int(match[1]) * _UNITS[match[2]] > LONGEST_SECONDS:
            raise forms.ValidationError(
                "Invalid period. Enter a number with s, m, h or d, such as 30m or 7d; at most one year."
            )
        return int(match[1]) * _UNITS[match[2]]


def by_default(name: str) -> str:
    """Format the default of a plan field for each environment."""
    return "; ".join(f"{seconds(getattr(DEFAULTS[env], name))} in {env}" for env in Environment)


def quiet_field() -> PeriodField:
    """Return the quiet period field for plans that cover several credentials."""
    return PeriodField(
        required=False,
        label="Quiet period",
        help_text=(
            f"How long each old key must be unused, such as 30m, 1h or 7d. Empty: {by_default('quiet_seconds')}, "
            "or twice the longest gap observed."
        ),
    )


def quarantine_field() -> PeriodField:
    return PeriodField(
        required=False,
        label="Quarantine",
        help_text=f"How long the old key is suspended before it is revoked. Empty: {by_default('quarantine_seconds')}.",
    )

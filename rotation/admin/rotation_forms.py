"""Forms to request a rotation and to act on one."""

from typing import Any

from django import forms

from keyvault.admin.framework.actions import Cleaned, ReasonForm, RowLookup, UtcField, VersionedForm, reason_field
from keyvault.admin.framework.choices import ComboboxInput
from keyvault.admin.framework.four_eyes import ApproveForm
from keyvault.domain.keys import KeyState
from keyvault.domain.sources import MAX_NAME_LENGTH
from keyvault.models import Credential
from rotation.admin.plan_fields import PlanForm, form_field, overrides_in, section_groups
from rotation.domain.plan_fields import FIELDS, PlanOverrides
from rotation.domain.policy import Plan
from rotation.models import Rotation


class RotationForm(PlanForm):
    """Form with every field of a plan; an empty field takes the default of the environment."""

    groups = section_groups()
    plan_fields = tuple(field for field in FIELDS.values() if field.section is not None)
    without = ()

    credential_id = RowLookup(
        Credential.objects.select_related("account__merchant").filter(keys__state=KeyState.ACTIVE).distinct(),
        account="account",
        widget=ComboboxInput("credentials"),
        label="Credential",
        help_text="Type the beginning of a label, the id of a merchant or of a credential. It must have an active key.",
        unknown="No credential with an active key has this id.",
    )
    reason = form_field(FIELDS["reason"])


def overrides_from(cleaned: Cleaned) -> PlanOverrides:
    """Build the plan overrides from the form. Raises RequestInvalidError for an invalid window."""
    return overrides_in(cleaned, FIELDS.values())


# --- forms of actions ---------------------------------------------------------------------------------------


class ApprovePlanForm(ApproveForm):
    @classmethod
    def plan_of(cls, row: Rotation) -> Plan:
        return row.approved_plan


class BypassForm(ApprovePlanForm):
    reason = reason_field("Why it cannot wait", help_text="Recorded in the audit log and shown to the reviewer.")


class ExtendForm(VersionedForm):
    deadline = UtcField(label="New deadline (UTC)", help_text="Later than now and than the current deadline.")

    @classmethod
    def initial_for(cls, row: Rotation) -> dict[str, Any]:
        return {"version": row.version, "deadline": row.deadline_at}


class ConfirmForm(ReasonForm):
    why = reason_field("Who confirmed it, and how", help_text="Recorded as evidence with your name.")


class WaiveForm(ReasonForm):
    source = forms.CharField(
        label="Source",
        max_length=MAX_NAME_LENGTH,
        help_text="By its name in the list of sources that the rotation waits for.",
    )
    why = reason_field("Why it may be refused", help_text="Recorded as evidence with your name.")


class RetireForm(VersionedForm):
    retire_at = UtcField(label="Retired at (UTC)", help_text="The old key is refused from this time.")

    @classmethod
    def initial_for(cls, row: Rotation) -> dict[str, Any]:
        return {"version": row.version, "retire_at": row.retire_at}

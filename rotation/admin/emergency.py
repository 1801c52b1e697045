"""Compromised keys in the console: revoke them and request a replacement on the same page.

Keyvault's own pages only revoke a key; this module adds the actions that also request a rotation.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.db.models import Exists

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.actions import (
    ActionForm,
    ActionResult,
    Cleaned,
    RowAction,
    Tone,
    reason_field,
)
from keyvault.admin.keys.keys import REPORT_EXPLANATION, is_last, warn_if_last_key
from keyvault.admin.keys.receipts import receipt_url
from keyvault.admin.site import ConsoleSite
from keyvault.domain.errors import Fault, RequestInvalidError
from keyvault.domain.keys import DEAD_STATES, KeyState, can_transition
from keyvault.models import Credential, Key, MerchantStatus
from keyvault.services.keys.lifecycle import usable_keys
from rotation.domain.states import CLOSED
from rotation.models import Rotation
from rotation.services.rotations.emergency import (
    CompromiseResponse,
    respond_to_compromise,
    respond_to_leak,
)
from rotation.services.rotations.requests import reissue_key

_MAX_LISTED = 5
"""Maximum keys or rotations that a message lists."""


class CompromiseForm(ActionForm):
    """Form without required fields, because nothing may delay stopping a key."""

    reason = reason_field("What happened", required=False, rows=2, help_text="Recorded in the audit log. Optional.")
    replace = forms.BooleanField(
        required=False,
        label="Request a replacement now",
        help_text="For credentials without another usable key. The replacement is created as soon as it is approved, "
        "outside of any window. The old key stays revoked in any case.",
    )

    @classmethod
    def initial_for(cls, row: Any) -> dict[str, Any]:
        return {"replace": not isinstance(row, Key) or is_last(row)}


class ReissueForm(ActionForm):
    reason = reason_field("Reason", help_text="Recorded in the audit log and shown to the approver.")


def _report(grant: Grant, key: Key, cleaned: Cleaned) -> ActionResult:
    response = respond_to_compromise(grant, key, reason=cleaned["reason"], replace=cleaned["replace"])
    message = f"Key {key} is reported compromised and permanently refused. {_format_replacements([response])}".strip()
    return ActionResult(message, url=receipt_url(key, response.sequence))


def _report_credential(grant: Grant, credential: Credential, cleaned: Cleaned) -> ActionResult:
    living = [str(key.pk) for key in credential.keys.exclude(state__in=DEAD_STATES)]
    return _report_all(grant, living, cleaned)


def _report_all(grant: Grant, presented: Sequence[str], cleaned: Cleaned) -> ActionResult:
    """Report keys as compromised. Raises RequestInvalidError if none was revoked."""
    responses = respond_to_leak(
        grant.principal, presented, reason=cleaned["reason"], replace=cleaned["replace"], now=grant.at
    )
    ended = [response for response in responses if not response.fault]
    failures = [f"{response.key_id}: {response.fault}" for response in responses if response.fault]
    if not ended:
        more = [f"and {len(failures) - _MAX_LISTED} more"] if len(failures) > _MAX_LISTED else []
        raise RequestInvalidError(
            _NOTHING_REVOKED, [Fault("/key_ids", each) for each in (*failures[:_MAX_LISTED], *more)]
        )
    count = "1 key is" if len(ended) == 1 else f"{len(ended)} keys are"
    not_ended = f"NOT revoked, {len(failures)}: {_join_first(failures)}." if failures else ""
    message = " ".join(
        filter(None, (f"{count} revoked and permanently refused.", not_ended, _format_replacements(ended)))
    )
    return ActionResult(message, is_partial=bool(failures))


_NOTHING_REVOKED = (
    "No key was revoked. Correct the entries below. A key id is the 16 characters after the third underscore of a key."
)


def _format_replacements(responses: Sequence[CompromiseResponse]) -> str:
    """Format which replacements were requested or refused; empty if none was wanted."""
    rotation_ids = list(dict.fromkeys(response.rotation_id for response in responses if response.rotation_id))
    refused = [f"{response.key_id}: {response.no_replacement}" for response in responses if response.no_replacement]
    parts = [f"The replacement comes with rotation {_join_first(rotation_ids)}." if rotation_ids else ""]
    parts += [f"No replacement: {_join_first(refused)}." if refused else ""]
    return " ".join(filter(None, parts))


def _join_first(texts: Sequence[str]) -> str:
    more = len(texts) - _MAX_LISTED
    return "; ".join(text.removesuffix(".") for text in texts[:_MAX_LISTED]) + (
        f"; and {more} more" if more > 0 else ""
    )


def _reissue(grant: Grant, credential: Credential, cleaned: Cleaned) -> ActionResult:
    rotation = reissue_key(grant, credential, " ".join(cleaned["reason"].split()))
    return ActionResult(f"Requested rotation {rotation}. The key is created as soon as it is approved.")


def _can_be_reissued(credential: Credential) -> bool:
    """Whether the credential had a key, has no usable key and no open rotation."""
    if credential.account.merchant.status == MerchantStatus.OFFBOARDED:
        return False
    if any(key.state == KeyState.ACTIVE and key.expires_at is None for key in credential.keys.all()):
        return False  # the usual case, without a query
    has_had_key = Exists(credential.keys.exclude(state=KeyState.PRE_ACTIVATION))
    has_usable_key = Exists(usable_keys(credential.credential_id, datetime.now(UTC)))
    has_open_rotation = Exists(Rotation.objects.filter(credential=credential).exclude(state__in=CLOSED))
    rows = Credential.objects.filter(has_had_key, ~has_usable_key, ~has_open_rotation, pk=credential.pk)
    return bool(rows.exists())


def _has_living_key(credential: Credential) -> bool:
    return any(key.state not in DEAD_STATES for key in credential.keys.all())


REPORT = RowAction(
    "report-compromise",
    "Report compromise",
    P.KEYS_REPORT_COMPROMISE,
    _report,
    lambda key: REPORT_EXPLANATION,
    form=CompromiseForm,
    is_available=lambda key: can_transition(KeyState(key.state), KeyState.COMPROMISED),
    warn=warn_if_last_key,
    tone=Tone.DANGER,
    step_up=True,
)
REPORT_CREDENTIAL = RowAction(
    "compromised",
    "Revoke compromised keys and replace",
    P.KEYS_REPORT_COMPROMISE,
    _report_credential,
    lambda credential: f"Reports every usable or suspended key of the credential. {REPORT_EXPLANATION}",
    form=CompromiseForm,
    is_available=_has_living_key,
    warn=lambda credential: "Users of the credential are refused immediately, until a new key is available.",
    tone=Tone.DANGER,
    step_up=True,
)
REISSUE = RowAction(
    "reissue",
    "Reissue",
    P.ROTATIONS_WRITE,
    _reissue,
    lambda credential: (
        "The credential has no usable key. A new key is created as soon as it is approved, outside of any window, "
        "and delivered as before. The credential keeps its id, limits and history."
    ),
    form=ReissueForm,
    is_available=_can_be_reissued,
    tone=Tone.GOOD,
)


def extend_console(site: ConsoleSite) -> None:
    """Add the actions to the pages of keys and credentials."""
    site.extend(Key, actions=[REPORT])
    site.extend(Credential, actions=[REPORT_CREDENTIAL, REISSUE])

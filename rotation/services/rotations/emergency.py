"""Response to a compromised key: revoke it first, in its own transaction, then request a replacement if possible.

Revoking needs one person and the database, nothing else. A replacement needs an approval and later the secret backend.
The revocation stands whatever happens to the replacement, and the response reports both.
"""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.db import DatabaseError, transaction

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import Principal
from keyvault.domain.errors import Fault, KeyvaultError, NotFoundError, RequestInvalidError
from keyvault.domain.free_text import clean_text
from keyvault.domain.ids import is_key_id
from keyvault.domain.keys import KeyState
from keyvault.domain.keystring import parse_keystring
from keyvault.models import Credential, Key
from keyvault.services.keys.lifecycle import get_key, last_sequence, report_compromise, usable_keys
from keyvault.services.recording.authorization import authorize
from rotation.domain.events import OUTCOMES, Event, RotationState
from rotation.domain.states import CLOSED
from rotation.models import Rotation
from rotation.services.rotations.requests import reissue_key
from rotation.services.rotations.turns import wake_rotation

_log = logging.getLogger(__name__)

MAX_KEYS = 500
"""Maximum number of keys in one report."""

_REASON = "a key was reported compromised"


@dataclass(frozen=True, slots=True)
class CompromiseResponse:
    """The outcome of one key's report.

    `state`, `sequence`: of the revoked key; None when it was not revoked, and `fault` says why. `rotation_id`: the
    rotation that makes a replacement, new or already open; `no_replacement`: why there is none.
    """

    key_id: str
    state: KeyState | None = None
    sequence: int | None = None
    credential_id: str | None = None
    fault: str = ""
    rotation_id: str | None = None
    no_replacement: str = ""


def respond_to_compromise(grant: Grant, key: Key, *, reason: str = "", replace: bool = False) -> CompromiseResponse:
    """Revoke the key as compromised, in its own transaction; with `replace`, then request a replacement.

    The grant is for `keys:report_compromise` or `keys:revoke`. The replacement needs `rotations:write`; without it the
    key is revoked nevertheless.
    """
    why = clean_text(" ".join(reason.split()), 300)
    response = _revoke(grant, key, why)
    return _with_replacement(response, grant.principal, key.credential, why, grant.at) if replace else response


def respond_to_leak(
    principal: Principal, presented: Sequence[str], *, reason: str = "", replace: bool = False, now: datetime
) -> list[CompromiseResponse]:
    """Revoke up to 500 keys, each in its own transaction; request replacements after all of them.

    `presented`: key ids, or whole keys as they were found, of which only the id is read. Errors are isolated per key;
    the responses are in the order given. Raises RequestInvalidError for none or more than 500.
    """
    wanted = list(dict.fromkeys(text.strip() for text in presented if text.strip()))
    if not 1 <= len(wanted) <= MAX_KEYS:
        raise RequestInvalidError("The report is invalid.", [Fault("/key_ids", f"1 to {MAX_KEYS} keys")])
    why = clean_text(" ".join(reason.split()), 300)
    responses = [_revoke_presented(principal, text, number, why, now) for number, text in enumerate(wanted, 1)]
    if not replace:
        return responses
    credentials = Credential.objects.select_related("account__merchant").in_bulk(
        [response.credential_id for response in responses if response.credential_id is not None]
    )
    return [
        _with_replacement(response, principal, credentials[response.credential_id], why, now)
        if response.credential_id is not None
        else response
        for response in responses
    ]


def find_open_rotation(credential: Credential) -> Rotation | None:
    rotation: Rotation | None = Rotation.objects.filter(credential=credential).exclude(state__in=CLOSED).first()
    return rotation


def _revoke_presented(principal: Principal, text: str, number: int, why: str, now: datetime) -> CompromiseResponse:
    """Revoke one presented key. Text that is no key id is not echoed, since it may be part of a secret."""
    keystring = parse_keystring(text, settings.KEY_PREFIX)
    key_id = text if keystring is None else keystring.key_id
    if not is_key_id(key_id):
        return CompromiseResponse(f"no. {number}", fault="This is neither a key id nor a whole key.")
    key = get_key(key_id)
    try:
        if key is None:
            raise NotFoundError
        grant = authorize(principal, P.KEYS_REPORT_COMPROMISE, key.credential.account, now=now)
        return _revoke(grant, key, why)
    except NotFoundError:
        return CompromiseResponse(key_id, fault="There is no such key.")
    except KeyvaultError as error:
        return CompromiseResponse(key_id, fault=error.detail)
    except DatabaseError as error:
        _log.exception("a leaked key was not revoked", extra={"key_id": key_id})
        return CompromiseResponse(
            key_id, fault=f"The database did not record it ({type(error).__name__}). Report it again."
        )


def _revoke(grant: Grant, key: Key, why: str) -> CompromiseResponse:
    """Revoke the key durably: committed on return, never part of a transaction that may still fail."""
    with transaction.atomic(durable=True):
        record = report_compromise(grant, key, why=why)
    return CompromiseResponse(key.key_id, KeyState(key.state), record.sequence or last_sequence(key), key.credential_id)


def _with_replacement(
    response: CompromiseResponse, principal: Principal, credential: Credential, reason: str, now: datetime
) -> CompromiseResponse:
    try:
        rotation_id, why_not = _request_replacement(principal, credential, reason or _REASON, now)
    except KeyvaultError as error:
        faults = "; ".join(fault.detail for fault in getattr(error, "faults", ()))
        return dataclasses.replace(response, no_replacement=f"{error.detail} {faults}".strip())
    except Exception:  # noqa: BLE001  the key is revoked, and the response must say so whatever failed here
        _log.exception("no replacement was requested", extra={"credential_id": credential.credential_id})
        return dataclasses.replace(response, no_replacement="The request failed. Try again on the credential's page.")
    return dataclasses.replace(response, rotation_id=rotation_id, no_replacement=why_not)


def _request_replacement(
    principal: Principal, credential: Credential, reason: str, now: datetime
) -> tuple[str | None, str]:
    """Return the id of the rotation that makes a replacement, or why there is none."""
    grant = authorize(principal, P.ROTATIONS_WRITE, credential.account, now=now)
    open_rotation = find_open_rotation(credential)
    usable = set(usable_keys(credential.credential_id, now).values_list("pk", flat=True))
    if open_rotation is not None:
        wake_rotation(open_rotation, now)
        if continues_as_emergency(open_rotation) or open_rotation.replacement_id in usable:
            return open_rotation.rotation_id, ""
    if usable:
        return None, "The credential has another usable key."
    if open_rotation is not None:
        ends = f"Rotation {open_rotation.rotation_id} ends by itself first."
        if open_rotation.is_held:
            ends = f"Rotation {open_rotation.rotation_id} holds a key in quarantine. Release the held key first."
        return None, f"{ends} Reissue the credential afterwards if it has no usable key."
    return reissue_key(grant, credential, reason).rotation_id, ""


def continues_as_emergency(rotation: Rotation) -> bool:
    """Whether the open rotation makes the replacement as an emergency after its predecessor was compromised."""
    stage = rotation.stage
    return RotationState.EMERGENCY in {stage, OUTCOMES[Event.PREDECESSOR_COMPROMISED].get(stage)}

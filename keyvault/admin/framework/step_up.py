"""Step-up: an action with the flag `step_up` requires a second factor within the last five minutes.

The form of the action asks for the factor itself, so that nothing that was filled in is lost.
"""

import json
from datetime import UTC, datetime
from typing import Any

from django.http import HttpRequest, HttpResponse

from keyvault.admin.framework.sign_in import factor_attempt, set_locked
from keyvault.domain.errors import KeyvaultError, PermissionMissingError
from keyvault.models import Operator
from keyvault.services.sessions.lockout import SignInLockedError
from keyvault.services.sessions.passkeys import are_passkeys_possible, begin_authentication, verifier_of
from keyvault.services.sessions.second_factors import (
    PASSKEY,
    RECOVERY_CODES,
    FactorAttempt,
    check_code,
    check_passkey,
    list_second_factors,
)
from keyvault.services.sessions.single_sign_on import may_prove_second_factor
from keyvault.services.sessions.step_up import is_fresh, note_second_factor

CODE, CREDENTIAL = "second_factor_code", "second_factor_credential"
"""Names of the fields, which no form of an action has."""

_MAX_CODE_CHARACTERS = 64


def is_step_up_due(request: HttpRequest) -> bool:
    return not is_fresh(request.session, datetime.now(UTC))


def pass_step_up(request: HttpRequest) -> None:
    """Check the second factor of a submitted form.

    Raises PermissionMissingError if there is none, and the errors of `check_code`.
    """
    if not isinstance(request.user, Operator):
        raise PermissionMissingError("Not signed in. Sign in to the console.")
    if not request.POST.get(CODE) and not request.POST.get(CREDENTIAL):
        raise PermissionMissingError("Your last second factor is older than five minutes. Confirm with it again below.")
    now = datetime.now(UTC)
    check_factor(factor_attempt(request, request.user), request.POST, now)
    note_second_factor(request.session, now)


def refuse_step_up(request: HttpRequest) -> KeyvaultError | None:
    """Check the second factor of a submitted form, if one is due. Return why it is refused; None: it is not."""
    if is_step_up_due(request):
        try:
            pass_step_up(request)
        except KeyvaultError as error:
            return error
    return None


def step_up_context(request: HttpRequest) -> dict[str, Any] | None:
    """Return what a form needs to ask for the second factor; None: none is due."""
    if not is_step_up_due(request) or not isinstance(request.user, Operator):
        return None
    return factor_context(request, request.user)


def answer_locked(response: HttpResponse, error: KeyvaultError | None) -> HttpResponse:
    """Return the response of a refused form, with the status of too many attempts if that is why."""
    if isinstance(error, SignInLockedError):
        set_locked(response, error.retry_after_seconds)
    return response


def check_factor(attempt: FactorAttempt, posted: Any, now: datetime) -> str:
    """Check the passkey or the code of a form. Return the device's cookie. Raises the errors of `check_code`."""
    if posted.get(CREDENTIAL):
        return check_passkey(attempt, verifier_of(attempt.operator, read_credential(posted)), now)
    return check_code(attempt, posted.get(CODE, "")[:_MAX_CODE_CHARACTERS], now)


def read_credential(posted: Any) -> Any:
    """Return the response of the browser for a passkey; None: it is no JSON."""
    try:
        return json.loads(posted.get(CREDENTIAL, ""))
    except (ValueError, RecursionError):
        return None


def factor_context(request: HttpRequest, operator: Operator) -> dict[str, Any]:
    """Return what a page needs to ask for a second factor. A passkey's challenge is new for each page."""
    kinds = {factor.type for factor in list_second_factors(operator)}
    has_passkey = PASSKEY in kinds and are_passkeys_possible(request.get_host())
    return {
        "has_factor": bool(kinds - {RECOVERY_CODES}),
        "has_code": bool(kinds - {PASSKEY}),
        "passkey_options": begin_authentication(operator) if has_passkey else None,
        "has_single_sign_on": may_prove_second_factor(operator),
    }

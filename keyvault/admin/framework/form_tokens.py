"""Forms that are sent twice: the second submission leads to the row that the first one created.

The page of the form has a token, with which the services keep the result, as they do for an Idempotency-Key. Scripts
disable the button; this holds without them, and for a form that is sent again from the browser's history.
"""

import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import urlencode

from django.http import HttpRequest

from keyvault.admin.framework.actions import ActionResult
from keyvault.admin.framework.enforcement import operator_of
from keyvault.domain.errors import ErrorCode, IdempotencyError, StateConflictError
from keyvault.services.idempotency import StoredResponse, run_once

TOKEN = "form_token"  # noqa: S105  the name of the field
"""Hidden field of the form."""

_MAX_LENGTH = 64

_NOT_COMPARED = ("csrfmiddlewaretoken", "second_factor")
"""Prefixes of the names of fields that differ between two submissions."""

_ATTEMPTS, _PAUSE_SECONDS = 20, 0.1
"""How often, and after which pause in seconds, a second submission looks for the result of the first one."""

pause = time.sleep


def token_of(request: HttpRequest) -> str:
    """Return the token of the form that the page shows: the posted one, or a new one."""
    return request.POST.get(TOKEN, "")[:_MAX_LENGTH] or secrets.token_urlsafe(16)


def create_once(
    request: HttpRequest, name: str, create: Callable[[], ActionResult], url_of: Callable[[ActionResult], str]
) -> ActionResult:
    """Create a row, or return the result of the earlier submission of the same form with the same values.

    Args:
        name: of the action.
        url_of: returns the page of the result.

    Raises StateConflictError while the first submission is running, and the errors of `create`.
    """
    if not request.POST.get(TOKEN):
        return create()
    made: list[ActionResult] = []

    def store() -> StoredResponse:
        result = create()
        made.append(result)
        return StoredResponse(200, {"message": result.message, "url": url_of(result)})

    operator, values = operator_of(request), sorted(request.POST.lists())
    typed = urlencode([(field, value) for field, value in values if not field.startswith(_NOT_COMPARED)], doseq=True)
    for _ in range(_ATTEMPTS):
        try:
            # The values are part of the key: a form that was changed before it was sent again is another request.
            answer = run_once(
                holder=f"operator:{operator.person}",
                endpoint=f"console:{name}",
                environment=None,
                key=typed,
                body=b"",
                now=datetime.now(UTC),
                prepare=lambda: store,
            )
        except IdempotencyError as error:
            if error.code != ErrorCode.IDEMPOTENCY_IN_PROGRESS:
                raise
            pause(_PAUSE_SECONDS)
            continue
        stored = answer.answer.body
        return made[0] if made else ActionResult(str(stored["message"]), url=str(stored["url"]))
    raise StateConflictError("This form was sent already, and is still being processed. Look at the list first.")

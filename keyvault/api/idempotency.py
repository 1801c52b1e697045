"""Idempotent create requests over REST: a retry with the same Idempotency-Key gets the first response."""

from collections.abc import Callable
from copy import deepcopy
from datetime import datetime

from rest_framework.request import Request
from rest_framework.response import Response

from keyvault.domain.environments import Environment
from keyvault.services.idempotency import Effect, run_once
from keyvault.wire.idempotency import IDEMPOTENCY_KEY, REPLAYED, read_idempotency_key


def answer_once(
    request: Request,
    *,
    holder: str,
    endpoint: str,
    environment: Environment | None,
    now: datetime,
    prepare: Callable[[], Effect],
) -> Response:
    """Return the effect's response, or the stored response of an earlier request with this Idempotency-Key.

    A retry has the same path and the same body, byte for byte. `prepare` validates the body.
    Raises the errors of `read_idempotency_key`, `run_once`, `prepare` and the effect.
    """
    key = read_idempotency_key(request.headers.get(IDEMPOTENCY_KEY))
    outcome = run_once(
        holder=holder,
        endpoint=endpoint,
        environment=environment,
        key=key,
        body=_fingerprint(request),
        now=now,
        prepare=prepare,
    )
    answer, body = outcome.answer, deepcopy(outcome.answer.body)
    if answer.secret is not None:
        body[answer.secret_field] = answer.secret.reveal()
    headers = {REPLAYED: "true"} if outcome.is_replay else None
    return Response(body, status=answer.status, headers=headers)


def _fingerprint(request: Request) -> bytes:
    """Return path and body: the path names the customer or the issuance request, so it is part of the request."""
    return request._request.path_info.encode() + b"\n" + request._request.body

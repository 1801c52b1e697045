"""Execute a request once: the reply is stored in the transaction of its effect, and replayed for a repeated request.

An attempt first claims its key for HOLD_SECONDS, in a short transaction of its own. After that time another attempt may
take the key over. A fencing token counts the attempts: a slow attempt that was taken over finds its token stale and is
rolled back entirely. Failures are not stored, so the caller can correct the request and retry.
"""

import json
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any, NoReturn

from django.db import DatabaseError, InterfaceError, connection, transaction
from django.db import IntegrityError as DatabaseIntegrityError
from django.db.models import QuerySet

from keyvault.domain.canonical import JsonValue
from keyvault.domain.digests import PEPPER_SET, Peppers
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, IdempotencyError
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.sealing import seal, unseal
from keyvault.models.idempotency import IdempotentRequest
from keyvault.services.peppers.ring import load_peppers
from keyvault.services.work.deletion import delete_batch

_SHRED_BATCH = 500
"""Maximum ids in one query."""

_MAX_SEALED = 10_000
"""Maximum sealed replies that are compared with the secrets that were used."""

HOLD_SECONDS = 15
"""Time for which an attempt holds its key, in seconds."""

KEEP = timedelta(hours=24)
"""Retention of a stored reply."""

SEALED_FOR = timedelta(minutes=15)
"""Retention of the sealed secret in a stored reply."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A reply to store.

    A show-once secret is in `secret`; the body has None in the field `secret_field`. `secret_of` is the id of the key
    or customer token whose first use shreds the stored secret.
    """

    status: int
    body: dict[str, JsonValue]
    secret_field: str = ""
    secret: Plaintext | None = None
    secret_of: str = ""


Effect = Callable[[], StoredResponse]
"""The work done once, inside the transaction that also stores its reply."""


@dataclass(frozen=True, slots=True)
class IdempotentResult:
    """The reply. `is_secret_available` is False for a replay whose secret was shredded; the body states it too."""

    answer: StoredResponse
    is_replay: bool
    is_secret_available: bool


def run_once(
    *,
    holder: str,
    endpoint: str,
    environment: Environment | None,
    key: str,
    body: bytes,
    now: datetime,
    prepare: Callable[[], Effect],
) -> IdempotentResult:
    """Run the effect and return its reply, or replay the reply of the earlier request with this key.

    A key is scoped to its holder and endpoint. `environment` selects the peppers that seal a secret in the reply; None
    for an endpoint whose replies have none. `prepare` validates the body and returns the effect. Both may raise
    anything, and nothing is stored then.

    Raises IdempotencyError while the first attempt is running, or if it had another body.
    """
    scope = _RequestScope(holder, endpoint, environment, sha256(key.encode()).digest(), sha256(body).digest())
    found = _find(scope)
    if (outcome := _find_result(scope, found, now)) is not None:
        return outcome
    effect = prepare()
    claimed = _claim(scope, found, now)
    if claimed is None:
        # Another attempt claimed it just now: it is either running or done.
        return _find_result(scope, _find(scope), now) or _refuse_for_now()
    try:
        return IdempotentResult(_execute(claimed, scope, effect, now), is_replay=False, is_secret_available=True)
    except BaseException:
        with suppress(DatabaseError, InterfaceError):  # the original error is raised; a claim left behind expires
            claimed.delete()
        raise


@dataclass(frozen=True, slots=True)
class _RequestScope:
    """Identity of a request: holder, endpoint and key, with the digest of its body."""

    holder: str
    endpoint: str
    environment: Environment | None
    key_digest: bytes
    body_digest: bytes

    @property
    def context(self) -> bytes:
        """The sealing context, so that a secret only opens in its own row."""
        return f"{self.holder}|{self.endpoint}|{self.key_digest.hex()}".encode()

    @property
    def peppers(self) -> Peppers:
        if self.environment is None:
            raise TypeError(f"{self.endpoint} is declared to reply without a secret")
        return load_peppers(PEPPER_SET[self.environment])


def _find(scope: _RequestScope) -> IdempotentRequest | None:
    return IdempotentRequest.objects.filter(
        holder=scope.holder, endpoint=scope.endpoint, key_digest=scope.key_digest
    ).first()


def _find_result(scope: _RequestScope, found: IdempotentRequest | None, now: datetime) -> IdempotentResult | None:
    """Return the stored result. None: there is none, or it has expired. Raises IdempotencyError."""
    if found is None or found.expires_at <= now:
        return None
    if bytes(found.body_digest) != scope.body_digest:
        raise IdempotencyError(
            ErrorCode.IDEMPOTENCY_BODY_MISMATCH,
            "This Idempotency-Key was used before with another body. Send that body again, or use a new key.",
        )
    if found.status is not None:
        return _replay(scope, found, found.status, now)
    if found.held_until > now:
        _refuse_for_now()
    return None


def _refuse_for_now() -> NoReturn:
    """Raise a retryable error. The delay is short, because an attempt takes milliseconds unless its process died."""
    raise IdempotencyError(
        ErrorCode.IDEMPOTENCY_IN_PROGRESS,
        "The first request with this Idempotency-Key is still in progress.",
        retry_after_seconds=1,
    )


def _claim(scope: _RequestScope, found: IdempotentRequest | None, now: datetime) -> QuerySet[IdempotentRequest] | None:
    """Claim the key. Return a query that selects the row while the claim is valid; None: another attempt came first."""
    fresh: dict[str, Any] = {
        "body_digest": scope.body_digest,
        "held_until": now + timedelta(seconds=HOLD_SECONDS),
        "created_at": now,
        "expires_at": now + KEEP,
    }
    rows = IdempotentRequest.objects.all()
    running = rows.filter(status__isnull=True)
    if found is not None:
        emptied = {"status": None, "body": "", "sealed": None, "sealed_until": None, "secret_of": ""}
        as_found = rows.filter(pk=found.pk, fence=found.fence, status=found.status)
        taken = as_found.update(**fresh, **emptied, fence=found.fence + 1)
        return running.filter(pk=found.pk, fence=found.fence + 1) if taken else None
    try:
        with transaction.atomic():
            made = rows.create(holder=scope.holder, endpoint=scope.endpoint, key_digest=scope.key_digest, **fresh)
    except DatabaseIntegrityError:
        return None
    return running.filter(pk=made.pk, fence=made.fence)


def _execute(
    claimed: QuerySet[IdempotentRequest], scope: _RequestScope, effect: Effect, now: datetime
) -> StoredResponse:
    """Run the effect and store its reply atomically."""
    with transaction.atomic(durable=True):
        answer = effect()
        stored: dict[str, Any] = {
            "status": answer.status,
            "body": json.dumps({"body": answer.body, "secret_field": answer.secret_field}),
            "secret_of": answer.secret_of,
        }
        if answer.secret is not None:
            sealed = seal(scope.peppers, answer.secret, scope.context, secrets.token_bytes)
            stored |= {"sealed": sealed, "sealed_until": now + SEALED_FOR}
        if claimed.update(**stored) != 1:
            _refuse_for_now()
    return answer


def _replay(scope: _RequestScope, found: IdempotentRequest, status: int, now: datetime) -> IdempotentResult:
    """Return the stored reply, with its secret while that is still sealed."""
    stored = json.loads(found.body)
    body, field = stored["body"], stored["secret_field"]
    if not field:
        return IdempotentResult(StoredResponse(status, body), is_replay=True, is_secret_available=True)
    if found.sealed is None or found.sealed_until is None or found.sealed_until <= now:
        body["secret_available"] = False
        return IdempotentResult(StoredResponse(status, body, field), is_replay=True, is_secret_available=False)
    secret = unseal(scope.peppers, bytes(found.sealed), scope.context)
    answer = StoredResponse(status, body, field, secret, found.secret_of)
    return IdempotentResult(answer, is_replay=True, is_secret_available=True)


# --- retention ------------------------------------------------------------------------------------------------


def shred_used(owners: Iterable[str]) -> None:
    """Shred the sealed secrets of these keys and customer tokens, whose use shows that the reply arrived.

    Thousands of them are in use, and few secrets are sealed. So this reads the newest sealed ones first, by their index
    and in plain SQL, because it runs every second beside the verdicts. Older ones are shredded when they expire.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT secret_of FROM keyvault_idempotentrequest WHERE sealed IS NOT NULL "
            "ORDER BY sealed_until DESC LIMIT %s",
            [_MAX_SEALED],
        )
        sealed = {secret_of for (secret_of,) in cursor.fetchall()}
    owners_sealed = sorted(sealed.intersection(owners)) if sealed else []
    for start in range(0, len(owners_sealed), _SHRED_BATCH):
        _shred(IdempotentRequest.objects.filter(secret_of__in=owners_sealed[start : start + _SHRED_BATCH]))


def shred_due(now: datetime) -> None:
    """Shred the secrets whose retention is over."""
    _shred(IdempotentRequest.objects.filter(sealed_until__lte=now))


def _shred(rows: QuerySet[IdempotentRequest]) -> None:
    """Shred in row order, so that concurrent calls do not deadlock."""
    sealed = rows.filter(sealed__isnull=False).order_by("pk").select_for_update()
    with transaction.atomic():
        IdempotentRequest.objects.filter(pk__in=sealed.values("pk")).update(sealed=None)


def forget_expired(now: datetime) -> int:
    """Delete a batch of expired replies, oldest first. Return how many."""
    return delete_batch(IdempotentRequest.objects.filter(expires_at__lte=now).order_by("expires_at"))

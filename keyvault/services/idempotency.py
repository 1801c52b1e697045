"""The same request again has no second effect: its answer is stored in the transaction of the effect, and replayed.

An attempt claims its key first, in a short transaction of its own, for HOLD_SECONDS; a key whose attempt died is
taken over after that. The fence counts the attempts: the slow one that lives on all the same finds its fence gone
and is rolled back with everything it did. What fails is not stored, so that the caller may mend it and try again.
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

_AT_ONCE = 500

HOLD_SECONDS = 15
KEEP = timedelta(hours=24)
SEALED_FOR = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """What is answered. A show-once secret is not in `body`, where None stands in its field: it is `secret`,
    and `secret_of` names the key or customer token whose first use shreds it. `secret_field`: its name."""

    status: int
    body: dict[str, JsonValue]
    secret_field: str = ""
    secret: Plaintext | None = None
    secret_of: str = ""


Effect = Callable[[], StoredResponse]
"""What is done once, inside the transaction that also stores its answer."""


@dataclass(frozen=True, slots=True)
class IdempotentResult:
    """`is_secret_available` is False for the replay of a secret that was shredded: the body says so too."""

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
    """The effect's answer, or that of the request before with this key of this holder at this endpoint.

    `environment` is whose peppers seal a secret in the answer; None for an endpoint whose answers hold none.
    `prepare` validates the body; it, and the effect, may raise what they like, and nothing is stored then.
    Raises IdempotencyError while the first attempt is at work, or when it had another body.
    """
    place = _Place(holder, endpoint, environment, sha256(key.encode()).digest(), sha256(body).digest())
    found = _find(place)
    if (outcome := _answered(place, found, now)) is not None:
        return outcome
    effect = prepare()
    claimed = _claim(place, found, now)
    if claimed is None:
        # Somebody was faster, a moment ago: either at work or, already, done.
        return _answered(place, _find(place), now) or _refuse_for_now()
    try:
        return IdempotentResult(_act(claimed, place, effect, now), is_replay=False, is_secret_available=True)
    except BaseException:
        with suppress(
            DatabaseError, InterfaceError
        ):  # What went wrong is told; a claim that stays for it ends by itself.
            claimed.delete()
        raise


@dataclass(frozen=True, slots=True)
class _Place:
    """Whose request, where, under which key; and with which body."""

    holder: str
    endpoint: str
    environment: Environment | None
    key_digest: bytes
    body_digest: bytes

    @property
    def context(self) -> bytes:
        """What a secret is sealed for, so that it opens in its own row only."""
        return f"{self.holder}|{self.endpoint}|{self.key_digest.hex()}".encode()

    @property
    def peppers(self) -> Peppers:
        if self.environment is None:
            raise TypeError(f"{self.endpoint} was said to answer without a secret")
        return load_peppers(PEPPER_SET[self.environment])


def _find(place: _Place) -> IdempotentRequest | None:
    return IdempotentRequest.objects.filter(
        holder=place.holder, endpoint=place.endpoint, key_digest=place.key_digest
    ).first()


def _answered(place: _Place, found: IdempotentRequest | None, now: datetime) -> IdempotentResult | None:
    """What is known already. None: nothing, or nothing that counts any more. Raises IdempotencyError."""
    if found is None or found.expires_at <= now:
        return None
    if bytes(found.body_digest) != place.body_digest:
        raise IdempotencyError(
            ErrorCode.IDEMPOTENCY_BODY_MISMATCH, "This Idempotency-Key was used with another body before."
        )
    if found.status is not None:
        return _replay(place, found, found.status, now)
    if found.held_until > now:
        _refuse_for_now()
    return None


def _refuse_for_now() -> NoReturn:
    """An attempt takes milliseconds; how long a dead one is held is no reason to make everybody wait as long."""
    raise IdempotencyError(
        ErrorCode.IDEMPOTENCY_IN_PROGRESS,
        "The first request with this Idempotency-Key is still at work.",
        retry_after_seconds=1,
    )


def _claim(place: _Place, found: IdempotentRequest | None, now: datetime) -> QuerySet[IdempotentRequest] | None:
    """The row of this attempt while it is at work and nobody took it over; None when somebody else was faster."""
    fresh: dict[str, Any] = {
        "body_digest": place.body_digest,
        "held_until": now + timedelta(seconds=HOLD_SECONDS),
        "created_at": now,
        "expires_at": now + KEEP,
    }
    rows = IdempotentRequest.objects.all()
    at_work = rows.filter(status__isnull=True)
    if found is not None:
        emptied = {"status": None, "body": "", "sealed": None, "sealed_until": None, "secret_of": ""}
        as_found = rows.filter(pk=found.pk, fence=found.fence, status=found.status)
        taken = as_found.update(**fresh, **emptied, fence=found.fence + 1)
        return at_work.filter(pk=found.pk, fence=found.fence + 1) if taken else None
    try:
        with transaction.atomic():
            made = rows.create(holder=place.holder, endpoint=place.endpoint, key_digest=place.key_digest, **fresh)
    except DatabaseIntegrityError:
        return None
    return at_work.filter(pk=made.pk, fence=made.fence)


def _act(claimed: QuerySet[IdempotentRequest], place: _Place, effect: Effect, now: datetime) -> StoredResponse:
    """The effect and its stored answer: both or neither."""
    with transaction.atomic(durable=True):
        answer = effect()
        stored: dict[str, Any] = {
            "status": answer.status,
            "body": json.dumps({"body": answer.body, "secret_field": answer.secret_field}),
            "secret_of": answer.secret_of,
        }
        if answer.secret is not None:
            sealed = seal(place.peppers, answer.secret, place.context, secrets.token_bytes)
            stored |= {"sealed": sealed, "sealed_until": now + SEALED_FOR}
        if claimed.update(**stored) != 1:
            _refuse_for_now()
    return answer


def _replay(place: _Place, found: IdempotentRequest, status: int, now: datetime) -> IdempotentResult:
    """The stored answer, with its secret while that is still sealed."""
    stored = json.loads(found.body)
    body, field = stored["body"], stored["secret_field"]
    if not field:
        return IdempotentResult(StoredResponse(status, body), is_replay=True, is_secret_available=True)
    if found.sealed is None or found.sealed_until is None or found.sealed_until <= now:
        body["secret_available"] = False
        return IdempotentResult(StoredResponse(status, body, field), is_replay=True, is_secret_available=False)
    secret = unseal(place.peppers, bytes(found.sealed), place.context)
    answer = StoredResponse(status, body, field, secret, found.secret_of)
    return IdempotentResult(answer, is_replay=True, is_secret_available=True)


# --- what goes, and when --------------------------------------------------------------------------------------


def shred_used(owners: Iterable[str]) -> None:
    """The secrets of these keys and customer tokens, which were used and so have arrived.

    Thousands are in use at once, and few secrets are sealed: those are looked at first, by their index, and without
    what Django takes to make a query, since this is asked each second beside the verdicts.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT secret_of FROM keyvault_idempotentrequest WHERE sealed IS NOT NULL")
        sealed = {secret_of for (secret_of,) in cursor.fetchall()}
    names = sorted(sealed.intersection(owners)) if sealed else []
    for start in range(0, len(names), _AT_ONCE):
        _shred(IdempotentRequest.objects.filter(secret_of__in=names[start : start + _AT_ONCE]))


def shred_due(now: datetime) -> None:
    """The secrets that were sealed long enough."""
    _shred(IdempotentRequest.objects.filter(sealed_until__lte=now))


def _shred(rows: QuerySet[IdempotentRequest]) -> None:
    """In the order of the rows, so that no two shredders wait for each other in a ring."""
    sealed = rows.filter(sealed__isnull=False).order_by("pk").select_for_update()
    with transaction.atomic():
        IdempotentRequest.objects.filter(pk__in=sealed.values("pk")).update(sealed=None)


def forget_expired(now: datetime) -> None:
    """The answers that were kept long enough."""
    IdempotentRequest.objects.filter(expires_at__lte=now).delete()

"""Standard Webhooks 1.0.0 (standardwebhooks.com): signing, retry schedule, and interpretation of responses.

A merchant's service may copy `verify`, or use any library of the standard.
"""

import base64
import hmac
import re
from binascii import Error as Base64Error
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from enum import StrEnum
from hashlib import sha256

from keyvault.domain.base62 import RandomBytes
from keyvault.domain.plaintext import Plaintext

ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER = "webhook-id", "webhook-timestamp", "webhook-signature"

TOLERANCE = timedelta(minutes=5)
MAX_RETRY_AFTER = timedelta(hours=24)

_SECRET_PREFIX = "whsec_"  # noqa: S105  how each secret begins, no secret
_SECRET_BYTES = 32
_MIN_BYTES, _MAX_BYTES = 24, 64

_PAUSES = tuple(
    timedelta(seconds=seconds) for seconds in (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
)
"""Delay after each attempt except the last; 75 hours and 35 minutes in total, as the standard proposes."""
MAX_ATTEMPTS = len(_PAUSES) + 1
_JITTER = 0.1
GIVE_UP_AFTER = timedelta(hours=84)
"""Age from which a failed attempt is the last one, although fewer than MAX_ATTEMPTS were made.

Longer than all pauses together. It applies while an endpoint does not reply and its messages wait for each other.
"""
FAILURES_TO_OPEN = 3
"""Consecutive attempts without a reply that open the breaker of an endpoint."""
_FIRST_OPEN, _LONGEST_OPEN = timedelta(minutes=1), timedelta(minutes=10)


class SecretInvalidError(ValueError):
    """The text is no webhook secret: `whsec_` and the base64 of 24 to 64 bytes."""


class SignatureInvalidError(Exception):
    """The signature is invalid or the timestamp out of tolerance; the text states which, for the log."""


# --- signing ----------------------------------------------------------------------------------------------------


def mint_secret(random_bytes: RandomBytes) -> Plaintext:
    return Plaintext(_SECRET_PREFIX + base64.b64encode(random_bytes(_SECRET_BYTES)).decode())


def require_secret(text: str) -> None:
    """Raise SecretInvalidError unless the text is a webhook secret."""
    _key(text)


def sign(secrets: Iterable[Plaintext], message_id: str, at: datetime, body: bytes) -> dict[str, str]:
    """Return the three headers of one attempt. During a rotation both secrets sign, so either one verifies.

    Raises ValueError for an id that contains a dot, which would make the signed text ambiguous.
    """
    if "." in message_id:
        raise ValueError("a message id must not contain a dot")
    timestamp = str(int(at.timestamp()))
    signatures = [_signature(_key(secret.reveal()), message_id, timestamp, body) for secret in secrets]
    return {ID_HEADER: message_id, TIMESTAMP_HEADER: timestamp, SIGNATURE_HEADER: " ".join(signatures)}


def verify(secret: str, headers: Mapping[str, str], body: bytes, now: datetime) -> str:
    """Verify a message and return its id. Retries have the same id: process each id once.

    `headers`: names in lower case. `body`: the received bytes, unchanged. Raises SignatureInvalidError,
    SecretInvalidError.
    """
    message_id, timestamp, signatures = (
        headers.get(name, "") for name in (ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER)
    )
    # An id outside of ASCII is not the service's, and may have no encoding.
    if not message_id or not message_id.isascii() or not signatures or re.fullmatch(r"[0-9]{1,12}", timestamp) is None:
        raise SignatureInvalidError("a header is missing or unreadable")
    if abs(now.timestamp() - int(timestamp)) > TOLERANCE.total_seconds():
        raise SignatureInvalidError("the timestamp is out of tolerance")
    expected = _signature(_key(secret), message_id, timestamp, body).encode()
    # Compares all, so that the time does not reveal which one matches.
    fits = [hmac.compare_digest(expected, given.encode(errors="replace")) for given in signatures.split(" ")]
    if not any(fits):
        raise SignatureInvalidError("no signature matches")
    return message_id


def _signature(key: bytes, message_id: str, timestamp: str, body: bytes) -> str:
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, sha256)).decode()


def _key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX), validate=True)
    except (Base64Error, ValueError) as error:
        raise SecretInvalidError("the text after whsec_ is not base64") from error
    if not secret.startswith(_SECRET_PREFIX) or not _MIN_BYTES <= len(key) <= _MAX_BYTES:
        raise SecretInvalidError(f"a secret is whsec_ and the base64 of {_MIN_BYTES} to {_MAX_BYTES} bytes")
    return key


# --- delivery ---------------------------------------------------------------------------------------------------


class DeliveryOutcome(StrEnum):
    """`gone`: the endpoint permanently accepts no messages."""

    DELIVERED = "delivered"
    GONE = "gone"
    RETRY = "retry"


@dataclass(frozen=True, slots=True)
class DeliveryAssessment:
    """The interpretation of a response. `wait`: the minimum delay that the endpoint requested."""

    verdict: DeliveryOutcome
    wait: timedelta = timedelta()


def judge_response(status: int, retry_after: str | None, now: datetime) -> DeliveryAssessment:
    """Interpret a response. Only 2xx means delivered. Redirects are not followed and count as failures."""
    if 200 <= status <= 299:
        return DeliveryAssessment(DeliveryOutcome.DELIVERED)
    if status == 410:
        return DeliveryAssessment(DeliveryOutcome.GONE)
    if status in {429, 503} and retry_after is not None:
        return DeliveryAssessment(DeliveryOutcome.RETRY, min(_read_retry_after(retry_after, now), MAX_RETRY_AFTER))
    return DeliveryAssessment(DeliveryOutcome.RETRY)


def next_attempt(attempts: int, random: Callable[[], float]) -> timedelta | None:
    """Return the delay after this many attempts, with 10 % jitter; None when there are no more attempts.

    `random` returns a number in [0, 1).
    """
    if attempts >= MAX_ATTEMPTS:
        return None
    return _PAUSES[max(attempts, 1) - 1] * (1 - _JITTER + 2 * _JITTER * random())


def open_breaker_for(failures: int) -> timedelta | None:
    """Return how long the breaker is open after this many consecutive attempts without a reply; None: it is closed.

    The pause doubles from one minute to ten. The attempt after it decides again (half-open).
    """
    if failures < FAILURES_TO_OPEN:
        return None
    return min(_FIRST_OPEN * (1 << min(failures - FAILURES_TO_OPEN, 10)), _LONGEST_OPEN)


def _read_retry_after(text: str, now: datetime) -> timedelta:
    """Parse seconds or an HTTP date (RFC 9110, 10.2.3). Returns zero for other text and past dates."""
    if re.fullmatch(r"[0-9]{1,9}", text.strip()) is not None:
        return timedelta(seconds=int(text))
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return timedelta()
    return max(at.replace(tzinfo=at.tzinfo or UTC) - now, timedelta())

"""Standard Webhooks 1.0.0 (standardwebhooks.com): what is signed and how, when it is tried again, what answers mean.

PURE: a merchant's service may use `verify` as it stands, as may any other library of the standard.
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
LONGEST_RETRY_AFTER = timedelta(hours=24)

_SECRET_PREFIX = "whsec_"  # noqa: S105  how each secret begins, no secret
_SECRET_BYTES = 32
_FEWEST_BYTES, _MOST_BYTES = 24, 64

_PAUSES = tuple(
    timedelta(seconds=seconds) for seconds in (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
)
"""After each attempt but the last; 75 hours and 35 minutes together, as the standard proposes."""
MOST_ATTEMPTS = len(_PAUSES) + 1
_JITTER = 0.1


class SecretInvalidError(ValueError):
    """No secret of the standard: `whsec_` and the base64 of 24 to 64 bytes."""


class SignatureInvalidError(Exception):
    """The message is not from whoever holds the secret, or not from now; the text says which, for the log."""


# --- signing ----------------------------------------------------------------------------------------------------


def mint_secret(random_bytes: RandomBytes) -> Plaintext:
    return Plaintext(_SECRET_PREFIX + base64.b64encode(random_bytes(_SECRET_BYTES)).decode())


def sign(secrets: Iterable[Plaintext], message_id: str, at: datetime, body: bytes) -> dict[str, str]:
    """The three headers of one attempt. During a rotation both secrets sign, so that either proves the message.

    Raises ValueError for an id with a dot in it, which would move the borders of what is signed.
    """
    if "." in message_id:
        raise ValueError("a message id has no dot")
    timestamp = str(int(at.timestamp()))
    signatures = [_signature(_key(secret.reveal()), message_id, timestamp, body) for secret in secrets]
    return {ID_HEADER: message_id, TIMESTAMP_HEADER: timestamp, SIGNATURE_HEADER: " ".join(signatures)}


def verify(secret: str, headers: Mapping[str, str], body: bytes, now: datetime) -> str:
    """The id of the message, which is the same however often it comes: act on each id once.

    `headers` are looked up in lower case; `body` is what was received, byte for byte. Raises SignatureInvalidError,
    SecretInvalidError.
    """
    message_id, timestamp, signatures = (
        headers.get(name, "") for name in (ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER)
    )
    if not message_id or not signatures or re.fullmatch(r"[0-9]{1,12}", timestamp) is None:
        raise SignatureInvalidError("a header is missing or unreadable")
    if abs(now.timestamp() - int(timestamp)) > TOLERANCE.total_seconds():
        raise SignatureInvalidError("the timestamp is too far from now")
    expected = _signature(_key(secret), message_id, timestamp, body).encode()
    # All are compared, so that the time it takes does not say which one fits.
    fits = [hmac.compare_digest(expected, given.encode(errors="replace")) for given in signatures.split(" ")]
    if not any(fits):
        raise SignatureInvalidError("no signature fits")
    return message_id


def _signature(key: bytes, message_id: str, timestamp: str, body: bytes) -> str:
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, sha256)).decode()


def _key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX), validate=True)
    except (Base64Error, ValueError) as error:
        raise SecretInvalidError("no base64 after whsec_") from error
    if not secret.startswith(_SECRET_PREFIX) or not _FEWEST_BYTES <= len(key) <= _MOST_BYTES:
        raise SecretInvalidError(f"whsec_ and the base64 of {_FEWEST_BYTES} to {_MOST_BYTES} bytes")
    return key


# --- delivery ---------------------------------------------------------------------------------------------------


class DeliveryOutcome(StrEnum):
    """`gone`: the endpoint wants no message any more, ever."""

    DELIVERED = "delivered"
    GONE = "gone"
    RETRY = "retry"


@dataclass(frozen=True, slots=True)
class DeliveryAssessment:
    """`wait`: how long the endpoint asked to be left alone, at least."""

    verdict: DeliveryOutcome
    wait: timedelta = timedelta()


def judge_answer(status: int, retry_after: str | None, now: datetime) -> DeliveryAssessment:
    """What an answer means. Only 2xx is a yes; a redirect is none, and is not followed."""
    if 200 <= status <= 299:
        return DeliveryAssessment(DeliveryOutcome.DELIVERED)
    if status == 410:
        return DeliveryAssessment(DeliveryOutcome.GONE)
    if status in {429, 503} and retry_after is not None:
        return DeliveryAssessment(DeliveryOutcome.RETRY, min(_read_retry_after(retry_after, now), LONGEST_RETRY_AFTER))
    return DeliveryAssessment(DeliveryOutcome.RETRY)


def next_attempt(attempts: int, random: Callable[[], float]) -> timedelta | None:
    """How long to wait after so many attempts, a tenth more or less; None: it is given up.

    `random`: 0 up to, but not, 1.
    """
    if attempts >= MOST_ATTEMPTS:
        return None
    return _PAUSES[max(attempts, 1) - 1] * (1 - _JITTER + 2 * _JITTER * random())


def _read_retry_after(text: str, now: datetime) -> timedelta:
    """Seconds or an HTTP date (RFC 9110, 10.2.3); nothing for what is neither, or past."""
    if re.fullmatch(r"[0-9]{1,9}", text.strip()) is not None:
        return timedelta(seconds=int(text))
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return timedelta()
    return max(at.replace(tzinfo=at.tzinfo or UTC) - now, timedelta())

"""Verification of customer access tokens, in the same two pure steps as for a key.

    read_customer_token(presented) -> KeyString | CustomerFault       no look-up: rejects malformed tokens
    judge_customer_token(keystring, record, ...) -> Customer | CustomerFault

A token adds a signed-in customer's context to a private key. It grants nothing without the key.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from keyvault.access.principals import KeyHolder
from keyvault.domain.digests import DECOY_DIGEST, DECOY_VERSION, Peppers
from keyvault.domain.environments import Environment
from keyvault.domain.keystring import SHAPED, STRING_SCOPE, KeyString, StringKind, parse_keystring

CUSTOMER_ID = r"^(?!\.{1,2}$)[A-Za-z0-9._~!$&'()*+,=:@-]{1,128}$"
"""Pattern of a merchant's id for a customer: a plain path segment, because the id appears unescaped in a path."""
CUSTOMER_ID_RULE = "Use 1 to 128 characters of A-Z, a-z, 0-9 and ._~!$&'()*+,=:@- (but neither '.' nor '..')."

_CUSTOMER_ID = re.compile(CUSTOMER_ID)


class CustomerFault(StrEnum):
    """Why a token is not accepted. Expired and revoked are disclosed only after proof."""

    INVALID = "invalid"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class CustomerRecord:
    """The immutable view of a stored token that a verdict needs."""

    token_id: str
    environment: Environment
    merchant_id: str
    customer_id: str
    digest: bytes
    pepper_version: int
    expires_at: datetime
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True)
class Customer:
    """The signed-in customer that a token authenticates."""

    customer_id: str
    token_id: str
    expires_at: datetime


def find_customer_id_fault(text: str) -> str | None:
    """Return the requirement that a customer id fails, or None. Never quotes the text."""
    if _CUSTOMER_ID.fullmatch(text) is None:
        return "1 to 128 of A-Z, a-z, 0-9 and ._~!$&'()*+,=:@-, and neither . nor .."
    if SHAPED.search(text) is not None:
        return "must not contain a key string, because it is stored and shown"
    return None


def read_customer_token(presented: str, *, environment: Environment, key_prefix: str) -> KeyString | CustomerFault:
    """Parse a presented token. Returns INVALID for anything but a customer access token of this environment."""
    keystring = parse_keystring(presented, key_prefix)
    if (
        keystring is None
        or keystring.kind is not StringKind.CUSTOMER_TOKEN
        or keystring.scope is not STRING_SCOPE[environment]
    ):
        return CustomerFault.INVALID
    return keystring


def judge_customer_token(
    keystring: KeyString, record: CustomerRecord | None, holder: KeyHolder, peppers: Peppers, now: datetime
) -> Customer | CustomerFault:
    """Check proof, then ownership, then state. Another merchant's token is indistinguishable from an unknown one."""
    digest, version = (DECOY_DIGEST, DECOY_VERSION) if record is None else (record.digest, record.pepper_version)
    proved = peppers.matches(keystring.text, digest, version)
    if record is None or not proved:
        return CustomerFault.INVALID
    return judge_customer_record(record, holder, now)


def judge_customer_record(record: CustomerRecord, holder: KeyHolder, now: datetime) -> Customer | CustomerFault:
    """Judge a token whose possession is proved, or (to explain a verdict) assumed."""
    if (record.environment, record.merchant_id) != (holder.environment, holder.merchant_id):
        return CustomerFault.INVALID
    if now >= record.expires_at:
        return CustomerFault.EXPIRED
    if record.revoked_at is not None:
        return CustomerFault.REVOKED
    return Customer(record.customer_id, record.token_id, record.expires_at)

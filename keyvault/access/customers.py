"""Is the presented customer access token good beside this key? The same two pure steps as for a key.

    read_customer_token(presented) -> KeyString | CustomerFault       no look-up: what is malformed dies here
    judge_customer_token(keystring, record, ...) -> Customer | CustomerFault

A token adds a signed-in customer's context to a private key (D3, D6); by itself it opens nothing.
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
"""A merchant's own name for a customer: it stands in a path as it is, so that it is what a plain segment may be."""

_CUSTOMER_ID = re.compile(CUSTOMER_ID)


class CustomerFault(StrEnum):
    """Why a token gives no customer; expired and revoked are told only after proof."""

    INVALID = "invalid"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class CustomerRecord:
    """The frozen view of a stored token that a verdict needs."""

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
    """The signed-in customer that a token has proved."""

    customer_id: str
    token_id: str
    expires_at: datetime


def find_customer_id_fault(text: str) -> str | None:
    """What is wrong with a customer id, as a demand; None when nothing is. Never quotes the text."""
    if _CUSTOMER_ID.fullmatch(text) is None:
        return "1 to 128 of A-Z, a-z, 0-9 and ._~!$&'()*+,=:@-, and neither . nor .."
    if SHAPED.search(text) is not None:
        return "no key string: it would be kept and shown"
    return None


def read_customer_token(presented: str, *, environment: Environment, brand: str) -> KeyString | CustomerFault:
    """The parts of what was presented, or INVALID for whatever can be no customer access token of this environment."""
    keystring = parse_keystring(presented, brand)
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
    """Proof first, then whose it is, then its state; somebody else's token is as unknown as one that never was."""
    digest, version = (DECOY_DIGEST, DECOY_VERSION) if record is None else (record.digest, record.pepper_version)
    proved = peppers.matches(keystring.text, digest, version)
    if record is None or not proved:
        return CustomerFault.INVALID
    return judge_customer_record(record, holder, now)


def judge_customer_record(record: CustomerRecord, holder: KeyHolder, now: datetime) -> Customer | CustomerFault:
    """The judgement of a token whose possession is proved, or (to explain a verdict) assumed."""
    if (record.environment, record.merchant_id) != (holder.environment, holder.merchant_id):
        return CustomerFault.INVALID
    if now >= record.expires_at:
        return CustomerFault.EXPIRED
    if record.revoked_at is not None:
        return CustomerFault.REVOKED
    return Customer(record.customer_id, record.token_id, record.expires_at)

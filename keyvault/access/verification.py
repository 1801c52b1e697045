"""Verification of presented keys and service tokens: two pure steps, with the entry point's look-up between them.

read_key(presented) -> KeyString | Denial       no look-up: rejects malformed keys
judge_key(keystring, record, ...) -> KeyHolder | Denial
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import unquote

from keyvault.access.decision import Denial
from keyvault.access.principals import KeyHolder, Service
from keyvault.domain.digests import DECOY_DIGEST, DECOY_VERSION, Peppers
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode as Code
from keyvault.domain.keys import KeyRecord, KeyState, RetirementReason
from keyvault.domain.keystring import (
    SHAPED,
    STRING_SCOPE,
    KeyString,
    StringKind,
    parse_keystring,
)

INVALID = Denial(Code.CREDENTIAL_INVALID, "The API key is not valid.")
"""One denial for every string that proves nothing, so that it discloses nothing."""

_MAX_ESCAPES = 4
"""Maximum levels of percent-encoding to decode: each proxy on the way may have added one."""

_API_KEYS = frozenset({StringKind.PUBLIC, StringKind.PRIVATE})


def find_exposed(url: str) -> Denial | None:
    """Deny a path and query that contain text shaped like a key string, escaped or not."""
    return _EXPOSED if any(SHAPED.search(text) for text in _unescaped(url)) else None


def read_exposed(url: str, key_prefix: str) -> KeyString | None:
    """Return the first well-formed API key in a URL, or None. Its owner is disclosed only after proof."""
    found = (match[0] for text in _unescaped(url) for match in _WHOLE.finditer(text))
    parsed = (parse_keystring(text, key_prefix) for text in found)
    return next((keystring for keystring in parsed if keystring and keystring.kind in _API_KEYS), None)


def _unescaped(url: str) -> Iterator[str]:
    """Yield the URL as received, and then after each level of percent-decoding."""
    yield url
    for _ in range(_MAX_ESCAPES):
        if "%" not in url:
            return
        url = unquote(url)
        yield url


_EXPOSED = Denial(
    Code.CREDENTIAL_IN_URL,
    "The URL contains a credential. Logs and proxies store URLs, so rotate it, and send credentials only in headers.",
)
_WHOLE = re.compile(r"[a-z][a-z0-9]{0,15}_(?:pub|prv)_(?:sbx|prd)_[0-9A-Za-z]{65}")


def find_ambiguous(key: str | None, bearer: str | None) -> Denial | None:
    """Deny a credential header that was sent more than once: HTTP servers join repeated headers with a comma."""
    for name, value in (("X-Api-Key", key), ("Authorization", bearer)):
        if value is not None and "," in value:
            return Denial(Code.CREDENTIAL_AMBIGUOUS, f"The {name} header was sent more than once or contains a comma.")
    return None


def read_key(
    presented: str | None,
    *,
    environment: Environment,
    key_prefix: str,
    base_urls: Mapping[Environment, str],
) -> KeyString | Denial:
    """Parse a presented key for this environment, or deny what cannot be one of its keys."""
    if presented is None:
        return Denial(Code.CREDENTIAL_MISSING, "The endpoint requires an API key in the X-Api-Key header.")
    keystring = parse_keystring(presented, key_prefix)
    if keystring is None or keystring.kind not in _API_KEYS:
        return INVALID
    if keystring.scope is not STRING_SCOPE[environment]:
        home = next(env for env, scope in STRING_SCOPE.items() if scope is keystring.scope)
        return deny_other_environment(home, environment, base_urls)
    return keystring


def deny_other_environment(home: Environment, environment: Environment, base_urls: Mapping[Environment, str]) -> Denial:
    return Denial(
        Code.ENVIRONMENT_MISMATCH,
        f"The key is for {home}, the request went to {environment}. The base URL of {home} is {base_urls[home]}.",
    )


def judge_key(keystring: KeyString, record: KeyRecord | None, peppers: Peppers, now: datetime) -> KeyHolder | Denial:
    """Check proof, then state. An unknown key takes the same time as a wrong secret and gets the same denial."""
    if record is None:
        peppers.matches(keystring.text, DECOY_DIGEST, DECOY_VERSION)
        return INVALID
    if not peppers.matches(keystring.text, record.digest, record.pepper_version):
        return INVALID
    return judge_record(record, now)


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The immutable view of a stored service token. `service`: the principal that it authenticates."""

    service: Service
    digest: bytes
    pepper_version: int
    expires_at: datetime
    revoked_at: datetime | None


def read_service_token(presented: str | None, key_prefix: str) -> KeyString | None:
    """Parse a presented service token. Returns None for anything else."""
    keystring = parse_keystring(presented, key_prefix) if presented else None
    return keystring if keystring is not None and keystring.kind is StringKind.SERVICE_TOKEN else None


def judge_service_token(
    keystring: KeyString, record: TokenRecord | None, peppers: Peppers, now: datetime
) -> Service | None:
    """Return the service that holds this token, or None. The caller does not learn the reason."""
    digest, version = (DECOY_DIGEST, DECOY_VERSION) if record is None else (record.digest, record.pepper_version)
    proved = peppers.matches(keystring.text, digest, version)
    if record is None or not proved or record.revoked_at is not None or now >= record.expires_at:
        return None
    return record.service


def judge_record(record: KeyRecord, now: datetime) -> KeyHolder | Denial:
    """Judge a key whose possession is proved, or (to explain a verdict) assumed."""
    holder = KeyHolder(
        key_id=record.key_id,
        credential_id=record.credential_id,
        kind=record.kind,
        environment=record.environment,
        merchant_id=record.merchant_id,
        merchant_active=record.merchant_active,
        account_active=record.account_active,
        reports_origin=record.reports_origin,
        networks=record.networks,
    )
    return _judge_state(record, holder, now) or holder


def _judge_state(record: KeyRecord, holder: KeyHolder, now: datetime) -> Denial | None:
    if record.may_verify(now):
        return None
    if record.state in {KeyState.PRE_ACTIVATION, KeyState.SUSPENDED}:
        code, detail = (
            Code.KEY_NOT_ACTIVE,
            "The key is suspended or not active yet. Use its replacement if there is one.",
        )
    elif record.state is KeyState.ACTIVE or (
        record.state is KeyState.DEACTIVATED and record.retirement is RetirementReason.EXPIRED
    ):
        code, detail = Code.KEY_EXPIRED, "The key has expired. Use its replacement."
    else:
        code, detail = Code.KEY_REVOKED, "The key was revoked. Use its replacement."
    return Denial(code, detail, internal=f"the key is {record.state}", holder=holder)

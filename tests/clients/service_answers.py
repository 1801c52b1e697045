"""The service's answer to a verifier's question, computed by its pure packages from a few stored credentials."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec

from keyvault.access.catalog import BUILT_IN, Endpoint
from keyvault.access.customers import CustomerRecord
from keyvault.access.judgement import judge
from keyvault.access.limits import Bucket, BucketState, Limit, Spend, spend
from keyvault.access.permissions import Permission
from keyvault.access.principals import Service
from keyvault.access.scopes import AccessScope
from keyvault.domain.digests import Peppers
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind, KeyRecord, KeyState, RetirementReason
from keyvault.domain.keystring import KEY_ID_PLACE, KeyString, StringKind, StringScope
from keyvault.domain.networks import parse_network
from keyvault.hotpath.messages.rendering import decision
from keyvault.hotpath.messages.requests import read_verify
from keyvault.hotpath.slow_path.slow_path import _verification_request
from tests.access.judging import BASE_URLS, CUSTOMER_TOKEN, NOW, PEPPERS, Case, key_string, stored_digest
from tests.domain.minting import mint

KEYS = {
    "private_sandbox": key_string(),
    "private_sandbox_2": mint(seed="its replacement"),
    "revoked_sandbox": mint(seed="revoked"),
    "suspended_sandbox": mint(seed="suspended"),
    "restricted_sandbox": mint(seed="restricted"),
    "unknown_sandbox": mint(seed="never issued"),
    "public_sandbox": mint(StringKind.PUBLIC, seed="public"),
    "private_production": mint(StringKind.PRIVATE, StringScope.PRODUCTION, seed="production"),
    "customer_token": CUSTOMER_TOKEN,
    "service_token": mint(StringKind.SERVICE_TOKEN, StringScope.SANDBOX, seed="shop"),
}
"""Strings with valid checksums. No installation has issued them."""

REQUEST_ID = "3QbVxkUnw1tS9dJgYyLh0A"
LIMIT = Limit(25, 1)

_SERVICE = Service("Ab1Cd2Ef3Gh4Ij5K", "shop", "tam", frozenset({Permission.KEYS_VERIFY}), AccessScope())


def _stored(name: str, **changes: Any) -> KeyRecord:
    digest, version = stored_digest(KEYS[name])
    stored = {"key_id": KEYS[name][KEY_ID_PLACE], "digest": digest, "pepper_version": version}
    return msgspec.structs.replace(Case().record(), credential_id=f"crd_{name}", **stored, **changes)


RECORDS = {
    record.key_id: record
    for record in (
        _stored("private_sandbox"),
        _stored("private_sandbox_2"),
        _stored("revoked_sandbox", state=KeyState.DEACTIVATED, retirement=RetirementReason.REVOKED),
        _stored("suspended_sandbox", state=KeyState.SUSPENDED),
        _stored("public_sandbox", kind=KeyKind.PUBLIC),
        _stored("restricted_sandbox", networks=(parse_network("192.0.2.0/24"),)),
    )
}


@dataclass
class StoredSources:
    """The sources of a judgement, with an account limit that is exhausted on request."""

    is_exhausted: bool = False
    key_prefix: str = "kv"
    base_urls: Mapping[Environment, str] = field(default_factory=lambda: BASE_URLS)

    def peppers(self, environment: Environment) -> Peppers:
        return PEPPERS[environment]

    def take_pepper(self, peppers: Peppers, version: int) -> Peppers:
        return peppers

    def find_key(self, key_id: str, address: str | None) -> KeyRecord | None:
        return RECORDS.get(key_id)

    def find_customer(self, token_id: str) -> CustomerRecord | None:
        record = Case().customer_record()
        return record if record.token_id == token_id else None

    def buckets(self, record: KeyRecord, endpoint: Endpoint) -> tuple[Bucket, ...]:
        return (Bucket("account", "acme", LIMIT),)

    def spend(self, buckets: tuple[Bucket, ...], cost: int, *, refuse_on_loss: bool) -> Spend:
        now_us = int(NOW.timestamp() * 1_000_000)
        full_at = now_us + int(timedelta(seconds=LIMIT.seconds) / timedelta(microseconds=1))
        return spend([BucketState(full_at, 0) if self.is_exhausted else None], buckets, cost, now_us)[0]

    def note_failed_proof(self, address: str | None) -> int | None:
        return None

    def note_proof(self, record: KeyRecord, keystring: KeyString, peppers: Peppers) -> None:
        """Record nothing."""


def decide(question: dict[str, Any], *, is_exhausted: bool = False) -> dict[str, Any]:
    """Return the decision on a verify request, as the service renders it."""
    request = read_verify(json.dumps(question).encode())
    environment = Environment(request.environment)
    endpoint = BUILT_IN.match(str(request.method), str(request.path), f"/{environment}")
    presented = _verification_request(request, environment, endpoint, _SERVICE)
    rendered: dict[str, Any] = json.loads(
        msgspec.json.encode(decision(judge(presented, StoredSources(is_exhausted), NOW), REQUEST_ID))
    )
    return rendered

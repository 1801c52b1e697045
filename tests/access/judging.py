"""The whole judgement of a request, pure from end to end: what the doors do, with a look-up that is given.

A `Case` is a request that would be allowed, unless its fields say otherwise.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache

from keyvault.access.catalog import Endpoint, Miss, find_endpoint
from keyvault.access.decision import Check, Denial, Grant, decide
from keyvault.access.principals import KeyHolder
from keyvault.access.rules import EndpointRequest, EndpointRule
from keyvault.access.verification import find_exposed, judge_key, read_key
from keyvault.domain.digests import PEPPER_BYTES, PEPPER_SET, Peppers
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind, KeyRecord, KeyState, Retirement
from keyvault.domain.keystring import STRING_KIND, STRING_SCOPE
from keyvault.domain.plaintext import Plaintext
from tests.domain.minting import mint

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SANDBOX, PRODUCTION = Environment.SANDBOX, Environment.PRODUCTION
BASE_URLS = {SANDBOX: "https://sandbox.pay.example/api", PRODUCTION: "https://pay.example/api"}
PEPPERS = {
    environment: Peppers(PEPPER_SET[environment], {1: environment.value.encode().ljust(PEPPER_BYTES, b"\0")})
    for environment in Environment
}


@cache
def key_string(kind: KeyKind = KeyKind.PRIVATE, environment: Environment = SANDBOX, *, seed: object = "a key") -> str:
    return mint(STRING_KIND[kind], STRING_SCOPE[environment], seed=seed)


@cache
def stored_digest(text: str) -> tuple[bytes, int]:
    return PEPPERS[SANDBOX].digest(Plaintext(text))


@dataclass(frozen=True)
class Case:
    """A request for an endpoint, and what is stored of its key. `presented`: None for the stored key itself."""

    kind: KeyKind = KeyKind.PRIVATE
    state: KeyState = KeyState.ACTIVE
    retirement: Retirement | None = None
    expires_at: datetime | None = NOW + timedelta(days=1)
    is_stored: bool = True
    is_presented: bool = True
    presented: str | None = None
    environment: Environment = SANDBOX
    url: str = ""
    endpoint: Endpoint | Miss | None = None
    named_merchant: str | None = None
    merchant_active: bool = True
    account_active: bool = True
    has_bearer: bool = False
    has_origin: bool = False
    reports_origin: bool = False

    def but(self, **changes: object) -> "Case":
        return replace(self, **changes)  # type: ignore[arg-type]  # a test's own words

    @property
    def own_endpoint(self) -> Endpoint | Miss:
        """The endpoint, or one that takes this kind of key."""
        if self.endpoint is not None:
            return self.endpoint
        return find_endpoint("orders.create" if self.kind is KeyKind.PRIVATE else "client.configuration")

    @property
    def text(self) -> str | None:
        if not self.is_presented:
            return None
        return key_string(self.kind) if self.presented is None else self.presented

    def record(self) -> KeyRecord:
        stored = key_string(self.kind)
        digest, version = stored_digest(stored)
        return KeyRecord(
            key_id=stored[11:27],
            credential_id="crd_1",
            kind=self.kind,
            environment=SANDBOX,
            merchant_id="acme",
            digest=digest,
            pepper_version=version,
            state=self.state,
            retirement=self.retirement,
            expires_at=self.expires_at,
            merchant_active=self.merchant_active,
            account_active=self.account_active,
            reports_origin=self.reports_origin,
        )


def judge(case: Case, trace: list[Check] | None = None) -> Grant | Denial:
    """The verdict, by the pure functions in the order in which every door calls them."""
    exposed = find_exposed(case.url)
    if exposed is not None:
        return exposed
    keystring = read_key(case.text, environment=case.environment, brand="kv", base_urls=BASE_URLS)
    if isinstance(keystring, Denial):
        return keystring
    stored = case.record()
    record = stored if case.is_stored and keystring.key_id == stored.key_id else None
    holder = judge_key(keystring, record, PEPPERS[case.environment], NOW)
    if not isinstance(holder, KeyHolder):
        return holder
    request = EndpointRequest(case.named_merchant, case.has_bearer, case.has_origin)
    return decide(EndpointRule(case.own_endpoint), holder, request, NOW, trace)


def code_of(verdict: Grant | Denial) -> str:
    return "allowed" if isinstance(verdict, Grant) else verdict.code.value

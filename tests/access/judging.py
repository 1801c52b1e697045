"""The complete judgement of a request by pure functions, with stored records as arguments.

A `Case` is a request that is allowed unless its fields change that.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache

from keyvault.access.catalog import BUILT_IN, Bearer, ContextPlace, ContextSource, Endpoint, NoMatchingEndpoint
from keyvault.access.customers import (
    Customer,
    CustomerFault,
    CustomerRecord,
    judge_customer_token,
    read_customer_token,
)
from keyvault.access.decision import Check, Denial, Grant, decide, deny_unmatched
from keyvault.access.principals import KeyHolder
from keyvault.access.rules import EndpointRequest, EndpointRule
from keyvault.access.verification import find_ambiguous, find_exposed, judge_key, read_key
from keyvault.domain.digests import PEPPER_BYTES, PEPPER_SET, Peppers
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind, KeyRecord, KeyState, RetirementReason
from keyvault.domain.keystring import STRING_KIND, STRING_SCOPE, StringKind, StringScope
from keyvault.domain.networks import IPNetwork
from keyvault.domain.plaintext import Plaintext
from tests.domain.minting import mint

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SANDBOX, PRODUCTION = Environment.SANDBOX, Environment.PRODUCTION
BASE_URLS = {SANDBOX: "https://sandbox.pay.example/api", PRODUCTION: "https://pay.example/api"}
PEPPERS = {
    environment: Peppers(PEPPER_SET[environment], {1: environment.value.encode().ljust(PEPPER_BYTES, b"\0")})
    for environment in Environment
}
CUSTOMER_TOKEN = mint(StringKind.CUSTOMER_TOKEN, StringScope.SANDBOX, seed="a customer")

# Endpoints as operators add them: what no built-in one asks for.
_IN_PATH, _IN_HEADER = ContextSource(ContextPlace.PATH, "merchant"), ContextSource(ContextPlace.HEADER, "X-Merchant")
_STORE = ContextSource(ContextPlace.HEADER, "X-Store")
_PRIVATE = frozenset({KeyKind.PRIVATE})
PAYOUTS = Endpoint("payouts.list", "GET", "/payouts/<merchant>", _PRIVATE, merchant_from=_IN_PATH, is_built_in=False)
SHELVES = Endpoint("shelves.list", "GET", "/shelves", _PRIVATE, store_from=_STORE, is_built_in=False)
RATES = Endpoint("rates.read", "GET", "/rates", frozenset(KeyKind), is_built_in=False)
WALLET = Endpoint(
    "wallet.read",
    "GET",
    "/wallet",
    _PRIVATE,
    Bearer.REQUIRED,
    merchant_from=_IN_HEADER,
    store_from=_STORE,
    is_built_in=False,
)
ADDED = (PAYOUTS, SHELVES, RATES, WALLET)
CATALOG = BUILT_IN.with_added(ADDED)


@cache
def key_string(kind: KeyKind = KeyKind.PRIVATE, environment: Environment = SANDBOX, *, seed: object = "a key") -> str:
    return mint(STRING_KIND[kind], STRING_SCOPE[environment], seed=seed)


@cache
def stored_digest(text: str) -> tuple[bytes, int]:
    return PEPPERS[SANDBOX].digest(Plaintext(text))


@dataclass(frozen=True)
class Case:
    """A request for an endpoint, with the stored state of its key and its customer access token.

    `presented` None: the stored key itself; `bearer` None: the request has no token.
    """

    kind: KeyKind = KeyKind.PRIVATE
    state: KeyState = KeyState.ACTIVE
    retirement: RetirementReason | None = None
    expires_at: datetime | None = NOW + timedelta(days=1)
    is_stored: bool = True
    is_presented: bool = True
    presented: str | None = None
    environment: Environment = SANDBOX
    url: str = ""
    endpoint: Endpoint | NoMatchingEndpoint | None = None
    named_merchant: str | None = None
    merchant_context: str | None = "acme"
    store_context: str | None = "store-1"
    merchant_active: bool = True
    account_active: bool = True
    has_origin: bool = False
    reports_origin: bool = False
    client_address: str | None = None
    networks: tuple[IPNetwork, ...] = ()
    bearer: str | None = None
    is_customer_stored: bool = True
    customer_merchant: str = "acme"
    customer_expires_at: datetime = NOW + timedelta(minutes=15)
    customer_revoked_at: datetime | None = None

    def but(self, **changes: object) -> "Case":
        return replace(self, **changes)  # type: ignore[arg-type]  # a test's own words

    @property
    def own_endpoint(self) -> Endpoint | NoMatchingEndpoint:
        """Return the endpoint, or one that accepts this kind of key."""
        if self.endpoint is not None:
            return self.endpoint
        return CATALOG.find("orders.create" if self.kind is KeyKind.PRIVATE else "client.configuration")

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
            networks=self.networks,
        )

    def customer_record(self) -> CustomerRecord:
        digest, version = stored_digest(CUSTOMER_TOKEN)
        return CustomerRecord(
            token_id=CUSTOMER_TOKEN[11:27],
            environment=SANDBOX,
            merchant_id=self.customer_merchant,
            customer_id="cust-1",
            digest=digest,
            pepper_version=version,
            expires_at=self.customer_expires_at,
            revoked_at=self.customer_revoked_at,
        )


def judge(case: Case, trace: list[Check] | None = None) -> Grant | Denial:
    """Return the verdict of the pure functions, called in the order of every entry point."""
    early = find_exposed(case.url) or find_ambiguous(case.text, case.bearer)
    if early is not None:
        return early
    endpoint = case.own_endpoint
    if case.text is None and isinstance(endpoint, NoMatchingEndpoint):
        return deny_unmatched(endpoint, None)
    holder = _judge_key(case.text, case.record() if case.is_stored else None, case.environment)
    if isinstance(holder, Denial):
        return holder
    request = EndpointRequest(
        named_merchant=case.named_merchant,
        has_bearer=case.bearer is not None,
        has_origin=case.has_origin,
        client_address=case.client_address,
        merchant_context=case.merchant_context,
        store_context=case.store_context,
        customer=judge_bearer(case, endpoint, holder),
    )
    return decide(EndpointRule(endpoint), holder, request, NOW, trace)


@cache  # since most of a matrix's cases differ in other things
def _judge_key(text: str | None, stored: KeyRecord | None, environment: Environment) -> KeyHolder | Denial:
    keystring = read_key(text, environment=environment, key_prefix="kv", base_urls=BASE_URLS)
    if isinstance(keystring, Denial):
        return keystring
    record = stored if stored is not None and keystring.key_id == stored.key_id else None
    return judge_key(keystring, record, PEPPERS[environment], NOW)


def judge_bearer(
    case: Case, endpoint: Endpoint | NoMatchingEndpoint, holder: KeyHolder
) -> Customer | CustomerFault | None:
    """Return None without a Bearer, and for an endpoint that accepts none."""
    if case.bearer is None or isinstance(endpoint, NoMatchingEndpoint) or endpoint.bearer is Bearer.NONE:
        return None
    return _judge_token(case.bearer, case.customer_record() if case.is_customer_stored else None, holder)


@cache
def _judge_token(text: str, stored: CustomerRecord | None, holder: KeyHolder) -> Customer | CustomerFault:
    keystring = read_customer_token(text, environment=holder.environment, key_prefix="kv")
    if isinstance(keystring, CustomerFault):
        return keystring
    record = stored if stored is not None and keystring.key_id == stored.token_id else None
    return judge_customer_token(keystring, record, holder, PEPPERS[holder.environment], NOW)


def code_of(verdict: Grant | Denial) -> str:
    return "allowed" if isinstance(verdict, Grant) else verdict.code.value

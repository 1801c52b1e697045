"""Database rows of the golden matrix, made by the real services, and the parts of a request by the words of a case."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

from keyvault.access.catalog import BUILT_IN, Endpoint
from keyvault.access.decision import Grant
from keyvault.access.endpoints import EndpointDraft
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST, WORKER, KeyHolder
from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.domain.keystring import STRING_KIND, STRING_SCOPE, StringKind, StringScope
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Account, Key
from keyvault.models.keys import OriginHeader
from keyvault.services.catalog.endpoints import add_endpoint
from keyvault.services.keys.credentials import restrict_credential
from keyvault.services.keys.lifecycle import (
    discard_key,
    expire_key,
    get_key,
    report_compromise,
    revoke_key,
    stage_key,
    suspend_key,
)
from keyvault.services.merchants.merchants import suspend_account, suspend_merchant
from keyvault.services.merchants.orders import create_order
from keyvault.services.recording.transaction import recorded
from keyvault.services.tokens.customer_tokens import issue_customer_token, revoke_customer_token
from tests.access.judging import ADDED
from tests.domain.minting import mint
from tests.entry_points.golden import ELSEWHERE, HERE, IN_URL, STORED, UNPROVED, Row, escaped, forged
from tests.factories import account, grant, issue, make_merchant, make_token, now, the_operator

OWNER = {"merchant_suspended": "initech", "account_suspended": "umbrella"}
"""The merchant of the key in a state of its merchant or account; acme otherwise."""


@dataclass(frozen=True)
class Stored:
    """A stored key and its string."""

    key_id: str
    text: str


@dataclass(frozen=True)
class Tokens:
    """Customer access tokens of one environment by their words, as strings and as ids, and the id of an order."""

    texts: Mapping[str, str]
    ids: Mapping[str, str]
    order: str


@dataclass(frozen=True)
class Rows:
    keys: Mapping[tuple[Environment, str, str], Stored]
    tokens: Mapping[Environment, Tokens]
    gateways: Mapping[Environment, str]
    service: str

    def stored(self, home: Environment, row: Row) -> Stored:
        return self.keys[home, row.kind, row.state]

    def key(self, home: Environment, row: Row) -> str | None:
        """Return the presented string; None without a credential."""
        kind, scope = STRING_KIND[KeyKind(row.kind)], STRING_SCOPE[home]
        good = self.keys[home, row.kind, "active"].text
        return (
            {
                "no_key": None,
                "twice": f"{good},{good}",
                "bearer_twice": good,
                "in_url": good,
                "in_url_escaped": good,
                "empty": "",
                "malformed": "nonsense",
                "wrong_checksum": good[:-6] + "000000",
                "customer_token": mint(StringKind.CUSTOMER_TOKEN, scope, seed="a token for a key"),
                "service_token": mint(StringKind.SERVICE_TOKEN, StringScope.ALL, seed="a service token for a key"),
                "unknown": mint(kind, scope, seed="unknown"),
                "wrong_secret": forged(good),
            }[row.state]
            if row.state in UNPROVED
            else self.stored(home, row).text
        )

    def bearer(self, asked: Environment, row: Row) -> str | None:
        texts = self.tokens[asked].texts
        if row.state == "bearer_twice":
            return f"{texts['valid']},{texts['valid']}"
        given = {"no_bearer": None, "garbage": "garbage", "wrong_secret": forged(texts["valid"]), **texts}
        return given[row.bearer]

    def merchant(self, row: Row) -> str | None:
        """Return the merchant that the request names."""
        own = OWNER.get(row.state, "acme")
        return {"unnamed": None, "own": own, "other": "globex"}[row.merchant]

    def path(self, asked: Environment, row: Row) -> tuple[str, str]:
        """Return the method, and the path below the base URL with the query that exposes a key, if any."""
        method, path = self._line(asked, row)
        if row.state in IN_URL:
            good = self.keys[asked, row.kind, "active"].text
            path = f"{path}?key={escaped(good) if row.state == 'in_url_escaped' else good}"
        return method, path

    def _line(self, asked: Environment, row: Row) -> tuple[str, str]:
        special = {"(unknown)": ("GET", "/nowhere/at-all"), "(other_method)": ("PUT", "/merchants/orders")}
        if row.endpoint in special:
            return special[row.endpoint]
        endpoint = endpoint_named(row.endpoint)
        tokens = self.tokens[asked]
        variables = {
            "order_token": tokens.order,
            "customer_id": "cust-2",
            "token_id": tokens.ids["valid"],
            "merchant": self.merchant(row) or "acme",
        }
        segments = (variables[each[1:-1]] if each.startswith("<") else each for each in endpoint.segments)
        return endpoint.method, "/" + "/".join(segments)


def other(environment: Environment) -> Environment:
    return Environment.PRODUCTION if environment is Environment.SANDBOX else Environment.SANDBOX


@cache
def endpoint_named(name: str) -> Endpoint:
    found = BUILT_IN.with_added(ADDED).find(name)
    assert isinstance(found, Endpoint), name
    return found


def make_rows() -> Rows:
    """Make all rows in both environments, with account limits that no test reaches."""
    for merchant_id in ("acme", "globex", *OWNER.values()):
        make_merchant(merchant_id)
        for environment in Environment:
            row = account(merchant_id, environment)
            with recorded(grant(HOST, P.MERCHANTS_WRITE, row), P.MERCHANTS_WRITE, "test.unlimited", account=row):
                row.compare_and_swap(limit_count=1_000_000, limit_seconds=1)
    for endpoint in ADDED:
        draft = EndpointDraft(
            endpoint.name,
            endpoint.method,
            endpoint.path,
            endpoint.credentials,
            endpoint.bearer,
            merchant_from=str(endpoint.merchant_from or ""),
            store_from=str(endpoint.store_from or ""),
        )
        add_endpoint(_may(P.CATALOG_WRITE), draft)
    keys = {
        (environment, kind.value, state): _make_key(environment, kind, state)
        for environment in Environment
        for kind in KeyKind
        for state in STORED
    }
    suspend_merchant(grant(HOST, P.MERCHANTS_WRITE), account("initech").merchant)
    for environment in Environment:
        suspend_account(_may(P.MERCHANTS_WRITE, account("umbrella", environment)), account("umbrella", environment))
    return Rows(
        keys,
        {environment: _make_tokens(environment, keys) for environment in Environment},
        {
            environment: make_token(P.KEYS_VERIFY, scope=STRING_SCOPE[environment])[1].reveal()
            for environment in Environment
        },
        make_token(P.KEYS_VERIFY, scope=StringScope.ALL)[1].reveal(),
    )


def _may(permission: P, of: Account | None = None) -> Grant:
    return grant(the_operator("admin", Role.KEY_ADMINISTRATOR), permission, of)


def _make_key(environment: Environment, kind: KeyKind, state: str) -> Stored:
    place = account(OWNER.get(state, "acme"), environment)
    long_ago = now() - timedelta(days=40)
    if state in {"expired", "deactivated"}:
        issued, text = issue(place, kind=kind, label=state, expires_in_days=30, at=long_ago)
    else:
        issued, text = issue(place, kind=kind, label=state)
    if state in {"pre_activation", "destroyed"}:
        staged, text = stage_key(grant(WORKER, P.ROTATIONS_ADVANCE, place), issued.credential, expires_in_days=None)
        issued = staged
    key = get_key(issued.key_id)
    assert key is not None
    _bring(key, state, place)
    assert state != "expired" or key.state == KeyState.ACTIVE, "no job has noticed the expiry"
    return Stored(key.key_id, text.reveal())


def _bring(key: Key, state: str, place: Account) -> None:
    """Change the key to that state."""
    if state == "suspended":
        suspend_key(_may(P.KEYS_SUSPEND, place), key)
    elif state == "deactivated":
        expire_key(grant(WORKER, P.ROTATIONS_ADVANCE, place), key)
    elif state == "revoked":
        revoke_key(_may(P.KEYS_REVOKE, place), key, RevocationReason.SUPERSEDED)
    elif state == "compromised":
        report_compromise(_may(P.KEYS_REPORT_COMPROMISE, place), key)
    elif state == "destroyed":
        discard_key(_may(P.KEYS_REVOKE, place), key)
    elif state == "active_reporting":
        _restrict(key, place, [], OriginHeader.REPORT)
    elif state == "active_from_here":
        _restrict(key, place, [HERE], OriginHeader.REFUSE)
    elif state == "active_from_elsewhere":
        _restrict(key, place, [ELSEWHERE], OriginHeader.REFUSE)


def _restrict(key: Key, place: Account, networks: list[str], origin: OriginHeader) -> None:
    """Restrict the credential; a public key's credential has no setting for browser origins."""
    if key.credential.kind == KeyKind.PRIVATE or networks:
        restrict_credential(_may(P.CREDENTIALS_RESTRICT, place), key.credential, networks, origin)


def _make_tokens(environment: Environment, keys: Mapping[tuple[Environment, str, str], Stored]) -> Tokens:
    holders = {"acme": _holder(keys[environment, "private", "active"].key_id)}
    holders["globex"] = _holder(issue(account("globex", environment))[0].key_id)
    texts, ids = {}, {}
    for word in ("valid", "other_merchant", "expired", "revoked"):
        holder = holders["globex" if word == "other_merchant" else "acme"]
        place, key = account(holder.merchant_id, environment), get_key(holder.key_id)
        assert key is not None
        at = now() - timedelta(hours=1) if word == "expired" else now()
        allowed = grant(holder, P.CUSTOMER_TOKENS_WRITE, place, at=at)
        token, text = issue_customer_token(allowed, place, key, customer_id="cust-1", ttl_seconds=900)
        if word == "revoked":
            revoke_customer_token(allowed, place, token.token_id)
        texts[word], ids[word] = text.reveal(), token.token_id
    place = account("acme", environment)
    allowed = grant(holders["acme"], P.ORDERS_CREATE, place)
    order = create_order(allowed, place, amount_minor=1, currency="EUR", customer_id="cust-1")
    return Tokens(texts, ids, order.order_token)


def _holder(key_id: str) -> KeyHolder:
    key = get_key(key_id)
    assert key is not None
    credential = key.credential
    return KeyHolder(
        key_id,
        credential.credential_id,
        KeyKind(credential.kind),
        credential.environment,
        credential.account.merchant_id,
    )

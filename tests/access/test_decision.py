"""`decide` for requests to endpoints: the order of its rules, and the conditions of a grant."""

from dataclasses import FrozenInstanceError
from datetime import UTC, datetime
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.access.catalog import ENDPOINTS, Bearer, Endpoint, NoMatchingEndpoint
from keyvault.access.customers import Customer, CustomerFault
from keyvault.access.decision import Check, Denial, Grant, decide
from keyvault.access.principals import KeyHolder
from keyvault.access.rules import EndpointRequest, EndpointRule
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode as Code
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.domain.keystring import checksum
from keyvault.domain.networks import parse_network

from .judging import CATALOG, CUSTOMER_TOKEN, NOW, PRODUCTION, RATES, WALLET, Case, code_of, judge, key_string

# The reviewed order of the checks; the first that fails decides. The second `credential_invalid` is the proof.
# Limits come after all of these: tests/services/verification/test_judging.py.
CONTRACT_ORDER = [
    "credential_in_url",
    "credential_ambiguous",
    "credential_missing",
    "credential_invalid",
    "environment_mismatch",
    "credential_invalid (proof)",
    "key_not_active",
    "merchant_mismatch",
    "merchant_suspended",
    "endpoint_unknown",
    "method_not_supported",
    "bearer_not_supported",
    "private_key_in_browser",
    "ip_not_allowed",
    "context_missing",
    "customer_token_missing",
    "customer_token_invalid",
    "customer_token_expired",
    "customer_token_revoked",
]

RIGHT = key_string()
FORGED = RIGHT[:27] + key_string(seed="another")[27:70]
ENDPOINT = {endpoint.name: endpoint for endpoint in CATALOG.endpoints}
OFFICE = (parse_network("192.0.2.0/24"), parse_network("2001:db8::/32"))

# Both checks apply to the same token: one that is expired and revoked is reported as revoked.
NOT_REVOKED: dict[str, object] = {"customer_revoked_at": None}

# What makes each rule fail, by itself.
FAILURES: dict[str, dict[str, object]] = {
    "credential_in_url": {"url": f"/merchants/orders?key={RIGHT}"},
    "credential_ambiguous": {"presented": f"{RIGHT}, {RIGHT}"},
    "credential_missing": {"is_presented": False, "presented": None},
    "credential_invalid": {"presented": RIGHT[:-1]},
    "environment_mismatch": {"presented": key_string(environment=PRODUCTION)},
    "credential_invalid (proof)": {"presented": FORGED + checksum(FORGED)},
    "key_not_active": {"state": KeyState.SUSPENDED},
    "merchant_mismatch": {"named_merchant": "globex"},
    "merchant_suspended": {"merchant_active": False},
    "endpoint_unknown": {"endpoint": NoMatchingEndpoint()},
    "method_not_supported": {"endpoint": ENDPOINT["client.configuration"]},
    "bearer_not_supported": {"endpoint": RATES, "bearer": CUSTOMER_TOKEN},
    "private_key_in_browser": {"has_origin": True},
    "ip_not_allowed": {"networks": OFFICE},
    "context_missing": {"endpoint": WALLET, "store_context": None},
    "customer_token_missing": {"endpoint": WALLET, "bearer": None},
    "customer_token_invalid": {"endpoint": WALLET, "bearer": "x"},
    "customer_token_expired": {"endpoint": WALLET, "bearer": CUSTOMER_TOKEN, "customer_expires_at": NOW, **NOT_REVOKED},
    "customer_token_revoked": {"endpoint": WALLET, "bearer": CUSTOMER_TOKEN, "customer_revoked_at": NOW},
}


def code(name: str) -> str:
    return name.removesuffix(" (proof)")


def pairs() -> list[tuple[str, str]]:
    """Every two rules that one request can fail together, the earlier of the contract first.

    One exception to the order: without a key, the response reports an unknown endpoint first.
    """
    return [
        (earlier, later)
        for at, earlier in enumerate(CONTRACT_ORDER)
        for later in CONTRACT_ORDER[at + 1 :]
        if (earlier, later) != ("credential_missing", "endpoint_unknown")
        and all(FAILURES[later].get(name, value) == value for name, value in FAILURES[earlier].items())
    ]


holders = st.builds(
    KeyHolder,
    key_id=st.just("A" * 16),
    credential_id=st.just("crd_1"),
    kind=st.sampled_from(KeyKind),
    environment=st.sampled_from(Environment),
    merchant_id=st.sampled_from(["acme", "globex"]),
    merchant_active=st.booleans(),
    account_active=st.booleans(),
    reports_origin=st.booleans(),
    networks=st.sampled_from([(), OFFICE]),
)
CUSTOMER = Customer("cust-1", CUSTOMER_TOKEN[11:27], NOW)
REQUESTED: list[Endpoint | NoMatchingEndpoint] = [
    *CATALOG.endpoints,
    NoMatchingEndpoint(),
    NoMatchingEndpoint(("GET", "POST")),
]
rules = st.sampled_from([EndpointRule(each) for each in REQUESTED])
requests = st.builds(
    EndpointRequest,
    named_merchant=st.sampled_from([None, "acme", "globex", ""]),
    has_bearer=st.booleans(),
    has_origin=st.booleans(),
    client_address=st.sampled_from([None, "", "192.0.2.9", "2001:db8::9", "203.0.113.9", "192.0.2.9, 1.1.1.1", "x"]),
    merchant_context=st.sampled_from([None, "", "acme", "globex"]),
    store_context=st.sampled_from([None, "", "store-1"]),
    customer=st.sampled_from([None, CUSTOMER, *CustomerFault]),
)


# --- order ------------------------------------------------------------------------------------------------


def test_order_cases_cover_every_rule_of_the_contract() -> None:
    assert list(FAILURES) == CONTRACT_ORDER
    assert len(pairs()) > 120


def test_decide_good_request_is_allowed() -> None:
    assert isinstance(judge(Case()), Grant)
    assert isinstance(judge(Case(kind=KeyKind.PUBLIC)), Grant)


@pytest.mark.parametrize("name", CONTRACT_ORDER)
def test_decide_request_that_fails_one_rule_gets_its_code(name: str) -> None:
    assert code_of(judge(Case().but(**FAILURES[name]))) == code(name)


@pytest.mark.parametrize(("earlier", "later"), pairs())
def test_decide_request_that_fails_two_rules_gets_the_earlier_code(earlier: str, later: str) -> None:
    """Guarantee: every entry point applies the rules in the order of the contract, so all report the same code."""
    assert code_of(judge(Case().but(**FAILURES[later] | FAILURES[earlier]))) == code(earlier)


# --- what a grant needs -----------------------------------------------------------------------------------


@given(rules, holders, requests)
def test_decide_grants_exactly_the_requests_that_meet_every_condition(
    rule: EndpointRule, holder: KeyHolder, request_: EndpointRequest
) -> None:
    """Guarantee: nothing starts allowed. A grant needs all these conditions, restated here independently."""
    endpoint = rule.endpoint
    fulfilled = (
        isinstance(endpoint, Endpoint)
        and holder.merchant_active
        and holder.account_active
        and request_.named_merchant in {None, holder.merchant_id}
        and request_.merchant_context in {None, holder.merchant_id}
        and holder.kind in endpoint.credentials
        and (not request_.has_bearer or endpoint.bearer is not Bearer.NONE)
        and (request_.has_bearer or endpoint.bearer is not Bearer.REQUIRED)
        and (not request_.has_bearer or request_.customer is CUSTOMER)
        and request_.customer not in {CustomerFault.EXPIRED, CustomerFault.REVOKED}
        and not (request_.has_origin and holder.kind is KeyKind.PRIVATE and not holder.reports_origin)
        and (not holder.networks or request_.client_address in {"192.0.2.9", "2001:db8::9"})
        and (endpoint.merchant_from is None or request_.merchant_context == holder.merchant_id)
        and (endpoint.store_from is None or request_.store_context == "store-1")
    )
    verdict = decide(rule, holder, request_, NOW)
    assert isinstance(verdict, Grant) == fulfilled
    assert isinstance(verdict, Grant | Denial)


@given(rules, holders, requests)
def test_decide_denial_names_the_holder_and_a_reason(
    rule: EndpointRule, holder: KeyHolder, request_: EndpointRequest
) -> None:
    """After proof of the key, the caller learns which key was refused and why."""
    verdict = decide(rule, holder, request_, NOW)
    if isinstance(verdict, Denial):
        assert verdict.holder == holder
        assert verdict.detail.endswith(".")
        assert (verdict.code is Code.METHOD_NOT_ALLOWED) == bool(verdict.allowed_methods)


@given(rules, holders, requests)
def test_decide_detail_reveals_nothing_about_another_merchant(
    rule: EndpointRule, holder: KeyHolder, request_: EndpointRequest
) -> None:
    """The public reason names neither the key's merchant nor the requested one; the internal reason may."""
    verdict = decide(rule, holder, request_, NOW)
    if isinstance(verdict, Denial):
        assert "acme" not in verdict.detail
        assert "globex" not in verdict.detail
        assert "crd_1" not in verdict.detail


@given(rules, holders, requests)
def test_decide_is_a_function_of_its_arguments(
    rule: EndpointRule, holder: KeyHolder, request_: EndpointRequest
) -> None:
    """`decide` reads no state and no clock: the same arguments give the same verdict."""
    assert decide(rule, holder, request_, NOW) == decide(rule, holder, request_, NOW)


def test_grant_names_principal_permission_and_time() -> None:
    verdict = judge(Case())
    assert isinstance(verdict, Grant)
    assert isinstance(verdict.principal, KeyHolder)
    assert verdict.principal.merchant_id == "acme"
    assert verdict.rule == EndpointRule(ENDPOINT["orders.create"])
    assert verdict.at == NOW == datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.mark.parametrize("name", ["principal", "rule", "target", "at"])
def test_grant_cannot_be_changed_afterwards(name: str) -> None:
    """Guarantee: a grant cannot be changed to another principal, permission or target."""
    with pytest.raises(FrozenInstanceError):
        setattr(judge(Case()), name, None)


# --- single rules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["globex", "ACME", "acme ", "", " ", "acme\x00", "acme,globex"])
def test_decide_any_other_merchant_is_a_mismatch(named: str) -> None:
    """Guarantee: a key is valid only for its own merchant; the comparison is exact."""
    assert code_of(judge(Case(named_merchant=named))) == "merchant_mismatch"


@pytest.mark.parametrize(("merchant_active", "account_active"), [(False, True), (True, False), (False, False)])
def test_decide_suspended_merchant_or_account_is_refused(merchant_active: bool, account_active: bool) -> None:
    verdict = judge(Case(merchant_active=merchant_active, account_active=account_active))
    assert code_of(verdict) == "merchant_suspended"


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.name)
def test_decide_public_key_on_a_private_endpoint_is_refused(endpoint: Endpoint) -> None:
    """Guarantee: a public key, which every app contains, permits no server-to-server operation."""
    verdict = judge(Case(kind=KeyKind.PUBLIC, endpoint=endpoint))
    assert code_of(verdict) == ("allowed" if endpoint.name == "client.configuration" else "method_not_supported")


@pytest.mark.parametrize("endpoint", CATALOG.endpoints, ids=lambda endpoint: endpoint.name)
def test_decide_bearer_never_replaces_the_key(endpoint: Endpoint) -> None:
    """Guarantee: a customer token identifies the customer and never replaces the key."""
    with_bearer = Case(endpoint=endpoint, bearer=CUSTOMER_TOKEN)
    assert code_of(judge(with_bearer.but(is_presented=False))) == "credential_missing"
    for kind in set(KeyKind) - endpoint.credentials:
        assert code_of(judge(with_bearer.but(kind=kind))) == "method_not_supported"


def test_decide_endpoint_of_both_kinds_takes_either() -> None:
    for kind in KeyKind:
        assert code_of(judge(Case(kind=kind, endpoint=RATES))) == "allowed"


def test_decide_public_key_with_an_origin_is_allowed() -> None:
    """Public keys are used in browsers."""
    assert code_of(judge(Case(kind=KeyKind.PUBLIC, has_origin=True))) == "allowed"


def test_decide_private_key_with_an_origin_is_allowed_only_where_that_was_set() -> None:
    assert code_of(judge(Case(has_origin=True))) == "private_key_in_browser"
    assert code_of(judge(Case(has_origin=True, reports_origin=True))) == "allowed"


@pytest.mark.parametrize("context", ["globex", "ACME", "acme ", " "])
def test_decide_any_other_merchant_in_context_is_a_mismatch(context: str) -> None:
    """A merchant in the path or a header counts like one that the caller names explicitly."""
    for named in (None, "acme"):
        verdict = judge(Case(endpoint=WALLET, merchant_context=context, named_merchant=named))
        assert code_of(verdict) == "merchant_mismatch"


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("192.0.2.9", "allowed"),
        ("2001:db8::9", "allowed"),
        ("::ffff:192.0.2.9", "allowed"),
        ("192.0.3.1", "ip_not_allowed"),
        ("2001:db9::", "ip_not_allowed"),
        ("::ffff:203.0.113.9", "ip_not_allowed"),
        ("::192.0.2.9", "ip_not_allowed"),
        ("nonsense", "ip_not_allowed"),
        ("", "ip_not_allowed"),
        (None, "ip_not_allowed"),
    ],
)
def test_decide_address_outside_the_list_is_refused(address: str | None, code: str) -> None:
    """If a credential lists networks, an unknown address is refused."""
    assert code_of(judge(Case(networks=OFFICE, client_address=address))) == code
    assert code_of(judge(Case(client_address=address))) == "allowed"


@pytest.mark.parametrize("store", [None, "", " ", "\t"])
def test_decide_blank_context_is_none(store: str | None) -> None:
    """Guarantee: an empty header gives the endpoint no context, however an entry point reads it."""
    assert code_of(judge(Case(endpoint=WALLET, bearer=CUSTOMER_TOKEN, store_context=store))) == "context_missing"


def test_decide_bearer_without_a_judgement_is_not_accepted() -> None:
    """Guarantee: an entry point that does not judge the customer token denies the request."""
    holder = KeyHolder("A" * 16, "crd_1", KeyKind.PRIVATE, Environment.SANDBOX, "acme")
    verdict = decide(EndpointRule(ENDPOINT["orders.retrieve"]), holder, EndpointRequest(has_bearer=True), NOW)
    assert code_of(verdict) == "customer_token_invalid"


def test_decide_customer_without_a_bearer_is_missing() -> None:
    """A customer without a Bearer does not count."""
    holder = KeyHolder("A" * 16, "crd_1", KeyKind.PRIVATE, Environment.SANDBOX, "acme")
    verdict = decide(EndpointRule(ENDPOINT["customers.me"]), holder, EndpointRequest(customer=CUSTOMER), NOW)
    assert code_of(verdict) == "customer_token_missing"


@pytest.mark.parametrize("miss", [NoMatchingEndpoint(), NoMatchingEndpoint(("GET",))])
def test_request_without_any_key_learns_that_there_is_no_endpoint(miss: NoMatchingEndpoint) -> None:
    """A request without a key for an unknown path gets `endpoint_unknown` or `method_not_allowed`.

    With a key that proves nothing, the order of the table holds.
    """
    expected = "method_not_allowed" if miss.allowed else "endpoint_unknown"
    for bearer in (None, "x", CUSTOMER_TOKEN):
        verdict = judge(Case(endpoint=miss, is_presented=False, bearer=bearer))
        assert code_of(verdict) == expected
        assert isinstance(verdict, Denial)
        assert verdict.holder is None
    assert code_of(judge(Case(endpoint=miss, presented=""))) == "credential_invalid"
    assert code_of(judge(Case(endpoint=miss, presented="x"))) == "credential_invalid"
    assert code_of(judge(Case(endpoint=miss, is_presented=False, bearer="a,b"))) == "credential_ambiguous"


def test_decide_wrong_method_returns_the_allowed_ones() -> None:
    verdict = judge(Case(endpoint=NoMatchingEndpoint(("GET", "DELETE"))))
    assert isinstance(verdict, Denial)
    assert verdict.code is Code.METHOD_NOT_ALLOWED
    assert verdict.allowed_methods == ("GET", "DELETE")
    assert "GET, DELETE" in verdict.detail


# --- the trace --------------------------------------------------------------------------------------------

RULES = CONTRACT_ORDER[CONTRACT_ORDER.index("merchant_mismatch") :]


def test_trace_of_a_grant_names_every_rule_in_order() -> None:
    trace: list[Check] = []
    assert isinstance(judge(Case(), trace), Grant)
    assert trace == [Check(Code(name), True) for name in RULES]


@pytest.mark.parametrize("name", RULES)
def test_trace_of_a_denial_ends_with_the_rule_that_failed(name: str) -> None:
    trace: list[Check] = []
    judge(Case().but(**FAILURES[name]), trace)
    passed = RULES[: RULES.index(name)]
    assert trace == [*(Check(Code(each), True) for each in passed), Check(Code(name), False)]


@given(rules, holders, requests)
def test_trace_changes_no_verdict(rule: EndpointRule, holder: KeyHolder, request_: EndpointRequest) -> None:
    trace: list[Check] = []
    verdict = decide(rule, holder, request_, NOW, trace)
    assert verdict == decide(rule, holder, request_, NOW)
    assert isinstance(verdict, Grant) == all(check.passed for check in trace)


def test_endpoint_rules_every_kind_and_origin_is_settled() -> None:
    """No combination of key, endpoint, Bearer and Origin raises an error."""
    for kind, endpoint, bearer, has_origin in product(KeyKind, CATALOG.endpoints, [None, "x"], [True, False]):
        code_of(judge(Case(kind=kind, endpoint=endpoint, bearer=bearer, has_origin=has_origin)))

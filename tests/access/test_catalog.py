"""The endpoint catalog: it agrees with the contract, and a path is matched or refused, never guessed."""

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.access.catalog import (
    BUILT_IN,
    ENDPOINTS,
    Bearer,
    Catalog,
    ContextPlace,
    ContextSource,
    Endpoint,
    LimiterFailurePolicy,
    NoMatchingEndpoint,
    parse_context,
)
from keyvault.domain.keys import KeyKind

# The reviewed table of the built-in endpoints: name, method, path, credential, Bearer, idempotent by key.
CONTRACT = """
orders.retrieve          GET     /merchants/orders/<order_token>           private  optional  -
orders.create            POST    /merchants/orders                         private  none      idempotent
client.configuration     GET     /client/configuration                     public   none      -
customer_tokens.create   POST    /customers/<customer_id>/access-tokens    private  none      idempotent
customer_tokens.revoke   DELETE  /customers/access-tokens/<token_id>       private  none      -
customers.me             GET     /customers/me                             private  required  -
credentials.acknowledge  POST    /credentials/acknowledge                  private  none      -
credentials.replacement  GET     /credentials/replacement                  private  none      -
credentials.recipient_key PUT    /credentials/recipient-key                private  none      -
credentials.revoke_self  POST    /credentials/revoke-self                  private  none      -
"""

EXAMPLES = {
    "orders.retrieve": "/merchants/orders/ord_1",
    "orders.create": "/merchants/orders",
    "client.configuration": "/client/configuration",
    "customer_tokens.create": "/customers/42/access-tokens",
    "customer_tokens.revoke": "/customers/access-tokens/tok_1",
    "customers.me": "/customers/me",
    "credentials.acknowledge": "/credentials/acknowledge",
    "credentials.replacement": "/credentials/replacement",
    "credentials.recipient_key": "/credentials/recipient-key",
    "credentials.revoke_self": "/credentials/revoke-self",
}
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "", "GET "]

endpoints = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.name)


def name_of(found: Endpoint | NoMatchingEndpoint) -> str | None:
    return found.name if isinstance(found, Endpoint) else None


# --- what is in it ----------------------------------------------------------------------------------------


def test_catalog_is_the_contract_s_table() -> None:
    ours = [
        [
            each.name,
            each.method,
            each.path,
            each.kinds,
            each.bearer,
            "idempotent" if each.idempotent_by_key else "-",
        ]
        for each in ENDPOINTS
    ]
    assert ours == [line.split() for line in CONTRACT.strip().splitlines()]


def test_catalog_names_and_request_lines_are_unique() -> None:
    assert len({each.name for each in ENDPOINTS}) == len(ENDPOINTS)
    assert len({(each.method, re.sub(r"<.*?>", "<>", each.path)) for each in ENDPOINTS}) == len(ENDPOINTS)


def test_catalog_no_request_line_fits_two_endpoints() -> None:
    """The order of the catalog does not matter: no path matches two templates of one method."""

    clashes = [
        (one.name, other.name)
        for one, other in product(ENDPOINTS, ENDPOINTS)
        if one.name < other.name and one.overlaps(other)
    ]
    assert clashes == []


@endpoints
def test_catalog_entry_is_well_formed(endpoint: Endpoint) -> None:
    assert re.fullmatch(r"[a-z_]+\.[a-z_]+", endpoint.name)
    assert re.fullmatch(r"GET|POST|PUT|PATCH|DELETE", endpoint.method)
    assert re.fullmatch(r"(/([a-z-]+|<[a-z_]+>))+", endpoint.path)
    assert endpoint.summary.endswith(".")
    assert endpoint.bearer is Bearer.NONE or endpoint.credentials == {KeyKind.PRIVATE}
    assert endpoint.is_built_in


def test_catalog_only_revocation_of_a_leaked_credential_spends_no_limit() -> None:
    """Guarantee: a finder of a leaked key cannot keep it alive by using up its owner's limit."""
    assert [each.name for each in ENDPOINTS if not each.spends] == ["customer_tokens.revoke", "credentials.revoke_self"]


def test_catalog_loss_of_the_limiter_is_never_unlimited() -> None:
    assert {each.on_limiter_loss for each in ENDPOINTS} == {LimiterFailurePolicy.LOCAL_SHARE}
    assert set(LimiterFailurePolicy) == {LimiterFailurePolicy.LOCAL_SHARE, LimiterFailurePolicy.REFUSE}


@endpoints
def test_endpoint_is_found_by_its_name(endpoint: Endpoint) -> None:
    assert BUILT_IN.find(endpoint.name) is endpoint


@pytest.mark.parametrize(
    "name", ["", "orders", "orders.Retrieve", "orders.retrieve ", "GET", "/merchants/orders", "\x00"]
)
def test_endpoint_of_another_name_is_a_miss(name: str) -> None:
    assert BUILT_IN.find(name) == NoMatchingEndpoint()


# --- matching ---------------------------------------------------------------------------------------------


def test_catalog_every_endpoint_has_an_example() -> None:
    assert list(EXAMPLES) == [endpoint.name for endpoint in ENDPOINTS]


@endpoints
def test_match_finds_the_endpoint_of_its_request_line(endpoint: Endpoint) -> None:
    assert BUILT_IN.match(endpoint.method, EXAMPLES[endpoint.name]) is endpoint


@endpoints
@pytest.mark.parametrize("method", METHODS)
def test_match_known_path_with_another_method_returns_the_allowed_ones(endpoint: Endpoint, method: str) -> None:
    """A wrong method is never accepted as a right one: not in lower case, not HEAD for GET."""
    found = BUILT_IN.match(method, EXAMPLES[endpoint.name])
    if method == endpoint.method:
        assert found is endpoint
    else:
        assert isinstance(found, NoMatchingEndpoint)
        assert endpoint.method in found.allowed
        assert method not in found.allowed


def test_match_path_that_fits_two_templates_allows_both_methods() -> None:
    found = BUILT_IN.match("PUT", "/customers/access-tokens/access-tokens")
    assert isinstance(found, NoMatchingEndpoint)
    assert set(found.allowed) == {"POST", "DELETE"}


@pytest.mark.parametrize(
    "token",
    ["a", "ord_1", "A-Z.~_", "0" * 500, "a@b", "a:b", "a,b", "a=b&c", "a+b", "'a'", "(a)", "a!$*b", "..."],
)
def test_match_variable_takes_any_one_plain_segment(token: str) -> None:
    assert name_of(BUILT_IN.match("GET", f"/merchants/orders/{token}")) == "orders.retrieve"


AMBIGUOUS = [
    "/merchants/orders/a%2fb",
    "/merchants/orders/a%2Fb",
    "/merchants/orders/%2e%2e",
    "/merchants/orders/%61",
    "/merchants/orders/a%",
    "/merchants/orders/a%00",
    "/merchants%2forders/a",
    "/%6derchants/orders/a",
    "/merchants/orders/..",
    "/merchants/orders/.",
    "/merchants/./orders/a",
    "/merchants/x/../orders/a",
    "/../merchants/orders/a",
    "/merchants/orders/a;b",
    "/merchants/orders;v=1/a",
    "/merchants/orders/;",
    "//merchants/orders/a",
    "/merchants//orders/a",
    "/merchants/orders//a",
    "/merchants/orders/a/",
    "/merchants/orders/a//",
    "/merchants/orders/",
    "/merchants\\orders\\a",
    "\\merchants/orders/a",
    "/merchants/orders/a\\..\\b",
    "/merchants/orders/é",
    "/merchants/orders/\u2025",
    "/merchants/orders/a\uff0fb",
    "/merchants/ordërs/a",
    "/merchants/orders/\ud800",
    "/merchants/orders/a b",
    "/merchants/orders/ ",
    "/merchants/orders/a\t",
    "/merchants/orders/a\r\nX: y",
    "/merchants/orders/a\n",
    "/merchants/orders/a\x00",
    "/merchants/orders/a\x7f",
    "/merchants/orders/a#b",
    "/merchants/orders/a/b",
    "/merchants/orders/<order_token>",
    "/merchants/orders/{order_token}",
    '/merchants/orders/a"b',
    "/merchants/orders/a|b",
    "/merchants/orders/a^b`[c]",
    "/Merchants/orders/a",
    "/MERCHANTS/ORDERS/a",
    "merchants/orders/a",
    " /merchants/orders/a",
    "http://host/merchants/orders/a",
    "//host/merchants/orders/a",
    "*",
    "?",
    "",
    "/",
    "//",
    "/..",
    "/merchants",
]


@pytest.mark.parametrize("path", AMBIGUOUS, ids=ascii)
@pytest.mark.parametrize("base_path", ["", "/sandbox"], ids=["bare", "with base"])
def test_match_ambiguous_path_is_a_miss(path: str, base_path: str) -> None:
    """A path that a proxy, a framework and the service could parse differently matches no rule (endpoint_unknown)."""
    assert BUILT_IN.match("GET", base_path + path, base_path) == NoMatchingEndpoint()


@given(st.text(max_size=30), st.sampled_from(sorted(EXAMPLES.values())), st.text(max_size=10))
def test_match_any_text_matches_plain_paths_only(before: str, middle: str, after: str) -> None:
    """Any bytes as a request line cause no fault, and only a plain path of known segments matches."""
    for path in (before, before + middle, middle + after):
        found = BUILT_IN.match("GET", path)
        if isinstance(found, Endpoint):
            route = path.partition("?")[0]
            template = re.sub(r"<.*?>", r"[!$&-.0-:<-~]+", found.path)
            assert re.fullmatch(template, route)
            assert not {"..", ".", ""} & set(route.split("/")[1:])


@pytest.mark.parametrize("query", ["?", "?a=b", "?a=%2f&b=/../;", "?é\\//", "??", "?#"])
def test_match_query_string_makes_no_difference(query: str) -> None:
    """The query does not affect which rule applies."""
    assert name_of(BUILT_IN.match("GET", f"/merchants/orders/a{query}")) == "orders.retrieve"
    assert BUILT_IN.match("GET", f"/merchants/other{query}") == NoMatchingEndpoint()


# --- under a base URL -------------------------------------------------------------------------------------


@endpoints
@pytest.mark.parametrize("base_path", ["/sandbox", "/a/b/c"])
def test_match_path_with_or_without_its_base_path_is_the_same(endpoint: Endpoint, base_path: str) -> None:
    path = EXAMPLES[endpoint.name]
    assert BUILT_IN.match(endpoint.method, base_path + path, base_path) is endpoint
    assert BUILT_IN.match(endpoint.method, path, base_path) is endpoint


@pytest.mark.parametrize(
    "path",
    [
        "/sandbox",
        "/sandbox/",
        "/sandbox/sandbox/customers/me",
        "/sandbox//customers/me",
        "/sandboxcustomers/me",
        "/sandbox-2/customers/me",
        "/Sandbox/customers/me",
        "/production/customers/me",
        "/sandbox/../production/customers/me",
        "/sandbox?/customers/me",
        "/%73andbox/customers/me",
    ],
)
def test_match_path_under_anything_but_its_base_path_is_a_miss(path: str) -> None:
    """A request for one environment is never matched under another's base URL, nor under it twice."""
    assert BUILT_IN.match("GET", path, "/sandbox") == NoMatchingEndpoint()


# --- endpoints that operators add -------------------------------------------------------------------------

REFUND = Endpoint(
    "refunds.create", "POST", "/shops/<shop>/refunds/<id>", frozenset({KeyKind.PRIVATE}), is_built_in=False
)


def test_catalog_with_added_endpoints_finds_them_beside_its_own() -> None:
    catalog = BUILT_IN.with_added([REFUND])
    assert catalog.find("refunds.create") is catalog.match("POST", "/shops/s/refunds/1") is REFUND
    assert catalog.match("GET", "/shops/s/refunds/1") == NoMatchingEndpoint(("POST",))
    assert all(catalog.find(each.name) is each for each in ENDPOINTS)
    assert BUILT_IN.find("refunds.create") == NoMatchingEndpoint()
    assert Catalog(()).match("GET", "/customers/me") == NoMatchingEndpoint()


@pytest.mark.parametrize(
    ("path", "shop", "order"),
    [
        ("/shops/s-1/refunds/7", "s-1", "7"),
        ("/sandbox/shops/a/refunds/b?shop=c", "a", "b"),
        ("/shops/x/refunds/y", "x", "y"),
    ],
)
def test_variables_are_read_from_the_path_alone(path: str, shop: str, order: str) -> None:
    """Variables come from the path, with or without a base path, and never from the query."""
    assert REFUND.variables(path) == {"shop": shop, "id": order}


@pytest.mark.parametrize(
    ("one", "other", "overlaps"),
    [
        ("/a/<b>", "/a/c", True),
        ("/a/<b>", "/<a>/c", True),
        ("/a/b", "/a/b", True),
        ("/a/b", "/a/c", False),
        ("/a/<b>", "/a/<b>/c", False),
        ("/a/<b>", "/A/<b>", False),
    ],
)
def test_endpoints_overlap_when_one_request_could_be_for_both(one: str, other: str, overlaps: bool) -> None:
    kinds = frozenset(KeyKind)
    first, second = Endpoint("a.a", "GET", one, kinds), Endpoint("a.b", "GET", other, kinds)
    assert first.overlaps(second) is second.overlaps(first) is overlaps
    assert not first.overlaps(Endpoint("a.c", "POST", one, kinds))


def test_endpoint_kinds_are_formatted_for_people() -> None:
    assert [
        Endpoint("a.a", "GET", "/a", kinds).kinds for kinds in (frozenset(KeyKind), frozenset({KeyKind.PUBLIC}))
    ] == [
        "public or private",
        "public",
    ]


# --- where context is read from ---------------------------------------------------------------------------


def test_context_is_parsed_and_written_alike() -> None:
    assert parse_context("") is None
    assert parse_context("path:shop") == ContextSource(ContextPlace.PATH, "shop")
    assert str(parse_context("header:X-Store-Id")) == "header:X-Store-Id"


@pytest.mark.parametrize("text", ["shop", "path:", ":shop", "query:shop", "PATH:shop", " path:shop", "header"])
def test_context_with_an_invalid_source_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="path:<variable> or header:<name>"):
        parse_context(text)


@pytest.mark.parametrize(
    ("value", "read"),
    [("s-1", "s-1"), (" s-1 ", "s-1"), ("", None), ("  ", None), ("a,b", None), (",", None), (None, None)],
)
def test_context_that_is_repeated_or_blank_is_none(value: str | None, read: str | None) -> None:
    """A value that a server joined from two headers is neither of the two."""
    headers = {} if value is None else {"X-Store-Id": value}
    assert ContextSource(ContextPlace.HEADER, "X-Store-Id").read({"X-Store-Id": "no"}, headers) == read
    variables = {} if value is None else {"shop": value}
    assert ContextSource(ContextPlace.PATH, "shop").read(variables, {"shop": "no"}) == read

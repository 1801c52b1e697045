"""Endpoints that operators may add to the catalog: every entry point reads them alike, and every fault is reported."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.access.catalog import BUILT_IN, Bearer, Catalog, Endpoint, is_canonical_path
from keyvault.access.endpoint_description import authorization_panel
from keyvault.access.endpoints import RESERVED, EndpointDraft, read_endpoint
from keyvault.domain.keys import KeyKind
from tests.domain.minting import mint

PRIVATE = frozenset({KeyKind.PRIVATE})
GOOD = EndpointDraft("refunds.create", "POST", "/refunds/<refund_id>", PRIVATE)


def read(draft: EndpointDraft = GOOD, others: tuple[Endpoint, ...] = BUILT_IN.endpoints, **changed: Any) -> Any:
    return read_endpoint(replace(draft, **changed), others, frozenset({"live"}))


def pointers(**changed: Any) -> list[str]:
    """Return the fields with faults; none for a valid endpoint."""
    found = read(**changed)
    return [] if isinstance(found, Endpoint) else [fault.pointer for fault in found]


def test_endpoint_draft_without_faults_becomes_an_endpoint() -> None:
    found = read(merchant_from="path:refund_id", store_from="header:X-Store-Id", limit_count=5, limit_seconds=60)
    assert isinstance(found, Endpoint)
    assert (found.name, found.method, found.path, found.kinds) == (
        "refunds.create",
        "POST",
        "/refunds/<refund_id>",
        "private",
    )
    assert (str(found.merchant_from), str(found.store_from)) == ("path:refund_id", "header:X-Store-Id")
    assert found.limit is not None
    assert (found.limit.count, found.limit.seconds, found.is_built_in) == (5, 60, False)


@pytest.mark.parametrize(
    "name",
    ["", "refunds", "Refunds.create", "refunds.", ".create", "a..b", "1a.b", "a.1b", "a.b" * 50, "a.b\n"],
)
def test_endpoint_name_that_is_malformed_is_refused(name: str) -> None:
    assert "/name" in pointers(name=name)


@pytest.mark.parametrize("method", ["", "get", "OPTIONS", "TRACE", "CONNECT", "POST "])
def test_endpoint_method_outside_the_supported_ones_is_refused(method: str) -> None:
    assert pointers(method=method) == ["/method"]


@pytest.mark.parametrize(
    "path",
    [
        "",
        "refunds",
        "/",
        "/refunds/",
        "//refunds",
        "/refunds//x",
        "/refunds/../x",
        "/refunds/.",
        "/refunds/%2f",
        "/refunds;v=1",
        "/refunds?x=1",
        "/refunds#x",
        "/refünds",
        "/refunds/a b",
        "/refunds/<Id>",
        "/refunds/<1>",
        "/refunds/<>",
        "/refunds/x<id>",
        "/refunds/<a>/<a>",
        "/<anything>/refunds",
        "/refunds/" + "a" * 300,
        "/refunds" + "/a" * 20,
        "/live/refunds",
        "/LIVE/refunds",
        *(f"/{word}" for word in sorted(RESERVED)),
    ],
)
def test_endpoint_path_that_is_ambiguous_is_refused(path: str) -> None:
    """Guarantee: every entry point reads a path template alike, and none can collide with the service's own paths."""
    assert "/path" in pointers(path=path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/merchants/orders/<order_token>"),
        ("GET", "/merchants/<thing>/<token>"),
        ("GET", "/customers/<customer_id>"),
        ("DELETE", "/customers/<one>/<two>"),
    ],
)
def test_endpoint_that_overlaps_another_is_refused(method: str, path: str) -> None:
    """No request line matches two endpoints: an added rule cannot take over the requests of a built-in one."""
    assert pointers(method=method, path=path) == ["/path"]


def test_endpoint_of_another_method_or_length_does_not_overlap() -> None:
    assert pointers(method="PATCH", path="/merchants/orders/<order_token>") == []
    assert pointers(method="GET", path="/merchants/orders/<order_token>/lines") == []


def test_endpoint_name_of_a_built_in_one_is_refused() -> None:
    assert pointers(name="orders.retrieve") == ["/name"]


def test_endpoint_without_a_kind_of_key_is_refused() -> None:
    """An omitted field never opens an endpoint."""
    assert pointers(credentials=frozenset()) == ["/credentials"]


@pytest.mark.parametrize("bearer", [Bearer.OPTIONAL, Bearer.REQUIRED])
@pytest.mark.parametrize("kinds", [frozenset({KeyKind.PUBLIC}), frozenset(KeyKind)])
def test_endpoint_with_a_bearer_beside_a_public_key_is_refused(bearer: Bearer, kinds: frozenset[KeyKind]) -> None:
    """A customer access token is never accepted without the private key."""
    assert pointers(bearer=bearer, credentials=kinds) == ["/bearer"]


@pytest.mark.parametrize(
    "source",
    [
        "x",
        "path:",
        "query:merchant",
        "path:merchant",
        "header:",
        "header:X Merchant",
        "header:X_Merchant",
        "header:X-Api-Key",
        "header:authorization",
        "header:X-SERVICE-TOKEN",
        "header:cookie",
        "header:Host",
        "header:" + "a" * 65,
    ],
)
@pytest.mark.parametrize("field", ["merchant_from", "store_from"])
def test_endpoint_context_that_cannot_be_read_is_refused(field: str, source: str) -> None:
    """A context comes from a variable of the path, or from a header that is used for nothing else."""
    assert pointers(**{field: source}) == [f"/{field}"]


@pytest.mark.parametrize(
    ("count", "seconds", "at_fault"),
    [(5, None, "/limit_seconds"), (None, 5, "/limit_count"), (0, 1, "/limit_count"), (1, 86_401, "/limit_count")],
)
def test_endpoint_limit_out_of_bounds_is_refused(count: int | None, seconds: int | None, at_fault: str) -> None:
    assert pointers(limit_count=count, limit_seconds=seconds) == [at_fault]


def test_endpoint_summary_with_a_key_string_is_refused() -> None:
    """A summary is public, so it may contain no secret."""
    assert pointers(summary=f"for {mint()}") == ["/summary"]


def test_endpoint_with_many_faults_lists_them_all() -> None:
    found = pointers(name="x", method="x", path="x", credentials=frozenset(), merchant_from="x", limit_count=0)
    assert set(found) == {"/name", "/method", "/path", "/credentials", "/merchant_from", "/limit_seconds"}


SEGMENT = st.text(st.sampled_from("aB0.%;<>/_-~é \n?#"), max_size=6)


@given(st.lists(SEGMENT, min_size=1, max_size=4).map(lambda parts: "/refunds/" + "/".join(parts)))
def test_endpoint_that_is_read_is_matched_by_canonical_paths_only(path: str) -> None:
    """For every valid template, a request with its variables filled in is canonical and matches it."""
    found = read(path=path)
    if not isinstance(found, Endpoint):
        return
    filled = re.sub(r"<[^>]*>", "x", found.path)
    assert is_canonical_path(filled)
    assert Catalog((found,)).match("POST", filled) is found


@pytest.mark.parametrize("endpoint", BUILT_IN.endpoints, ids=lambda endpoint: endpoint.name)
def test_endpoint_description_agrees_with_the_catalog(endpoint: Endpoint) -> None:
    panel = dict(authorization_panel(endpoint))
    assert (panel["Method"], panel["Path"]) == (endpoint.method, endpoint.path)
    assert panel["X-Api-Key"].startswith(endpoint.kinds)
    assert panel["Bearer"].startswith({"none": "not", "optional": "optional", "required": "required"}[endpoint.bearer])
    assert (panel["Idempotency-Key"] == "required") is endpoint.idempotent_by_key


def test_endpoint_description_has_the_same_labels_for_every_endpoint() -> None:
    """Every panel has the same labels, so that a property that an endpoint lacks is stated, too."""
    added = read(merchant_from="path:refund_id", limit_count=5, limit_seconds=1)
    labels = [tuple(label for label, _ in authorization_panel(each)) for each in (*BUILT_IN.endpoints, added)]
    assert len(set(labels)) == 1
    assert dict(authorization_panel(added))["Context"] == "merchant from path:refund_id"
    assert dict(authorization_panel(added))["Limit"] == "5 per 1 s, in addition to the account's"

"""The fast parser, the full parser and the documented schema of verify requests agree on every body."""

import json
import re
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from jsonschema import Draft202012Validator, FormatChecker, ValidationError  # type: ignore[import-untyped]  # no stubs
from jsonschema.validators import extend  # type: ignore[import-untyped]  # no stubs
from msgspec import UNSET

from keyvault.api.openapi_components import COMPONENTS, Schema
from keyvault.api.schemas import VERIFY_BATCH_REQUEST_BODY, VERIFY_REQUEST_BODY
from keyvault.domain.errors import RequestInvalidError
from keyvault.hotpath.messages.requests import (
    MAX_BATCH_REQUESTS,
    VerifyRequest,
    decode_batch,
    decode_plain_verify,
    decode_verify,
    read_batch,
    read_verify,
)

texts = st.text(max_size=5) | st.sampled_from(["", " ", "a\x00", "\ud800", "kv_prv", "x" * 65, "x" * 129, "x" * 8193])
odd: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([1.0, 1e300, 10**30, [], {}, ["a"]]) | texts
)
usual: dict[str, st.SearchStrategy[Any]] = {
    "key": texts | st.none(),
    "environment": st.sampled_from(["sandbox", "production"]),
    "endpoint": st.sampled_from(["orders.create", "x" * 100, "x" * 101]),
    "method": st.sampled_from(["GET", "POST", "get", "A" * 16, "A" * 17, "GET\n"]),
    "path": st.sampled_from(["/a", "/" * 8192, "/" * 8193, "/é"]),
    "merchant": st.sampled_from(["acme", "x" * 64, "x" * 65, None]),
    "store": st.sampled_from(["store", "x" * 128, "x" * 129, None]),
    "customer_token": texts | st.none(),
    "client_ip": st.sampled_from(["192.0.2.1", "2001:DB8::1", "::ffff:192.0.2.1", "fe80::1%eth0", "x", "", None]),
    "origin": st.sampled_from(["https://shop.example", "", "x" * 500, "x" * 501, None]),
    "user_agent": st.sampled_from(["shop/1", "", "x" * 8192, "x" * 8193, None]),
    "cost": st.sampled_from([1, 3, 1_000_000, 1_000_001, 0, 1.0, 2.5, 1e6, True]),
    "dry_run": st.booleans(),
}
NEEDED = {"key", "environment"}


@st.composite
def questions(draw: st.DrawFn) -> dict[str, Any]:
    """Draw requests that are mostly valid, with occasional faults."""
    by = draw(
        st.sampled_from([("endpoint",), ("endpoint",), ("method", "path"), ("method",), (), ("endpoint", "path")])
    )
    others = [name for name in usual if name not in {"endpoint", "method", "path", *NEEDED}]
    names = [*NEEDED, *by, *draw(st.lists(st.sampled_from(others), max_size=3, unique=True))]
    asked = {name: draw(usual[name]) for name in names}
    for name in draw(st.lists(st.sampled_from([*usual, "unknown", "a/b~c"]), max_size=1)):
        asked[name] = draw(odd)
    for name in draw(st.lists(st.sampled_from(sorted(NEEDED)), max_size=1)) if draw(st.booleans()) else ():
        asked.pop(name, None)
    return asked


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def raw(value: Any) -> bytes:
    """Return the JSON without escapes, as most clients send it."""
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


def wholly(body: bytes) -> VerifyRequest | set[str]:
    """Return the parsed request, or the pointers of its faults."""
    try:
        return read_verify(body)
    except RequestInvalidError as error:
        return {fault.pointer for fault in error.faults}


@given(questions(), st.booleans())
def test_requests_of_the_fast_parser_equal_those_of_the_full_parser(asked: dict[str, Any], is_raw: bool) -> None:
    """Guarantee: the fast parser accepts nothing that the full parser refuses, and reads nothing differently."""
    body = raw(asked) if is_raw else encoded(asked)
    quick = decode_verify(body)
    assert quick is None or quick == wholly(body)


@given(questions(), st.data())
def test_requests_of_any_bytes_are_read_alike(asked: dict[str, Any], data: st.DataObject) -> None:
    """A byte too many, too few, or another one; a name twice; what is behind the end."""
    body = bytearray(raw(asked))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        end = at + data.draw(st.integers(0, 12))
        body[at:end] = data.draw(
            st.binary(max_size=2)
            | st.sampled_from([b'"', b',"cost":1', b',"key":"x"', b"\\", b" ", b"\xed\xa0\x80", b"{"])
        )
    quick = decode_verify(bytes(body))
    assert quick is None or quick == wholly(bytes(body))


@pytest.mark.parametrize(
    "body",
    [
        b'{"key":"a","key":"b","environment":"sandbox","endpoint":"x"}',
        b'{"key":"a","environment":"sandbox","endpoint":"x","cost":1,"cost":2}',
        b'{"key":"a","environment":"sandbox","endpoint":"x","cost":1.5}',
        b'{"key":"a","environment":"sandbox","endpoint":"x","cost":1e999}',
        b'{"key":"a","environment":"sandbox","endpoint":"x","dry_run":true,"dry_run":false}',
        b'{"key":"a","environment":"sandbox","endpoint":"x"} {}',
        b'\xef\xbb\xbf{"key":"a","environment":"sandbox","endpoint":"x"}',
        b'{"key":"\xff","environment":"sandbox","endpoint":"x"}',
        b'{"key":"\xed\xa0\x80","environment":"sandbox","endpoint":"x"}',
        b'{"key":"a","environment":"sandbox","endpoint":"x","unknown":null}',
        b'{"key":"a","environment":"sandbox","endpoint":"x","cost":NaN}',
        b'[{"key":"a","environment":"sandbox","endpoint":"x"}]',
        b"[" * 100_000,
        b"",
    ],
)
def test_requests_that_are_ambiguous_are_refused(body: bytes) -> None:
    assert decode_verify(body) is None
    assert isinstance(wholly(body), set)


@pytest.mark.parametrize("cost", [b"2", b"2.0", b"2e0", b"20e-1"])
def test_requests_with_a_whole_cost_in_any_notation_have_the_same_cost(cost: bytes) -> None:
    request = read_verify(b'{"key":"a","environment":"sandbox","endpoint":"x","cost":%s}' % cost)
    assert (request.cost, type(request.cost)) == (2, int)


@given(questions())
@example({"key": None, "environment": "sandbox", "endpoint": "x"})
def test_requests_that_are_read_are_those_that_the_openapi_page_describes(asked: dict[str, Any]) -> None:
    """The page accepts and refuses the same fields as the parsers."""
    found = wholly(encoded(asked))
    assert documented_faults(asked) == (set() if isinstance(found, VerifyRequest) else found)


def documented_faults(asked: dict[str, Any]) -> set[str]:
    """Return the pointers of the faults by the page's schema: unknown fields, else fields, else the combination."""
    faults: dict[str, set[str]] = {"unknown": set(), "field": set(), "combination": set()}
    for error in documented(VERIFY_REQUEST_BODY).iter_errors(asked):
        if error.validator == "additionalProperties":
            faults["unknown"] |= {f"/{_escaped(name)}" for name in asked.keys() - error.schema["properties"].keys()}
        elif error.validator == "required":
            faults["field"] |= {f"/{name}" for name in NEEDED - asked.keys()}
        elif error.path:
            faults["field"].add(f"/{error.path[0]}")
        else:
            assert error.validator == "oneOf"
            faults["combination"].add("")
    # A JSON schema cannot refuse a lone surrogate.
    texts = {name: value for name, value in asked.items() if isinstance(value, str) and name not in VERBATIM}
    faults["field"] |= {f"/{name}" for name, value in texts.items() if re.search("[\ud800-\udfff]", value)}
    return faults["unknown"] or faults["field"] or faults["combination"]


VERBATIM = {"key", "customer_token"}
"""Fields that the verdict judges, whatever they are."""


def documented(schema: Schema) -> Draft202012Validator:
    """Return a validator of the page's schema that reads a pattern as ECMAScript does."""
    exact = extend(Draft202012Validator, {"pattern": _check_pattern})
    return exact({**schema, "components": {"schemas": COMPONENTS}}, format_checker=FormatChecker())


def _check_pattern(_: Any, pattern: str, text: Any, __: Any) -> Iterator[ValidationError]:
    # In Python `$` also matches before a final line feed.
    if isinstance(text, str) and re.search(re.sub(r"\$$", r"\\Z", pattern), text) is None:
        yield ValidationError(f"{text!r} does not match {pattern!r}")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


@given(st.lists(questions(), max_size=4))
def test_requests_of_a_batch_are_read_as_each_of_them(several: list[dict[str, Any]]) -> None:
    quick = decode_batch(raw({"requests": several}))
    body = encoded({"requests": several})
    each = [wholly(encoded(asked)) for asked in several]
    is_good = bool(each) and all(isinstance(one, VerifyRequest) for one in each)
    assert quick is None or (is_good and quick == each)
    if is_good:
        assert read_batch(body) == each
    else:
        with pytest.raises(RequestInvalidError) as caught:
            read_batch(body)
        pointers = {fault.pointer for fault in caught.value.faults}
        expected = {
            f"/requests/{number}{pointer}" for number, one in enumerate(each) if isinstance(one, set) for pointer in one
        }
        assert pointers == (expected or {"/requests"})


def test_requests_of_a_batch_are_as_many_as_documented() -> None:
    one = {"key": None, "environment": "sandbox", "endpoint": "x"}
    for many in (1, MAX_BATCH_REQUESTS, MAX_BATCH_REQUESTS + 1):
        body = {"requests": [one] * many}
        is_taken = many <= MAX_BATCH_REQUESTS
        assert documented(VERIFY_BATCH_REQUEST_BODY).is_valid(body) is is_taken
        assert (decode_batch(raw(body)) is not None) is is_taken


@given(questions(), st.booleans(), st.data())
def test_requests_read_as_plain_have_only_plain_fields(
    asked: dict[str, Any], is_whole: bool, data: st.DataObject
) -> None:
    """Guarantee: a request that is answered without a check of its other fields has none, whatever its spacing."""
    if is_whole:
        asked = {"key": "a", "environment": "sandbox", "endpoint": "x", "client_ip": "192.0.2.1", **asked}
    text = raw(asked).decode(errors="surrogatepass")
    spaced = text.replace('":', data.draw(st.sampled_from(['":', '" :', '"\n:']))).replace(", ", " , ")
    body = spaced.encode(errors="surrogatepass")
    plain = decode_plain_verify(body)
    assert plain is None or plain == wholly(body)
    if plain is not None:
        others = set(usual) - {"key", "environment", "endpoint", "client_ip", "user_agent"}
        assert all(getattr(plain, name) is UNSET for name in others)


@pytest.mark.parametrize("colon", [":", " :", "\t:", "\n :"])
@pytest.mark.parametrize(
    "more",
    ['"merchant"%s"globex"', '"dry_run"%strue', '"cost"%s9', '"key"%s"b"', '"customer_token"%s"x"', '"store"%snull'],
)
def test_requests_with_another_field_are_not_plain(more: str, colon: str) -> None:
    """Regression: a blank before the colon hid a field from the count of names."""
    start = '{"key":"a","environment":"sandbox","endpoint":"x"'
    for before in (start, f'{start},"client_ip":"192.0.2.1"'):
        assert decode_plain_verify(f"{before},{more % colon}}}".encode()) is None
    assert decode_plain_verify(b'{"key":"a","environment" : "sandbox", "endpoint":"x"}') is not None


def test_requests_name_of_a_field_that_is_a_key_is_not_repeated() -> None:
    """Guarantee: no answer repeats a secret, in whatever place it was sent."""
    text = "kv_prv_sbx_" + "A" * 65
    with pytest.raises(RequestInvalidError) as refused:
        read_verify(json.dumps({"key": None, "environment": "sandbox", "endpoint": "a.b", text: 1}).encode())
    assert all("A" * 43 not in fault.pointer for fault in refused.value.faults)

"""Canonical bytes of a value: equal values give equal bytes, and ambiguous values are refused."""

import hashlib
import json
import random
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.canonical import JsonValue, canonical_bytes, canonical_digest
from keyvault.domain.plaintext import Plaintext

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | texts
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


def shuffled(value: Any, chance: random.Random) -> Any:
    """Return the same value with the members of its objects in another order."""
    if isinstance(value, dict):
        members = [(key, shuffled(member, chance)) for key, member in value.items()]
        chance.shuffle(members)
        return dict(members)
    return [shuffled(member, chance) for member in value] if isinstance(value, list) else value


def exact(value: Any) -> Any:
    """Return the value with its types, because True equals 1 in Python."""
    if isinstance(value, dict):
        return {key: exact(member) for key, member in value.items()}
    return [exact(member) for member in value] if isinstance(value, list) else (type(value).__name__, value)


@given(values)
def test_canonical_any_value_round_trips(value: JsonValue) -> None:
    assert exact(json.loads(canonical_bytes(value))) == exact(value)


@given(values, st.randoms(use_true_random=False))
def test_canonical_order_of_members_makes_no_difference(value: JsonValue, chance: random.Random) -> None:
    """An approval's digest does not depend on the order of a dictionary."""
    assert canonical_bytes(shuffled(value, chance)) == canonical_bytes(value)


@given(values, values)
def test_canonical_different_values_give_different_bytes(value: JsonValue, other: JsonValue) -> None:
    """No two different requests have the same digest."""
    assert (canonical_bytes(value) == canonical_bytes(other)) == (exact(value) == exact(other))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, b"null"),
        (True, b"true"),
        (1, b"1"),
        (-(2**70), b"-1180591620717411303424"),
        ('é\n"\\/\u2028', '"é\\n\\"\\\\/\u2028"'.encode()),
        ({"b": 1, "a": {"d": [1, "2", None], "c": False}}, b'{"a":{"c":false,"d":[1,"2",null]},"b":1}'),
        ({"": 0, "A": 0, "a": 0, "é": 0}, '{"":0,"A":0,"a":0,"é":0}'.encode()),
        ([], b"[]"),
        ({}, b"{}"),
        ((1, 2), b"[1,2]"),
    ],
    ids=repr,
)
def test_canonical_known_value_gives_known_bytes(value: JsonValue, expected: bytes) -> None:
    """Stored digests stay valid: sorted members, no white space, UTF-8, minimal escapes."""
    assert canonical_bytes(value) == expected
    assert canonical_digest(value) == hashlib.sha256(expected).hexdigest()


AMBIGUOUS: list[Any] = [
    1.0,
    0.1,
    float("nan"),
    float("inf"),
    Decimal(1),
    b"bytes",
    bytearray(b"bytes"),
    {1, 2},
    frozenset({1}),
    datetime(2026, 11, 21, tzinfo=UTC),
    object(),
    Plaintext("secret"),
    {1: "a"},
    {None: "a"},
    {True: "a"},
    {1.5: "a"},
    {("a",): "a"},
    {b"a": "a"},
    range(3),
    (number for number in (1, 2)),
]


@pytest.mark.parametrize("value", AMBIGUOUS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("depth", ["bare", "in a list", "in an object", "deep"])
def test_canonical_anything_ambiguous_is_refused(value: Any, depth: str) -> None:
    """What could be written in two ways, or not at all, is never guessed at, however deep it lies."""
    wrapped = {"bare": value, "in a list": [value], "in an object": {"a": value}, "deep": {"a": [1, {"b": [value]}]}}
    with pytest.raises(TypeError):
        canonical_bytes(wrapped[depth])


@pytest.mark.parametrize("value", ["\ud800", ["a\udfff"], {"\ud800": 1}])
def test_canonical_lone_surrogate_is_refused(value: JsonValue) -> None:
    """It has no UTF-8, so that it has no bytes to sign."""
    with pytest.raises(UnicodeEncodeError):
        canonical_bytes(value)


@given(st.dictionaries(texts, scalars, min_size=1, max_size=5), st.data())
def test_canonical_digest_changes_with_any_member(value: dict[str, Any], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(value)))
    other = data.draw(scalars.filter(lambda found: exact(found) != exact(value[key])))
    changed: Mapping[str, Any] = {**value, key: other}
    assert canonical_digest(changed) != canonical_digest(value)
    assert canonical_digest({name: member for name, member in value.items() if name != key}) != canonical_digest(value)

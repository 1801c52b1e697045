"""Every verdict on a request, as a reviewed file: `verdicts.txt`.

`KEYVAULT_TEST_REWRITE=verdicts pytest tests/access/test_verdicts.py` rewrites it; review the diff.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest

from keyvault.access.catalog import Bearer, NoMatchingEndpoint
from keyvault.domain.errors import ErrorCode
from keyvault.domain.keys import KeyKind, KeyState, RetirementReason
from keyvault.domain.keystring import STRING_KIND, StringKind, StringScope, checksum
from keyvault.domain.networks import parse_network
from tests.domain.minting import mint

from .folding import Row, folded
from .judging import ADDED, CATALOG, CUSTOMER_TOKEN, NOW, PRODUCTION, Case, code_of, judge, key_string

GOLDEN = Path(__file__).with_name("verdicts.txt")

HEADING = """\
# Every verdict on a request. `*`: any value; `a|b`: one of these; `!a|b`: any but these. test_verdicts.py generates
# this file, and defines its words. Review a change of this file as a diff.
"""
KEYS_HEADING = """
# --- 1. Every key, in the best and the worst circumstances: the rules up to the key's state depend on nothing else.
# verdict               kind     key
"""
REQUESTS_HEADING = """
# --- 2. A good key, in every circumstance. Operators add the endpoints from payouts.list on.
# verdict               kind     merchant  standing  endpoint  origin  address  context  bearer
"""

RIGHT = {kind: key_string(kind) for kind in KeyKind}


def forged(text: str) -> str:
    """Return a string with the same id, another secret and a correct checksum."""
    head = text[:27] + key_string(seed="another")[27:70]
    return head + checksum(head)


Changes = dict[str, object]
Column = Mapping[str, Changes]


def keys_of(kind: KeyKind) -> dict[str, Changes]:
    """Return the changes of a good case to the presented and the stored key."""
    expired, revoked = RetirementReason.EXPIRED, RetirementReason.REVOKED
    return {
        "no_key": {"is_presented": False},
        "empty": {"presented": ""},
        "comma": {"presented": f"{RIGHT[kind]},{RIGHT[kind]}"},
        "malformed": {"presented": RIGHT[kind][:-1]},
        "non_ascii": {"presented": RIGHT[kind][:-1] + "é"},
        "wrong_checksum": {"presented": RIGHT[kind][:-6] + "000000"},
        "other_prefix": {"presented": mint(STRING_KIND[kind], key_prefix="other")},
        "customer_token": {"presented": mint(StringKind.CUSTOMER_TOKEN)},
        "service_token": {"presented": mint(StringKind.SERVICE_TOKEN, StringScope.ALL)},
        "unknown_id": {"is_stored": False},
        "wrong_secret": {"presented": forged(RIGHT[kind])},
        "other_environment": {"presented": key_string(kind, PRODUCTION)},
        "pre_activation": {"state": KeyState.PRE_ACTIVATION},
        "active": {},
        "active_expired": {"expires_at": NOW},
        "suspended": {"state": KeyState.SUSPENDED},
        "suspended_expired": {"state": KeyState.SUSPENDED, "expires_at": NOW - timedelta(days=1)},
        "deactivated_expired": {"state": KeyState.DEACTIVATED, "retirement": expired, "expires_at": NOW},
        "deactivated_revoked": {"state": KeyState.DEACTIVATED, "retirement": revoked},
        "compromised": {"state": KeyState.COMPROMISED},
        "compromised_expired": {"state": KeyState.COMPROMISED, "retirement": expired, "expires_at": NOW},
        "destroyed": {"state": KeyState.DESTROYED},
        "destroyed_expired": {"state": KeyState.DESTROYED, "retirement": expired, "expires_at": NOW},
    }


# `named`: in the verification request; `in_context`: where an added endpoint reads it.
MERCHANTS: Column = {
    "unnamed": {},
    "named": {"named_merchant": "acme"},
    "other_named": {"named_merchant": "globex"},
    "other_in_context": {"named_merchant": "acme", "merchant_context": "globex"},
}
STANDINGS: Column = {
    "in_good_standing": {},
    "merchant_suspended": {"merchant_active": False},
    "account_suspended": {"account_active": False},
}
REQUESTED: Column = {
    **{endpoint.name: {"endpoint": endpoint} for endpoint in CATALOG.endpoints},
    "(unknown)": {"endpoint": NoMatchingEndpoint()},
    "(other_method)": {"endpoint": NoMatchingEndpoint(("GET",))},
}
BEARERS: Column = {
    "no_bearer": {},
    "valid": {"bearer": CUSTOMER_TOKEN},
    "malformed": {"bearer": "x"},
    "other_environment": {"bearer": mint(StringKind.CUSTOMER_TOKEN, StringScope.PRODUCTION)},
    "unknown": {"bearer": CUSTOMER_TOKEN, "is_customer_stored": False},
    "wrong_secret": {"bearer": forged(CUSTOMER_TOKEN)},
    "other_merchant": {"bearer": CUSTOMER_TOKEN, "customer_merchant": "globex"},
    "other_merchant_revoked": {"bearer": CUSTOMER_TOKEN, "customer_merchant": "globex", "customer_revoked_at": NOW},
    "expired": {"bearer": CUSTOMER_TOKEN, "customer_expires_at": NOW},
    "revoked": {"bearer": CUSTOMER_TOKEN, "customer_revoked_at": NOW},
}
ORIGINS: Column = {
    "no_origin": {},
    "origin": {"has_origin": True},
    "origin_reported": {"has_origin": True, "reports_origin": True},
}
_NETWORKS = (parse_network("192.0.2.0/24"), parse_network("2001:db8::/32"))
ADDRESSES: Column = {
    "no_list": {},
    "listed": {"networks": _NETWORKS, "client_address": "192.0.2.9"},
    "not_listed": {"networks": _NETWORKS, "client_address": "203.0.113.9"},
    "unknown": {"networks": _NETWORKS},
}
CONTEXTS: Column = {
    "no_context": {"merchant_context": None, "store_context": None},
    "merchant": {"store_context": None},
    "store": {"merchant_context": None},
    "merchant_and_store": {},
}

CIRCUMSTANCES = (MERCHANTS, STANDINGS, REQUESTED, ORIGINS, ADDRESSES, CONTEXTS, BEARERS)


def verdicts(kind: KeyKind, keys: Column, columns: Sequence[Column]) -> dict[Row, str]:
    """Return the verdict of every combination."""
    found: dict[Row, str] = {}
    for names in product(keys, *columns):
        changes: Changes = {"kind": kind}
        # The last column first: `other_in_context` overrides the column of contexts.
        for values, name in zip(reversed((keys, *columns)), reversed(names), strict=True):
            changes |= values[name]
        found[kind.value, *names] = code_of(judge(Case(**changes)))  # type: ignore[arg-type]  # a table's own words
    return found


def ends(column: Column) -> Column:
    """Return the first and the last value of the column."""
    names = list(column)
    return {name: column[name] for name in (names[0], names[-1])}


def every_key() -> dict[Row, str]:
    """Return the verdicts on all invalid keys, in a sample of circumstances."""
    sample = (*map(ends, CIRCUMSTANCES[:2]), REQUESTED, *map(ends, CIRCUMSTANCES[3:]))
    found: dict[Row, str] = {}
    for kind in KeyKind:
        keys = keys_of(kind)
        del keys["active"]
        found |= verdicts(kind, keys, sample)
    return found


def every_request() -> dict[Row, str]:
    """Return the verdicts on the valid key in every circumstance."""
    return {
        (kind, *circumstances): code
        for each in KeyKind
        for (kind, _, *circumstances), code in verdicts(each, {"active": {}}, CIRCUMSTANCES).items()
    }


@pytest.fixture(scope="module")
def keys() -> dict[Row, str]:
    return every_key()


@pytest.fixture(scope="module")
def requests() -> dict[Row, str]:
    return every_request()


def test_verdicts_equal_the_reviewed_file(keys: dict[Row, str], requests: dict[Row, str]) -> None:
    """Guarantee: every change of a rule changes this file, so that a reviewer sees it."""
    text = HEADING + KEYS_HEADING + folded(keys) + REQUESTS_HEADING + folded(requests)
    if os.environ.get("KEYVAULT_TEST_REWRITE") == "verdicts":
        GOLDEN.write_text(text)
        pytest.skip(f"{GOLDEN.name} was rewritten; review its diff")
    assert text == GOLDEN.read_text()


def test_verdicts_allow_only_the_good_key(keys: dict[Row, str]) -> None:
    """Guarantee: a key that is not active and proved is denied everywhere."""
    assert "allowed" not in keys.values()


def test_verdicts_allow_a_request_that_meets_every_condition_and_no_other(requests: dict[Row, str]) -> None:
    """Guarantee: an allowed request meets every condition of the contract, restated here independently."""
    for row, code in requests.items():
        kind, merchant, standing, name, origin, address, context, bearer = row
        endpoint = CATALOG.find(name)
        fits = (
            not isinstance(endpoint, NoMatchingEndpoint)
            and kind in endpoint.credentials
            and "other" not in merchant
            and standing == "in_good_standing"
            and (bearer in {"no_bearer", "valid"})
            and (bearer == "no_bearer" or endpoint.bearer is not Bearer.NONE)
            and (bearer == "valid" or endpoint.bearer is not Bearer.REQUIRED)
            and (kind == "public" or origin != "origin")
            and address not in {"not_listed", "unknown"}
            and (endpoint.merchant_from is None or "merchant" in context)
            and (endpoint.store_from is None or "store" in context)
        )
        assert (code == "allowed") == fits, row


def test_verdicts_cover_every_rule_that_needs_no_state_of_a_server(
    keys: dict[Row, str], requests: dict[Row, str]
) -> None:
    """Every code up to the limits; `credential_in_url` is in test_verification.py."""
    order = list(ErrorCode)
    judged = set(order[: order.index(ErrorCode.RATE_LIMITED)]) - {ErrorCode.CREDENTIAL_IN_URL}
    assert {*keys.values(), *requests.values()} == {*judged, "allowed"}


def test_verdicts_of_added_endpoints_are_in_the_matrix() -> None:
    assert {endpoint.name for endpoint in ADDED} <= set(REQUESTED)

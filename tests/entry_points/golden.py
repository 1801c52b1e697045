"""The golden matrix: every credential in every state, asked about in every way, and the verdict that is demanded.

A `Row` is a case as the words of its columns. What each word stands for is told twice: here to the pure judgement
(tests/access/judging.py), and in `golden_rows.py` to the database and to the doors.
"""

import random
from collections.abc import Iterable, Mapping
from datetime import timedelta
from itertools import combinations, product
from typing import NamedTuple

from keyvault.access.catalog import NoMatchingEndpoint
from keyvault.domain.keys import KeyKind, KeyState, RetirementReason
from keyvault.domain.keystring import StringKind, checksum
from keyvault.domain.networks import parse_network
from keyvault.wire.problems import PROBLEM_TYPES
from tests.access.judging import CATALOG, CUSTOMER_TOKEN, NOW, PRODUCTION, Case, code_of, judge, key_string
from tests.domain.minting import mint

Changes = dict[str, object]
Column = Mapping[str, Changes]

ADDRESS = "192.0.2.9"
"""Of the client, in every case."""

HERE, ELSEWHERE = "192.0.2.0/24", "198.51.100.0/24"


class Row(NamedTuple):
    """`environment` is the one that is asked for: the key's own or the other; `merchant` whom the request names."""

    kind: str
    environment: str
    state: str
    merchant: str
    endpoint: str
    origin: str
    bearer: str
    store: str


def forged(text: str) -> str:
    """The same id, another secret, the right checksum."""
    head = text[:27] + mint(seed="another")[27:70]
    return head + checksum(head)


def _unproved(kind: KeyKind) -> dict[str, Changes]:
    right = key_string(kind)
    return {
        "no_key": {"is_presented": False},
        "twice": {"presented": f"{right},{right}"},
        "in_url_too": {"url": f"/?key={right}"},
        "malformed": {"presented": "nonsense"},
        "wrong_checksum": {"presented": right[:-6] + "000000"},
        "customer_token": {"presented": mint(StringKind.CUSTOMER_TOKEN)},
        "unknown": {"is_stored": False},
        "wrong_secret": {"presented": forged(right)},
    }


UNPROVED = frozenset(_unproved(KeyKind.PRIVATE))
STORED: Column = {
    "pre_activation": {"state": KeyState.PRE_ACTIVATION},
    "active": {},
    "active_from_here": {"networks": (parse_network(HERE),)},
    "active_from_elsewhere": {"networks": (parse_network(ELSEWHERE),)},
    "active_reporting": {"reports_origin": True},
    "suspended": {"state": KeyState.SUSPENDED},
    "expired": {"expires_at": NOW - timedelta(days=1)},
    "deactivated": {"state": KeyState.DEACTIVATED, "retirement": RetirementReason.EXPIRED, "expires_at": NOW},
    "revoked": {"state": KeyState.DEACTIVATED, "retirement": RetirementReason.REVOKED},
    "compromised": {"state": KeyState.COMPROMISED},
    "destroyed": {"state": KeyState.DESTROYED},
    "merchant_suspended": {"merchant_active": False},
    "account_suspended": {"account_active": False},
}
"""States of a key that is in the database, and of what it hangs on."""

ENVIRONMENTS: Column = {"own": {}, "other": {"environment": PRODUCTION}}
MERCHANTS: Column = {
    "nobody": {"merchant_context": None},
    "own": {"named_merchant": "acme", "merchant_context": "acme"},
    "other": {"named_merchant": "globex", "merchant_context": "globex"},
}
ENDPOINTS: Column = {
    **{endpoint.name: {"endpoint": endpoint} for endpoint in CATALOG.endpoints},
    "(unknown)": {"endpoint": NoMatchingEndpoint()},
    "(other_method)": {"endpoint": NoMatchingEndpoint(("POST",))},
}
ORIGINS: Column = {"no_origin": {}, "origin": {"has_origin": True}}
BEARERS: Column = {
    "no_bearer": {},
    "valid": {"bearer": CUSTOMER_TOKEN},
    "garbage": {"bearer": "garbage"},
    "other_merchant": {"bearer": CUSTOMER_TOKEN, "customer_merchant": "globex"},
    "expired": {"bearer": CUSTOMER_TOKEN, "customer_expires_at": NOW},
    "revoked": {"bearer": CUSTOMER_TOKEN, "customer_revoked_at": NOW},
}
STORES: Column = {"no_store": {"store_context": None}, "store": {}}
CIRCUMSTANCES = (MERCHANTS, ENDPOINTS, ORIGINS, BEARERS, STORES)


def matrix() -> dict[Row, str]:
    """Every case with the code that is demanded, or `allowed`."""
    found = {}
    for kind in KeyKind:
        states = _unproved(kind) | dict(STORED)
        columns = (ENVIRONMENTS, states, *CIRCUMSTANCES)
        for names in product(*columns):
            changes: Changes = {"kind": kind, "client_address": ADDRESS}
            for values, name in zip(columns, names, strict=True):
                changes |= values[name]
            found[Row(kind.value, *names)] = code_of(judge(Case(**changes)))  # type: ignore[arg-type]  # a table's own
    return found


STATUS = {"allowed": 200, **{code.value: kind.status for code, kind in PROBLEM_TYPES.items()}}


def reaches_requests(row: Row) -> bool:
    """Whether the rules on requests are asked at all, so that every circumstance may count."""
    return row.environment == "own" and row.state.startswith("active")


def sample(demanded: Mapping[Row, str], rows: Iterable[Row], least: int) -> list[Row]:
    """Rows in which every two words occur together, where a request's rules are asked with every outcome; at least so
    many. The same ones in every run."""
    shuffled = sorted(rows)
    random.Random(_SEED).shuffle(shuffled)  # noqa: S311  nothing secret about it
    shuffled.sort(key=reaches_requests, reverse=True)
    seen: set[object] = set()
    chosen: list[Row] = []
    others: list[Row] = []
    for row in shuffled:
        outcome = demanded[row] if reaches_requests(row) else ""
        new: set[object] = {(outcome, one, other) for one, other in combinations(enumerate(row), 2)}
        new.add((demanded[row], row.state))
        (others if new <= seen else chosen).append(row)
        seen |= new
    return chosen + others[: max(0, least - len(chosen))]


_SEED = 9

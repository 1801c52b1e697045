"""The golden matrix: each combination of credential, state and request with the verdict that is required.

A `Row` is a case as one word per column. This module maps each word to the arguments of the pure judgement
(tests/access/judging.py); `golden_rows.py` maps it to database rows and to the parts of a request.
"""

import random
from collections.abc import Iterable, Mapping
from datetime import timedelta
from itertools import combinations, product
from typing import NamedTuple

from keyvault.access.catalog import NoMatchingEndpoint
from keyvault.domain.keys import KeyKind, KeyState, RetirementReason
from keyvault.domain.keystring import StringKind, StringScope, checksum
from keyvault.domain.networks import parse_network
from keyvault.wire.problems import PROBLEM_TYPES
from tests.access.judging import CATALOG, CUSTOMER_TOKEN, NOW, PRODUCTION, Case, code_of, judge, key_string
from tests.domain.minting import mint

Changes = dict[str, object]
Column = Mapping[str, Changes]

ADDRESS = "192.0.2.9"
"""The client's address in every case."""

HERE, ELSEWHERE = "192.0.2.0/24", "198.51.100.0/24"


class Row(NamedTuple):
    """One case. `environment`: the requested one, the key's own or the other; `merchant`: the one the request names."""

    kind: str
    environment: str
    state: str
    merchant: str
    endpoint: str
    origin: str
    bearer: str
    store: str


def forged(text: str) -> str:
    """Return a string with the same id, another secret and a correct checksum."""
    head = text[:27] + mint(seed="another")[27:70]
    return head + checksum(head)


def escaped(text: str) -> str:
    """Return the string as a client may percent-encode it in a URL."""
    return text.replace("_", "%5F")


def _unproved(kind: KeyKind) -> dict[str, Changes]:
    right = key_string(kind)
    return {
        "no_key": {"is_presented": False},
        "twice": {"presented": f"{right},{right}"},
        "bearer_twice": {"bearer": f"{CUSTOMER_TOKEN},{CUSTOMER_TOKEN}"},
        "in_url": {"url": f"/?key={right}"},
        "in_url_escaped": {"url": f"/?key={escaped(right)}"},
        "empty": {"presented": ""},
        "malformed": {"presented": "nonsense"},
        "wrong_checksum": {"presented": right[:-6] + "000000"},
        "customer_token": {"presented": mint(StringKind.CUSTOMER_TOKEN)},
        "service_token": {"presented": mint(StringKind.SERVICE_TOKEN, StringScope.ALL)},
        "unknown": {"is_stored": False},
        "wrong_secret": {"presented": forged(right)},
    }


UNPROVED = frozenset(_unproved(KeyKind.PRIVATE))
"""Words for credentials that prove possession of no key."""

IN_URL = frozenset({"in_url", "in_url_escaped"})
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
"""States of a stored key, of its account and of its merchant."""

ENVIRONMENTS: Column = {"own": {}, "other": {"environment": PRODUCTION}}
MERCHANTS: Column = {
    "unnamed": {"merchant_context": None},
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
    "wrong_secret": {"bearer": forged(CUSTOMER_TOKEN)},
    "other_merchant": {"bearer": CUSTOMER_TOKEN, "customer_merchant": "globex"},
    "expired": {"bearer": CUSTOMER_TOKEN, "customer_expires_at": NOW},
    "revoked": {"bearer": CUSTOMER_TOKEN, "customer_revoked_at": NOW},
}
STORES: Column = {"no_store": {"store_context": None}, "store": {}}
CIRCUMSTANCES = (MERCHANTS, ENDPOINTS, ORIGINS, BEARERS, STORES)


def matrix() -> dict[Row, str]:
    """Return every case with the error code that is required, or `allowed`."""
    found = {}
    for kind in KeyKind:
        states = _unproved(kind) | dict(STORED)
        columns = (ENVIRONMENTS, states, *CIRCUMSTANCES)
        for names in product(*columns):
            changes: Changes = {"kind": kind, "client_address": ADDRESS}
            # In reverse order: a state can fix what a circumstance would choose.
            for values, name in zip(reversed(columns), reversed(names), strict=True):
                changes |= values[name]
            found[Row(kind.value, *names)] = code_of(judge(Case(**changes)))  # type: ignore[arg-type]  # the table holds the fields of a Case
    return found


STATUS = {"allowed": 200, **{code.value: kind.status for code, kind in PROBLEM_TYPES.items()}}


def reaches_requests(row: Row) -> bool:
    """Return whether the request's rules are evaluated, so that every circumstance can decide the verdict."""
    return row.environment == "own" and row.state.startswith("active")


def sample(demanded: Mapping[Row, str], rows: Iterable[Row], least: int, together: int = 2) -> list[Row]:
    """Choose at least `least` rows in which every `together` words occur together, the same ones in every run.

    Where a request's rules are evaluated, they occur with every outcome that they can have.
    """
    shuffled = sorted(rows)
    random.Random(_SEED).shuffle(shuffled)  # noqa: S311  the order is not a secret
    shuffled.sort(key=reaches_requests, reverse=True)
    seen: set[object] = set()
    chosen: list[Row] = []
    others: list[Row] = []
    for row in shuffled:
        outcome = demanded[row] if reaches_requests(row) else ""
        new: set[object] = {(outcome, *words) for words in combinations(enumerate(row), together)}
        new.add((demanded[row], row.state))
        (others if new <= seen else chosen).append(row)
        seen |= new
    return chosen + others[: max(0, least - len(chosen))]


_SEED = 9

"""Every verdict there is, as a text that is read when it changes: `verdicts.txt`.

`KEYVAULT_TEST_REWRITE=verdicts pytest tests/access/test_verdicts.py` writes it anew; the diff is the review.
"""

import os
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest

from keyvault.access.catalog import ENDPOINTS, Miss
from keyvault.domain.keys import KeyKind, KeyState, Retirement
from keyvault.domain.keystring import STRING_KIND, StringKind, StringScope, checksum
from tests.domain.minting import mint

from .judging import NOW, PRODUCTION, Case, code_of, judge, key_string

GOLDEN = Path(__file__).with_name("verdicts.txt")

HEADING = """\
# Every verdict on a request. `*`: whatever it is, the answer is the same; `a|b`: the same for these.
# Made by test_verdicts.py, which also says how to make it anew. Review a change of this file as a diff.
"""

RIGHT = {kind: key_string(kind) for kind in KeyKind}
# The right id and the right checksum around another key's secret.
FORGED_HEADS = {kind: RIGHT[kind][:27] + key_string(kind, seed="another")[27:70] for kind in KeyKind}
FORGED = {kind: head + checksum(head) for kind, head in FORGED_HEADS.items()}

Changes = dict[str, object]


def keys_of(kind: KeyKind) -> dict[str, Changes]:
    """What is presented and stored: each makes a good case into that one."""
    expired, revoked = Retirement.EXPIRED, Retirement.REVOKED
    return {
        "no_key": {"is_presented": False},
        "empty": {"presented": ""},
        "comma": {"presented": f"{RIGHT[kind]},{RIGHT[kind]}"},
        "malformed": {"presented": RIGHT[kind][:-1]},
        "non_ascii": {"presented": RIGHT[kind][:-1] + "é"},
        "wrong_checksum": {"presented": RIGHT[kind][:-6] + "000000"},
        "other_brand": {"presented": mint(STRING_KIND[kind], brand="other")},
        "customer_token": {"presented": mint(StringKind.CUSTOMER_TOKEN)},
        "service_token": {"presented": mint(StringKind.SERVICE_TOKEN, StringScope.ALL)},
        "unknown_id": {"is_stored": False},
        "wrong_secret": {"presented": FORGED[kind]},
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


MERCHANTS: dict[str, Changes] = {
    "none_named": {},
    "own_named": {"named_merchant": "acme"},
    "other_named": {"named_merchant": "globex"},
}
STANDINGS: dict[str, Changes] = {
    "in_good_standing": {},
    "merchant_suspended": {"merchant_active": False},
    "account_suspended": {"account_active": False},
}
REQUESTED: dict[str, Changes] = {
    **{endpoint.name: {"endpoint": endpoint} for endpoint in ENDPOINTS},
    "(unknown)": {"endpoint": Miss()},
    "(other_method)": {"endpoint": Miss(("GET",))},
}
BEARERS: dict[str, Changes] = {"no_bearer": {}, "bearer": {"has_bearer": True}}
ORIGINS: dict[str, Changes] = {
    "no_origin": {},
    "origin": {"has_origin": True},
    "origin_reported": {"has_origin": True, "reports_origin": True},
}
CIRCUMSTANCES = (MERCHANTS, STANDINGS, REQUESTED, BEARERS, ORIGINS)
COLUMNS: list[list[str]] = [list(KeyKind), list(keys_of(KeyKind.PRIVATE)), *map(list, CIRCUMSTANCES)]

Row = tuple[str, ...]


def verdicts() -> dict[Row, str]:
    """The whole matrix."""
    found: dict[Row, str] = {}
    for kind in KeyKind:
        for key, presented in keys_of(kind).items():
            for names in product(*CIRCUMSTANCES):
                changes: Changes = {"kind": kind, **presented}
                for values, name in zip(CIRCUMSTANCES, names, strict=True):
                    changes |= values[name]
                found[(kind.value, key, *names)] = code_of(judge(Case().but(**changes)))
    return found


def summary(found: dict[Row, str]) -> str:
    """The matrix with everything folded that no further column tells apart."""
    return HEADING + "".join(f"{code:<22}  {'  '.join(row)}\n" for *row, code in _folded(found, ()))


def _folded(found: dict[Row, str], known: Row) -> list[Row]:
    """The lines below `known`, without it."""
    depth = len(COLUMNS) - len(known)
    if depth == 0:
        return [(found[known],)]
    branches: dict[tuple[Row, ...], list[str]] = {}
    for value in COLUMNS[len(known)]:
        branches.setdefault(tuple(_folded(found, (*known, value))), []).append(value)
    return [
        ("*" if len(values) == len(COLUMNS[len(known)]) else "|".join(values), *rest)
        for branch, values in branches.items()
        for rest in branch
    ]


@pytest.fixture(scope="module")
def found() -> dict[Row, str]:
    return verdicts()


def test_verdicts_are_those_that_were_reviewed(found: dict[Row, str]) -> None:
    """No change of a rule goes unread: this text has to change with it, and its diff is what is reviewed."""
    text = summary(found)
    if os.environ.get("KEYVAULT_TEST_REWRITE") == "verdicts":
        GOLDEN.write_text(text)
        pytest.skip(f"{GOLDEN.name} was written; read its diff")
    assert text == GOLDEN.read_text()


def test_verdicts_allow_a_good_key_on_its_own_endpoints_only(found: dict[Row, str]) -> None:
    """Whatever is allowed is an active key of the right kind, in good standing, at the right merchant."""
    for (kind, key, merchant, standing, endpoint, bearer, origin), code in found.items():
        if code == "allowed":
            assert key == "active"
            assert merchant != "other_named"
            assert standing == "in_good_standing"
            assert (kind == "public") == (endpoint == "client.configuration")
            assert endpoint in {each.name for each in ENDPOINTS} - {"customers.me"}
            assert bearer == "no_bearer"
            assert kind == "public" or origin != "origin"


def test_verdicts_cover_every_code_that_exists_so_far(found: dict[Row, str]) -> None:
    assert set(found.values()) == {
        "allowed",
        "credential_ambiguous",
        "credential_missing",
        "credential_invalid",
        "environment_mismatch",
        "key_not_active",
        "key_expired",
        "key_revoked",
        "merchant_mismatch",
        "merchant_suspended",
        "endpoint_unknown",
        "method_not_allowed",
        "method_not_supported",
        "bearer_not_supported",
        "private_key_in_browser",
        "customer_token_missing",
        "customer_token_invalid",
    }

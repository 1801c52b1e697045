"""The lists of the service plane: filters, scope, and pages by cursor."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from keyvault.access.permissions import Permission as P
from keyvault.domain.environments import Environment
from keyvault.domain.keystring import StringScope
from keyvault.models import Account
from rotation.domain.plan_fields import PlanOverrides
from rotation.services.rotations.requests import request_rotation
from tests.factories import account, grant, issue, make_merchant, make_token, now, request_key
from tests.rotation import scene

from .conftest import Call

pytestmark = [pytest.mark.database, pytest.mark.django_db]

SANDBOX, PRODUCTION = Environment.SANDBOX, Environment.PRODUCTION


@dataclass(frozen=True)
class PagedList:
    """One list. `filters`: a filter by a column of the rows, and the environment of the rows that it finds."""

    path: str
    member: str
    identity: str
    permission: P
    make: Callable[[Account, datetime], str]
    filters: dict[str, Environment | None]


def make_credential(place: Account, at: datetime) -> str:
    return issue(place, at=at)[0].credential_id


def make_request(place: Account, at: datetime) -> str:
    return request_key(place, at=at).issuance_request_id


def make_rotation(place: Account, at: datetime) -> str:
    key, _ = issue(place, at=at)
    asking = grant(scene.tam(), P.ROTATIONS_WRITE, place, at=at)
    return request_rotation(asking, key.credential, PlanOverrides()).rotation_id


LISTS = (
    PagedList("/v1/credentials", "credentials", "credential_id", P.KEYS_READ, make_credential, {"kind=public": None}),
    PagedList(
        "/v1/issuance-requests",
        "issuance_requests",
        "issuance_request_id",
        P.ISSUANCE_REQUEST,
        make_request,
        {"state=approved": SANDBOX, "state=pending": PRODUCTION, "state=issued": None},
    ),
    PagedList(
        "/v1/rotations",
        "rotations",
        "rotation_id",
        P.ROTATIONS_READ,
        make_rotation,
        {"state=scheduled": SANDBOX, "state=awaiting_approval": PRODUCTION, "state=stalled": None},
    ),
)

lists = pytest.mark.parametrize("rows", LISTS, ids=[rows.member for rows in LISTS])


def read(call: Call, rows: PagedList, query: str = "", **headers: str) -> list[str]:
    """Return the ids of all pages."""
    found: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        answer = call("GET", f"{rows.path}?{query}{cursor and f'&cursor={cursor}'}", **headers)
        assert answer.status_code == 200, answer.body
        assert b"+00:00" not in answer.content
        page = [row[rows.identity] for row in answer.body[rows.member]]
        assert page or not cursor
        found += page
        cursor = answer.body["next_cursor"]
    return found


def bearer(*permissions: P, **options: Any) -> dict[str, str]:
    return {"HTTP_AUTHORIZATION": f"Bearer {make_token(*permissions, **options)[1].reveal()}"}


@lists
def test_list_is_filtered_by_merchant_environment_and_state_and_paged(call: Call, rows: PagedList) -> None:
    """Each row is on exactly one page, the newest first, also among rows of the same time and of several accounts."""
    earlier = now() - timedelta(minutes=1)
    acme, globex, live = account("acme"), account("globex"), account("acme", PRODUCTION)
    old = {rows.make(place, earlier) for place in (acme, acme, globex, live, live)}
    new = [rows.make(place, earlier + timedelta(seconds=second)) for second, place in enumerate((acme, live), 1)]
    whole = read(call, rows)
    assert whole[:2] == new[::-1]
    assert (set(whole[2:]), len(whole)) == (old, 7)
    for limit in (1, 2, 6, 7):
        assert read(call, rows, f"limit={limit}") == whole
    sandbox, production = (read(call, rows, f"environment={name}&limit=2") for name in (SANDBOX, PRODUCTION))
    assert (len(sandbox), sorted([*sandbox, *production])) == (4, sorted(whole))
    assert len(read(call, rows, "merchant=acme&limit=2")) == 6
    assert len(read(call, rows, "merchant=acme&environment=sandbox&limit=1")) == 3
    assert read(call, rows, "merchant=nobody") == []
    for query, environment in rows.filters.items():
        expected = {SANDBOX: sandbox, PRODUCTION: production, None: []}[environment]
        assert read(call, rows, f"{query}&limit=2") == expected
        assert len(read(call, rows, f"{query}&merchant=globex")) == (environment is SANDBOX)


@lists
def test_list_of_a_scoped_token_has_only_its_merchants(call: Call, rows: PagedList) -> None:
    """Another merchant is not found, whether it exists or not, in every environment; another environment is refused."""
    rows.make(account("acme"), now())
    own = rows.make(account("globex"), now())
    header = bearer(rows.permission, merchants=["globex"], scope=StringScope.SANDBOX)
    assert read(call, rows, **header) == read(call, rows, "merchant=globex", **header) == [own]
    make_merchant("initech")
    other = bearer(rows.permission, merchants=["initech"])
    assert read(call, rows, **other) == read(call, rows, "merchant=initech", **other) == []
    for query, expected in (
        ("merchant=acme", (404, "not_found")),
        ("merchant=nobody", (404, "not_found")),
        ("merchant=acme&environment=production", (404, "not_found")),
        ("merchant=globex&environment=production", (403, "permission_missing")),
        ("environment=production", (403, "permission_missing")),
    ):
        refused = call("GET", f"{rows.path}?{query}", **header)
        assert (refused.status_code, refused.body["code"]) == expected, query


@lists
def test_page_takes_as_many_queries_for_many_rows_as_for_one(call: Call, rows: PagedList) -> None:
    place = account("acme")
    call("GET", rows.path)  # a process loads its peppers once
    counts = []
    for _ in range(2):
        rows.make(place, now())
        with CaptureQueriesContext(connection) as made:
            call("GET", f"{rows.path}?merchant=acme")
        counts.append(len(made))
    assert counts[0] == counts[1]


@pytest.mark.postgres_once
@lists
@pytest.mark.parametrize(
    "query",
    ["colour=red", "environment=x", "state=x", "kind=x", "limit=0", "limit=201", "limit=1&limit=2"]
    + [
        f"cursor={text}"
        for text in ("../etc", "1.crd_short", "x.crd_00000000000000000000", "9" * 17 + ".crd_" + "0" * 20)
    ],
)
def test_list_with_an_invalid_query_is_refused(call: Call, rows: PagedList, query: str) -> None:
    answer = call("GET", f"{rows.path}?{query}")
    assert (answer.status_code, answer.body["code"]) == (400, "request_invalid")
    assert answer.body["errors"][0]["pointer"] == f"/{query.partition('=')[0]}"


def test_list_with_the_latest_cursor_begins_with_the_newest_row(call: Call) -> None:
    made = make_request(account("acme"), now())
    (rows,) = (rows for rows in LISTS if rows.member == "issuance_requests")
    assert read(call, rows, f"cursor={'9' * 16}.req_{'z' * 20}") == [made]
    assert read(call, rows, f"cursor=0.req_{'0' * 20}") == []

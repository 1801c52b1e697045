"""Rotations on the console's overview."""

from datetime import timedelta
from itertools import count
from typing import Any

import pytest
from django.db.models import QuerySet

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.access.scopes import AccessScope
from keyvault.domain.keys import KeyKind
from keyvault.models import Key
from rotation.admin import overview
from rotation.domain.events import RotationState as S
from rotation.services.schedules import overdue
from rotation.services.schedules.schedules import ScheduleDraft, ScheduleScope, save_schedule
from tests.admin.desk import browser, set_up_desk, text_of
from tests.factories import SANDBOX, account, grant, issue, make_merchant, make_operator, now
from tests.services.rows import disable_triggers

from .test_full_pages import make_full_rotation, put_in

pytestmark = pytest.mark.database

WAITS = [
    (S.EMERGENCY, None, "the emergency replacement"),
    (S.STAGED, None, "every verifier to accept the replacement"),
    (S.PUBLISHING, None, "the merchant&#x27;s webhook endpoint"),
    (S.AWAITING_PROOF, None, "use of the replacement"),
    (S.OVERLAP, None, "silence of the old key"),
    (S.QUARANTINE, None, "the quarantine, "),
    (S.REVOKING, None, "the worker to revoke the old key"),
    (S.ROLLING_BACK, None, "the quarantine, "),
    (S.STALLED, S.OVERLAP, "the deadline passed"),
]


@pytest.mark.usefixtures("db")
def test_overview_says_what_each_rotation_waits_for() -> None:
    row = make_full_rotation(set_up_desk(), KeyKind.PRIVATE)
    client, shown = browser(make_operator("viewer", *Role)), {}
    for state, stalled_from, expected in WAITS:
        put_in(row, state, stalled_from)
        table = text_of(client.get("/admin/")).partition("Waiting for</th>")[2].partition("</table>")[0]
        shown[state] = (expected in table, "deadline in " in table)
    assert set(shown) == set(overview._SHOWN_STATES)
    without_deadline = {S.REVOKING, S.STALLED}
    assert shown == {state: (True, state not in without_deadline) for state, _, _ in WAITS}


@pytest.mark.usefixtures("db")
def test_overview_omits_a_rotation_that_ends_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    row = make_full_rotation(set_up_desk(), KeyKind.PRIVATE)
    put_in(row, S.OVERLAP)
    select_rows, reads = overview._rows_shown, count(1)

    def end_before_the_second_read(*given: Any) -> QuerySet[Any]:
        if next(reads) == 2:
            put_in(row, S.COMPLETED)
        return select_rows(*given)

    monkeypatch.setattr(overview, "_rows_shown", end_before_the_second_read)
    page = text_of(browser(make_operator("viewer", *Role)).get("/admin/"))
    assert next(reads) == 3
    assert "No rotation is in progress." in page


@pytest.mark.usefixtures("db")
def test_overview_counts_keys_past_the_cryptoperiod_of_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: only active private keys to which the schedule of the environment applies are counted."""
    desk = set_up_desk()
    client = browser(make_operator("viewer", *Role))

    def tile() -> str:
        return text_of(client.get("/admin/")).partition(" past their cryptoperiod")[0].rpartition(">")[2]

    assert " past their cryptoperiod" not in text_of(client.get("/admin/"))
    for name in ("globex", "initech"):
        make_merchant(name)
    late = [issue(desk.sandbox, label=f"late-{number}")[0] for number in range(2)]
    public, elsewhere, own = (
        issue(desk.sandbox, kind=KeyKind.PUBLIC),
        issue(desk.production),
        issue(account("globex", SANDBOX)),
    )
    issue(account("initech", SANDBOX))
    disable_triggers()
    keys: QuerySet[Key] = QuerySet(Key)
    old = [key.pk for key in (*late, public[0], elsewhere[0], own[0])]
    keys.filter(pk__in=old).update(activated_at=now() - timedelta(days=100))
    author, globex = make_operator("author", *Role), account("globex", SANDBOX)
    save_schedule(grant(author, P.SCHEDULES_WRITE), ScheduleScope(SANDBOX), ScheduleDraft(90))
    save_schedule(grant(author, P.SCHEDULES_WRITE, globex), ScheduleScope(SANDBOX, globex), ScheduleDraft(365))
    assert tile() == "2"
    monkeypatch.setattr(overdue, "MAX_OVERDUE", 1)
    monkeypatch.setattr("rotation.admin.overview.MAX_OVERDUE", 1)
    assert tile().endswith("+")
    limited = make_operator("limited", Role.KEY_ADMINISTRATOR, scope=AccessScope(frozenset({"acme"})))
    assert "past their cryptoperiod" not in text_of(browser(limited).get("/admin/"))

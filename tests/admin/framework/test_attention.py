"""The lines of the overview: which of them are joined or left out."""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
from django.contrib import admin
from django.test import RequestFactory

from keyvault.access.principals import OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.admin.framework.attention import (
    Attention,
    AttentionItem,
    KeptQueries,
    attention_context,
    select_rows,
)
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.widgets import Line
from keyvault.admin.oversight import approvals
from keyvault.admin.site import ConsoleSite
from keyvault.models import IssuanceRequest
from tests.admin.desk import set_up_desk
from tests.factories import SANDBOX, request_key


class FoundItem:
    """Stands for an `Attention` whose rows were read."""

    tone = "alarm"

    def __init__(self, title: str, *lines: Line) -> None:
        self._read = AttentionItem(title, f"/{title}/", len(lines), lines, self.tone)

    def read(self, *_: Any) -> AttentionItem:
        return self._read


def shown(*items: FoundItem) -> list[str]:
    context = attention_context(RequestFactory().get("/admin/"), cast(Any, [(item, ["id"]) for item in items]))
    return [line.url for _, line in context["attention_lines"]]


def stalled(number: int) -> Line:
    return Line(f"/rotation/{number}/", f"rotation {number}", "")


def alarm(number: int) -> Line:
    return Line(f"/alarm/{number}/", "Rotation stalled", "", about=f"/rotation/{number}/")


def test_alarm_about_a_page_that_the_overview_links_has_no_line() -> None:
    assert shown(FoundItem("stalled", stalled(1)), FoundItem("alarms", alarm(1))) == ["/rotation/1/"]


def test_alarm_about_a_row_beyond_the_first_lines_keeps_its_line() -> None:
    """Guarantee: an alarm is left out only if the overview links what it is about."""
    rotations = FoundItem("stalled", *map(stalled, range(4)))
    assert shown(rotations, FoundItem("alarms", *map(alarm, range(4)))) == [
        *(f"/rotation/{number}/" for number in range(3)),
        "/alarm/3/",
    ]


def test_alarms_of_one_kind_are_one_line_that_leads_to_the_list() -> None:
    assert shown(FoundItem("alarms", alarm(1), alarm(2))) == ["/alarms/"]


@pytest.mark.database
@pytest.mark.usefixtures("db")
def test_rows_of_several_selections_are_found_once_and_shown_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: the page reads the first rows only, whatever selection found them, and counts all."""
    desk = set_up_desk()
    made = [request_key(desk.production, label=f"label-{number}", by=desk.tam).pk for number in range(4)]
    request: Any = RequestFactory().get("/admin/")
    request.console_operator, request.session = desk.approver, {}
    rows, model_admin = IssuanceRequest.objects.order_by("created_at"), admin.site._registry[IssuanceRequest]
    selections = [rows.filter(pk__in=made[2:]), rows.filter(pk__in=made[:3])]
    item = Attention(cast(ConsoleModelAdmin, model_admin), "Keys", rows, "", selections=selections)
    monkeypatch.setattr("keyvault.admin.framework.attention.MAX_LINES", 2)
    ((_, ids),), _ = select_rows(request, [item]).find()
    assert sorted(ids) == sorted(made)
    read = item.read(request, ids)
    assert read.count == 4
    assert [line.label[-7:] for line in read.lines] == ["label-0", "label-1"]
    _, parameters = item.first_rows(request, [*ids, *map(str, range(100))], 2).query.sql_with_params()
    assert len(parameters) <= 5


OPERATOR = OperatorPrincipal("ada", "per_ada", frozenset(Role), EVERYWHERE)


def request_of(operator: OperatorPrincipal, environment: str = "") -> Any:
    request: Any = RequestFactory().get("/admin/")
    request.console_operator, request.session = operator, {"console_environment": environment}
    return request


def test_query_is_kept_for_one_operator_and_environment() -> None:
    """Guarantee: a query serves only the person, roles, scope and environment that it was compiled for."""
    kept, select = KeptQueries(), cast(Any, object)
    first = kept.find("menu", request_of(OPERATOR), select)
    assert kept.find("menu", request_of(OPERATOR), select) is first
    others = [
        replace(OPERATOR, person="per_eve"),
        replace(OPERATOR, roles=frozenset({Role.AUDITOR})),
        replace(OPERATOR, scope=AccessScope(None, frozenset({SANDBOX}))),
    ]
    for request in (*map(request_of, others), request_of(OPERATOR, SANDBOX)):
        assert kept.find("menu", request, select) is not first
    assert kept.find("overview", request_of(OPERATOR), select) is not first
    named = request_of(replace(OPERATOR, scope=AccessScope(frozenset({"acme"}))))
    assert kept.find("menu", named, select) is not kept.find("menu", named, select)


@pytest.mark.database
@pytest.mark.usefixtures("db")
@pytest.mark.parametrize("environment", ["", SANDBOX])
def test_query_has_no_time_and_no_row(environment: str, django_assert_num_queries: Any) -> None:
    """Guarantee: a query that is kept never becomes outdated: it is the same at any time, and reads nothing."""
    site = cast(ConsoleSite, admin.site)
    for roles in (frozenset(Role), *(frozenset({role}) for role in Role)):
        operator = replace(OPERATOR, roles=roles)
        for select in (site._select_overview, site._select_menu, partial(approvals._select, site)):
            with django_assert_num_queries(0):
                first, second = (select(request_of(operator, environment)) for _ in range(2))
            assert repr(first.statement) == repr(second.statement)

"""The lines of the overview: which of them are joined or left out."""

from typing import Any, cast

from django.test import RequestFactory

from keyvault.admin.framework.attention import AttentionItem, attention_context
from keyvault.admin.framework.widgets import Line


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

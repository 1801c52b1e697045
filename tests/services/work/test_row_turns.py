"""Due rows in turn: bounded batches that reach every row, whatever fails."""

from datetime import timedelta
from functools import partial

import pytest
from pytest_django import DjangoAssertNumQueries

from keyvault.models import WorkLease
from keyvault.services.work import row_turns
from keyvault.services.work.row_turns import RowTurns, batch_after
from tests.factories import now

pytestmark = [pytest.mark.database, pytest.mark.django_db]

BEGIN = now()


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_turns, "BATCH", 2)


def add(*subjects: str) -> None:
    """Add due rows; those with the same letter are due at the same time."""
    for subject in subjects:
        WorkLease.objects.create(subject=subject, due_at=BEGIN + timedelta(days=ord(subject[0])))


def visit(turns: RowTurns[WorkLease]) -> list[str]:
    list_after = partial(batch_after, WorkLease.objects.all(), "due_at")
    return [row.subject for row in turns.visit(list_after)]


def test_row_turns_continue_after_the_last_row_and_begin_again() -> None:
    add("a1", "a2", "b1")
    turns = RowTurns[WorkLease]()
    assert [visit(turns) for _ in range(3)] == [["a1", "a2"], ["b1", "a1"], ["a2", "b1"]]


def test_row_turns_without_a_due_row_query_no_whole_rows(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    """Idle workers look for due rows every few seconds."""
    with django_assert_num_queries(1) as queries:
        assert visit(RowTurns[WorkLease]()) == []
    assert "last_error" not in queries.captured_queries[0]["sql"]


def test_row_turns_reach_earlier_rows_although_later_ones_keep_arriving() -> None:
    add("a1", "b1", "b2")
    turns = RowTurns[WorkLease]()
    assert visit(turns) == ["a1", "b1"]
    add("c1")
    assert visit(turns) == ["b2", "c1"]
    add("d1")
    assert visit(turns) == ["d1", "a1"]


def test_row_turns_of_a_caller_that_stops_continue_with_the_next_row() -> None:
    add("a1", "a2", "b1")
    turns = RowTurns[WorkLease]()
    list_after = partial(batch_after, WorkLease.objects.all(), "due_at")
    assert next(turns.visit(list_after)).subject == "a1"
    assert visit(turns) == ["a2", "b1"]


def test_row_turns_with_few_rows_visit_all_of_them_each_time() -> None:
    add("a1")
    turns = RowTurns[WorkLease]()
    assert [visit(turns), visit(turns)] == [["a1"], ["a1"]]

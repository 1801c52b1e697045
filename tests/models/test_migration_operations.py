"""Operations of migrations under traffic: what they leave, and that an interrupted one can be repeated."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import DatabaseError, connection, models
from django.db.migrations.operations import AddField
from django.db.migrations.state import ModelState, ProjectState
from django.db.models import F, Q

from keyvault.models import migration_operations
from keyvault.models.migration_operations import AddConstraintOnline, AddIndexOnline, Backfill, RemoveIndexOnline
from tests.upgrade.migration_check import make_migration

pytestmark = [pytest.mark.database, pytest.mark.django_db(transaction=True)]

INDEX = models.Index(fields=["amount"], name="shelf_amount")
CHECK = models.CheckConstraint(name="shelf_positive", condition=Q(amount__gte=1))
ROWS = 7


@pytest.fixture
def state() -> Iterator[ProjectState]:
    """The state of an app with one table, which exists and has rows."""
    state = ProjectState()
    fields: list[tuple[str, models.Field[Any, Any]]] = [
        ("id", models.BigAutoField(primary_key=True)),
        ("amount", models.IntegerField()),
    ]
    state.add_model(ModelState("keyvault", "Shelf", fields, {"indexes": [], "constraints": []}))
    model = state.apps.get_model("keyvault", "shelf")
    with connection.schema_editor() as editor:
        editor.create_model(model)
    model.objects.bulk_create(model(amount=number) for number in range(1, ROWS + 1))
    yield state
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE keyvault_shelf")


def apply(state: ProjectState, *operations: Any, atomic: bool = False) -> ProjectState:
    with connection.schema_editor(atomic=atomic) as editor:
        return make_migration(*operations, atomic=atomic).apply(state.clone(), editor)


def constraints() -> dict[str, Any]:
    with connection.cursor() as cursor:
        return dict(connection.introspection.get_constraints(cursor, "keyvault_shelf"))


def test_index_online_is_built_once_and_removed_once(state: ProjectState) -> None:
    """Guarantee: a migration that was killed before it was recorded is repeated without an error."""
    apply(state, AddIndexOnline("shelf", INDEX))
    after = apply(state, AddIndexOnline("shelf", INDEX))
    assert "shelf_amount" in constraints()
    apply(after, RemoveIndexOnline("shelf", "shelf_amount"))
    apply(after, RemoveIndexOnline("shelf", "shelf_amount"))
    assert "shelf_amount" not in constraints()


@pytest.mark.postgres
def test_index_online_replaces_what_an_interrupted_build_left(state: ProjectState) -> None:
    apply(state, AddIndexOnline("shelf", INDEX))
    with connection.cursor() as cursor:
        cursor.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'shelf_amount'::regclass")
        apply(state, AddIndexOnline("shelf", INDEX))
        cursor.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = 'shelf_amount'::regclass")
        assert cursor.fetchone() == (True,)


def test_constraint_online_is_added_once_and_enforced(state: ProjectState) -> None:
    apply(state, AddConstraintOnline("shelf", CHECK))
    if connection.vendor == "postgresql":
        apply(state, AddConstraintOnline("shelf", CHECK))
    with pytest.raises(DatabaseError), connection.cursor() as cursor:
        cursor.execute("INSERT INTO keyvault_shelf (amount) VALUES (0)")


def test_constraint_online_of_rows_that_violate_it_is_refused(state: ProjectState) -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO keyvault_shelf (amount) VALUES (0)")
    with pytest.raises(DatabaseError):
        apply(state, AddConstraintOnline("shelf", CHECK))


def test_backfill_continues_after_an_interruption(state: ProjectState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: a batch that is committed is not repeated, and no row is left out."""
    monkeypatch.setattr(migration_operations, "BATCH_ROWS", 2)
    twice = AddField("shelf", "twice", models.IntegerField(null=True))
    after = apply(state, twice, atomic=True)
    backfill = Backfill("shelf", Q(twice__isnull=True), {"twice": F("amount") * 2})
    rows = after.apps.get_model("keyvault", "shelf").objects
    batches = interrupt_after(2, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        apply(after, backfill)
    assert rows.filter(twice__isnull=True).count() == ROWS - 4
    apply(after, backfill)
    assert list(rows.order_by("pk").values_list("amount", "twice")) == [(n, 2 * n) for n in range(1, ROWS + 1)]
    assert batches == [2, 2, 2, 1]


def interrupt_after(number: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Interrupt the batch after this many, once; return the numbers of rows that each batch has changed."""
    batches: list[int] = []
    update = models.QuerySet.update

    def counted(rows: Any, **values: Any) -> int:
        if len(batches) == number:
            batches.append(-1)
            raise KeyboardInterrupt
        if batches and batches[-1] == -1:
            batches.pop()
        changed = update(rows, **values)
        batches.append(changed)
        return changed

    monkeypatch.setattr(models.QuerySet, "update", counted)
    return batches

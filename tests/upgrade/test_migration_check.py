"""No migration stops the release that runs beside it, and the check that says so refuses each way to do that."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, migrations, models
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.state import ProjectState
from django.db.models import Q

from keyvault.models.migration_operations import AddConstraintOnline, AddIndexOnline, Backfill, RemoveIndexOnline
from tests.upgrade.migration_check import find_faults, list_new_migrations, make_migration, released_state
from tests.upgrade.rehearsal import CONTRACT, EXPAND, read_rehearsal

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

NOTE = models.CharField(max_length=9, null=True)
INDEX = models.Index(fields=["currency"], name="order_currency_index")
CHECK = models.CheckConstraint(name="order_small", condition=Q(amount_minor__lt=10**12))


@pytest.fixture(scope="module")
def loader(django_db_setup: None, django_db_blocker: Any) -> Iterator[MigrationLoader]:
    with django_db_blocker.unblock():
        yield MigrationLoader(connection)


@pytest.fixture(scope="module")
def check(loader: MigrationLoader) -> Callable[..., list[str]]:
    """Return a function for the faults of a migration with these operations that follows the newest one."""
    state, released = loader.project_state(), released_state(loader)

    def find(*operations: Any, atomic: bool = True) -> list[str]:
        return find_faults(make_migration(*operations, atomic=atomic), state, released)

    return find


def test_migrations_since_the_last_release_stop_no_process(loader: MigrationLoader) -> None:
    """Guarantee: an upgrade needs no downtime. A failure says what to write instead."""
    released = released_state(loader)
    for migration in list_new_migrations(loader):
        before = loader.project_state((migration.app_label, migration.name), at_end=False)
        assert find_faults(migration, before, released) == [], migration


def test_rehearsal_migrations_are_accepted(loader: MigrationLoader) -> None:
    """The check accepts a migration of each kind: the ones that `make upgrade-test` applies under traffic."""
    state, released = loader.project_state(), released_state(loader)
    for migration in read_rehearsal(EXPAND + CONTRACT, "0001_initial"):
        assert find_faults(migration, state, released) == [], migration
        state = migration.mutate_state(state)


@pytest.mark.parametrize(
    ("operations", "fault"),
    [
        pytest.param(
            [migrations.AddField("order", "note", models.CharField(max_length=9, default=""))],
            "order.note is not null and has no db_default",
            id="column that the last release does not fill",
        ),
        pytest.param(
            [migrations.AddField("order", "note", models.CharField(max_length=9, null=True, db_index=True))],
            "require-concurrent-index-creation",
            id="column with an index",
        ),
        pytest.param(
            [migrations.AddField("merchant", "note", NOTE), migrations.AddField("account", "note", NOTE)],
            "keyvault_account and keyvault_merchant are altered in one transaction",
            id="two tables that queries join",
        ),
        pytest.param(
            [migrations.AddField("order", "by", models.ForeignKey("keyvault.merchant", models.PROTECT, null=True))],
            "adding-foreign-key-constraint",
            id="foreign key",
        ),
        pytest.param(
            [migrations.AlterField("order", "currency", models.CharField(max_length=9))],
            "changing-column-type",
            id="longer text",
        ),
        pytest.param(
            [migrations.AlterField("order", "currency", models.IntegerField())],
            "changing-column-type",
            id="another type",
        ),
        pytest.param(
            [migrations.AlterField("order", "customer_id", models.CharField(max_length=128))],
            "adding-not-nullable-field",
            id="not null",
        ),
        pytest.param([migrations.RenameField("order", "currency", "money")], "renaming-column", id="renamed column"),
        pytest.param([migrations.RenameModel("Order", "Purchase")], "renaming-table", id="renamed table"),
        pytest.param(
            [migrations.RemoveField("order", "currency")],
            "keyvault_order.currency is dropped, and the last release uses it",
            id="dropped column",
        ),
        pytest.param(
            [migrations.RunSQL("ALTER TABLE keyvault_order DROP COLUMN currency")],
            "keyvault_order.currency is dropped, and the last release uses it",
            id="column dropped by SQL",
        ),
        pytest.param(
            [migrations.DeleteModel("Order")], "keyvault_order is dropped, and the last release", id="dropped table"
        ),
        pytest.param([migrations.AddIndex("order", INDEX)], "require-concurrent-index-creation", id="index"),
        pytest.param([migrations.AddConstraint("order", CHECK)], "constraint-missing-not-valid", id="constraint"),
        pytest.param(
            [migrations.AddConstraint("order", models.UniqueConstraint(fields=["created_at"], name="order_unique"))],
            "disallowed-unique-constraint",
            id="unique constraint",
        ),
        pytest.param([migrations.RunPython(lambda apps, editor: None)], "RunPython may read or write", id="RunPython"),
        *(
            pytest.param([migrations.RunSQL(sql)], "it may lock a table or write many rows: ", id=sql[:30])
            for sql in (
                "UPDATE keyvault_order SET currency = 'EUR'",
                "-- fill\nUPDATE keyvault_order SET currency = 'EUR'",
                "COMMENT ON TABLE keyvault_order IS 'x'; UPDATE keyvault_order SET currency = 'EUR'",
                "WITH few AS (SELECT 1) UPDATE keyvault_order SET currency = 'EUR'",
                "LOCK TABLE keyvault_order",
                "VACUUM FULL keyvault_order",
                "CLUSTER keyvault_order",
                "REFRESH MATERIALIZED VIEW orders",
                "DO $$ BEGIN DELETE FROM keyvault_order; END $$",
            )
        ),
    ],
)
def test_migration_that_stops_the_last_release_is_refused(
    check: Callable[..., list[str]], operations: list[Any], fault: str
) -> None:
    faults = check(*operations)
    assert any(each.startswith(fault) for each in faults), faults


def test_migration_in_online_operations_is_accepted(check: Callable[..., list[str]]) -> None:
    existing = "order_currency_index"
    faults = check(
        Backfill("order", Q(customer_id__isnull=True), {"customer_id": ""}),
        AddIndexOnline("order", INDEX),
        RemoveIndexOnline("order", existing),
        AddConstraintOnline("order", CHECK),
        atomic=False,
    )
    assert faults == []


def test_migration_without_a_transaction_has_online_operations_only(check: Callable[..., list[str]]) -> None:
    """Guarantee: an interrupted migration continues at the next `setup`."""
    faults = check(migrations.AddField("order", "note", NOTE), atomic=False)
    assert [fault.partition(" ")[0] for fault in faults] == ["AddField"]


def test_migration_that_writes_a_bounded_number_of_rows_says_so(check: Callable[..., list[str]]) -> None:
    assert check(migrations.RunPython(lambda apps, editor: None, hints={"bounded": True})) == []


def test_column_that_the_last_release_does_not_use_may_be_dropped(loader: MigrationLoader) -> None:
    """The second half of a removal: the release before has removed the column from the state."""
    gone: ProjectState = released_state(loader)
    gone.remove_field("keyvault", "order", "customer_id")
    drop = migrations.RunSQL("ALTER TABLE keyvault_order DROP COLUMN customer_id")
    assert find_faults(make_migration(drop), gone, gone) == []

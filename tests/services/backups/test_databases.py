"""How the programs of PostgreSQL get the connection."""

from types import SimpleNamespace

import pytest
from psycopg import pq

from keyvault.domain.errors import StateConflictError
from keyvault.services.backups import databases, restore

SECRETS = {option.keyword.decode() for option in pq.Conninfo.get_defaults() if option.dispchar == b"*"}


def connect_with(monkeypatch: pytest.MonkeyPatch, **parameters: str) -> None:
    monkeypatch.setattr(databases, "connection", SimpleNamespace(get_connection_params=lambda: parameters))


def test_connection_string_has_no_password_and_no_parameter_of_psycopg(monkeypatch: pytest.MonkeyPatch) -> None:
    connect_with(monkeypatch, dbname="kv", password="swordfish", sslkey="/k", keepalives="0", cursor_factory="x")
    conninfo, password = databases._read_conninfo()
    assert (set(conninfo.split()), password) == ({"dbname=kv", "sslkey=/k", "keepalives=0"}, "swordfish")


@pytest.mark.parametrize("name", sorted(SECRETS - {"password"}))
def test_other_secret_of_libpq_is_refused_because_the_list_of_processes_would_show_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    connect_with(monkeypatch, dbname="kv", **{name: "swordfish"})
    with pytest.raises(StateConflictError, match=name) as refused:
        databases._read_conninfo()
    assert "swordfish" not in str(refused.value)


def test_database_of_another_service_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its tables may have names of ours, such as `django_migrations`."""
    tables = ["django_migrations", "shop_order"]
    introspection = SimpleNamespace(table_names=lambda: tables)
    monkeypatch.setattr(restore, "connection", SimpleNamespace(introspection=introspection))
    with pytest.raises(StateConflictError, match="another service"):
        restore._require_own_tables()
    tables.append("keyvault_installation")
    restore._require_own_tables()

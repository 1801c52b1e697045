"""How every process connects to PostgreSQL: to the primary only, with a timeout."""

import json
import subprocess
from pathlib import Path

import psycopg
import pytest
from django.db import connection

from tests.project.test_start import run

PRINT = (
    "import json; from keyvault.project import settings; print(json.dumps(settings.DATABASES['default']['OPTIONS']))"
)
URL = "postgresql://keyvault@db.example/keyvault"


def options(folder: Path, url: str) -> dict[str, object]:
    done: subprocess.CompletedProcess[str] = run(["-c", PRINT], folder, KEYVAULT_DATABASE_URL=url)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_database_on_postgres_requires_the_primary_and_times_out_when_silent(tmp_path: Path) -> None:
    """Guarantee: a name that resolves to a standby, which may lack the latest revocations, is refused."""
    found = options(tmp_path, URL)
    assert found["target_session_attrs"] == "read-write"
    assert {"connect_timeout", "tcp_user_timeout", "keepalives_idle"} <= set(found)


def test_database_url_with_its_own_options_overrides_the_defaults(tmp_path: Path) -> None:
    found = options(tmp_path, f"{URL}?target_session_attrs=any&tcp_user_timeout=60000&sslmode=verify-full")
    assert (found["target_session_attrs"], found["tcp_user_timeout"]) == ("any", 60_000)
    assert found["sslmode"] == "verify-full"
    assert "keepalives_count" in found


def test_database_on_sqlite_has_no_postgres_options(tmp_path: Path) -> None:
    assert set(options(tmp_path, "")) == {"transaction_mode", "timeout", "init_command"}


@pytest.mark.postgres
@pytest.mark.django_db
def test_database_read_only_server_is_refused() -> None:
    """Covers Django's connections and those that reuse its parameters: the follower and the verifier's reader."""
    chosen = connection.get_connection_params()
    for name in ("context", "cursor_factory", "server_side_binding"):
        chosen.pop(name, None)
    psycopg.connect(**chosen).close()
    with pytest.raises(psycopg.OperationalError, match="read-only"):
        psycopg.connect(**chosen, options="-c default_transaction_read_only=on")

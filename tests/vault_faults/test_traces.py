"""After whole rotations no usable secret is stored in the Vault's directory, the database or the logs."""

import base64
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from keyvault.domain.digests import PepperSet
from keyvault.services.peppers.ring import read_pepper
from keyvault.services.secrets.backend import vault_backend
from rotation.domain.events import RotationState as S

from .faults import LOST, NARROWED, SEALED
from .harness import VaultHarness
from .journey import Journey

pytestmark = [pytest.mark.database, pytest.mark.django_db]

SECRET_AND_CHECKSUM = 49
"""The characters of a key string that are secret."""

Places = dict[str, bytes]


def read_files(folder: Path) -> Places:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_database() -> Places:
    """Return every value of every column of every table, as bytes."""
    places = {}
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f"SELECT * FROM {connection.ops.quote_name(table)}")  # noqa: S608  a table's own name
            places[table] = b"\n".join(map(as_bytes, (value for row in cursor.fetchall() for value in row)))
    return places


def as_bytes(value: Any) -> bytes:
    return bytes(value) if isinstance(value, bytes | memoryview) else str(value).encode()


def find(places: Places, wanted: Iterable[bytes]) -> Iterator[str]:
    """Yield each place that holds one of the wanted values, with its prefix."""
    for place, content in places.items():
        for text in wanted:
            if text in content:
                yield f"{place}: {text[:6]!r}…"


def run_rotations(harness: VaultHarness) -> tuple[list[Journey], list[bytes]]:
    """Run successful, rolled-back and faulty rotations whose logins begin as wrapped secret ids.

    Returns the journeys and every secret that was used.
    """
    opens = []
    for begins_wrapped in (True, False):
        harness.make_logins(renew=True, wrap_seconds=300 if begins_wrapped else None)
        opens += [path.read_bytes().strip() for path in harness.folder.glob("*secret_id")]
    harness.make_logins(renew=True, wrap_seconds=300)
    opens += [path.read_bytes().strip() for path in harness.folder.glob("*.wrapped_secret_id")]
    harness.begin_process()
    journeys = [Journey(harness), Journey(harness, aborted_in=S.QUARANTINE)]
    calls = [journey.run().calls for journey in journeys]
    for fault in (LOST, SEALED, NARROWED):
        journeys.append(Journey(harness, fault, calls[0].index("POST keys-sandbox/data") + 1))
        journeys[-1].run()
    opens += [path.read_bytes().strip() for path in harness.folder.glob("*.secret_id")]
    opens += [
        held.token.text.reveal().encode() for held in (each._held for each in vault_backend()._clients.values()) if held
    ]
    return journeys, opens


@pytest.mark.timeout(300)
def test_rotations_on_a_vault_leave_no_secret_in_audit_log_database_or_logs(
    harness: VaultHarness, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guarantee: no issued key, secret id, wrapping token, login token or pepper appears in anything that the server or
    the service wrote: the server's directory with its audit log, every database column, and every log record down to
    debug level.
    """
    with caplog.at_level(logging.DEBUG):
        journeys, opens = run_rotations(harness)
    issued = [text.reveal().encode() for journey in journeys for text in journey.strings.values()]
    issued += [journey.bystander_text.reveal().encode() for journey in journeys]
    peppers = [read_pepper(each, 1) for each in PepperSet]
    wanted = {*issued, *(text[-SECRET_AND_CHECKSUM:] for text in issued), *opens}
    wanted |= {*peppers, *(base64.b64encode(pepper) for pepper in peppers), *(p.hex().encode() for p in peppers)}
    wanted |= {harness.server.root_token.encode(), harness.server._key.encode()}
    assert len(issued) >= 12
    assert len(opens) >= 40
    logs = "\n".join(f"{record.getMessage()} {vars(record)}" for record in caplog.records) + "".join(capfd.readouterr())
    files = read_files(harness.server.audit_log.parent)
    for places, public in (
        (files, f"{harness.layout.prefix}-keys-sandbox/data/{journeys[0].credential.backend_path}"),
        (read_database(), journeys[0].credential.credential_id),
        ({"logs": logs.encode()}, journeys[0].rotation_id),
    ):
        # Public values are found, so the search itself works.
        assert list(find(places, [public.encode()]))
        assert list(find(places, wanted)) == []
    assert journeys[0].credential.backend_path.encode() in files["audit.log"]

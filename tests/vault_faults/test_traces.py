"""After a whole story nothing that opens anything stands anywhere: the Vault's directory, our database, our logs."""

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
from .journey import Journey
from .stand import Stand

pytestmark = [pytest.mark.database, pytest.mark.django_db]

SECRET_AND_CHECKSUM = 49
"""The characters of a key string that are no public handle."""

Places = dict[str, bytes]


def read_files(folder: Path) -> Places:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_database() -> Places:
    """Every value of every column of every table; bytes as they are."""
    places = {}
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f"SELECT * FROM {connection.ops.quote_name(table)}")  # noqa: S608  a table's own name
            places[table] = b"\n".join(map(as_bytes, (value for row in cursor.fetchall() for value in row)))
    return places


def as_bytes(value: Any) -> bytes:
    return bytes(value) if isinstance(value, bytes | memoryview) else str(value).encode()


def find(places: Places, wanted: Iterable[bytes]) -> Iterator[str]:
    """Where one of them stands, and how it begins."""
    for place, content in places.items():
        for text in wanted:
            if text in content:
                yield f"{place}: {text[:6]!r}…"


def tell_story(stand: Stand) -> tuple[list[Journey], list[bytes]]:
    """Rotations there and back, and disturbed, whose logins begin as wrapped secret ids; and all that opened something
    on the way."""
    opens = []
    for begins_wrapped in (True, False):
        stand.make_logins(renew=True, wrap_seconds=300 if begins_wrapped else None)
        opens += [path.read_bytes().strip() for path in stand.folder.glob("*secret_id")]
    stand.make_logins(renew=True, wrap_seconds=300)
    opens += [path.read_bytes().strip() for path in stand.folder.glob("*.wrapped_secret_id")]
    stand.begin_process()
    journeys = [Journey(stand), Journey(stand, aborted_in=S.QUARANTINE)]
    calls = [journey.run().calls for journey in journeys]
    for fault in (LOST, SEALED, NARROWED):
        journeys.append(Journey(stand, fault, calls[0].index("POST keys-sandbox/data") + 1))
        journeys[-1].run()
    opens += [path.read_bytes().strip() for path in stand.folder.glob("*.secret_id")]
    opens += [
        held.token.text.reveal().encode() for held in (each._held for each in vault_backend()._clients.values()) if held
    ]
    return journeys, opens


@pytest.mark.timeout(300)
def test_story_on_a_vault_leaves_no_secret_in_its_audit_log_our_database_or_our_logs(
    stand: Stand, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guarantee: no issued string, secret id, wrapping token, login's token or pepper is to be read in anything that
    the server or the service wrote: the audit log and all else in the server's directory, every column of the
    database, every log record with all that hangs on it, down to the level of debugging."""
    with caplog.at_level(logging.DEBUG):
        journeys, opens = tell_story(stand)
    issued = [text.reveal().encode() for journey in journeys for text in journey.strings.values()]
    issued += [journey.bystander_text.reveal().encode() for journey in journeys]
    peppers = [read_pepper(each, 1) for each in PepperSet]
    wanted = {*issued, *(text[-SECRET_AND_CHECKSUM:] for text in issued), *opens}
    wanted |= {*peppers, *(base64.b64encode(pepper) for pepper in peppers), *(p.hex().encode() for p in peppers)}
    wanted |= {stand.server.root_token.encode(), stand.server._key.encode()}
    assert len(issued) >= 12
    assert len(opens) >= 40
    told = "\n".join(f"{record.getMessage()} {vars(record)}" for record in caplog.records) + "".join(capfd.readouterr())
    files = read_files(stand.server.audit_log.parent)
    for places, public in (
        (files, f"{stand.layout.prefix}-keys-sandbox/data/{journeys[0].credential.backend_path}"),
        (read_database(), journeys[0].credential.credential_id),
        ({"logs": told.encode()}, journeys[0].rotation_id),
    ):
        # What is public is found, so that the search is one.
        assert list(find(places, [public.encode()]))
        assert list(find(places, wanted)) == []
    assert journeys[0].credential.backend_path.encode() in files["audit.log"]

"""A dump of the database and a copy of the data directory contain no key string."""

import base64
import os
from pathlib import Path

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.digests import PEPPER_SET
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason
from keyvault.services import maintenance
from keyvault.services.issuance import requests
from keyvault.services.keys.lifecycle import revoke_key
from keyvault.services.peppers.ring import load_peppers
from tests.factories import PASSWORD, approve, grant, issue, issue_request, make_token, request_key
from tests.services.conftest import Scene, make_scene
from tests.services.rows import dump_tables

pytestmark = [pytest.mark.database, pytest.mark.django_db(transaction=True)]


def create_and_end_keys(scene: Scene) -> list[Plaintext]:
    """Create keys and tokens of every kind; collect, revoke and destroy some. Return all their strings."""
    strings = [issue(place, kind=kind)[1] for place in (scene.sandbox, scene.production) for kind in KeyKind]
    strings += [make_token()[1], make_token(P.KEYS_REVOKE, by=scene.admin)[1]]
    request = request_key(scene.production, delivery=Delivery.SHOW_ONCE)
    issue_request(approve(request))
    strings.append(requests.collect_key(grant(scene.tam, P.ISSUANCE_COLLECT, scene.production), request))
    key, text = issue(scene.sandbox)
    revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.KEY_COMPROMISE)
    maintenance.destroy_due()
    return [*strings, text]


def encodings_of(text: str) -> list[bytes]:
    """Return the string and its secret part, plain and in base64."""
    secret = text[-49:-6]
    return [form for part in (text, secret) for form in (part.encode(), base64.b64encode(part.encode()))]


def test_secrecy_dump_and_data_directory_contain_no_key_string(data_dir: Path) -> None:
    """No table and no file (database, keystore, their logs) contains the string of a key or its secret part."""
    scene = make_scene()
    strings = [text.reveal() for text in create_and_end_keys(scene)]
    assert len(set(strings)) == 8
    found = repr(dump_tables()).encode() + b"".join(
        path.read_bytes() for path in sorted(data_dir.rglob("*")) if path.is_file()
    )
    assert strings[0][-65:-49].encode() in found, "the dump lacks the public handle"
    assert [text[:27] for text in strings if any(encoding in found for encoding in encodings_of(text))] == []
    assert PASSWORD.encode() not in found


def test_secrecy_dump_and_data_directory_contain_no_pepper(data_dir: Path) -> None:
    """Without the master key, an attacker cannot compute digests from stolen files."""
    make_scene()
    files = b"".join(
        path.read_bytes() for path in sorted(data_dir.rglob("*")) if path.is_file() and path.name != "master.key"
    )
    found = repr(dump_tables()).encode() + files
    for pepper_set in PEPPER_SET.values():
        pepper = load_peppers(pepper_set).versions[1]
        for form in (pepper, pepper.hex().encode(), base64.b64encode(pepper)):
            assert form not in found


def test_secrecy_data_directory_is_readable_only_by_its_owner(data_dir: Path) -> None:
    make_scene()
    for name in ("keystore.sqlite3", "master.key"):
        assert os.stat(data_dir / name).st_mode & 0o077 == 0

"""The disk of the data folder, with SQLite's database and the revocation log, is full; then it has space again.

The disk is a small file system of its own, so that this needs root. Another writer takes each byte that becomes free.
"""

import http.client
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from django.conf import settings
from django.db import connections

from keyvault.access.permissions import Permission as P
from keyvault.domain.plaintext import Plaintext
from keyvault.management.service import ADDRESS
from tests.factories import make_token
from tests.faults.hosts import copy_data
from tests.faults.programs import GaveUpError, served, until
from tests.faults.results import Options, Result, say
from tests.faults.traffic import VerifierClient
from tests.rotation import scene

VICTIMS = 3
GOOD = 10
DISK_BYTES = 160 * 1024 * 1024
STEP_SECONDS = 300


def run(options: Options) -> Result:
    result = Result("keys revoked", n=VICTIMS)
    gateway = make_token(P.KEYS_VERIFY, name="gateway")[1]
    responder = make_token(P.KEYS_REVOKE, name="responder")[1]
    keys = [_issue(number) for number in range(VICTIMS + GOOD)]
    victims, good = keys[:VICTIMS], keys[VICTIMS:]
    with tempfile.TemporaryDirectory(prefix="kv-disk-") as folder, _disk(Path(folder)) as disk:
        data = _move(disk)
        environ = {"KEYVAULT_DATA_DIR": str(data), "KEYVAULT_DATABASE_URL": f"sqlite:///{data}/keyvault.sqlite3"}
        try:
            with served(options.folder, environ=environ) as (service, port):
                client = VerifierClient(port, gateway)
                until("readiness", lambda: not _is_named_full(port), STEP_SECONDS, service.restart_ended)
                for key_id, _ in victims:
                    _fill(disk)
                    until("readyz to name the disk", lambda: _is_named_full(port), STEP_SECONDS)
                    status = _revoke(port, responder, key_id)
                    result.must_be(status == 202, f"{key_id} is not revoked on a full disk: {status}")
                _judge(result, client, victims, good)
                say("the disk is full, and the keys are revoked")
                (disk / "filler").unlink()
                until("readyz to be silent", lambda: not _is_named_full(port), STEP_SECONDS)
                _judge(result, client, victims, good)
                client.close()
            # Restarted, from what is on the disk.
            with served(options.folder, environ=environ) as (_, port):
                client = VerifierClient(port, gateway)
                _judge(result, client, victims, good)
                client.close()
        except GaveUpError as gave_up:
            result.must_be(False, str(gave_up))
        log = (data / "revocation_log").read_text()
        result.must_be_none("not in the revocation log", [key_id for key_id, _ in victims if key_id not in log])
    return result


def _issue(number: int) -> tuple[str, Plaintext]:
    key, text = scene.issue(scene.account("acme"), datetime.now(UTC), label=f"key {number}")
    return key.key_id, text


def _judge(
    result: Result, client: VerifierClient, victims: list[tuple[str, Plaintext]], good: list[tuple[str, Plaintext]]
) -> None:
    refused = [client.ask(*key, 0, is_dry=False) for key in good]
    allowed = [client.ask(*key, 0, is_dry=False) for key in victims]
    result.must_be_none(
        "refused that should pass", [f"{each.key_id}: {each.status} {each.code}" for each in refused if not each.is_yes]
    )
    result.must_be_none("allowed that should not", [each.key_id for each in allowed if each.is_yes])


def _is_named_full(port: int) -> bool:
    """Whether `/readyz` names the disk."""
    checks: dict[str, str] = json.loads(_request(port, "GET", "/readyz")[1])["checks"]
    return checks["disk"] == "failing"


def _revoke(port: int, token: Plaintext, key_id: str) -> int:
    headers = {"Authorization": f"Bearer {token.reveal()}", "Content-Type": "application/json"}
    body = json.dumps({"reason": "key_compromise"})
    return _request(port, "POST", f"/v1/keys/{key_id}/revoke", body, headers)[0]


def _request(
    port: int, method: str, path: str, body: str = "", headers: Mapping[str, str] | None = None
) -> tuple[int, str]:
    with closing(http.client.HTTPConnection(ADDRESS, port, timeout=30)) as connection:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


@contextmanager
def _disk(folder: Path) -> Iterator[Path]:
    options = f"size={DISK_BYTES},mode=0700"
    mount = ["mount", "-t", "tmpfs", "-o", options, "keyvault-faults", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield folder
    finally:
        unmount = ["umount", "--lazy", str(folder)]
        subprocess.run(unmount, check=True)


def _move(disk: Path) -> Path:
    """Copy the installation of this process, database included, to the disk."""
    connections.close_all()
    return copy_data(settings.DATA_DIR, disk / "data")


def _fill(disk: Path) -> None:
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
    say(f"{os.statvfs(disk).f_bavail} blocks are free")

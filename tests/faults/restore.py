"""A database set back under every kind of revocation log, with and without the revocation anchor.

200 keys end after the backup. For each combination the host is assembled from copies and started. If the start is
refused, the host is repaired with `replay_revocations` and started again. No ended key may be good, except in the
combinations of `UNDETECTABLE`, where nothing names it any more.
"""

import itertools
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connections

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.domain.keys import DEAD_STATES
from keyvault.domain.revocation import RevocationReason
from keyvault.domain.revocation_log import (
    ConfirmedLines,
    DamagedLineError,
    Ended,
    LogLine,
    Opened,
    line_bytes,
    parse_line,
)
from keyvault.models import Key
from keyvault.services.keys import lifecycle
from keyvault.services.recording.revocation_log import describe_ended, read_lines
from keyvault.services.revocations.anchor import AnchorWriter
from keyvault.services.revocations.replay import read_counter
from keyvault.services.startup.startup_checks import require_current
from tests.factories import account, forget_evidence, grant, issue, make_merchant, make_operator, now
from tests.faults.results import Options, Result, say

ENDED = 200

UNDETECTABLE = {
    ("restored", "truncated", False): ENDED // 4,
    ("restored", "older", False): ENDED // 2,
    ("restored", "another host's", False): ENDED // 4,
    ("restored", "of the backup", False): ENDED,
}
"""Number of good ended keys, by database, log and whether there is an anchor.

The database was set back, and the log is a file that was once whole. Nothing on the host or outside it differs from a
host on which these keys were never revoked.
"""


@dataclass(frozen=True, slots=True)
class Copies:
    """Files of a host, by state. `logs`: None: the file is deleted. `named`: ids of the ended keys in each log."""

    databases: dict[str, bytes]
    keystores: dict[bool, bytes]
    logs: dict[str, bytes | None]
    named: dict[str, set[str]]


def run(options: Options) -> Result:
    result = Result("combinations")
    database, keystore = options.folder / "keyvault.sqlite3", options.folder / "keystore.sqlite3"
    copies, ended = _make_copies(database, keystore)
    for state, log, is_anchored in itertools.product(copies.databases, copies.logs, copies.keystores):
        place = f"database {state}, log {log}, anchor {'present' if is_anchored else 'absent'}"
        connections.close_all()
        _place(database, copies.databases[state])
        _place(keystore, copies.keystores[is_anchored])
        _place(settings.REVOCATION_LOG, copies.logs[log])
        is_started = _start()
        good = set(Key.objects.filter(pk__in=ended).exclude(state__in=DEAD_STATES).values_list("pk", flat=True))
        named = ended if is_anchored else copies.named[log]
        say(f"{place}: {'started' if is_started else 'refused'}, {len(good)} of {len(ended)} good")
        result.n += 1
        if is_started:
            result.must_be_none("ended keys good again", [f"{place}: {key_id}" for key_id in sorted(good & named)])
            undetected = UNDETECTABLE.get((state, log, is_anchored), 0)
            result.must_be(len(good) == undetected, f"{place}: {len(good)} good, not {undetected}")
            if undetected:
                result.counts[f"undetectable: {place}"] = len(good)
        result.must_be(is_started or (log == "deleted" and not is_anchored), f"{place}: it does not start")
    return result


def _make_copies(database: Path, keystore: Path) -> tuple[Copies, set[str]]:
    admin = make_operator("admin", Role.KEY_ADMINISTRATOR)
    make_merchant("acme")
    keys = [issue(account("acme"), label=f"key {number}")[0] for number in range(ENDED)]
    databases = {"restored": _read(database)}
    logs: dict[str, bytes | None] = {"deleted": None}
    sizes = []
    for key in keys:
        sizes.append(settings.REVOCATION_LOG.stat().st_size)
        allowed = grant(admin, P.KEYS_REVOKE, key.credential.account)
        lifecycle.revoke_key(allowed, key, RevocationReason.SUPERSEDED)
    writer = AnchorWriter()
    while writer.run(now()):
        pass
    keystores = {True: _read(keystore)}
    forget_evidence(keystore)
    keystores[False] = _read(keystore)
    databases["kept"] = _read(database)
    whole = settings.REVOCATION_LOG.read_bytes()
    logs |= {"kept": whole, "older": whole[: sizes[ENDED // 2]], "of the backup": whole[: sizes[0]]}
    logs["truncated"] = whole[: sizes[ENDED * 3 // 4] + 20]  # in the middle of a line
    opened = next(line for _, line in read_lines() if isinstance(line, Opened))
    others = describe_ended([("key", key.key_id) for key in keys[: ENDED * 3 // 4]], read_counter(), now())
    lines: list[LogLine] = [opened, *others]
    logs["another host's"] = b"".join(map(line_bytes, lines))
    named = {name: _names(text) for name, text in logs.items()}
    return Copies(databases, keystores, logs, named), {key.key_id for key in keys}


def _names(text: bytes | None) -> set[str]:
    """Return the ended keys whose revocation a log confirms."""
    confirmed, names = ConfirmedLines(), set[str]()
    for line in [] if text is None else text.splitlines():
        try:
            names |= {each.id for each in confirmed.add(parse_line(line)) if isinstance(each, Ended)}
        except DamagedLineError:
            break
    return names


def _read(path: Path) -> bytes:
    """Return an online copy of a SQLite file."""
    copy = path.with_name(f"{path.name}.copy")
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    text = copy.read_bytes()
    copy.unlink()
    return text


def _place(path: Path, text: bytes | None) -> None:
    for ending in ("", "-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)
    if text is not None:
        path.write_bytes(text)
        path.chmod(0o600)


def _start() -> bool:
    """Start and repair as an operator does; return whether the service starts in the end."""
    try:
        require_current()
    except ImproperlyConfigured:
        with suppress(CommandError, SystemExit):
            call_command("replay_revocations", stdout=StringIO())
    else:
        return True
    try:
        require_current()
    except ImproperlyConfigured:
        return False
    return True

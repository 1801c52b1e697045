"""Commands of the part `growth`, in a process with its own database: `python -m tests.bench.growth_commands`.

Each line of standard input is a command; its reply is a line of JSON:

- `add COUNT OUT`: insert keys until there are COUNT, and write the strings of the new keys to the file OUT;
- `measure COUNT`: look up COUNT keys as a verifier does on a cache miss;
- `remember COUNT`: cache COUNT records as a verifier does;
- `sizes`: return the sizes of tables and indexes.

The first `VALID_KEYS` rows are valid keys: string, checksum, and digest under the real pepper. Further rows have the
same shape with random ids and digests, and no key string.
"""

import functools
import gc
import json
import os
import secrets
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import django
import uvloop

from .figures import percentile

VALID_KEYS = 1_000_000
SAMPLE = 20_000
CHUNK = 1000
TABLES = ("keyvault_key", "keyvault_credential")


def main() -> int:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
    django.setup()
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "add": _add,
        "measure": _measure,
        "remember": _remember,
        "sizes": _sizes,
    }
    for line in sys.stdin:
        name, *arguments = line.split()
        sys.stdout.write(json.dumps(commands[name](*arguments)) + "\n")
        sys.stdout.flush()
    return 0


def _add(count: str, out: str) -> dict[str, Any]:
    from django.db import connection

    from keyvault.domain.digests import PepperSet
    from keyvault.models import Account, Credential, Key
    from keyvault.services.peppers.ring import load_peppers

    have = Key.objects.count()
    accounts = list(Account.objects.filter(environment="production").values_list("pk", flat=True))
    template = Key.objects.select_related("credential").order_by("created_at").first()
    assert template is not None
    began = time.perf_counter()
    # Skip triggers and foreign keys, for speed.
    with connection.cursor() as cursor:
        cursor.execute("SET session_replication_role = replica")
    credentials: list[str] = []
    # Before COPY, during which the connection accepts no other statement.
    peppers = load_peppers(PepperSet.PRODUCTION)
    with open(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as texts:
        made = _new_keys(int(count) - have, have, peppers, credentials, texts)
        _copy(Key, template, made)
    own = (
        {"credential_id": name, "account_id": accounts[turn % len(accounts)]} for turn, name in enumerate(credentials)
    )
    _copy(Credential, template.credential, own)
    with connection.cursor() as cursor:
        cursor.execute("SET session_replication_role = origin")
        cursor.execute(f"VACUUM ANALYZE {', '.join(TABLES)}")
    return {"keys": int(count), "seconds": time.perf_counter() - began}


def _new_keys(count: int, have: int, peppers: Any, credentials: list[str], texts: Any) -> Iterator[dict[str, Any]]:
    """Yield the columns in which the rows differ."""
    from keyvault.domain.digests import DIGEST_BYTES
    from keyvault.domain.ids import mint_id, mint_key_id
    from tests.bench.seed_keys import mint

    for number in range(have, have + count):
        if number < VALID_KEYS:
            minted = mint()
            key_id, (digest, version) = minted.key_id, peppers.digest(minted.text)
            texts.write(f"{minted.text.reveal()}\n")
        else:
            key_id, digest, version = mint_key_id(secrets.token_bytes), secrets.token_bytes(DIGEST_BYTES), 1
        credentials.append(mint_id("crd", secrets.token_bytes))
        yield {"key_id": key_id, "credential_id": credentials[-1], "digest": digest, "pepper_version": version}


def _copy(model: Any, template: Any, rows: Iterator[dict[str, Any]]) -> None:
    """Copy the template's row once for each of `rows`, with the columns of that row."""
    from django.db import connection

    fields = model._meta.concrete_fields
    same = {field.attname: field.get_db_prep_save(getattr(template, field.attname), connection) for field in fields}
    names = ", ".join(f'"{field.column}"' for field in fields)
    with (
        connection.cursor() as cursor,
        cursor.cursor.copy(f"COPY {model._meta.db_table} ({names}) FROM STDIN") as copy,
    ):
        for row in rows:
            copy.write_row([row.get(field.attname, same[field.attname]) for field in fields])


class _Reader:
    """The database reads of a dedicated verifier, on their own event loop."""

    def __init__(self) -> None:
        from django.db import connection

        from keyvault.hotpath.adapters.stores import PostgresStore

        with connection.cursor() as cursor:
            cursor.execute("SELECT key_id FROM keyvault_key ORDER BY random() LIMIT %s", [SAMPLE])
            self._sample = [row[0] for row in cursor.fetchall()]
        self._store, self._loop = PostgresStore(), uvloop.new_event_loop()
        # Read each key once, so that its pages are in memory.
        self._loop.run_until_complete(self.look_up(self._sample))

    def measure(self, count: int) -> dict[str, float]:
        took = self._loop.run_until_complete(self.look_up([secrets.choice(self._sample) for _ in range(count)]))
        return {"p50_us": percentile(took, 0.5), "p99_us": percentile(took, 0.99)}

    async def look_up(self, key_ids: Sequence[str]) -> list[float]:
        """Look up the keys one after the other; return the time of each, in microseconds."""
        from keyvault.hotpath.messages.pending_requests import KEY

        took = []
        for key_id in key_ids:
            wanted = frozenset((key_id,))
            began = time.perf_counter_ns()
            found = await self._store.find(KEY, wanted)
            took.append((time.perf_counter_ns() - began) / 1000)
            if wanted != set(found):
                raise RuntimeError("A lookup found no key.")
        return took


@functools.cache
def _reader() -> _Reader:
    return _Reader()


def _measure(count: str) -> dict[str, float]:
    return _reader().measure(int(count))


def _remember(count: str) -> dict[str, float]:
    """Return the size of a cached record with its indexes, in bytes, as tracemalloc measures it."""
    from keyvault.hotpath.engine.memory import Memory
    from keyvault.models import Key
    from keyvault.services.keys.records import find_keys

    wanted = list(Key.objects.values_list("key_id", flat=True)[: int(count)])
    tracemalloc.start()
    memory = Memory(secrets.token_bytes(32), len(wanted))
    before, _ = tracemalloc.get_traced_memory()
    for start in range(0, len(wanted), CHUNK):
        for key_id, record in find_keys(wanted[start : start + CHUNK]).items():
            known = memory.admit_key(record)
            memory.keys.bind(known, memory.tag(key_id.encode()))
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"keys": len(wanted), "bytes_each": (after - before) / len(wanted)}


def _sizes() -> dict[str, float]:
    """Return sizes in MiB."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT sum(pg_table_size(name::regclass)), sum(pg_indexes_size(name::regclass)),"
            " pg_relation_size('keyvault_key_pkey') FROM unnest(%s::text[]) name",
            [list(TABLES)],
        )
        tables, indexes, primary = cursor.fetchone()
    return {"tables_mb": int(tables) / 2**20, "indexes_mb": int(indexes) / 2**20, "primary_mb": int(primary) / 2**20}


if __name__ == "__main__":
    sys.exit(main())

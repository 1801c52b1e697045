"""Commands of the part `scale`, in a process with its own database: `python -m tests.bench.scale_commands`.

Each line of standard input is a command, a method of `Commands`; its reply is a line of JSON:

- `load SIZE`: insert the rows of SIZE credentials;
- `idle ROUNDS`, `due COUNT`: measure each periodic job and each step of maintenance, without and with due work;
- `pages`, `revoke COUNT`, `repeat COUNT`: measure console pages and revocations;
- `prepare COUNT`, `complete`, `drive COUNT RATE`: measure rotations;
- `sizes`, `written`: return the sizes of tables, and the number of inserted rows.

Costs are processor time, which other processes affect little.
"""

import gc
import inspect
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import django

from .figures import percentile
from .machine import cost

if TYPE_CHECKING:
    from tests.bench.scale_rows import PlatformSize, Samples

QUIET_SECONDS = 1
"""Quiet period and quarantine of the rotations that are completed, in seconds: the minimum of the sandbox."""

PAGE_TIMES = 3
"""Measurements of each page, after it was opened once."""

PAGE_SECONDS = 20
"""Maximum time to open a page once and measure it, in seconds; a page that takes longer has no figure."""

DRIVE_SECONDS = 0.1
"""Interval between two rounds of starting, acknowledging and reporting in `drive`, in seconds."""


def main() -> int:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
    django.setup()
    # Log lines of each rotation step would be measured too; warnings stay.
    logging.disable(logging.INFO)
    commands = Commands()
    for line in sys.stdin:
        name, *arguments = line.split()
        answer = getattr(commands, name)(*map(int, arguments))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


class Commands:
    """The commands."""

    size: "PlatformSize"
    samples: "Samples"

    def __init__(self) -> None:
        self._prepared: list[str] = []

    def load(self, count: int) -> dict[str, Any]:
        from django.db import connection

        from tests.bench import scale_rows

        began = time.perf_counter()
        self.size = scale_rows.PlatformSize(count)
        self.samples = scale_rows.load(self.size)
        scale_rows.catch_up()
        with connection.cursor() as cursor:
            cursor.execute("VACUUM ANALYZE")
            cursor.execute("CHECKPOINT")
        return {"seconds": time.perf_counter() - began}

    # --- periodic jobs ------------------------------------------------------------------------------------------

    def idle(self, rounds: int) -> dict[str, Any]:
        """Measure each job ROUNDS times with nothing due, in ms, after one run that is not counted."""
        from keyvault.services.audit.checkpoints import sign_due

        with _checkpoints_due():
            while sign_due(datetime.now(UTC)):  # The loaded chains are unsigned.
                pass
            return {name: [_cost(job)[0] for _ in range(rounds + 1)][1:] for name, job in _list_jobs()}

    def due(self, count: int) -> dict[str, Any]:
        """Measure one run of each job with COUNT rows due, in ms."""
        from tests.bench import scale_rows as rows

        size, samples = self.size, self.samples
        make: dict[str, Callable[[], object]] = {
            "issue_due": lambda: rows.make_requests_due(samples, count),
            "expire_due": lambda: rows.make_expiries_due(size, count),
            "discard_due": lambda: rows.make_discards_due(size, count),
            "backfill_revocation_log": lambda: rows.make_backfill_due(size, count),
            "destroy_due": lambda: rows.make_destructions_due(size, count),
            "settle_due": lambda: rows.make_settlements_due(size, count),
            "settle_connections_due": lambda: rows.make_connections_due(size, count),
            "forget_paths_due": lambda: rows.make_paths_due(size, count),
            "forget_due": lambda: rows.make_rows_old(size, samples, count),
            "deliver-webhooks-production": lambda: rows.make_deliveries_due(size, samples, count),
            "dispatch-due-rotations-production": lambda: rows.make_rotations_due(size, count),
            "begin-scheduled-rotations-production": lambda: rows.make_schedules_due(size, count),
            "advance-campaigns-production": lambda: rows.make_campaign_due(size, count),
            "forget-pending-copies-production": lambda: rows.make_pending_due(size, count),
            "sign-checkpoints-production": lambda: rows.make_heads_due(size, count),
        }
        found = {}
        with rows.accept_messages(), _checkpoints_due():
            for name, job in _list_jobs():
                if name in make:
                    make[name]()
                    found[name] = _cost(job)[0]
        return found

    # --- console and revocations --------------------------------------------------------------------------------

    def pages(self) -> list[dict[str, Any]]:
        """Measure each page of the console as an administrator, by GET."""
        # As `project/asgi.py`: what is loaded is exempt from garbage collection.
        gc.collect()
        gc.freeze()
        return list(_measure_pages(self.samples))

    def revoke(self, count: int) -> dict[str, float]:
        """Revoke keys that no rotation has."""
        from keyvault.access.permissions import Permission as P
        from keyvault.domain.revocation import RevocationReason
        from keyvault.models import Key
        from keyvault.services.keys.lifecycle import revoke_key
        from tests.factories import grant
        from tests.rotation import scene

        keys = Key.objects.select_related("credential__account__merchant").filter(
            state="active", retiring_rotations__isnull=True, introducing_rotations__isnull=True
        )[:count]
        took = [
            _cost(
                partial(
                    revoke_key,
                    grant(scene.admin(), P.KEYS_REVOKE, key.credential.account),
                    key,
                    RevocationReason.SUPERSEDED,
                )
            )[0]
            for key in keys
        ]
        return {"p50_ms": median(took), "p99_ms": percentile(took, 0.99)}

    def repeat(self, count: int) -> dict[str, Any]:
        """Repeat a self-revocation of one key over HTTP."""
        from django.test import Client

        from tests import factories

        _allow_test_host()
        _, text = factories.issue(self.samples.account)
        client, took = Client(), []
        statuses: dict[int, int] = {}
        for _ in range(count):
            headers = {"X-Api-Key": text.reveal()}
            path = "/production/credentials/revoke-self"
            send = partial(client.post, path, content_type="application/json", headers=headers)
            spent, response = _cost(send)
            took.append(spent)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        return {
            "first_ms": took[0],
            "p50_ms": median(took[1:]),
            "p99_ms": percentile(took[1:], 0.99),
            "statuses": statuses,
        }

    # --- rotations ----------------------------------------------------------------------------------------------

    def prepare(self, count: int) -> dict[str, int]:
        """Issue COUNT keys in the sandbox, each to be replaced by a rotation."""
        from tests import factories
        from tests.rotation import scene

        place = scene.account(f"rotating-{os.getpid()}")
        self._prepared = [factories.issue(place)[0].credential_id for _ in range(count)]
        return {"prepared": count}

    def complete(self) -> dict[str, Any]:
        """Complete a rotation of each prepared key, at the maximum rate of this process."""
        from rotation.domain.events import RotationState as S
        from rotation.models import Rotation
        from rotation.services.rotations.engine import advance_rotation
        from tests.rotation import scene

        began, turns, database = time.monotonic(), 0, _database_process()
        spent = time.process_time() + cost([database], None).cpu_seconds
        with _reporter() as report:
            open_ids = [self._begin(credential_id) for credential_id in self._prepared]
            acknowledged: set[str] = set()
            while open_ids:
                for rotation_id in open_ids:
                    report()
                    advance_rotation(rotation_id)
                    turns += 1
                states = dict(Rotation.objects.filter(pk__in=open_ids).values_list("pk", "state"))
                for rotation_id in [each for each, state in states.items() if state == S.AWAITING_PROOF]:
                    if rotation_id not in acknowledged:
                        acknowledged.add(rotation_id)
                        scene.acknowledge_replacement(rotation_id, datetime.now(UTC))
                open_ids = [rotation_id for rotation_id in open_ids if states[rotation_id] != S.COMPLETED]
        spent = time.process_time() + cost([database], None).cpu_seconds - spent
        ended = time.monotonic()
        return {"completed": len(self._prepared), "turns": turns, "began": began, "ended": ended, "cpu": spent}

    def drive(self, count: int, rate: int) -> dict[str, Any]:
        """Start COUNT rotations at RATE per second and acknowledge each, while Celery workers advance them.

        One at a time: after several starts in a row, their acknowledgements would be a burst. On busy cores, the rate
        is therefore lower; `started_per_second` is the one that was reached.

        Returns, in ms, the time from each acknowledgement's commit to the step that follows it.
        """
        from rotation.domain.events import RotationState as S
        from rotation.models import Rotation
        from rotation.services.rotations.turns import dispatcher
        from rotation.tasks import send_turn
        from tests.rotation import scene

        self.prepare(count)
        # As in a web process: an event is dispatched when it is committed.
        dispatcher.send = send_turn
        began, started = time.monotonic(), datetime.now(UTC)
        ids: list[str] = []
        acknowledged: dict[str, datetime] = {}
        until, took_to_start = began + count / rate + 120, 0.0
        with _reporter() as report:
            while time.monotonic() < until:
                report()
                if len(ids) < min(count, (time.monotonic() - began) * rate):
                    ids.append(self._begin(self._prepared[len(ids)]))
                    took_to_start = time.monotonic() - began
                waiting = Rotation.objects.filter(pk__in=ids, state=S.AWAITING_PROOF).exclude(pk__in=acknowledged)
                for rotation_id in waiting.values_list("pk", flat=True):
                    scene.acknowledge_replacement(rotation_id, datetime.now(UTC))
                    acknowledged[rotation_id] = datetime.now(UTC)
                if len(ids) == count and not Rotation.objects.filter(pk__in=ids).exclude(state=S.COMPLETED).exists():
                    break
                if len(ids) >= min(count, (time.monotonic() - began) * rate):
                    time.sleep(DRIVE_SECONDS)
        done = Rotation.objects.filter(pk__in=ids, state=S.COMPLETED)
        proofs = dict(done.filter(evidence__kind="used").values_list("pk", "evidence__created_at"))
        took = [(proofs[each] - at).total_seconds() * 1e3 for each, at in acknowledged.items() if each in proofs]
        last = max(done.values_list("closed_at", flat=True), default=started)
        return {
            "rotations": count,
            "completed": done.count(),
            "rate": rate,
            "started_per_second": len(ids) / max(took_to_start, 1e-9),
            "per_second": done.count() / max((last - started).total_seconds(), 1e-9),
            "p50_ms": percentile(took, 0.5) if took else None,
            "p99_ms": percentile(took, 0.99) if took else None,
        }

    def _begin(self, credential_id: str) -> str:
        from keyvault.models import Credential
        from tests.rotation import scene

        credential = Credential.objects.select_related("account__merchant").get(pk=credential_id)
        periods = {"quiet_seconds": QUIET_SECONDS, "quarantine_seconds": QUIET_SECONDS}
        return str(scene.rotate(credential, datetime.now(UTC), **periods).rotation_id)

    # --- tables -------------------------------------------------------------------------------------------------

    def sizes(self) -> dict[str, dict[str, float]]:
        """Return the rows of each table, and its bytes with indexes."""
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT relname, reltuples, pg_total_relation_size(oid) FROM pg_class"
                " WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND reltuples > 0"
            )
            return {name: {"rows": float(rows), "bytes": float(size)} for name, rows, size in cursor.fetchall()}

    def written(self) -> dict[str, int]:
        """Return the number of rows inserted into each table so far."""
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_stat_force_next_flush()")
            cursor.execute("SELECT relname, n_tup_ins FROM pg_stat_user_tables")
            return dict(cursor.fetchall())


class TooSlowError(BaseException):
    """A page took longer than PAGE_SECONDS. No handler of the product may catch it."""


def _cost(act: Callable[[], Any]) -> tuple[float, Any]:
    """Call `act`; return the processor time of this process and its database connection in ms, and the result."""
    database = _database_process()
    began = time.process_time() + cost([database], None).cpu_seconds
    answer = act()
    return (time.process_time() + cost([database], None).cpu_seconds - began) * 1e3, answer


def _database_process() -> int:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def _list_jobs() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each entry of the beat's schedule, then each step of maintenance."""
    from django.conf import settings

    from keyvault.project import celery_app
    from keyvault.services import maintenance

    celery_app.loader.import_default_modules()
    for name, entry in settings.CELERY_BEAT_SCHEDULE.items():
        yield name, partial(celery_app.tasks[str(entry["task"])], *cast("tuple[Any, ...]", entry.get("args", ())))
    for name, step in vars(maintenance).items():
        is_public = inspect.isfunction(step) and step.__module__ == maintenance.__name__ and not name.startswith("_")
        if is_public and not inspect.signature(step).parameters:
            yield name, step


@contextmanager
def _checkpoints_due() -> Iterator[None]:
    """Remove the minimum interval between two checkpoints."""
    from datetime import timedelta

    from keyvault.services.audit import checkpoints

    with mock.patch.object(checkpoints, "CHECKPOINT_EVERY", timedelta(0)):
        yield


@contextmanager
def _reporter() -> Iterator[Callable[[], None]]:
    """Register a verifier that reports no uses; the callable moves its watermark to now."""
    from keyvault.models import UsageReporter

    name = f"scale-{os.getpid()}-{time.monotonic_ns()}"
    now = datetime.now(UTC)
    UsageReporter.objects.create(reporter_id=name, started_at=now, flushed_through_at=now, peppers={})

    reported = time.monotonic()

    def report() -> None:
        nonlocal reported
        if time.monotonic() - reported < DRIVE_SECONDS:
            return
        reported = time.monotonic()
        UsageReporter.objects.filter(pk=name).update(flushed_through_at=datetime.now(UTC))

    yield report
    UsageReporter.objects.filter(pk=name).update(stopped_at=datetime.now(UTC))


def _measure_pages(samples: "Samples") -> Iterator[dict[str, Any]]:
    """Measure each list and form, and each page of one object."""
    from keyvault.access.roles import Role
    from tests.admin.desk import browser, list_routes
    from tests.factories import make_operator

    _allow_test_host()
    client, ids = browser(make_operator("console", *Role)), _list_ids(samples)
    for name, path in list_routes():
        model = "_".join(name.split("_")[:2])
        if name in {"login", "logout", "everything else"} or ("<str:object_id>" in path and ids.get(model) is None):
            continue
        path = path.replace("<str:object_id>", str(ids.get(model))).replace("<int:sequence>", "1")
        yield {"page": name, **_open_page(partial(client.get, path))}


def _open_page(get: Callable[[], Any]) -> dict[str, Any]:
    """Open a page, then measure it PAGE_TIMES. `ms`: the median, or None: it took longer than PAGE_SECONDS."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    def stop(number_of: int, frame: object) -> None:
        raise TooSlowError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(PAGE_SECONDS)
    try:
        with CaptureQueriesContext(connection) as made:
            get()
        # Now: the next request clears Django's list of queries.
        queries = sum("SAVEPOINT" not in each["sql"] for each in made.captured_queries)
        measured = [_cost(get) for _ in range(PAGE_TIMES)]
    except TooSlowError:
        connection.close()
        return {"ms": None, "queries": None, "status": f"over {PAGE_SECONDS} s"}
    finally:
        signal.alarm(0)
    spent, responses = zip(*measured, strict=True)
    return {"ms": median(spent), "queries": queries, "status": str(responses[0].status_code)}


def _allow_test_host() -> None:
    """Accept the requests of Django's test client."""
    from django.conf import settings

    if "testserver" not in settings.ALLOWED_HOSTS:
        settings.ALLOWED_HOSTS.append("testserver")


def _list_ids(samples: "Samples") -> dict[str, Any]:
    """Return the id of one row of each model of the console: the samples, and the newest of the others."""
    from django.contrib import admin

    from rotation.domain.events import RotationState as S

    ids = {
        f"{model._meta.app_label}_{model._meta.model_name}": model._default_manager.order_by("-pk")
        .values_list("pk", flat=True)
        .first()
        for model in admin.site._registry
    }
    return ids | {
        "keyvault_account": samples.account.pk,
        "keyvault_merchant": samples.account.merchant_id,
        "keyvault_key": samples.key.pk,
        "keyvault_credential": samples.key.credential_id,
        "keyvault_webhookendpoint": samples.endpoint.pk,
        "rotation_rotation": samples.rotations[S.OVERLAP].pk,
    }


if __name__ == "__main__":
    sys.exit(main())

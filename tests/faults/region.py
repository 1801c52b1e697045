"""A regional verifier over a bad line: revocations, receipts, losses and partitions, and never a grant after a receipt.

The region has no log-in to the database. It reads the feed of one server through `bad_line`, and gateways in the region
verify keys there the whole time.
"""

import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.models import QuerySet
from django.db.models.functions import Now

from keyvault.access.permissions import Permission as P
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason
from keyvault.management import service
from keyvault.management.service import ADDRESS, READY_SECONDS, find_free_port
from keyvault.management.supervisor import Supervisor, start_child_process
from keyvault.models import Key, ServiceToken, Verifier
from keyvault.services.change_feed.receipts import VerifierProgress, _progress
from keyvault.services.keys.lifecycle import get_key, revoke_key
from tests.environment import ROOT
from tests.factories import grant, have_peppers, make_token, now
from tests.faults.bad_line import BadLine
from tests.faults.hosts import copy_data
from tests.faults.programs import until
from tests.faults.results import Options, Result, say
from tests.faults.sender import RequestSender, VerifyRequest, make_request
from tests.rotation import scene
from tests.servers.throwaway import free_port

DELAY_SECONDS = 0.15
LOSS = 0.05
GOOD = 5
STOP_SECONDS = 60


@dataclass(frozen=True, slots=True)
class ExperimentSize:
    """How long the experiment is. `bound_seconds`: the staleness bound of the region's token.

    `most_p99_ms`: maximum p99 of the receipts outside of partitions, in ms; None: too few receipts to judge.
    """

    revocations: int
    pause_seconds: float
    partitions: int
    partition_seconds: float
    bound_seconds: int
    most_p99_ms: int | None = None


LONG = ExperimentSize(
    revocations=1_000, pause_seconds=0.08, partitions=3, partition_seconds=30, bound_seconds=10, most_p99_ms=1_000
)
SHORT = ExperimentSize(revocations=60, pause_seconds=0.15, partitions=1, partition_seconds=8, bound_seconds=4)


def run(options: Options) -> Result:
    return perform(options.folder, options.seed, SHORT if options.minutes < 1 else LONG)


@dataclass(slots=True)
class Revocation:
    """A revoked key. Times are of the monotonic clock; `complete_at`: when its receipt was known to be complete."""

    name: str
    returned_at: float
    sequence: int
    complete_at: float | None = None


@dataclass(slots=True)
class Region:
    """The regional verifier's host, as `RequestSender` needs it."""

    name: str
    port: int
    log: Path
    process: Any
    workers: int = 1

    def connect(self) -> socket.socket:
        return socket.create_connection((ADDRESS, self.port), timeout=30)


@dataclass(slots=True)
class Receipts:
    """Watches the receipts of all revocations that are not complete, with one query for all."""

    pending: list[Revocation] = field(default_factory=list)
    done: list[Revocation] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)

    def add(self, revocation: Revocation) -> None:
        with self.lock:
            self.pending.append(revocation)

    def watch(self) -> None:
        try:
            while not self.stop.wait(0.01):
                with self.lock:
                    pending = list(self.pending)
                if pending:
                    self._check(pending)
        finally:
            connection.close()

    def _check(self, pending: list[Revocation]) -> None:
        rows = list(Verifier.objects.annotate(now=Now()))
        at = time.monotonic()
        for each in pending:
            waiting = (_progress(row, each.sequence, row.now) is VerifierProgress.WAITING for row in rows)
            if not any(waiting):
                each.complete_at = at
                with self.lock:
                    self.pending.remove(each)
                    self.done.append(each)


def perform(folder: Path, seed: int, size: ExperimentSize) -> Result:
    result, rng = Result("revocations"), random.Random(seed)  # noqa: S311  not for secrets
    say(f"{size.revocations} keys to revoke are issued")
    have_peppers()
    gateway = make_token(P.KEYS_VERIFY, name="gateway")[1]
    row, region_token = make_token(P.KEYS_REPLICATE, P.KEYS_REPLICATE_DIGESTS, name="region")
    QuerySet(ServiceToken).filter(pk=row.pk).update(max_staleness_seconds=size.bound_seconds)
    place = scene.account("acme")
    requests: dict[str, VerifyRequest] = {}
    keys: dict[str, Key] = {}
    for number in range(GOOD + size.revocations):
        key, text = scene.issue(place, now(), label=f"key {number}")
        name = f"good{number}" if number < GOOD else key.key_id
        requests[name] = make_request(name, text, gateway)
        if number >= GOOD:
            keys[name] = key
    with ExitStack() as stack:
        port = stack.enter_context(_central(folder))
        line = BadLine(port, delay_seconds=DELAY_SECONDS, loss=LOSS, seed=rng.randrange(2**31))
        stack.callback(line.close)
        region = stack.enter_context(_region(folder, line.port, region_token))
        receipts = Receipts()
        watcher = threading.Thread(target=receipts.watch)
        with RequestSender([region], requests, rng.randrange(2**31), rate=150.0) as sender:  # type: ignore[list-item]  # it has what the sender uses of a host
            watcher.start()
            partitions = _revoke_all(keys, receipts, sender, line, size)
            until("every receipt to be complete", lambda: not receipts.pending, 4 * size.bound_seconds)
            receipts.stop.set()
            watcher.join()
        _judge(result, receipts.done, list(sender.replies), partitions, size)
    return result


def _revoke_all(
    keys: Mapping[str, Key], receipts: Receipts, sender: RequestSender, line: BadLine, size: ExperimentSize
) -> list[tuple[float, float]]:
    """Revoke every key, some of them inside partitions; return the partitions' begins and ends."""
    names = list(keys)
    partitions: list[tuple[float, float]] = []
    at_which = {len(names) * (each + 1) // (size.partitions + 1) for each in range(size.partitions)}
    until("the region to answer", lambda: any(reply.is_yes for reply in list(sender.replies)), 60)
    held_until = 0.0
    for number, name in enumerate(names):
        if number in at_which:
            say(f"a partition of {size.partition_seconds:g} s ({number} of {len(names)} keys revoked)")
            line.partition()
            began = time.monotonic()
            held_until = began + size.partition_seconds
            partitions.append((began, held_until))
        sender.prefer(names[min(number + 2, len(names) - 1)])
        time.sleep(size.pause_seconds)
        receipts.add(_revoke(name, keys[name]))
        if held_until and number + 1 in {each + size.revocations // 20 for each in at_which}:
            time.sleep(max(0.0, held_until - time.monotonic()))
            line.heal()
            partitions[-1] = (partitions[-1][0], time.monotonic())
            held_until = 0.0
            say("healed")
    return partitions


def _revoke(name: str, key: Key) -> Revocation:
    row = get_key(key.key_id)
    assert row is not None
    sequence = revoke_key(
        grant(scene.admin(), P.KEYS_REVOKE, row.credential.account), row, RevocationReason.SUPERSEDED
    ).sequence
    assert sequence is not None
    return Revocation(name, time.monotonic(), sequence)


def _judge(
    result: Result,
    revoked: list[Revocation],
    replies: list[Any],
    partitions: list[tuple[float, float]],
    size: ExperimentSize,
) -> None:
    by_name = {each.name: each for each in revoked}
    after_receipt, too_late, unproved = [], [], []
    for reply in replies:
        if not reply.is_yes:
            continue
        made = by_name.get(reply.name)
        if made is not None and made.complete_at is not None and reply.sent_at > made.complete_at:
            after_receipt.append(f"{reply.name}: {reply.sent_at - made.complete_at:.3f} s after its receipt")
        if made is not None and reply.sent_at > made.returned_at + size.bound_seconds:
            too_late.append(f"{reply.name}: {reply.sent_at - made.returned_at:.3f} s after its revocation")
        for began, ended in partitions:
            if began + size.bound_seconds < reply.sent_at and reply.answered_at < ended:
                unproved.append(f"{reply.name}: {reply.sent_at - began:.3f} s into a partition")
    result.n = len(revoked)
    result.must_be_none("yes after a receipt", after_receipt)
    result.must_be_none("yes later than the bound", too_late)
    result.must_be_none("yes later than the bound inside a partition", unproved)
    outside = sorted(
        made.complete_at - made.returned_at
        for made in revoked
        if made.complete_at is not None
        and not any(began - 1 < made.complete_at and made.returned_at < ended + 1 for began, ended in partitions)
    )
    result.must_be(len(revoked) == size.revocations, f"only {len(revoked)} receipts were complete")
    result.must_be(bool(outside), "no receipt outside of partitions")
    if outside:
        result.counts["receipt p50, ms"] = round(1000 * outside[len(outside) // 2])
        p99 = result.counts["receipt p99, ms"] = round(1000 * outside[int(len(outside) * 0.99)])
        is_soon = size.most_p99_ms is None or p99 < size.most_p99_ms
        result.must_be(is_soon, f"receipt p99 outside of partitions is {p99} ms, not under {size.most_p99_ms} ms")
    calm = [
        reply
        for reply in replies
        if reply.name.startswith("good")
        and not any(began < reply.answered_at < ended + 5 for began, ended in partitions)
    ]
    result.counts["requests"] = len(replies)
    result.counts["good keys outside of partitions"] = len(calm)
    result.counts["refused that should pass"] = sum(not reply.is_yes for reply in calm)
    partitioned = [
        reply
        for reply in replies
        if any(began + size.bound_seconds < reply.sent_at < ended - 1 for began, ended in partitions)
    ]
    result.counts["refused inside partitions"] = sum(not reply.is_yes for reply in partitioned)
    result.must_be(bool(partitioned), "nothing was asked inside a partition after the bound")


@contextmanager
def _central(folder: Path) -> Iterator[int]:
    """Start one server, and yield its port."""
    port = find_free_port()
    variables = {**os.environ, "KEYVAULT_ORIGIN": f"http://{ADDRESS}:{port}"}
    with Supervisor([service.server_program(port)], variables, ROOT, folder / "logs", say) as supervised:
        service.wait_until_ready(supervised, port)
        yield port


@contextmanager
def _region(folder: Path, source: int, token: Plaintext) -> Iterator[Region]:
    """Start a regional verifier on a data folder with the keystore only."""
    data = copy_data(settings.DATA_DIR, folder / "region")
    for database in data.glob("keyvault.sqlite3*"):
        database.unlink()
    shutil.rmtree(data / "uses", ignore_errors=True)
    dropped = ("KEYVAULT_DATABASE_URL", "KEYVAULT_REDIS_URL", "KEYVAULT_BROKER_URL", "KEYVAULT_DATA_DIR")
    variables = {name: text for name, text in os.environ.items() if name not in dropped}
    variables |= {
        "KEYVAULT_DATA_DIR": str(data),
        "KEYVAULT_REGION_SOURCE": f"http://{ADDRESS}:{source}",
        "KEYVAULT_REGION_TOKEN": token.reveal(),
    }
    port, log = free_port(), folder / "region.log"
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    command = (sys.executable, "manage.py", "verifier", "--json", "--port", str(port), "--workers", "1")
    try:
        process = start_child_process(
            command, environ=variables, folder=ROOT, output=output, orphan_signal=signal.SIGTERM
        )
    finally:
        os.close(output)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not any('"pids"' in text for text in log.read_text().splitlines()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the region does not serve:\n{log.read_text()[-3000:]}")
            time.sleep(0.05)
        yield Region("region", port, log, process)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        finally:
            process.kill()
            process.wait()

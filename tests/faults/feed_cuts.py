"""Ways to cut a verifier off from the change feed or from its host's generation counter, one function each.

Each cut runs while other threads revoke and suspend keys, revokes some keys itself at the worst moments, and restores
the initial state. It records what must be true as bans; `answer_checks` judges them.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from django.db import connection, connections

from keyvault.services.recording import changes
from tests.environment import ROOT
from tests.faults.changes import Ban
from tests.faults.feed_scene import FeedScene
from tests.faults.programs import until
from tests.faults.results import say
from tests.faults.sender import VerifierConnection, VerifyRequest

HOUR = 3600.0


# --- connections ---------------------------------------------------------------------------------------------


def kill_listeners(scene: FeedScene) -> None:
    """Terminate the LISTEN connections and all backends of the verifiers, alternately."""
    with scene.outage(), psycopg.connect(**_parameters(), autocommit=True) as killer:
        killed, names = 0, [host.name for host in scene.hosts]
        for turn in range(60):
            killed += len(killer.execute(_END_LISTENERS if scene.rng.random() < 0.6 else _END_ALL, [names]).fetchall())
            if turn % 12 == 0:
                scene.changes.revoke()
            scene.pause(0.06)
        _count(scene, "backends ended", killed)


_END_ALL = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = ANY(%s)"
_END_LISTENERS = f"{_END_ALL} AND query LIKE 'LISTEN%%'"


def restart_fast(scene: FeedScene) -> None:
    _restart(scene, signal.SIGINT, 1.0)


def restart_immediate(scene: FeedScene) -> None:
    _restart(scene, signal.SIGQUIT, 1.0)


def restart_late(scene: FeedScene) -> None:
    """Stop the database for longer than the staleness bound."""
    _restart(scene, signal.SIGQUIT, scene.staleness + 2.5)


def _restart(scene: FeedScene, how: signal.Signals, seconds: float) -> None:
    assert scene.postgres
    scene.changes.revoke()
    with scene.outage():
        scene.postgres.stop(how)
        stopped_at = time.monotonic()
        ban = scene.ban_all("PostgreSQL is away", None, stopped_at, scene.staleness)
        scene.pause(seconds)
        ban.ended_at = time.monotonic()
        scene.postgres.start()
        connections.close_all()
        for _ in range(3):
            scene.changes.revoke()
    if seconds > scene.staleness:
        scene.must_see_refusals(None, stopped_at)


def crash_backend(scene: FeedScene) -> None:
    """kill -9 of one backend: PostgreSQL ends all others, and recovers by itself."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name = ANY(%s)", [[host.name for host in scene.hosts]]
        )
        pids = [row[0] for row in cursor.fetchall()]
    with scene.outage():
        scene.changes.revoke()
        os.kill(scene.rng.choice(pids), signal.SIGKILL)
        scene.pause(0.5)
        connections.close_all()
        for _ in range(3):
            scene.changes.revoke()


def crash_in_silence(scene: FeedScene) -> None:
    """Stall the network of one host, crash PostgreSQL, and revoke a key as soon as the database is back."""
    assert scene.postgres
    host = scene.elsewhere
    with scene.outage():
        host.proxy.send_command("hold")
        scene.postgres.stop(signal.SIGQUIT)
        scene.postgres.start()
        connections.close_all()
        for _ in range(3):
            scene.changes.revoke()
        scene.pause(scene.staleness * 1.25 + 0.5)
        host.proxy.send_command("cut")
        host.proxy.send_command("go")


def silence(scene: FeedScene) -> None:
    """Drop all traffic without closing a connection. Then pass it on, or reset all connections."""
    host, way = scene.choose(), scene.rng.choice(["go", "cut"])
    say(f"  {host.name}, then {way}")
    with scene.outage(host):
        scene.changes.revoke()
        host.proxy.send_command("hold")
        ban = scene.ban_all("the network is silent", host, time.monotonic(), scene.staleness)
        for _ in range(3):
            scene.changes.revoke()
        scene.pause(scene.staleness + 5)
        ban.ended_at = time.monotonic()
        if way == "cut":
            host.proxy.send_command("cut")
        host.proxy.send_command("go")
        for _ in range(2):
            scene.changes.revoke()
    scene.must_see_refusals(host, ban.returned_at)


# --- processes -----------------------------------------------------------------------------------------------


def freeze(scene: FeedScene) -> None:
    """Stop a verifier for 5 s. It responds to the requests of that time, sent after a revocation, when it continues."""
    host = scene.choose()
    say(f"  {host.name}")
    opened = [VerifierConnection(host) for _ in range(12 * host.workers)]
    for link in opened:
        link.ask(scene.sender.requests[scene.changes.subjects.good[0]])
    pid = scene.rng.choice(host.pids())
    with scene.outage(host):
        scene.changes.prefer(scene.changes.subjects.victims[-1].name)
        scene.pause(0.3)
        os.kill(pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        try:
            ban = scene.changes.revoke()
            requests = [] if ban is None else [(link, _of(scene, ban), _of(scene, ban)) for link in opened]
            sent = []
            for number, (link, request, _) in enumerate(requests):
                # The first half is within the staleness bound, the others after every receipt must list it as expired.
                if number == len(requests) // 2:
                    scene.pause(max(0.0, stopped_at + scene.staleness * 1.25 + 1.0 - time.monotonic()))
                with suppress(OSError):
                    sent.append((link, request, link.send(request)))
            scene.pause(max(0.0, stopped_at + 5 - time.monotonic()))
            scene.result.must_be(
                ban is None or (ban.complete_at is not None and bool(ban.expired)),
                f"a verifier was stopped for 5 s, and no receipt lists it as expired: {ban}",
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        for link, request, sent_at in sent:
            with suppress(OSError, ValueError, IndexError):
                scene.sender.replies.append(link.receive(request, sent_at))
        for link in opened:
            link.close()
        scene.changes.revoke()


def _of(scene: FeedScene, ban: Ban) -> VerifyRequest:
    return scene.sender.requests[ban.name or ""]


def kill_verifier(scene: FeedScene) -> None:
    """Kill a verifier. After its bound receipts list it as expired and are complete. Another one replaces it."""
    host = scene.choose()
    say(f"  {host.name}")
    with scene.outage(host, is_silent=True):
        pid = scene.rng.choice(host.pids())
        os.kill(pid, signal.SIGKILL)
        ban = scene.changes.revoke()
        began = time.monotonic()
        until(
            "a receipt that gives up a killed verifier",
            lambda: ban is None or ban.complete_at is not None,
            scene.staleness * 1.25 + 3,
        )
        if ban is not None and ban.complete_at is not None:
            _count(scene, "seconds until a killed one was given up", round(ban.complete_at - began, 2))
            scene.result.must_be(bool(ban.expired), "a killed verifier is not listed as expired")


def lose_writer(scene: FeedScene) -> None:
    """Kill a writer with SIGKILL between its commit and its update of the generation counter, and then a new writer."""
    ban = scene.changes.revoke(is_notified=False, by=lambda key_id: _write(key_id, "--dies"))
    scene.result.must_be(ban is not None and ban.sequence is not None, "the killed writer had not committed")
    scene.changes.revoke(by=_write)


def _write(key_id: str, *options: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.faults.fresh_writer", key_id, *options], cwd=ROOT, check=False)
    if done.returncode not in {0, -signal.SIGKILL} or (done.returncode == 0) == bool(options):
        raise RuntimeError(f"the writer ended with {done.returncode}")


# --- clocks, files, transactions ------------------------------------------------------------------------------


def step_clock(scene: FeedScene) -> None:
    """Step the clock an hour forward and back, then an hour back and forward.

    A key that expires in between is denied only while the clock is past its expiry.
    """
    host, expiring = scene.choose(), scene.changes.subjects.expiring
    say(f"  {host.name}")
    with scene.outage(host):
        for seconds in (HOUR, 0.0, -HOUR, 0.0):
            host.clock.step(seconds)
            stepped_at = time.monotonic()
            ban = None
            if seconds > 0:
                scene.changes.changed_during.setdefault(expiring, []).append([stepped_at - 1, float("inf")])
                ban = Ban(
                    "its time has ended", expiring, stepped_at, only=host.name, bound_seconds=0, is_notified=False
                )
                scene.changes.bans.append(ban)
                scene.changes.prefer(expiring)
            scene.changes.revoke()
            scene.pause(1.0)
            scene.changes.revoke()
            if ban is not None:
                ban.ended_at = time.monotonic()
                scene.changes.changed_during[expiring][-1][1] = ban.ended_at
        # Without confirmations, a step of the clock ends the use of cached data immediately, long before the bound.
        host.proxy.send_command("hold")
        scene.pause(0.3)
        host.clock.step(scene.rng.choice([HOUR, -HOUR, 2.0, -2.0]))
        ban = scene.ban_all("the clock was stepped, and nothing confirmed since", host, time.monotonic(), 0.0)
        scene.changes.changed_during.setdefault(expiring, []).append([ban.returned_at - 1, float("inf")])
        scene.pause(0.8)
        ban.ended_at = time.monotonic()
        host.clock.step(0.0)
        scene.changes.changed_during[expiring][-1][1] = time.monotonic()
        host.proxy.send_command("go")
        scene.changes.revoke()


def lose_generation(scene: FeedScene) -> None:
    """Delete the generation file, or replace it by an empty, an older or an unwritable one."""
    path = scene.here.data / "generation"
    old = path.with_name("generation.old")
    shutil.copyfile(path, old)
    ways: list[tuple[str, Callable[[], object]]] = [
        ("deleted", partial(path.unlink, missing_ok=True)),
        ("empty", lambda: _replace(path, b"")),
        ("shorter", lambda: _replace(path, old.read_bytes()[:4096])),
        ("older", lambda: _replace(path, old.read_bytes())),
        ("noise", lambda: _replace(path, os.urandom(len(old.read_bytes())))),
        ("unwritable", lambda: _block(scene, path)),
    ]
    scene.rng.shuffle(ways)
    for way, harm in ways:
        say(f"  {way}")
        _unblock(scene, path)
        # The change follows the damage immediately, so that no process can repair the file first.
        target = scene.changes.subjects.victims.pop()
        target.change = partial(_in_turn, harm, target.change)
        scene.changes.apply(target)
        for _ in range(2):
            scene.changes.revoke()
    _unblock(scene, path)
    old.unlink()
    scene.changes.revoke()


def _in_turn(*functions: Callable[[], object]) -> None:
    for function in functions:
        function()


def _block(scene: FeedScene, path: Path) -> None:
    """Make the file unwritable, also for root."""
    scene.changes.can_notify = False
    path.unlink(missing_ok=True)
    path.mkdir()


def _unblock(scene: FeedScene, path: Path) -> None:
    if path.is_dir():
        path.rmdir()
        scene.changes.can_notify = True


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name("generation.new")
    beside.write_bytes(content)
    beside.chmod(0o600)
    beside.replace(path)


def linger(scene: FeedScene) -> None:
    """Keep a transaction open after it has drawn a sequence: other revocations take effect, and their receipts wait."""
    with psycopg.connect(**_parameters()) as slow:
        slow.execute(changes._HOLD, changes._LOCK)
        slow.execute("INSERT INTO keyvault_change (subject_kind, subject_id, at) VALUES ('key', 'unknown', now())")
        bans = [ban for ban in (scene.changes.revoke() for _ in range(4)) if ban is not None]
        for ban in bans:
            # The revocations take effect immediately, not when the transaction ends, which is after the bound.
            ban.bound_seconds = scene.staleness / 2
        scene.pause(scene.staleness + 1)
        waiting = [ban for ban in bans if ban.complete_at is None]
        scene.result.must_be(len(waiting) == len(bans), "a receipt was complete before an earlier sequence had ended")
        slow.rollback() if scene.rng.random() < 0.5 else slow.commit()
    until("the receipts after it", lambda: all(ban.complete_at is not None for ban in bans), 5)


def _parameters() -> dict[str, Any]:
    parameters: dict[str, Any] = connection.get_connection_params()
    for name in ("context", "cursor_factory", "server_side_binding"):
        parameters.pop(name, None)
    return parameters


def _count(scene: FeedScene, name: str, more: float) -> None:
    scene.result.counts[name] = round(scene.result.counts.get(name, 0) + more, 2)


GENTLE = (kill_listeners, silence, freeze, kill_verifier, lose_writer, step_clock, lose_generation, linger)
"""The cuts that leave PostgreSQL running."""

STOPPING = (restart_fast, restart_immediate, restart_late, crash_backend, crash_in_silence)
CUTS: tuple[Callable[[FeedScene], None], ...] = (*GENTLE, *STOPPING)

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
from tests.faults.acting import Ban
from tests.faults.asking import Line, Question
from tests.faults.programs import until
from tests.faults.results import say
from tests.faults.stage import Stage

HOUR = 3600.0


# --- connections ---------------------------------------------------------------------------------------------


def kill_listeners(stage: Stage) -> None:
    """Terminate the LISTEN connections and all backends of the verifiers, alternately."""
    with stage.outage(), psycopg.connect(**_parameters(), autocommit=True) as killer:
        killed, names = 0, [host.name for host in stage.hosts]
        for turn in range(60):
            killed += len(killer.execute(_END_LISTENERS if stage.dice.random() < 0.6 else _END_ALL, [names]).fetchall())
            if turn % 12 == 0:
                stage.acts.revoke()
            stage.pause(0.06)
        _count(stage, "backends ended", killed)


_END_ALL = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = ANY(%s)"
_END_LISTENERS = f"{_END_ALL} AND query LIKE 'LISTEN%%'"


def restart_fast(stage: Stage) -> None:
    _restart(stage, signal.SIGINT, 1.0)


def restart_immediate(stage: Stage) -> None:
    _restart(stage, signal.SIGQUIT, 1.0)


def restart_late(stage: Stage) -> None:
    """Stop the database for longer than the staleness bound."""
    _restart(stage, signal.SIGQUIT, stage.staleness + 2.5)


def _restart(stage: Stage, how: signal.Signals, seconds: float) -> None:
    assert stage.postgres
    stage.acts.revoke()
    with stage.outage():
        stage.postgres.stop(how)
        stopped_at = time.monotonic()
        ban = stage.ban_all("PostgreSQL is away", None, stopped_at, stage.staleness)
        stage.pause(seconds)
        ban.ended_at = time.monotonic()
        stage.postgres.start()
        connections.close_all()
        for _ in range(3):
            stage.acts.revoke()
    if seconds > stage.staleness:
        stage.must_see_refusals(None, stopped_at)


def crash_backend(stage: Stage) -> None:
    """kill -9 of one backend: PostgreSQL ends all others, and recovers by itself."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name = ANY(%s)", [[host.name for host in stage.hosts]]
        )
        pids = [row[0] for row in cursor.fetchall()]
    with stage.outage():
        stage.acts.revoke()
        os.kill(stage.dice.choice(pids), signal.SIGKILL)
        stage.pause(0.5)
        connections.close_all()
        for _ in range(3):
            stage.acts.revoke()


def crash_in_silence(stage: Stage) -> None:
    """Stall the network of one host, crash PostgreSQL, and revoke a key as soon as the database is back."""
    assert stage.postgres
    host = stage.elsewhere
    with stage.outage():
        host.wire.order("hold")
        stage.postgres.stop(signal.SIGQUIT)
        stage.postgres.start()
        connections.close_all()
        for _ in range(3):
            stage.acts.revoke()
        stage.pause(stage.staleness * 1.25 + 0.5)
        host.wire.order("cut")
        host.wire.order("go")


def silence(stage: Stage) -> None:
    """Drop all traffic without closing a connection. Then pass it on, or reset all connections."""
    host, way = stage.choose(), stage.dice.choice(["go", "cut"])
    say(f"  {host.name}, then {way}")
    with stage.outage(host):
        stage.acts.revoke()
        host.wire.order("hold")
        ban = stage.ban_all("the network is silent", host, time.monotonic(), stage.staleness)
        for _ in range(3):
            stage.acts.revoke()
        stage.pause(stage.staleness + 5)
        ban.ended_at = time.monotonic()
        if way == "cut":
            host.wire.order("cut")
        host.wire.order("go")
        for _ in range(2):
            stage.acts.revoke()
    stage.must_see_refusals(host, ban.returned_at)


# --- processes -----------------------------------------------------------------------------------------------


def freeze(stage: Stage) -> None:
    """Stop a verifier for 5 s. It responds to the requests of that time, sent after a revocation, when it continues."""
    host = stage.choose()
    say(f"  {host.name}")
    lines = [Line(host) for _ in range(12 * host.workers)]
    for line in lines:
        line.ask(stage.asking.questions[stage.acts.cast.good[0]])
    pid = stage.dice.choice(host.pids())
    with stage.outage(host):
        stage.acts.attend(stage.acts.cast.victims[-1].name)
        stage.pause(0.3)
        os.kill(pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        try:
            ban = stage.acts.revoke()
            asked = [] if ban is None else [(line, _of(stage, ban), _of(stage, ban)) for line in lines]
            sent = []
            for number, (line, question, _) in enumerate(asked):
                # The first half is within the staleness bound, the others after every receipt must list it as expired.
                if number == len(asked) // 2:
                    stage.pause(max(0.0, stopped_at + stage.staleness * 1.25 + 1.0 - time.monotonic()))
                with suppress(OSError):
                    sent.append((line, question, line.send(question)))
            stage.pause(max(0.0, stopped_at + 5 - time.monotonic()))
            stage.result.must_be(
                ban is None or (ban.complete_at is not None and bool(ban.expired)),
                f"a verifier was stopped for 5 s, and no receipt lists it as expired: {ban}",
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        for line, question, sent_at in sent:
            with suppress(OSError, ValueError, IndexError):
                stage.asking.replies.append(line.receive(question, sent_at))
        for line in lines:
            line.close()
        stage.acts.revoke()


def _of(stage: Stage, ban: Ban) -> Question:
    return stage.asking.questions[ban.name or ""]


def kill_verifier(stage: Stage) -> None:
    """Kill a verifier. After its bound receipts list it as expired and are complete. Another one replaces it."""
    host = stage.choose()
    say(f"  {host.name}")
    with stage.outage(host, is_silent=True):
        pid = stage.dice.choice(host.pids())
        os.kill(pid, signal.SIGKILL)
        ban = stage.acts.revoke()
        began = time.monotonic()
        until(
            "a receipt that gives up a killed verifier",
            lambda: ban is None or ban.complete_at is not None,
            stage.staleness * 1.25 + 3,
        )
        if ban is not None and ban.complete_at is not None:
            _count(stage, "seconds until a killed one was given up", round(ban.complete_at - began, 2))
            stage.result.must_be(bool(ban.expired), "a killed verifier is not listed as expired")


def lose_writer(stage: Stage) -> None:
    """Kill a writer with SIGKILL between its commit and its update of the generation counter, and then a new writer."""
    ban = stage.acts.revoke(is_told=False, by=lambda key_id: _write(key_id, "--dies"))
    stage.result.must_be(ban is not None and ban.sequence is not None, "the killed writer had not committed")
    stage.acts.revoke(by=_write)


def _write(key_id: str, *options: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.faults.fresh_writer", key_id, *options], cwd=ROOT, check=False)
    if done.returncode not in {0, -signal.SIGKILL} or (done.returncode == 0) == bool(options):
        raise RuntimeError(f"the writer ended with {done.returncode}")


# --- clocks, files, transactions ------------------------------------------------------------------------------


def step_clock(stage: Stage) -> None:
    """Step the clock an hour forward and back, then an hour back and forward.

    A key that expires in between is denied only while the clock is past its expiry.
    """
    host, expiring = stage.choose(), stage.acts.cast.expiring
    say(f"  {host.name}")
    with stage.outage(host):
        for seconds in (HOUR, 0.0, -HOUR, 0.0):
            host.clock.step(seconds)
            stepped_at = time.monotonic()
            ban = None
            if seconds > 0:
                stage.acts.away.setdefault(expiring, []).append([stepped_at - 1, float("inf")])
                ban = Ban("its time has ended", expiring, stepped_at, only=host.name, bound_seconds=0, is_told=False)
                stage.acts.bans.append(ban)
                stage.acts.attend(expiring)
            stage.acts.revoke()
            stage.pause(1.0)
            stage.acts.revoke()
            if ban is not None:
                ban.ended_at = time.monotonic()
                stage.acts.away[expiring][-1][1] = ban.ended_at
        # Without confirmations, a step of the clock ends the use of cached data immediately, long before the bound.
        host.wire.order("hold")
        stage.pause(0.3)
        host.clock.step(stage.dice.choice([HOUR, -HOUR, 2.0, -2.0]))
        ban = stage.ban_all("the clock was stepped, and nothing confirmed since", host, time.monotonic(), 0.0)
        stage.acts.away.setdefault(expiring, []).append([ban.returned_at - 1, float("inf")])
        stage.pause(0.8)
        ban.ended_at = time.monotonic()
        host.clock.step(0.0)
        stage.acts.away[expiring][-1][1] = time.monotonic()
        host.wire.order("go")
        stage.acts.revoke()


def lose_generation(stage: Stage) -> None:
    """Delete the generation file, or replace it by an empty, an older or an unwritable one."""
    path = stage.here.data / "generation"
    old = path.with_name("generation.old")
    shutil.copyfile(path, old)
    ways: list[tuple[str, Callable[[], object]]] = [
        ("deleted", partial(path.unlink, missing_ok=True)),
        ("empty", lambda: _replace(path, b"")),
        ("shorter", lambda: _replace(path, old.read_bytes()[:4096])),
        ("older", lambda: _replace(path, old.read_bytes())),
        ("noise", lambda: _replace(path, os.urandom(len(old.read_bytes())))),
        ("unwritable", lambda: _block(stage, path)),
    ]
    stage.dice.shuffle(ways)
    for way, harm in ways:
        say(f"  {way}")
        _unblock(stage, path)
        # The change follows the damage immediately, so that no process can repair the file first.
        target = stage.acts.cast.victims.pop()
        target.away = partial(_in_turn, harm, target.away)
        stage.acts.take_away(target)
        for _ in range(2):
            stage.acts.revoke()
    _unblock(stage, path)
    old.unlink()
    stage.acts.revoke()


def _in_turn(*acts: Callable[[], object]) -> None:
    for act in acts:
        act()


def _block(stage: Stage, path: Path) -> None:
    """Make the file unwritable, also for root."""
    stage.acts.tells = False
    path.unlink(missing_ok=True)
    path.mkdir()


def _unblock(stage: Stage, path: Path) -> None:
    if path.is_dir():
        path.rmdir()
        stage.acts.tells = True


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name("generation.new")
    beside.write_bytes(content)
    beside.chmod(0o600)
    beside.replace(path)


def linger(stage: Stage) -> None:
    """Keep a transaction open after it has drawn a sequence: other revocations take effect, and their receipts wait."""
    with psycopg.connect(**_parameters()) as slow:
        slow.execute(changes._HOLD, changes._LOCK)
        slow.execute("INSERT INTO keyvault_change (subject_kind, subject_id, at) VALUES ('key', 'unknown', now())")
        bans = [ban for ban in (stage.acts.revoke() for _ in range(4)) if ban is not None]
        for ban in bans:
            # The revocations take effect immediately, not when the transaction ends, which is after the bound.
            ban.bound_seconds = stage.staleness / 2
        stage.pause(stage.staleness + 1)
        waiting = [ban for ban in bans if ban.complete_at is None]
        stage.result.must_be(len(waiting) == len(bans), "a receipt was complete before an earlier sequence had ended")
        slow.rollback() if stage.dice.random() < 0.5 else slow.commit()
    until("the receipts after it", lambda: all(ban.complete_at is not None for ban in bans), 5)


def _parameters() -> dict[str, Any]:
    parameters: dict[str, Any] = connection.get_connection_params()
    for name in ("context", "cursor_factory", "server_side_binding"):
        parameters.pop(name, None)
    return parameters


def _count(stage: Stage, name: str, more: float) -> None:
    stage.result.counts[name] = round(stage.result.counts.get(name, 0) + more, 2)


GENTLE = (kill_listeners, silence, freeze, kill_verifier, lose_writer, step_clock, lose_generation, linger)
"""The cuts that leave PostgreSQL running."""

STOPPING = (restart_fast, restart_immediate, restart_late, crash_backend, crash_in_silence)
CUTS: tuple[Callable[[Stage], None], ...] = (*GENTLE, *STOPPING)

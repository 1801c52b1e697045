"""kill -9 of a real worker at every named crash point, while merchants use their keys.

The first worker runs for a while. Every worker records each crash point (before or after a side effect) that it passes,
and each later worker is killed at one of them. Crash points that only a recovery has, such as a discarded key whose
string was lost, are recorded as they appear, and used while time remains. Then one worker runs normally, and the result
must be the same as without any crash.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from keyvault.management.supervisor import Supervisor
from tests.faults import expected_verdicts
from tests.faults.crashing import NOWHERE
from tests.faults.merchants import gateway_token, make_merchants
from tests.faults.programs import GaveUpError, WorkerLauncher, served
from tests.faults.results import Options, Result, say
from tests.faults.traffic import MerchantTraffic
from tests.faults.workload import Workload

CREDENTIALS = 36
REQUESTS_PER_SECOND = 60
LEARN_SECONDS = 12
MEET_SECONDS = 25
RECOVER_SECONDS = 90
RECOVERED_IN_SECONDS = 25
"""Approximate duration, in seconds."""

REQUIRED = tuple(
    f"{step}:{when}-{effect}"
    for step, effects in {
        "rotation.staged": ("commit",),
        "staged": ("ledger", "put"),
        "rotation.publishing": ("commit",),
        "publishing": ("ledger", "put", "ledger-outcome"),
        "rotation.delivered": ("commit",),
        "rotation.awaiting_proof": ("commit",),
        "rotation.overlap": ("commit",),
        "rotation.quarantine": ("commit",),
        "rotation.revoking": ("commit",),
        "revoking": ("ledger", "destroy", "ledger-outcome"),
        "rotation.completed": ("commit",),
        "rolling_back": ("ledger", "put", "ledger-outcome"),
        "rotation.written_back": ("commit",),
        "rotation.rolling_back": ("commit",),
        "rotation.rolled_back": ("commit",),
        "claim": ("update",),
        "release": ("update",),
    }.items()
    for effect in effects
    for when in ("before", "after")
)
"""Crash points at which a worker must be killed, however long that takes. Others are added as they are found."""


def run(options: Options) -> Result:
    result = Result("kills")
    merchants, token = make_merchants(CREDENTIALS), gateway_token()
    with served(options.folder, workers=0) as (service, port):
        launcher = WorkerLauncher(options.folder, options.folder / "edges")
        try:
            with MerchantTraffic(merchants, port, token, REQUESTS_PER_SECOND, options.seed) as traffic:
                workload = Workload(merchants, options.seed)
                _kill_and_recover(options, result, service, launcher, workload)
        finally:
            launcher.close()
    expected_verdicts.judge_traffic(result, traffic.answers, returned_at=workload.returned_at)
    expected_verdicts.judge_end(result, merchants)
    expected_verdicts.judge_logs(result, launcher.log.parent, kills_workers=True)
    return result


def _kill_and_recover(
    options: Options, result: Result, service: Supervisor, launcher: WorkerLauncher, workload: Workload
) -> None:
    edges, ends_at = _Edges(options.folder / "edges"), time.monotonic() + options.minutes * 60 - RECOVERED_IN_SECONDS
    launcher.launch(NOWHERE)
    _live(LEARN_SECONDS, service, launcher, workload)
    launcher.end_worker()
    say(f"{len(edges.read())} crash points so far")
    for point in edges.untried():
        if time.monotonic() > ends_at and point not in REQUIRED:
            continue
        started_at = time.monotonic()
        launcher.launch(point)
        if _live(MEET_SECONDS, service, launcher, workload):
            status = launcher.reap()
            result.must_be(os.WIFSIGNALED(status), f"{point}: the worker ended with wait status {status}")
            edges.killed.append(point)
            say(f"killed at {point} after {time.monotonic() - started_at:.1f} s")
        else:
            launcher.end_worker()
            edges.missed.append(point)
        some = workload.ordinary[len(edges.killed) % 3 :: 3]
        keyless = [f"after {point}: {each}" for each in expected_verdicts.find_keyless(some)]
        result.must_be_none("credentials without a usable key", keyless)
    result.n = len(edges.killed)
    say(f"{result.n} kills; not met again: {', '.join(edges.missed) or 'none'}")
    result.counts |= {"crash points": len(edges.read()), "not met again": len(edges.missed)}
    result.must_be_none("crash points left out", sorted(set(REQUIRED) - set(edges.killed)))
    launcher.launch(NOWHERE)
    workload.end()
    began = time.monotonic()
    try:
        workload.until_over(RECOVER_SECONDS, service.restart_ended)
    except GaveUpError as waited:
        say(str(waited))  # the count of stuck rotations reports it
    launcher.end_worker()
    result.counts |= {"seconds to recover": round(time.monotonic() - began), **workload.counts()}


def _live(seconds: float, service: Supervisor, launcher: WorkerLauncher, workload: Workload) -> bool:
    """Wait until the worker has ended, or for that time. Return whether it has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if launcher.has_ended(0.05):
            return True
        service.restart_ended()
        workload.poll()
    return False


class _Edges:
    """The crash points that the workers recorded, and the outcome of each."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes
        self.killed: list[str] = []
        self.missed: list[str] = []

    def read(self) -> list[str]:
        return list(dict.fromkeys(self._notes.read_text().split("\n")[:-1]))

    def untried(self) -> Iterator[str]:
        """Yield each crash point once, also those recorded in the meantime. Missed ones are tried again at the end."""
        tried: set[str] = set()
        # The required ones come first, because time may run out.
        while left := [point for point in (*REQUIRED, *self.read()) if point not in tried]:
            tried.add(left[0])
            yield left[0]
        again, self.missed = self.missed, []
        yield from again

"""Time from a revocation's commit to the last verifier's receipt and first refusal, under load, and any stale grants.

Same host: verifiers on the writer's data folder, which share its generation counter. Elsewhere: each verifier on its
own copy of the folder, so that only the database reports the change.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.environment import ROOT

from . import cases
from .figures import EVICTION, STALE, Spread, number, percentile
from .launch import running_server
from .machine import Cores
from .prober import Prober, WatchedRevocation
from .progress import report
from .seed_keys import key_id_of
from .servers import verifier_command
from .testbed import BenchmarkInstallation, Testbed

SAME_HOST, ELSEWHERE = "same host", "elsewhere"
PLACES = (SAME_HOST, ELSEWHERE)

NOT_COPIED = ("generation", "run.lock", "logs", "metrics")
"""Files of the data folder that other hosts do not have."""

MIN_QUIET_SHARE = 0.5
"""Minimum share of quiet revocations for ignoring the others."""

SETTLE_SECONDS = 2.0
SHOWN_EVERY = 100


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--verifiers", type=int, default=4, help="default 4")
    parser.add_argument("--revocations", type=int, default=300, help="in each place; default 300")
    parser.add_argument(
        "--sent-after",
        type=int,
        default=100_000,
        help="requests after the revokes returned, in each place; default 100,000",
    )
    # The prober, in Python and beside the database, reaches about 3,500 on two cores.
    parser.add_argument("--rate", type=float, default=2_000, help="requests a second to all verifiers; default 2,000")


class Revoke:
    """One run of the benchmark."""

    def __init__(self, testbed: Testbed, cores: Cores, options: argparse.Namespace) -> None:
        self._testbed, self._cores, self._options = testbed, cores, options

    def run(self) -> dict[str, Any]:
        installation, count = self._testbed.on_postgres, self._options.revocations
        results = []
        for turn, place in enumerate(PLACES):
            keys = installation.to_revoke[turn * count : (turn + 1) * count]
            with self._verifiers(installation, place) as ports, self._writer(installation) as writer:
                time.sleep(SETTLE_SECONDS)
                results.append(self._watch_all(installation, place, ports, writer, keys))
        return {
            "places": results,
            "verifiers": self._options.verifiers,
            "rate": self._options.rate,
            "cores": self._cores.description,
        }

    def _watch_all(
        self,
        installation: BenchmarkInstallation,
        place: str,
        ports: list[int],
        writer: "subprocess.Popen[bytes]",
        keys: list[str],
    ) -> dict[str, Any]:
        after = -(-self._options.sent_after // len(keys))
        load = cases.verify(installation, place).requests[:2000]
        prober = Prober(ports, load, self._options.rate, connections=4, writer=writer)
        watched, began = [], time.monotonic()
        try:
            for number_of, key in enumerate(keys, 1):
                watched.append(
                    summarize(prober.watch(key_id_of(key), cases.verify_one(installation, key), after), len(ports))
                )
                if number_of % SHOWN_EVERY == 0:
                    report(f"  {place}: {number_of} of {len(keys)} revocations")
        finally:
            prober.close()
        results = {"place": place, "per_second": prober.sent / (time.monotonic() - began), **summarize_all(watched)}
        report("  " + " | ".join(row(results)))
        return results

    @contextmanager
    def _verifiers(self, installation: BenchmarkInstallation, place: str) -> Iterator[list[int]]:
        with ExitStack() as stack:
            ports = []
            for turn in range(self._options.verifiers):
                data = installation.data if place == SAME_HOST else self._copy(installation.data, turn)
                environ = {**installation.environ, "KEYVAULT_DATA_DIR": str(data)}
                log = self._testbed.folder / f"{place.replace(' ', '-')}-{turn}.log"
                started = stack.enter_context(running_server(verifier_command(), environ, log, self._cores.server))
                ports.append(started.port)
            for port in ports:
                wrong = cases.find_wrong_response(port, cases.verify(installation, place).probes)
                if wrong is not None:
                    raise RuntimeError(f"A verifier's response is wrong: {wrong}")
            yield ports

    def _copy(self, data: Path, turn: int) -> Path:
        to = self._testbed.folder / f"host-{turn}"
        shutil.copytree(data, to, ignore=shutil.ignore_patterns(*NOT_COPIED))
        to.chmod(0o700)
        return to

    @contextmanager
    def _writer(self, installation: BenchmarkInstallation) -> Iterator["subprocess.Popen[bytes]"]:
        with subprocess.Popen(
            [sys.executable, "-m", "tests.bench.writer"],
            cwd=ROOT,
            env=dict(installation.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as writer:
            assert writer.stdout
            try:
                if not writer.stdout.readline():
                    raise RuntimeError("The writer did not start.")
                yield writer
            finally:
                writer.kill()


def summarize(watched: WatchedRevocation, verifiers: int) -> dict[str, Any]:
    """Return the figures of one revocation. `last_stale_ms`: from the commit to the last stale request."""
    after = watched.sent_after()
    stale = [each for each in after if each.is_allowed]
    return {
        "evicted_ms": watched.evicted_after_ms(verifiers),
        "refused_ms": watched.refused_after_ms(verifiers),
        "returned_ms": (watched.returned_ns - watched.commit_ns) / 1e6,
        "is_quiet": not watched.stolen_ms,
        "after": len(after),
        "stale": len(stale),
        "stale_after_receipt": sum(each.is_allowed for each in watched.sent_after_receipts()),
        "last_stale_ms": max(((each.sent_ns - watched.commit_ns) / 1e6 for each in stale), default=0.0),
    }


def summarize_all(watched: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize all revocations in one place. `lost`: number of those that some verifier missed."""
    quiet = [each for each in watched if each["is_quiet"]]
    if len(quiet) < MIN_QUIET_SHARE * len(watched):
        quiet = list(watched)
    return {
        "revocations": len(watched),
        "quiet": len(quiet),
        "lost": sum(each["evicted_ms"] is None for each in watched),
        **{f"{name}_ms": value for name, value in _tail(quiet, watched, "evicted_ms").items()},
        **{f"refused_{name}_ms": value for name, value in _tail(quiet, watched, "refused_ms").items()},
        "returned_p50_ms": percentile([each["returned_ms"] for each in watched], 0.5),
        "after": sum(each["after"] for each in watched),
        "stale": sum(each["stale"] for each in watched),
        "stale_after_receipt": sum(each["stale_after_receipt"] for each in watched),
        "last_stale_ms": max(each["last_stale_ms"] for each in watched),
    }


def _tail(quiet: Sequence[dict[str, Any]], watched: Sequence[dict[str, Any]], which: str) -> dict[str, float | None]:
    """Return the percentiles of the quiet revocations, and the p99 of all."""
    of_quiet, of_all = ([each[which] for each in some if each[which] is not None] for some in (quiet, watched))
    if not of_quiet:
        return {"p50": None, "p99": None, "all_p99": None}
    return {
        "p50": percentile(of_quiet, 0.5),
        "p99": percentile(of_quiet, 0.99),
        "all_p99": percentile(of_all, 0.99),
    }


HEADS = [
    "verifiers",
    "revocations",
    "receipt p50 ms",
    "p99 ms",
    "p99 of all, ms",
    "first denial p50 ms",
    "p99 ms",
    "p99 of all, ms",
    "requests after the return",
    'answered "valid"',
    "of them after the receipt",
]


def row(results: dict[str, Any]) -> list[str]:
    names = [f"{which}{name}_ms" for which in ("", "refused_") for name in ("p50", "p99", "all_p99")]
    times = [number(results[name]) if results[name] is not None else "-" for name in names]
    lost = f", {results['lost']} missed by some verifier" if results["lost"] else ""
    stale = f"{results['stale']:,}"
    if results["stale"]:
        stale += f", the last one sent {number(results['last_stale_ms'])} ms after the commit"
    late = f"{results['stale_after_receipt']:,}"
    return [
        results["place"],
        f"{results['revocations']:,}, {results['quiet']:,} counted{lost}",
        *times,
        f"{results['after']:,}",
        stale,
        late,
    ]


def describe(results: dict[str, Any]) -> str:
    rates = " and ".join(f"{place['per_second']:,.0f}" for place in results["places"])
    return (
        f"{results['verifiers']} verifiers at {rates} requests a second in total, half of them for the key that is"
        " revoked. Times are from just before COMMIT to the last verifier's receipt, by which it has evicted the key,"
        " and to its first denial, which waits for the prober's next request and shares a core with the other"
        " verifiers. A revocation is quiet if the host stole no time in its first tenth of a second; if at least half"
        f" are quiet, the others are ignored. {results['cores']}. PostgreSQL runs without fsync, so commits and"
        " verifiers' reports do not wait for a disk."
    )


def sample(results: dict[str, Any]) -> str:
    """Describe the sample of the eviction target."""
    (place,) = (each for each in results["places"] if each["place"] == ELSEWHERE)
    return f"elsewhere, by the receipt, {place['quiet']:,} of {place['revocations']:,} revocations"


def count_after(results: dict[str, Any]) -> int:
    return sum(place["after"] for place in results["places"] if place["place"] == SAME_HOST)


def figures_of(results: dict[str, Any]) -> dict[str, Spread]:
    """Return the figures of the targets.

    On the same host a key is evicted when the revoke call returns: later grants are stale. On other hosts the receipt
    reports the eviction. A missed change, or a grant after the receipt, fails the target.
    """
    places = {place["place"]: place for place in results["places"]}
    is_reliable = not any(place["lost"] or place["stale_after_receipt"] for place in results["places"])
    return {
        STALE: _single(places[SAME_HOST]["stale"]),
        EVICTION: _single(places[ELSEWHERE]["p99_ms"] if is_reliable else 1e9),
    }


def _single(value: float) -> Spread:
    return Spread(value, value, value, 1)

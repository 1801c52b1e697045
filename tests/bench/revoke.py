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
from .launch import launched
from .machine import Cores
from .prober import Prober, Watched
from .servers import verifier_command
from .site import House, Site
from .stock import id_of
from .telling import tell

SAME_HOST, ELSEWHERE = "same host", "elsewhere"
PLACES = (SAME_HOST, ELSEWHERE)

NOT_COPIED = ("generation", "run.lock", "logs", "metrics")
"""What another host would not have."""

LEAST_QUIET = 0.5
"""So large a share of quiet revocations is enough to leave the others out."""

SETTLE_SECONDS = 2.0
SHOWN_EVERY = 100


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--verifiers", type=int, default=4, help="4 unless told")
    parser.add_argument("--revocations", type=int, default=300, help="in each place; 300 unless told")
    parser.add_argument(
        "--sent-after", type=int, default=100_000, help="requests after the revokes returned, in each place; 100,000"
    )
    # The prober, in Python and beside the database, gives out at some 3,500 on two cores.
    parser.add_argument("--rate", type=float, default=2_000, help="requests a second to all verifiers; 2,000")


class Revoke:
    """One benchmark under way."""

    def __init__(self, site: Site, cores: Cores, asked: argparse.Namespace) -> None:
        self._site, self._cores, self._asked = site, cores, asked

    def run(self) -> dict[str, Any]:
        house, count = self._site.on_postgres, self._asked.revocations
        told = []
        for turn, place in enumerate(PLACES):
            keys = house.to_revoke[turn * count : (turn + 1) * count]
            with self._verifiers(house, place) as ports, self._writer(house) as writer:
                time.sleep(SETTLE_SECONDS)
                told.append(self._watch_all(house, place, ports, writer, keys))
        return {
            "places": told,
            "verifiers": self._asked.verifiers,
            "rate": self._asked.rate,
            "cores": self._cores.words,
        }

    def _watch_all(
        self, house: House, place: str, ports: list[int], writer: "subprocess.Popen[bytes]", keys: list[str]
    ) -> dict[str, Any]:
        after = -(-self._asked.sent_after // len(keys))
        load = cases.verify(house, place).requests[:2000]
        prober = Prober(ports, load, self._asked.rate, lines=4, writer=writer)
        watched, began = [], time.monotonic()
        try:
            for number_of, key in enumerate(keys, 1):
                watched.append(summed(prober.watch(id_of(key), cases.verify_one(house, key), after), len(ports)))
                if number_of % SHOWN_EVERY == 0:
                    tell(f"  {place}: {number_of} of {len(keys)} revocations")
        finally:
            prober.close()
        told = {"place": place, "per_second": prober.sent / (time.monotonic() - began), **sums(watched)}
        tell("  " + " | ".join(row(told)))
        return told

    @contextmanager
    def _verifiers(self, house: House, place: str) -> Iterator[list[int]]:
        with ExitStack() as stack:
            ports = []
            for turn in range(self._asked.verifiers):
                data = house.data if place == SAME_HOST else self._copy(house.data, turn)
                environ = {**house.environ, "KEYVAULT_DATA_DIR": str(data)}
                log = self._site.folder / f"{place.replace(' ', '-')}-{turn}.log"
                started = stack.enter_context(launched(verifier_command(), environ, log, self._cores.server))
                ports.append(started.port)
            for port in ports:
                wrong = cases.find_wrong(port, cases.verify(house, place).probes)
                if wrong is not None:
                    raise RuntimeError(f"a verifier answers wrongly: {wrong}")
            yield ports

    def _copy(self, data: Path, turn: int) -> Path:
        to = self._site.folder / f"host-{turn}"
        shutil.copytree(data, to, ignore=shutil.ignore_patterns(*NOT_COPIED))
        to.chmod(0o700)
        return to

    @contextmanager
    def _writer(self, house: House) -> Iterator["subprocess.Popen[bytes]"]:
        with subprocess.Popen(
            [sys.executable, "-m", "tests.bench.writer"],
            cwd=ROOT,
            env=dict(house.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as writer:
            assert writer.stdout
            try:
                if not writer.stdout.readline():
                    raise RuntimeError("the writer did not start")
                yield writer
            finally:
                writer.kill()


def summed(watched: Watched, verifiers: int) -> dict[str, Any]:
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


def sums(watched: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all revocations in one place. `lost`: those that some verifier never heard of."""
    quiet = [each for each in watched if each["is_quiet"]]
    if len(quiet) < LEAST_QUIET * len(watched):
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
    "first refusal p50 ms",
    "p99 ms",
    "p99 of all, ms",
    "requests after the return",
    'answered "valid"',
    "of them after the receipt",
]


def row(told: dict[str, Any]) -> list[str]:
    names = [f"{which}{name}_ms" for which in ("", "refused_") for name in ("p50", "p99", "all_p99")]
    times = [number(told[name]) if told[name] is not None else "-" for name in names]
    lost = f", {told['lost']} never seen by some verifier" if told["lost"] else ""
    stale = f"{told['stale']:,}"
    if told["stale"]:
        stale += f", the last asked {number(told['last_stale_ms'])} ms after the commit"
    late = f"{told['stale_after_receipt']:,}"
    return [
        told["place"],
        f"{told['revocations']:,}, {told['quiet']:,} counted{lost}",
        *times,
        f"{told['after']:,}",
        stale,
        late,
    ]


def describe(told: dict[str, Any]) -> str:
    rates = " and ".join(f"{place['per_second']:,.0f}" for place in told["places"])
    return (
        f"{told['verifiers']} verifiers under {rates} requests a second in all, half of them for the key that is being"
        " revoked. From just before COMMIT to the receipt of the last verifier, by which it has forgotten the key, and"
        " to the arrival of its first refusal, which waits for the prober's next request and is judged beside the"
        " other verifiers on one core. Where most were quiet, those are counted in whose first tenth of a second the"
        f" host took no time from this machine. {told['cores']}. PostgreSQL is a throwaway without fsync: COMMIT, and"
        " what a verifier reports, take no disk's time."
    )


def sample(told: dict[str, Any]) -> str:
    """What the target is held against."""
    (place,) = (each for each in told["places"] if each["place"] == ELSEWHERE)
    return f"elsewhere, by the receipt, {place['quiet']:,} of {place['revocations']:,} revocations"


def count_after(told: dict[str, Any]) -> int:
    return sum(place["after"] for place in told["places"] if place["place"] == SAME_HOST)


def figures_of(told: dict[str, Any]) -> dict[str, Spread]:
    """On the same host a key is forgotten when the revoke returns, and the wrong answers after that are counted;
    elsewhere the receipt says when. A change that was lost, or a receipt that was not true, is no eviction."""
    places = {place["place"]: place for place in told["places"]}
    is_true = not any(place["lost"] or place["stale_after_receipt"] for place in told["places"])
    return {
        STALE: _single(places[SAME_HOST]["stale"]),
        EVICTION: _single(places[ELSEWHERE]["p99_ms"] if is_true else 1e9),
    }


def _single(value: float) -> Spread:
    return Spread(value, value, value, 1)

"""Cost of more keys: latency of a lookup, size of the database, and memory of a verifier that caches them."""

import argparse
import http.client
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any

from . import cases
from .command_process import run_command, start_command_process
from .figures import BATCH_SIZE, GROWTH, Spread, number, spread
from .launch import StartError, running_server
from .machine import Cores, list_process_tree, rss_mb
from .progress import report
from .servers import verifier_command
from .testbed import POSTGRES, BenchmarkInstallation, Testbed

SMALL, LARGE, HUGE = 10_000, 1_000_000, 10_000_000
REMEMBERED = (10_000, 100_000, 1_000_000)
TRACED = 100_000
"""Number of records measured by tracemalloc, which takes several times as long as reading them."""

HEADS = ["keys", "lookup p50 us", "p99 us", "tables MB", "indexes MB", "index by key id MB", "loaded s"]


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--ten-million", action="store_true", help="measure 10,000,000 keys too; takes some minutes and 6 GB"
    )
    parser.add_argument("--look-ups", type=int, default=10_000, help="lookups in each round; default 10,000")


class Growth:
    """One run of the benchmark."""

    def __init__(self, testbed: Testbed, cores: Cores, options: argparse.Namespace) -> None:
        self._testbed, self._cores, self._options = testbed, cores, options

    def run(self) -> dict[str, Any]:
        installation = self._testbed.on_postgres
        sizes = [SMALL, LARGE, *([HUGE] if self._options.ten_million else [])]
        with ExitStack() as stack:
            results, processes, urls = [], [], {}
            for size in sizes:
                urls[size] = self._testbed.new_database(f"keys_{size}", template="keyvault")
                environ = {**installation.environ, "KEYVAULT_DATABASE_URL": urls[size]}
                process = stack.enter_context(start_command_process("tests.bench.growth_commands", environ))
                processes.append(process)
                strings = self._testbed.folder / f"keys-{size}"
                loaded = run_command(process, f"add {size} {strings}")
                results.append(
                    {"keys": size, "seconds": loaded["seconds"], **run_command(process, "sizes"), "rounds": []}
                )
                report(f"  {size:,} keys: {loaded['seconds']:.0f} s")
            traced = run_command(processes[sizes.index(LARGE)], f"remember {TRACED}")
            report(f"  a record in memory: {number(traced['bytes_each'])} bytes")
            for turn in range(1, self._options.rounds + 1):
                for each, process in zip(results, processes, strict=True):
                    each["rounds"].append(run_command(process, f"measure {self._options.look_ups}"))
                shown = "  ".join(
                    f"{each['keys']:,}: p50 {number(each['rounds'][-1]['p50_us'])} us" for each in results
                )
                report(f"  round {turn}: {shown}")
        try:
            memory, failed = self._remember(installation, urls[LARGE]), ""
        except (StartError, RuntimeError, OSError) as error:
            memory, failed = [], f"failed: {error}"
            report(f"  memory of a verifier: {failed}")
        return {
            "sizes": results,
            "traced": traced,
            "memory": memory,
            "memory_failed": failed,
            "cores": self._cores.description,
        }

    def _remember(self, installation: BenchmarkInstallation, url: str) -> list[dict[str, float]]:
        """Return the resident memory of a verifier by number of keys that it has verified."""
        environ = {**installation.environ, "KEYVAULT_DATABASE_URL": url, "KEYVAULT_VERIFIER_KEYS": str(2 * LARGE)}
        log, results = self._testbed.folder / "remembering.log", []
        with (
            running_server(verifier_command(), environ, log, self._cores.server) as started,
            (self._testbed.folder / f"keys-{LARGE}").open() as lines,
        ):
            time.sleep(2)
            connection = http.client.HTTPConnection(cases.ADDRESS, started.port, timeout=60)
            results.append({"keys": 0, "rss_mb": rss_mb(list_process_tree(started.process))})
            for size in REMEMBERED:
                # The installation's own keys are rows too; no request here uses them.
                wanted = min(size, LARGE - self._options.keys - 1) - int(results[-1]["keys"])
                began = time.monotonic()
                verified = _verify_all(connection, installation, lines, wanted)
                now = {"keys": results[-1]["keys"] + verified, "rss_mb": rss_mb(list_process_tree(started.process))}
                results.append({**now, "per_second": verified / (time.monotonic() - began)})
                report(f"  a verifier with {now['keys']:,.0f} cached keys: {number(now['rss_mb'])} MB")
            connection.close()
        return results


def _verify_all(
    connection: http.client.HTTPConnection, installation: BenchmarkInstallation, lines: Iterator[str], wanted: int
) -> int:
    """Verify each key once, in batches; return their number. Raises RuntimeError if one is denied."""
    verified = 0
    while keys := [line.strip() for line in islice(lines, min(BATCH_SIZE, wanted - verified))]:
        status, body = cases.send_request(connection, cases.batch_of(installation, keys))
        if not cases.are_allowed(status, body):
            raise RuntimeError(f"a batch of valid keys: {status} {body[:300]!r}")
        verified += len(keys)
    return verified


def row(results: Mapping[str, Any]) -> list[str]:
    times = [str(spread([(each[name], True) for each in results["rounds"]])) for name in ("p50_us", "p99_us")]
    sizes = [number(results[name]) for name in ("tables_mb", "indexes_mb", "primary_mb", "seconds")]
    return [f"{results['keys']:,}", *times, *sizes]


def describe(results: Mapping[str, Any]) -> str:
    return (
        "Sequential lookups with the query of a cache miss, in interleaved rounds, of keys that were read before;"
        f" PostgreSQL with {' '.join(POSTGRES)}; tables of keys and credentials with their indexes."
        f" Up to {LARGE:,} keys are valid; the others are random rows of the same shape. {results['cores']}."
    )


def memory_lines(results: Mapping[str, Any]) -> list[str]:
    """Return the lines on the memory of a verifier, and of each cached record."""
    if not results["memory"]:
        return [f"Memory of a verifier: {results['memory_failed']}"]
    bare, rows = results["memory"][0], []
    for each in results["memory"]:
        per_record = (each["rss_mb"] - bare["rss_mb"]) * 2**20 / each["keys"] if each["keys"] else 0.0
        rows.append([f"{each['keys']:,.0f}", number(each["rss_mb"]), number(per_record) if per_record else "-"])
    traced = results["traced"]
    about = (
        f"A cached record with its indexes: {number(traced['bytes_each'])} bytes, as Python's allocator counts"
        f" {traced['keys']:,} of them. A whole verifier, one worker and its supervisor, after one request for each key:"
    )
    heads = ["cached keys", "resident MB", "bytes each"]
    return [about, "", *("| " + " | ".join(each) + " |" for each in (heads, ["---"] * 3, *rows))]


def figures_of(results: Mapping[str, Any]) -> dict[str, Spread]:
    """Return the ratio of the median lookup among LARGE keys to that among SMALL keys, per round."""
    rounds = {each["keys"]: each["rounds"] for each in results["sizes"]}
    ratios = [
        (large["p50_us"] / small["p50_us"], True) for small, large in zip(rounds[SMALL], rounds[LARGE], strict=True)
    ]
    return {GROWTH: spread(ratios)} if ratios else {}

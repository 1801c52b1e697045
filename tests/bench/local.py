"""Decisions of `LocalVerifier` from memory: rate on one core, latency, and stale grants after a receipt.

The service is the web server of a production set-up on PostgreSQL. A process on a core of its own decides in a loop,
with everything that belongs to it: it follows the change feed, leases tokens of the limits and reports its uses.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import psycopg

from keyvault.management import service
from tests.environment import ROOT

from . import cases
from .figures import LOCAL_P50, LOCAL_RATE, LOCAL_STALE, Spread, find_noise, number, spread
from .launch import running_server
from .machine import Cores, pinned
from .progress import report
from .seed_keys import MERCHANTS
from .testbed import BenchmarkInstallation, Testbed

COUNTED_SECONDS = 20.0
"""Maximum time until the service has stored the last uses, in seconds."""

HEADS = ["round", "decisions/s", "p50 us", "p99 us", "questions to the service/s", "share of its core", "noisy"]


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--accounts", type=int, default=10, help="accounts whose keys are used; default 10")
    parser.add_argument("--account-keys", type=int, default=10, help="keys of each account; default 10")
    parser.add_argument("--decision-seconds", type=float, default=10, help="of each measurement; default 10")
    parser.add_argument("--local-revocations", type=int, default=50, help="default 50")
    parser.add_argument("--asked-after", type=int, default=200, help="requests after each receipt; default 200")


class Local:
    """One run of the benchmark."""

    def __init__(self, testbed: Testbed, cores: Cores, options: argparse.Namespace) -> None:
        self._testbed, self._cores, self._options = testbed, cores, options

    def run(self) -> dict[str, Any]:
        installation = self._testbed.on_postgres
        command = list(service.server_program(0).command)
        command[command.index("--port") + 1] = "{port}"
        environ = {**installation.environ, "KEYVAULT_ORIGIN": f"http://{cases.ADDRESS}:{{port}}"}
        log = self._testbed.folder / "local.log"
        before = _count_uses(installation)
        with running_server(command, environ, log, self._cores.load) as started:
            decided = self._decide(installation, service.local_url(started.port))
            counted = _await_uses(installation, before + decided["allowed"]) - before
        if counted != decided["allowed"]:
            raise RuntimeError(f"the service counted {counted:,} of {decided['allowed']:,} uses")
        for each in decided["rounds"]:
            each["flags"] = find_noise(each["others"], each["steal"])
            report("  " + " | ".join(row(each)))
        return {
            **decided,
            "keys": self._options.accounts * self._options.account_keys,
            "accounts": self._options.accounts,
            "cores": self._cores.description,
        }

    def _decide(self, installation: BenchmarkInstallation, url: str) -> dict[str, Any]:
        """Run the deciding process to its end, and return what it measured."""
        accounts, keys = self._options.accounts, self._options.accounts * self._options.account_keys
        chosen = [key for number, key in enumerate(installation.keys) if number % MERCHANTS < accounts]
        if len(chosen) < keys:
            raise RuntimeError(f"{accounts} accounts have {len(chosen)} keys. Use fewer, or a larger --keys.")
        order = {
            "url": url,
            "token": installation.token,
            "keys": chosen[:keys],
            "to_revoke": installation.to_revoke,
            "asked_after": self._options.asked_after,
            "rounds": self._options.rounds,
            "seconds": self._options.decision_seconds,
            "core": self._cores.server,
        }
        done = subprocess.run(
            pinned([sys.executable, "-m", "tests.bench.local_process"], self._cores.server),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "clients" / "python")},
            input=json.dumps(order),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the deciding process failed: {done.stderr.strip()[-1500:]}")
        decided: dict[str, Any] = json.loads(done.stdout)
        return decided


def _count_uses(installation: BenchmarkInstallation) -> int:
    with psycopg.connect(installation.environ["KEYVAULT_DATABASE_URL"]) as connection:
        found = connection.execute("SELECT coalesce(sum(count), 0) FROM keyvault_keyuse").fetchone()
    assert found is not None
    return int(found[0])


def _await_uses(installation: BenchmarkInstallation, expected: int) -> int:
    """Return the number of uses that the service has counted, once it is the expected one or time is up."""
    deadline = time.monotonic() + COUNTED_SECONDS
    while (counted := _count_uses(installation)) != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    return counted


def row(each: Mapping[str, Any]) -> list[str]:
    shown = [number(each[name]) for name in ("per_second", "p50_us", "p99_us", "asked_per_second", "share")]
    return [str(each["round"]), *shown, ", ".join(each["flags"])]


def describe(results: Mapping[str, Any]) -> str:
    return (
        f"One thread decides about {results['keys']} keys of {results['accounts']} accounts in turn, each with a limit"
        " of 1,000,000 a second. A decision includes making the question. The rate includes the threads that follow the"
        " feed and report uses, and the questions that lease tokens; p50 and p99 are of single decisions."
        f" The service counted all {results['allowed']:,} allowed requests. {results['revocations']} keys were then"
        f" revoked over REST while the process asked about them: {results['stale']} of {results['asked_after']:,}"
        f" requests after a complete receipt were allowed; receipt p50 {number(results['receipt_p50_ms'])} ms."
        f" {results['cores']}. PostgreSQL runs without fsync."
    )


def figures_of(results: Mapping[str, Any]) -> dict[str, Spread]:
    """Return the figures of the targets. A revocation without a complete receipt fails the one of stale grants."""
    rounds = results["rounds"]
    stale = results["stale"] if not results["without_receipt"] else 1e9
    return {
        LOCAL_RATE: spread([(each["per_second"], not each["flags"]) for each in rounds]),
        LOCAL_P50: spread([(each["p50_us"], not each["flags"]) for each in rounds]),
        LOCAL_STALE: Spread(stale, stale, stale, 1),
    }


def by_cpu(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the rate per second of the deciding process's processor time."""
    return {LOCAL_RATE: spread([(each["per_cpu_second"], True) for each in results["rounds"]]).median}

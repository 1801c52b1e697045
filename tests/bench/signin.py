"""Latency of `orders.retrieve` on the server of `make run`, during 16 sign-ins relative to none.

Each sign-in computes the hash of a correct password. Server, database and load share all cores in both halves of a
round.
"""

import argparse
import http.client
import json
import re
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from keyvault.management import service

from . import cases
from .figures import SIGN_IN, Spread, find_noise, number, spread
from .generators import find_generators
from .launch import RunningServer, run_checked, running_server
from .load import LoadResult, run_load
from .machine import Cores, pinned
from .pacer import write_requests
from .progress import report
from .testbed import BenchmarkInstallation, Testbed

SIGN_INS = 16
"""Number of concurrent sign-ins, each on its own connection."""

CONNECTIONS = 8
SETTLE_SECONDS = 2.0
"""Time between the first sign-ins and the measurement, in seconds."""

ACCEPTED = frozenset({200, 302})
"""Statuses of a sign-in whose password was checked."""

HEADS = ["round", "sign-ins", "a second", "p50 us", "p99 us", "p99 under sign-ins / idle", "noisy"]


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--sign-in-rounds", type=int, default=3, help="default 3")
    parser.add_argument("--sign-in-seconds", type=float, default=20, help="seconds of each half of a round; default 20")
    parser.add_argument("--order-rate", type=float, default=50, help="orders retrieved per second; default 50")


@dataclass(frozen=True, slots=True)
class Operator:
    username: str
    password: str


class SignIn:
    """One run of the benchmark."""

    def __init__(self, testbed: Testbed, cores: Cores, options: argparse.Namespace) -> None:
        self._testbed, self._cores, self._options = testbed, cores, options
        self._generators = find_generators(testbed.folder)

    def run(self) -> dict[str, Any]:
        installation = self._testbed.on_postgres
        operator = self._make_operator(installation)
        command = list(service.server_program(0).command)
        command[command.index("--port") + 1] = "{port}"
        environ = {**installation.environ, "KEYVAULT_ORIGIN": f"http://{cases.ADDRESS}:{{port}}"}
        log = self._testbed.folder / "signin.log"
        rounds = []
        # Child processes inherit the core of this process.
        command = pinned(command, self._cores.server, self._cores.load)
        with running_server(command, environ, log, None) as started:
            requests = self._write_request(started.port, installation)
            for turn in range(1, self._options.sign_in_rounds + 1):
                idle = self._measure(started, requests)
                with signing_in(started.port, operator) as tally:
                    time.sleep(SETTLE_SECONDS)
                    tally.clear()
                    loaded = self._measure(started, requests)
                    counted = dict(tally)
                rounds.append(_round(turn, idle, loaded, counted))
                report("  " + " | ".join(rows(rounds[-1])[1]))
        return {"rounds": rounds, "rate": self._options.order_rate, "generator": self._generators.names["open"]}

    def _make_operator(self, installation: BenchmarkInstallation) -> Operator:
        out = self._testbed.folder / "operator.json"
        made = [sys.executable, "-m", "tests.bench.signin", str(out)]
        run_checked(made, "the operator cannot be created", installation.environ)
        return Operator(**json.loads(out.read_text()))

    def _write_request(self, port: int, installation: BenchmarkInstallation) -> Path:
        """Create an order. Return the file with the request that retrieves it."""
        headers = {
            "X-Api-Key": installation.keys[0],
            "Content-Type": "application/json",
            "Idempotency-Key": "bench-sign-in",
        }
        body = json.dumps({"amount_minor": 100, "currency": "EUR"})
        connection = http.client.HTTPConnection(cases.ADDRESS, port, timeout=30)
        connection.request("POST", "/production/merchants/orders", body, headers)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        if response.status != 201:
            raise RuntimeError(f"No order was created: {response.status} {text[:300]!r}")
        target = f"/production/merchants/orders/{json.loads(text)['order_token']}"
        path = self._testbed.folder / "orders"
        write_requests(path, [cases.request("GET", target, {"X-Api-Key": installation.keys[0]})])
        return path

    def _measure(self, started: RunningServer, requests: Path) -> LoadResult:
        loaded = run_load(
            started.port,
            requests,
            generators=self._generators,
            process=started.process,
            cores=self._cores,
            seconds=self._options.sign_in_seconds,
            connections=CONNECTIONS,
            rate=self._options.order_rate,
        )
        if loaded.counts["errors"] or loaded.counts["unanswered"]:
            raise RuntimeError(f"Not every order was retrieved: {loaded.counts}")
        return loaded


@contextmanager
def signing_in(port: int, operator: Operator) -> Iterator[Counter[int]]:
    """Send SIGN_INS concurrent sign-ins until the block ends; yield the number of responses by status.

    Raises RuntimeError at the end if a sign-in was rejected or none had a response.
    """
    tally: Counter[int] = Counter()
    ends, failures = threading.Event(), list[str]()
    threads = [
        threading.Thread(target=partial(_sign_in, port, operator, tally, ends, failures)) for _ in range(SIGN_INS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield tally
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    if failures or not tally or not set(tally) <= ACCEPTED:
        raise RuntimeError(f"Not every sign-in had a response: {dict(tally)} {failures[:3]}")


def _sign_in(port: int, operator: Operator, tally: Counter[int], ends: threading.Event, failures: list[str]) -> None:
    """Send sequential sign-ins with the CSRF token of one page."""
    try:
        connection = http.client.HTTPConnection(cases.ADDRESS, port, timeout=120)
        connection.request("GET", "/admin/login/")
        page = connection.getresponse()
        found = re.search(rb'name="csrfmiddlewaretoken" value="([^"]+)"', page.read())
        if found is None:
            failures.append(f"no form: {page.status}")
            return
        fields = {"username": operator.username, "password": operator.password, "csrfmiddlewaretoken": found[1]}
        cookie = (page.getheader("Set-Cookie") or "").partition(";")[0]
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Cookie": cookie}
        while not ends.is_set():
            connection.request("POST", "/admin/login/", urlencode(fields), headers)
            response = connection.getresponse()
            response.read()
            tally[response.status] += 1
        connection.close()
    except (OSError, http.client.HTTPException) as error:
        failures.append(repr(error))


def _round(turn: int, idle: LoadResult, loaded: LoadResult, counted: Mapping[int, int]) -> dict[str, Any]:
    return {
        "round": turn,
        "sign_ins": sum(counted.values()),
        "sign_ins_per_second": sum(counted.values()) / loaded.counts["seconds"],
        "idle": {name: idle.counts[name] for name in ("p50_us", "p99_us", "late_us")},
        "loaded": {name: loaded.counts[name] for name in ("p50_us", "p99_us", "late_us")},
        "flags": find_noise(0.0, max(idle.steal, loaded.steal)),
    }


def rows(results: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the two rows of one round."""
    idle, loaded, turn = results["idle"], results["loaded"], str(results["round"])
    return (
        [turn, "0", "", number(idle["p50_us"]), number(idle["p99_us"]), "", ""],
        [
            turn,
            str(SIGN_INS),
            number(results["sign_ins_per_second"]),
            number(loaded["p50_us"]),
            number(loaded["p99_us"]),
            number(_ratio(results)),
            ", ".join(results["flags"]),
        ],
    )


def describe(results: Mapping[str, Any]) -> str:
    return (
        f"{number(results['rate'])} orders are retrieved a second over {CONNECTIONS} connections, in open loop;"
        f" In the second half of each round, {SIGN_INS} concurrent sign-ins compute password hashes."
        f" Server, database and load share all cores. Generator: {results['generator']}. PostgreSQL runs without fsync."
    )


def figures_of(results: Mapping[str, Any]) -> dict[str, Spread]:
    return {SIGN_IN: spread([(_ratio(each), not each["flags"]) for each in results["rounds"]])}


def _ratio(results: Mapping[str, Any]) -> float:
    return float(results["loaded"]["p99_us"] / results["idle"]["p99_us"])


def main() -> int:
    """Create an operator in the environment's database; write name and password to a file that only its owner reads."""
    import django

    django.setup()
    from datetime import UTC, datetime

    from keyvault.access.permissions import Permission
    from keyvault.access.principals import HOST
    from keyvault.access.roles import Role
    from keyvault.access.scopes import EVERYWHERE
    from keyvault.domain.plaintext import Plaintext
    from keyvault.services.operators.operators import create_operator
    from keyvault.services.recording.authorization import authorize

    out, password = Path(sys.argv[1]), secrets.token_urlsafe(24)
    grant = authorize(HOST, Permission.OPERATORS_ENROLL, now=datetime.now(UTC))
    operator = create_operator(
        grant, username="bench", roles=[Role.AUDITOR], scope=EVERYWHERE, password=Plaintext(password)
    )
    out.touch(mode=0o600)
    out.write_text(json.dumps({"username": operator.username, "password": password}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

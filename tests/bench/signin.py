"""The latency of `orders.retrieve` on the server of `make run` under 16 sign-ins, over that of an idle server.

Each sign-in computes the hash of a right password. The server, its database and the load share all cores, in both
halves of a round.
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
from .launch import Started, launched, run_to_end
from .load import Loaded, put_load
from .machine import Cores, pinned
from .pacer import write_requests
from .site import House, Site
from .telling import tell

SIGN_INS = 16
"""Number of sign-ins under way, each on a connection of its own."""

CONNECTIONS = 8
SETTLE_SECONDS = 2.0
"""Time after the first sign-ins are sent and before the measurement."""

ANSWERED = frozenset({200, 302})
"""Statuses of a sign-in whose password was checked."""

HEADS = ["round", "sign-ins", "a second", "p50 us", "p99 us", "p99 under sign-ins / idle", "noisy"]


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--sign-in-rounds", type=int, default=3, help="3 unless told")
    parser.add_argument("--sign-in-seconds", type=float, default=20, help="each half of a round; 20 unless told")
    parser.add_argument("--order-rate", type=float, default=50, help="orders retrieved a second; 50 unless told")


@dataclass(frozen=True, slots=True)
class Operator:
    username: str
    password: str


class SignIn:
    """One benchmark under way."""

    def __init__(self, site: Site, cores: Cores, asked: argparse.Namespace) -> None:
        self._site, self._cores, self._asked = site, cores, asked
        self._generators = find_generators(site.folder)

    def run(self) -> dict[str, Any]:
        house = self._site.on_postgres
        operator = self._make_operator(house)
        command = list(service.server_program(0).command)
        command[command.index("--port") + 1] = "{port}"
        environ = {**house.environ, "KEYVAULT_ORIGIN": f"http://{cases.ADDRESS}:{{port}}"}
        log = self._site.folder / "signin.log"
        rounds = []
        # This process is on the load's core, and so is what it starts.
        command = pinned(command, self._cores.server, self._cores.load)
        with launched(command, environ, log, None) as started:
            requests = self._write_request(started.port, house)
            for turn in range(1, self._asked.sign_in_rounds + 1):
                idle = self._measure(started, requests)
                with signing_in(started.port, operator) as tally:
                    time.sleep(SETTLE_SECONDS)
                    tally.clear()
                    loaded = self._measure(started, requests)
                    counted = dict(tally)
                rounds.append(_round(turn, idle, loaded, counted))
                tell("  " + " | ".join(rows(rounds[-1])[1]))
        return {"rounds": rounds, "rate": self._asked.order_rate, "generator": self._generators.names["open"]}

    def _make_operator(self, house: House) -> Operator:
        out = self._site.folder / "operator.json"
        made = [sys.executable, "-m", "tests.bench.signin", str(out)]
        run_to_end(made, "the operator cannot be created", house.environ)
        return Operator(**json.loads(out.read_text()))

    def _write_request(self, port: int, house: House) -> Path:
        """Create an order. Return the file with the request that retrieves it."""
        headers = {"X-Api-Key": house.keys[0], "Content-Type": "application/json", "Idempotency-Key": "bench-sign-in"}
        body = json.dumps({"amount_minor": 100, "currency": "EUR"})
        connection = http.client.HTTPConnection(cases.ADDRESS, port, timeout=30)
        connection.request("POST", "/production/merchants/orders", body, headers)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        if answer.status != 201:
            raise RuntimeError(f"no order was created: {answer.status} {text[:300]!r}")
        target = f"/production/merchants/orders/{json.loads(text)['order_token']}"
        path = self._site.folder / "orders"
        write_requests(path, [cases.request("GET", target, {"X-Api-Key": house.keys[0]})])
        return path

    def _measure(self, started: Started, requests: Path) -> Loaded:
        loaded = put_load(
            started.port,
            requests,
            generators=self._generators,
            process=started.process,
            cores=self._cores,
            seconds=self._asked.sign_in_seconds,
            connections=CONNECTIONS,
            rate=self._asked.order_rate,
        )
        if loaded.counted["errors"] or loaded.counted["unanswered"]:
            raise RuntimeError(f"not every order was retrieved: {loaded.counted}")
        return loaded


@contextmanager
def signing_in(port: int, operator: Operator) -> Iterator[Counter[int]]:
    """Keep SIGN_INS sign-ins under way; yield the number of answers by status.

    Raises RuntimeError at the end, if a sign-in was refused or none was answered.
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
    if failures or not tally or not set(tally) <= ANSWERED:
        raise RuntimeError(f"the sign-ins were not all answered: {dict(tally)} {failures[:3]}")


def _sign_in(port: int, operator: Operator, tally: Counter[int], ends: threading.Event, failures: list[str]) -> None:
    """Send one sign-in after the other, with the token of one page."""
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
            answer = connection.getresponse()
            answer.read()
            tally[answer.status] += 1
        connection.close()
    except (OSError, http.client.HTTPException) as error:
        failures.append(repr(error))


def _round(turn: int, idle: Loaded, loaded: Loaded, counted: Mapping[int, int]) -> dict[str, Any]:
    return {
        "round": turn,
        "sign_ins": sum(counted.values()),
        "sign_ins_per_second": sum(counted.values()) / loaded.counted["seconds"],
        "idle": {name: idle.counted[name] for name in ("p50_us", "p99_us", "late_us")},
        "loaded": {name: loaded.counted[name] for name in ("p50_us", "p99_us", "late_us")},
        "flags": find_noise(0.0, max(idle.steal, loaded.steal)),
    }


def rows(told: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The two rows of one round."""
    idle, loaded, turn = told["idle"], told["loaded"], str(told["round"])
    return (
        [turn, "0", "", number(idle["p50_us"]), number(idle["p99_us"]), "", ""],
        [
            turn,
            str(SIGN_INS),
            number(told["sign_ins_per_second"]),
            number(loaded["p50_us"]),
            number(loaded["p99_us"]),
            number(_ratio(told)),
            ", ".join(told["flags"]),
        ],
    )


def describe(told: Mapping[str, Any]) -> str:
    return (
        f"{number(told['rate'])} orders are retrieved a second over {CONNECTIONS} connections, in open loop;"
        f" {SIGN_INS} sign-ins are under way in the second half of each round, each of which computes a password hash."
        f" Server, database and load share all cores. Generator: {told['generator']}. PostgreSQL is a throwaway"
        " without fsync."
    )


def figures_of(told: Mapping[str, Any]) -> dict[str, Spread]:
    return {SIGN_IN: spread([(_ratio(each), not each["flags"]) for each in told["rounds"]])}


def _ratio(told: Mapping[str, Any]) -> float:
    return float(told["loaded"]["p99_us"] / told["idle"]["p99_us"])


def main() -> int:
    """Create an operator in the database of the environment; write name and password to a file of its owner."""
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

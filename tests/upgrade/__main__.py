"""Upgrades an installation under traffic, and rolls it back: `make upgrade-test`, or

    python -m tests.upgrade [ORDER...] [--seconds N] [--rate N] [--rows N]

Two releases run side by side on one PostgreSQL, one Redis and one data folder. The old one is the last release of
`releases.toml`, or this tree in a checkout without history. The new one is a copy of this tree with a migration of each
kind (`rehearsal`). In the order `upgrade` the new one migrates, joins and replaces the old one. In the order
`roll-back` the old one then joins again and replaces the new one, on the new schema. Clients send requests to every
server and dedicated verifier in service.

Exit 1 if a request was not answered 2xx, a verdict was wrong, a process exited by itself, or a log has a traceback.
Both sides use the packages of this environment.
"""

import argparse
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg

from keyvault.backends.private_files import ensure_private_directory
from keyvault.management.supervisor import StopRequestedError, stopping_on_signals
from tests.environment import required_servers
from tests.servers.postgres import postgres_server
from tests.servers.redis import redis_server
from tests.servers.throwaway import MissingServerError
from tests.upgrade.rehearsal import CONTRACT, EXPAND
from tests.upgrade.releases import has_history, read_releases
from tests.upgrade.sides import Side, copy_commit, copy_tree, environment, wait
from tests.upgrade.traffic import Installation, Traffic

UPGRADE, ROLL_BACK = "upgrade", "roll-back"
ORDERS = (UPGRADE, ROLL_BACK)
KEYS = 10
READ_ORDERS = 1_000
LEAST_SHARE = 0.9
"""Least share of the requests that must have been sent and answered: fewer wait behind a lock."""
ISSUE = ("issue_key", "--merchant", "acme", "--environment", "sandbox", "--kind", "private", "--requested-by", "tam")


@dataclass(frozen=True, slots=True)
class Size:
    """`rows`: orders in the table that is migrated."""

    seconds: float
    rate: int
    rows: int


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade")
    parser.add_argument("orders", nargs="*", metavar="ORDER", help=f"{UPGRADE} or {ROLL_BACK}; else both")
    parser.add_argument("--seconds", type=float, default=60, help="minimum duration of the traffic; 60 unless given")
    parser.add_argument("--rate", type=int, default=500, help="requests a second; 500 unless given")
    parser.add_argument("--rows", type=int, default=50_000, help="rows of a migrated table; 50,000 unless given")
    asked = parser.parse_args()
    if unknown := set(asked.orders) - set(ORDERS):
        parser.error(f"unknown order {min(unknown)}; use {UPGRADE} or {ROLL_BACK}")
    try:
        with stopping_on_signals():
            held = [_play(order, Size(asked.seconds, asked.rate, asked.rows)) for order in asked.orders or ORDERS]
    except MissingServerError as missing:
        _tell(f"not run: {missing.reason}")
        return 1 if required_servers() & {"postgres", "redis"} else 0
    except StopRequestedError as stop:
        return 128 + stop.number
    return 0 if all(held) else 1


def _play(order: str, size: Size) -> bool:
    """Play one order on a new installation, report it, and return whether nothing failed."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-upgrade-")))
        old, new, database_url = _lay(folder, stack)
        _tell(f"\n=== {order}: {old.name} and {new.name} ===")
        old.manage("setup")
        installation = _fill(old, database_url, size, sides := [old])
        old.start()
        with Traffic(installation, size.rate, (old.port,), (old.verifier_port,)) as traffic:
            course = _Course(traffic, old, new, sides, size.seconds)
            course.upgrade()
            if order == ROLL_BACK:
                course.roll_back()
            course.finish()
        old.stop()
        new.stop()
        return course.report(order)


def _lay(folder: Path, stack: ExitStack) -> tuple[Side, Side, str]:
    """Start the servers and lay the trees of both sides."""
    server = stack.enter_context(postgres_server())
    redis_url = stack.enter_context(redis_server())
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("CREATE DATABASE keyvault_upgrade")
    database_url = urlunsplit(urlsplit(server)._replace(path="/keyvault_upgrade"))
    data = ensure_private_directory(folder / "data")
    if has_history():
        last = read_releases()[-1]
        name, tree = f"release {last.version}", copy_commit(last.commit, folder / "old")
    else:
        name, tree = "this tree", copy_tree(folder / "old")
    variables = environment(data, database_url, redis_url, "http://127.0.0.1:8000")
    sides = (
        Side(name, tree, folder / "logs", variables),
        Side("this tree with a rehearsal", copy_tree(folder / "new"), folder / "logs", variables),
    )
    for side in sides:
        stack.callback(side.stop)
    return *sides, database_url


def _fill(old: Side, database_url: str, size: Size, sides: list[Side]) -> Installation:
    """Make merchants, keys, a service token and many orders. `sides`: those that may issue keys, which can change."""
    old.manage("seed_demo")
    permissions = ("--permission", "keys:verify", "--permission", "keys:revoke")
    token = old.manage("create_service_token", "balancer", "--environment", "sandbox", *permissions, "--reveal")
    keys = tuple(old.call(*ISSUE, "--reveal")["key"] for _ in range(KEYS))
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "INSERT INTO keyvault_order (version, order_token, account_id, amount_minor, currency, created_at)"
            " SELECT 1, 'ord_' || lpad(n::text, 20, '0'), id, n, 'EUR', now() FROM generate_series(1, %s) n,"
            " keyvault_account WHERE merchant_id = 'acme' AND environment = 'sandbox'",
            [size.rows],
        )
    orders = tuple(f"ord_{number:020}" for number in range(1, min(size.rows, READ_ORDERS) + 1))
    turn = iter(range(10**9))

    def issue() -> tuple[str, str]:
        answer = sides[next(turn) % len(sides)].call(*ISSUE, "--reveal")
        return answer["key_id"], answer["key"]

    return Installation("http://127.0.0.1:8000", token["token"], keys, orders, issue)


class _Course:
    """The steps of an upgrade. `issuing`: the sides that issue keys."""

    def __init__(self, traffic: Traffic, old: Side, new: Side, issuing: list[Side], seconds: float) -> None:
        self._traffic, self._old, self._new, self._issuing = traffic, old, new, issuing
        self._seconds, self._began = seconds, time.monotonic()
        self._migrated: list[str] = []

    def upgrade(self) -> None:
        self._run(0.15)
        self._new.add_migrations(EXPAND)
        self._migrate("expand")
        self._join(self._new)
        self._run(0.2)
        self._leave(self._old)
        self._run(0.1)

    def roll_back(self) -> None:
        self._join(self._old)
        self._run(0.15)
        self._leave(self._new)
        self._run(0.1)

    def finish(self) -> None:
        self._new.add_migrations(CONTRACT)
        self._migrate("contract")
        self._run(max(0.05, 1 - (time.monotonic() - self._began) / self._seconds))

    def report(self, order: str) -> bool:
        tally, sides = self._traffic.tally, (self._old, self._new)
        tracebacks = sum(side.count_in_logs("Traceback") for side in sides)
        exits = [line for side in sides for line in side.exits]
        for fault in (*tally.failures, *exits):
            _tell(f"  FAILED  {fault}")
        kinds = ", ".join(f"{what} {number:,}" for what, number in tally.requests.most_common())
        shares = ", ".join(
            f"{side.name} {tally.by_port[side.port]:,} and its verifier {tally.by_port[side.verifier_port]:,}"
            for side in sides
        )
        _tell(f"requests: {kinds}\nanswered by: {shares}\nmigrations: {', '.join(self._migrated)}")
        _tell(f"migrations that gave way to other transactions: {self._new.count_in_logs('gave way')}")
        sent, seconds = sum(tally.requests.values()), self._traffic.seconds
        _tell(
            f"{order}: {sent:,} requests in {seconds:.0f} s, slowest {tally.slowest_seconds:.2f} s; "
            f"{tally.failed} failed, {len(exits)} processes exited, {tracebacks} tracebacks"
        )
        if is_late := sent < LEAST_SHARE * self._traffic.rate * seconds:
            _tell(f"  FAILED  fewer than {LEAST_SHARE:.0%} of {self._traffic.rate} requests a second were sent")
        return not (tally.failed or exits or tracebacks or is_late)

    def _run(self, share: float) -> None:
        wait(share * self._seconds, (self._old, self._new))

    def _migrate(self, what: str) -> None:
        """Run the new release's `setup` beside the traffic."""
        began = time.monotonic()
        failure: list[BaseException] = []

        def set_up() -> None:
            try:
                self._new.manage("setup")
            except BaseException as error:  # noqa: BLE001  raised again by the main thread
                failure.append(error)

        thread = threading.Thread(target=set_up)
        thread.start()
        while thread.is_alive():
            wait(0.2, (self._old, self._new))
        thread.join()
        if failure:
            raise failure[0]
        self._migrated.append(f"{what} in {time.monotonic() - began:.1f} s")

    def _join(self, side: Side) -> None:
        side.start()
        self._traffic.ports = (*self._traffic.ports, side.port)
        self._traffic.verifiers = (*self._traffic.verifiers, side.verifier_port)
        self._issuing.append(side)

    def _leave(self, side: Side) -> None:
        self._issuing.remove(side)
        for port in (side.port, side.verifier_port):
            self._traffic.take_out(port)
        side.stop()


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

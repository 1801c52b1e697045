"""Rotate the credential of a merchant's fleet under traffic: `make fleet`, or

    python -m tests.fleet [ROTATION...] [--processes N]

Runs the programs of `make run` in a data folder of their own, and merchant processes with the Python client that create
orders the whole time. Their one credential is rotated three times:

- `forgotten`: one process does not watch its key file, and creates orders now and then only. It is refused in
  quarantine, and its operators then restart it.
- `webhook`: the merchant loses every webhook message about the replacement.
- `killed`: every program of the service is killed (SIGKILL) in the middle of the rotation, and started again later.

The agent fetches each replacement, sealed to the merchant's recipient key. No operator carries a key.

Prints a line for each rotation, and the totals. Exit 1 if an order failed that must not, if the service counted other
refusals in quarantine than the forgotten process, if it has other orders than the processes created, or if a rotation
did not complete.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import django

from keyvault.domain.plaintext import Plaintext
from keyvault.management import service
from keyvault.management.supervisor import StopRequestedError, Supervisor, stopping_on_signals
from tests import environment
from tests.backends.receivers import LOOPBACK, Receiver, receiver
from tests.faults.programs import GaveUpError
from tests.fleet.merchant import Fleet, OrderCounts, lay_key

FORGOTTEN, WEBHOOK, KILLED = "forgotten", "webhook", "killed"
ROTATIONS = (FORGOTTEN, WEBHOOK, KILLED)
PROCESSES = 20
QUIET_SECONDS = 8
"""Longer than a process takes between two orders, also on a busy machine."""

QUARANTINE_SECONDS = {FORGOTTEN: 20, WEBHOOK: 3, KILLED: 3}
"""The forgotten process sends an order before the quarantine is over, also on a busy machine."""

DOWN_SECONDS = 3.0
SETTLE_SECONDS = 3.0
"""Traffic after a rotation, in which a process with the revoked key would be refused."""

WITHIN_SECONDS = 300.0
POLL_SECONDS = 0.3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fleet")
    parser.add_argument("rotations", nargs="*", metavar="ROTATION", help=f"{', '.join(ROTATIONS)}; default: all")
    parser.add_argument("--processes", type=int, default=PROCESSES, help=f"default {PROCESSES}")
    asked = parser.parse_args()
    if unknown := set(asked.rotations) - set(ROTATIONS):
        parser.error(f"unknown rotation {min(unknown)}; use {', '.join(ROTATIONS)}")
    os.environ[environment.DATABASE] = "sqlite"
    data = environment.lay().data_dir
    os.environ["KEYVAULT_WEBHOOK_NETWORKS"] = str(LOOPBACK[0])
    django.setup()
    try:
        with stopping_on_signals(), ExitStack() as stack:
            held = _FleetCourse(stack, data, asked.processes).run(tuple(asked.rotations) or ROTATIONS)
    except StopRequestedError as stop:
        return 128 + stop.number
    except GaveUpError as gave_up:
        _tell(f"fleet: {gave_up}")
        return 1
    return 0 if held else 1


class _FleetCourse:
    """The service and the fleet, and the rotations in order."""

    def __init__(self, stack: ExitStack, data: Path, processes: int) -> None:
        # It imports the models, which need Django's settings.
        from keyvault.management.json_command import call

        self._call: Callable[..., dict[str, Any]] = call
        call("seed_demo")
        issued = call("issue_key", *_ACCOUNT, "--kind", "private", "--requested-by", "tam", "--reveal")
        self._credential: str = issued["credential_id"]
        hooks: Receiver = stack.enter_context(receiver())
        webhook = call("add_webhook", *_ACCOUNT, "--url", hooks.url(), "--by", "admin", "--reveal")
        self._port = service.find_free_port()
        self._service: Supervisor = stack.enter_context(service.supervise(self._port))
        self._service.report = lambda line: None
        service.wait_until_ready(self._service, self._port)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-", dir=data)))
        lay_key(folder, Plaintext(issued["key"]))
        base_url = f"{service.local_url(self._port)}/sandbox"
        self._fleet = stack.enter_context(Fleet(folder, base_url, processes, hooks, Plaintext(webhook["secret"])))
        self._until("every process to send orders", lambda: len(list(folder.glob("*.json"))) == processes)

    def run(self, rotations: tuple[str, ...]) -> bool:
        began, completed, counted = time.monotonic(), 0, 0
        for rotation in rotations:
            before, started = self._fleet.count(), time.monotonic()
            shown, note = self._rotate(rotation)
            now = self._fleet.count()
            counted += _refused_in_quarantine(shown)
            completed += shown["state"] == "completed"
            _tell(
                f"{rotation:<9} {shown['state']} in {time.monotonic() - started:.0f} s;"
                f" {_difference(now, before)}{note}"
            )
        self._fleet.stop()
        total, stored = self._report_failures(), self._count_orders()
        _tell(
            f"fleet: {self._fleet.size} processes, {completed} of {len(rotations)} rotations completed in"
            f" {time.monotonic() - began:.0f} s; {_describe(total)}; the service has {stored:,} orders, and counted"
            f" {counted} refusals in quarantine"
        )
        is_right = total.failed == 0 and stored == total.orders and counted == total.refused
        return is_right and completed == len(rotations)

    def _rotate(self, rotation: str) -> tuple[dict[str, Any], str]:
        """Rotate the credential once. Returns the rotation, and what was special."""
        lost_before = self._fleet.lost_webhooks
        self._fleet.loses_webhooks = rotation == WEBHOOK
        forgetful = self._fleet.forget() if rotation == FORGOTTEN else ""
        if forgetful:
            self._fleet.ask(forgetful)
            self._until("the forgetful process to create an order", lambda: self._fleet.count(forgetful).orders > 0)
        plan = ("--proof", "traffic", "--proof-count", str(2 * self._fleet.size), "--proof-sources", "1")
        periods = ("--quiet-seconds", str(QUIET_SECONDS), "--quarantine-seconds", str(QUARANTINE_SECONDS[rotation]))
        asked = ("--credential", self._credential, "--requested-by", "tam", "--reason", f"fleet: {rotation}")
        rotation_id = self._call("rotate_key", *asked, *plan, *periods)["rotation_id"]

        def show() -> dict[str, Any]:
            return self._call("show_rotation", rotation_id)

        note = ""
        if forgetful:
            self._until("the quarantine of the old key", lambda: show()["state"] == "quarantine")
            self._fleet.ask(forgetful)
            self._until("the old key to be reinstated", lambda: show()["reinstated_at"] is not None)
            self._fleet.remember(forgetful)
            note = "; the old key was reinstated, and the forgotten process restarted"
        if rotation == KILLED:
            self._until("the overlap", lambda: show()["state"] == "overlap")
            note = f"; the service was down for {self._kill_service():.1f} s"
        self._until("the end of the rotation", lambda: show()["state"] in {"completed", "stalled", "cancelled"})
        time.sleep(SETTLE_SECONDS)
        if rotation == WEBHOOK:
            lost = self._fleet.lost_webhooks - lost_before
            note = f"; {lost} messages lost"
            if not lost:
                raise GaveUpError("no webhook message was sent, so none was lost")
        return show(), note

    def _kill_service(self) -> float:
        """Kill every program of the service, and start them again. Returns how long it was not ready, in seconds."""
        began = time.monotonic()
        for child in self._service._children:
            assert child.process is not None
            os.killpg(child.process.pid, signal.SIGKILL)
        time.sleep(DOWN_SECONDS)
        self._until("every program to start again", self._has_restarted)
        service.wait_until_ready(self._service, self._port)
        return time.monotonic() - began

    def _has_restarted(self) -> bool:
        return all(self._service.is_running(child.program.name) for child in self._service._children)

    def _report_failures(self) -> OrderCounts:
        total = self._fleet.count()
        for failure in total.failures:
            _tell(f"  FAILED  {failure}")
        return total

    def _count_orders(self) -> int:
        from keyvault.models import Order

        return Order.objects.count()

    def _until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WITHIN_SECONDS
        while not holds():
            if time.monotonic() > deadline:
                self._report_failures()
                raise GaveUpError(f"not within {WITHIN_SECONDS:.0f} s: {what}")
            if ended := self._fleet.find_ended():
                raise GaveUpError(f"{ended[0]} exited by itself")
            self._service.restart_ended()
            time.sleep(POLL_SECONDS)


_ACCOUNT = ("--merchant", "acme", "--environment", "sandbox")


def _refused_in_quarantine(shown: dict[str, Any]) -> int:
    return sum(user["count"] for user in shown["predecessor_users"] if user["outcome"] == "refused")


def _difference(now: OrderCounts, before: OrderCounts) -> str:
    return _describe(OrderCounts(now.orders - before.orders, now.refused - before.refused, now.failed - before.failed))


def _describe(counts: OrderCounts) -> str:
    return f"{counts.orders:,} orders, {counts.failed} failed, {counts.refused} refused of the forgotten process"


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

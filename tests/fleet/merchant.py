"""The merchant's side: processes that share a key file, the rotate-agent, and an endpoint for webhooks."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from keyvault_client import WebhookError, verify_webhook
from keyvault_client.rotate_agent import write_atomically

from keyvault.domain.plaintext import Plaintext
from tests.backends.receivers import Receiver
from tests.environment import ROOT

AGENT_SECONDS = 10.0
"""Interval between two runs of the agent without a webhook message."""

AVAILABLE = "rotation.replacement_available"
_ENVIRON = {
    "PATH": os.environ.get("PATH", os.defpath),
    "PYTHONPATH": os.pathsep.join((str(ROOT / "clients" / "python"), str(ROOT))),
}


@dataclass(frozen=True, slots=True)
class OrderCounts:
    """What became of the orders. `refused`: with a key in quarantine."""

    orders: int = 0
    refused: int = 0
    failed: int = 0
    failures: tuple[str, ...] = ()

    def __add__(self, other: "OrderCounts") -> "OrderCounts":
        return OrderCounts(
            self.orders + other.orders,
            self.refused + other.refused,
            self.failed + other.failed,
            self.failures + other.failures,
        )


@dataclass(slots=True)
class Fleet:
    """A context manager that runs `size` processes and the agent. `forgetful`: one of them; it may be restarted."""

    folder: Path
    base_url: str
    size: int
    hooks: Receiver
    webhook_secret: Plaintext
    loses_webhooks: bool = False
    lost_webhooks: int = 0
    _processes: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)
    _woken: threading.Event = field(default_factory=threading.Event)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _agent: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._run_agent("--register", check=True)
        self.hooks.before_answer = self._receive
        for number in range(1, self.size + 1):
            self._start(f"process{number}", "watch")
        self._agent = threading.Thread(target=self._follow)
        self._agent.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let each process finish its order, and stop the agent. Repeatable."""
        self._stopped.set()
        self._woken.set()
        for name in list(self._processes):
            self._end(name)
        if self._agent is not None:
            self._agent.join()

    def forget(self) -> str:
        """Restart one process as one that reads the key file only now, and orders when asked. Returns its name."""
        name = next(iter(self._processes))
        self._end(name)
        self._start(f"{name}-forgetful", "forget")
        return f"{name}-forgetful"

    def ask(self, name: str) -> None:
        """Let a forgetful process send an order."""
        stdin = self._processes[name].stdin
        assert stdin
        stdin.write(b"\n")
        stdin.flush()

    def remember(self, name: str) -> None:
        """Restart a forgetful process, as its operators do after the alarm."""
        self._end(name)
        self._start(f"{name}-restarted", "watch")

    def count(self, name: str = "*") -> OrderCounts:
        """Return the counts of one process, or of all that ever ran."""
        total = OrderCounts()
        for file in sorted(self.folder.glob(f"{name}.json")):
            found = json.loads(file.read_text())
            failures = tuple(f"{file.stem}: {failure}" for failure in found.pop("failures"))
            total += OrderCounts(**found, failures=failures)
        return total

    def find_ended(self) -> list[str]:
        """Return the processes that exited by themselves."""
        return [name for name, process in self._processes.items() if process.poll() is not None]

    # --- processes ------------------------------------------------------------------------------------------------

    @property
    def key_file(self) -> Path:
        return self.folder / "key"

    def _start(self, name: str, mode: str) -> None:
        counts = str(self.folder / f"{name}.json")
        arguments = (self.base_url, str(self.key_file), counts, mode)
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.fleet.merchant_process", *arguments],
                cwd=self.folder,
                env=_ENVIRON,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C belongs to the command, which lets the processes finish.
                start_new_session=True,
            )

    def _end(self, name: str) -> None:
        process = self._processes.pop(name)
        assert process.stdin
        process.stdin.close()
        process.wait()

    # --- the agent ------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Run the agent after each webhook message, and after AGENT_SECONDS without one."""
        while not self._stopped.is_set():
            self._woken.wait(AGENT_SECONDS)
            self._woken.clear()
            self._run_agent()

    def _run_agent(self, *options: str, check: bool = False) -> None:
        with (self.folder / "agent.log").open("ab") as log:
            subprocess.run(
                [sys.executable, *self._agent_command(), *options, "--once"],
                cwd=self.folder,
                env=_ENVIRON,
                stdout=log,
                stderr=log,
                check=check,
            )

    def _agent_command(self) -> Sequence[str]:
        place = ("--base-url", self.base_url, "--environment", "sandbox")
        files = ("--file", str(self.key_file), "--recipient-key", str(self.folder / "recipient_key"))
        return ("-m", "keyvault_client", "rotate-agent", *place, *files)

    def _receive(self) -> None:
        """Take a message as a hint to run the agent: a late message of an earlier rotation changes nothing."""
        message = self.hooks.received[-1]
        self.hooks.status = 200
        try:
            verify_webhook(message.headers, message.body, [self.webhook_secret])
        except WebhookError:
            self.hooks.status = 401
            return
        if json.loads(message.body)["type"] == AVAILABLE:
            if self.loses_webhooks:
                self.hooks.status = 503
                self.lost_webhooks += 1
                return
            self._woken.set()


def lay_key(folder: Path, key: Plaintext) -> None:
    """Write the key with which the merchant starts. It is the only one that an operator gives it."""
    write_atomically(folder / "key", key)

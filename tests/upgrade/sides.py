"""A release in a folder of its own, and its processes on the data of the installation."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from keyvault.management import service
from keyvault.management.supervisor import Program, Supervisor
from tests.environment import ROOT
from tests.servers.throwaway import free_port
from tests.upgrade.rehearsal import copy_rehearsal

CODE = ("keyvault", "rotation")
SETUP_SECONDS = 600

ISSUER = """
import json, sys
from io import StringIO
import django
django.setup()
from django.core.management import call_command
for line in sys.stdin:
    out = StringIO()
    call_command(*json.loads(line), "--json", stdout=out)
    print(out.getvalue().strip(), flush=True)
"""
"""Runs commands in one process, because a process for each would take a second of processor time."""


class SideError(Exception):
    """A process of a side failed; the text has the end of its output."""


def copy_tree(to: Path) -> Path:
    """Copy this tree's code, as it is now."""
    for name in CODE:
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "manage.py", to)
    return to


def copy_commit(commit: str, to: Path) -> Path:
    """Copy the code of a commit."""
    archive = subprocess.run(
        ["git", "archive", commit, *CODE, "manage.py"],  # noqa: S607  the developer's own git
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    to.mkdir(parents=True)
    subprocess.run(["tar", "-x"], cwd=to, input=archive.stdout, check=True)  # noqa: S607  the developer's own tar
    return to


class Side:
    """One release: server, dedicated verifier, worker and beat, started, stopped and watched in the main thread."""

    def __init__(self, name: str, tree: Path, logs: Path, environ: Mapping[str, str]) -> None:
        self.name, self.tree, self.port, self.verifier_port = name, tree, free_port(), free_port()
        self.exits: list[str] = []
        self._logs = logs / name
        self._environ = {**environ, "PROMETHEUS_MULTIPROC_DIR": str(self._logs / "metrics")}
        Path(self._environ["PROMETHEUS_MULTIPROC_DIR"]).mkdir(parents=True)
        self._service: Supervisor | None = None
        self._issuer: subprocess.Popen[str] | None = None

    def add_migrations(self, names: tuple[str, ...]) -> None:
        copy_rehearsal(names, self.tree / "keyvault" / "migrations")

    def manage(self, *arguments: str) -> dict[str, Any]:
        """Run a management command and return its answer. Raises SideError."""
        with (self._logs / "manage.log").open("a") as log:
            done = subprocess.run(
                [sys.executable, "manage.py", *arguments, "--json"],
                cwd=self.tree,
                env=self._environ,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=SETUP_SECONDS,
                check=False,
            )
        if done.returncode != 0:
            raise SideError(f"{self.name}: manage.py {arguments[0]}: {(self._logs / 'manage.log').read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def start(self) -> None:
        """Return when its server and its verifier are ready. Raises ServiceError."""
        verifier = (
            sys.executable,
            "-m",
            "keyvault.project.verifier",
            "--ready",
            "2",
            "--port",
            str(self.verifier_port),
        )
        programs = [
            service.server_program(self.port),
            Program("verifier", verifier),
            service.worker_program(),
            service.beat_program(),
        ]
        self._service = Supervisor(programs, self._environ, self.tree, self._logs, self.exits.append).__enter__()
        for port in (self.port, self.verifier_port):
            service.wait_until_ready(self._service, port)

    def look(self) -> None:
        """Restart what has exited by itself, which counts as a failure."""
        if self._service is not None:
            self._service.restart_ended()

    def stop(self) -> None:
        """Stop its processes. Repeatable."""
        if self._service is not None:
            self._service.stop()
            self._service = None
        if self._issuer is not None:
            assert self._issuer.stdin
            with suppress(BrokenPipeError):
                self._issuer.stdin.close()
            self._issuer.wait()
            self._issuer = None

    def call(self, *arguments: str) -> dict[str, Any]:
        """Run a command in a process that stays; for one thread at a time. Raises SideError."""
        if self._issuer is None:
            self._issuer = subprocess.Popen(
                [sys.executable, "-c", ISSUER],
                cwd=self.tree,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(self._logs / "issuer.log").open("a"),
                text=True,
            )
        assert self._issuer.stdin
        assert self._issuer.stdout
        self._issuer.stdin.write(f"{json.dumps(arguments)}\n")
        self._issuer.stdin.flush()
        line = self._issuer.stdout.readline()
        if not line:
            raise SideError(f"{self.name}: {arguments[0]}: {(self._logs / 'issuer.log').read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def count_in_logs(self, words: str) -> int:
        return sum(path.read_text(errors="replace").count(words) for path in self._logs.glob("*.log"))


def environment(data: Path, database_url: str, redis_url: str, origin: str) -> dict[str, str]:
    """Return the settings of the installation, which both sides share."""
    own = {name: text for name, text in os.environ.items() if not name.startswith(("KEYVAULT_", "DJANGO_"))}
    return own | {
        "DJANGO_SETTINGS_MODULE": "keyvault.project.settings",
        "KEYVAULT_DATA_DIR": str(data),
        "KEYVAULT_DATABASE_URL": database_url,
        "KEYVAULT_REDIS_URL": redis_url,
        "KEYVAULT_ORIGIN": origin,
        "KEYVAULT_SANDBOX_LIMIT": "1000000/1",
        "C_FORCE_ROOT": "1",
    }


def wait(seconds: float, sides: tuple[Side, ...]) -> None:
    """Watch the processes of the sides for this time."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        for side in sides:
            side.look()
        time.sleep(min(0.2, left))

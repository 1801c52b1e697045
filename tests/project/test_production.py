"""The production commands of docs/operations.md, in an environment that holds the runtime lock and nothing else."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
import requests
from psycopg import sql

from tests.environment import POSTGRES_URL, ROOT
from tests.servers.throwaway import free_port

pytestmark = pytest.mark.long

DATABASE = "keyvault_production"
MARKER = "production"
READY_SECONDS = 60
ROTATION_SECONDS = 120
LOOK_SECONDS = 0.2


def documented_commands() -> list[list[str]]:
    """Return the page's commands, except those that create the environment and set its variables."""
    text = (ROOT / "docs" / "operations.md").read_text()
    block = text.split(f"<!-- {MARKER} -->\n")[1].split(f"<!-- /{MARKER} -->")[0]
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [arguments for arguments in commands if arguments[0] not in ("make", ".", "export")]


@dataclass(frozen=True)
class Production:
    """An installation: its environment variables, its folder and the port that its server listens on."""

    variables: dict[str, str]
    python: Path
    folder: Path
    port: int

    def manage(self, *arguments: str, typed: str = "") -> dict[str, Any]:
        """The JSON answer of a management command."""
        done = subprocess.run(
            [self.python, "manage.py", *arguments, "--json"],
            cwd=ROOT,
            env=self.variables,
            input=typed,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def request(self, method: str, path: str, key: str) -> requests.Response:
        """The answer of the sandbox's integration plane to a request with this private key."""
        url = f"http://127.0.0.1:{self.port}/sandbox{path}"
        return requests.request(method, url, headers={"X-Api-Key": key}, timeout=10)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a virtual environment made from requirements.txt alone."""
    venv = tmp_path_factory.mktemp("runtime") / "venv"
    make = shutil.which("make")
    assert make, "the documented commands need make"
    made = subprocess.run(
        [make, "ready-to-run", f"VENV={venv}"], cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )
    assert made.returncode == 0, made.stderr
    return venv / "bin"


@pytest.fixture
def production(runtime: Path, redis_url: str, tmp_path: Path) -> Iterator[Production]:
    """A new installation on PostgreSQL and Redis."""
    server = os.environ[POSTGRES_URL]
    port = free_port()
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("KEYVAULT_", "DJANGO_"))}
    variables |= {
        "PATH": f"{runtime}:{os.environ['PATH']}",
        "KEYVAULT_DATABASE_URL": urlunsplit(urlsplit(server)._replace(path=f"/{DATABASE}")),
        "KEYVAULT_REDIS_URL": redis_url,
        "KEYVAULT_ORIGIN": f"http://127.0.0.1:{port}",
        "KEYVAULT_DATA_DIR": str(tmp_path / "data"),
        "GRANIAN_PORT": str(port),
        # The suite may run as root; a Celery worker otherwise refuses to.
        "C_FORCE_ROOT": "1",
    }
    drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(DATABASE))
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(drop)
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
        yield Production(variables, runtime / "python", tmp_path, port)
        connection.execute(drop)


@pytest.mark.postgres
@pytest.mark.timeout(600)
def test_documented_commands_on_the_runtime_lock_issue_and_rotate_a_key(production: Production) -> None:
    """A production installation needs nothing that only the test lock contains."""
    setup, *processes = documented_commands()
    assert [arguments[0] for arguments in processes] == ["granian", "celery", "celery"]
    subprocess.run(setup, cwd=ROOT, env=production.variables, check=True, timeout=120, stdout=subprocess.DEVNULL)
    production.manage("seed_demo")
    with ExitStack() as stack:
        running = [stack.enter_context(_running(production, arguments)) for arguments in processes]

        def until(what: str, holds: Callable[[], bool], seconds: float) -> None:
            deadline = time.monotonic() + seconds
            while not holds():
                ended = [process.args for process in running if process.poll() is not None]
                if ended or time.monotonic() > deadline:
                    pytest.fail(f"{what}: not within {seconds} s; ended: {ended}\n{_logs(production)}")
                time.sleep(LOOK_SECONDS)

        until("the server is ready", lambda: _is_ready(production.port), READY_SECONDS)
        people = ("--requested-by", "tam", "--approved-by", "approver")
        issued = production.manage(
            "issue_key", "--merchant", "acme", "--environment", "sandbox", "--kind", "private", *people, "--reveal"
        )
        assert production.request("GET", "/merchants/orders/none", issued["key"]).status_code == 404

        plan = ("--proof", "ack", "--quiet-seconds", "1", "--quarantine-seconds", "1")
        started = production.manage("rotate_key", "--credential", issued["credential_id"], *people, *plan)
        rotation = started["rotation_id"]

        def is_in(state: str) -> bool:
            shown: str = production.manage("show_rotation", rotation)["state"]
            return shown == state

        # Only the worker, started by beat through Redis, takes these steps.
        until("the replacement is delivered", lambda: is_in("awaiting_proof"), ROTATION_SECONDS)
        replacement = production.manage("collect_key", "--rotation", rotation, "--by", "tam", "--reveal")["key"]
        assert production.request("POST", "/credentials/acknowledge", replacement).status_code == 204
        until("the rotation completes", lambda: is_in("completed"), ROTATION_SECONDS)
        refused = production.request("GET", "/merchants/orders/none", issued["key"])
        assert (refused.status_code, refused.json()["code"]) == (401, "key_revoked")
        assert production.request("GET", "/merchants/orders/none", replacement).status_code == 404


@contextmanager
def _running(production: Production, arguments: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a documented command in its own process group and end that group afterwards."""
    with (production.folder / f"{arguments[0]}-{arguments[-1]}.log").open("wb") as output:
        process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env=production.variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            process.terminate()
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_ready(port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/readyz", timeout=5).status_code == 200
    except requests.RequestException:
        return False


def _logs(production: Production) -> str:
    return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in sorted(production.folder.glob("*.log")))

"""Run the demo: the lifecycle of a key in a minute, live. `make demo` runs it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from keyvault.domain.errors import KeyvaultError
from keyvault.management.service import CHECKOUT, ServiceError, find_free_port, local_url
from keyvault.management.supervisor import STOP_SECONDS, StopRequestedError, start_child_process, stopping_on_signals
from rotation.management.demo.context import DemoError
from rotation.management.demo.own_vault import own_vault
from rotation.management.demo.report import DemoReport
from rotation.management.demo.scenario import run_demo

CLEANUP_SECONDS = STOP_SECONDS + 5


class Command(BaseCommand):
    help = (
        "Issue a key under four eyes, rotate it while a merchant uses it, revoke it, and count requests and failures. "
        "The demo uses a temporary data folder and a free port, and exits 0 only if every check passed. With "
        "KEYVAULT_BACKEND=vault it starts an OpenBao or Vault from PATH and uses it."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--inside", type=int, metavar="PORT", help="internal: run in the prepared data folder")

    def handle(self, *args: Any, **options: Any) -> None:
        sys.exit(_run_in_child() if options["inside"] is None else _run_demo(options["inside"]))


def _run_in_child() -> int:
    """Prepare a data folder, run the demo in a child process, and clean up in every case.

    The child gets settings of its own, which a process reads only at startup. This process remains to clean up when the
    child is killed.
    """
    port = find_free_port()
    folder = tempfile.mkdtemp(prefix="kv-demo-")
    ours = {name: text for name, text in os.environ.items() if not name.startswith(("KEYVAULT_", "VAULT_"))}
    environ = ours | {
        "KEYVAULT_DATA_DIR": folder,
        "KEYVAULT_ORIGIN": local_url(port),
        "KEYVAULT_SANDBOX_APPROVALS": "1",
    }
    try:
        with stopping_on_signals(), ExitStack() as stack:
            if settings.IS_VAULT:
                environ |= stack.enter_context(own_vault(Path(folder)))
            command = [sys.executable, str(CHECKOUT / "manage.py"), "demo", "--inside", str(port)]
            process = start_child_process(command, environ=environ, folder=CHECKOUT, orphan_signal=signal.SIGTERM)
            try:
                status = process.wait()
            except StopRequestedError as stop:
                _end(process, stop.number)
                return 128 + stop.number
    except StopRequestedError as stop:
        return 128 + stop.number
    except (ServiceError, KeyvaultError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if status < 0:
        sys.stderr.write(f"The demo was killed by {signal.Signals(-status).name}.\n")
        return 1
    return status


def _end(process: "subprocess.Popen[bytes]", number: int) -> None:
    process.send_signal(number)
    try:
        process.wait(CLEANUP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _run_demo(port: int) -> int:
    report = DemoReport()
    report.title("Keyvault: the lifecycle of one key")
    try:
        with stopping_on_signals():
            run_demo(report, port)
    except StopRequestedError as stop:
        report.failure(f"Stopped by {stop}. All started processes have ended.")
        return 128 + stop.number
    except (DemoError, ServiceError) as error:
        report.failure(f"A check failed.\n{error}")
        return 1
    report.success(f"Every check passed, in {report.elapsed:.0f} s.")
    return 0

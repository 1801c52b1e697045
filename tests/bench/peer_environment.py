"""The virtual environment of the peers, created on first use from the pinned `requirements.txt`."""

import shutil
import sys
import venv
from pathlib import Path

from tests.environment import ROOT

from .launch import run_checked

LOCK = Path(__file__).with_name("requirements.txt")
PEERS = ROOT / ".venv" / "bench"
_DONE = ".installed"


def ensure_peer_environment() -> Path:
    """Return the folder of the environment; create it if necessary. Raises RuntimeError with the reason."""
    done = PEERS / _DONE
    if done.exists() and done.read_text() == LOCK.read_text():
        return PEERS
    sys.stderr.write(f"Installing {LOCK.relative_to(ROOT)} into {PEERS}; this takes about a minute.\n")
    shutil.rmtree(PEERS, ignore_errors=True)
    venv.create(PEERS, with_pip=True)
    pip = [str(PEERS / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    run_checked([*pip, "install", "--no-user", "--require-hashes", "-r", str(LOCK)], "the peers cannot be installed")
    done.write_text(LOCK.read_text())
    return PEERS

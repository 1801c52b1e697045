"""The peers' own virtual environment, made on first use of what `requirements.txt` pins."""

import shutil
import sys
import venv
from pathlib import Path

from tests.environment import ROOT

from .launch import run_to_end

LOCK = Path(__file__).with_name("requirements.txt")
PLACE = ROOT / ".venv" / "bench"
_DONE = ".installed"


def find_peers() -> Path:
    """The environment, complete. Raises RuntimeError where it cannot be made, saying why."""
    done = PLACE / _DONE
    if done.exists() and done.read_text() == LOCK.read_text():
        return PLACE
    sys.stderr.write(f"set-up: {PLACE} with what {LOCK.relative_to(ROOT)} pins; the first time takes a minute\n")
    shutil.rmtree(PLACE, ignore_errors=True)
    venv.create(PLACE, with_pip=True)
    pip = [str(PLACE / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    run_to_end([*pip, "install", "--no-user", "--require-hashes", "-r", str(LOCK)], "the peers cannot be installed")
    done.write_text(LOCK.read_text())
    return PLACE

"""The wheel of the Python client: `python -m tests.clients.python.wheel` (`make test-wheel`) tests it alone.

It builds the wheel, installs it with the packages of `clients/python/requirements.txt` into an empty environment, and
runs the client's tests there, in a folder without the rest of the repository.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]
CLIENT = ROOT / "clients/python"
TESTS = Path("tests/clients/python")
ALONE = (
    "feed_service.py",
    "scripted_server.py",
    "test_clocks.py",
    "test_conformance.py",
    "test_errors.py",
    "test_hostile_server.py",
    "test_key_changes.py",
    "test_local.py",
    "test_uses.py",
    "test_verifier.py",
)
"""The files of the client's tests that need nothing but the client."""


def load_bundle() -> ModuleType:
    """Import the build hook, which is in no package."""
    spec = importlib.util.spec_from_file_location("bundle", CLIENT / "bundle.py")
    if spec is None or spec.loader is None:
        raise ImportError("clients/python/bundle.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(folder: Path) -> Path:
    """Build the wheel into a folder, with the pinned build backend and without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=CLIENT, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    return wheel


def run_alone(folder: Path) -> int:
    """Install the wheel into an empty environment, and run its tests. Return pytest's exit status."""
    wheel = build(folder / "dist")
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv/bin/python")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "--require-hashes", "-r", str(CLIENT / "requirements.txt")], check=True)
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    place = folder / "alone"
    for path in (TESTS.parents[1], TESTS.parent, TESTS):
        (place / path).mkdir(parents=True, exist_ok=True)
        (place / path / "__init__.py").touch()
    for name in ALONE:
        shutil.copy(ROOT / TESTS / name, place / TESTS / name)
    (place / "clients").mkdir()
    shutil.copy(ROOT / "clients/conformance.json", place / "clients")
    # The wheel must need nothing of the environment that runs this.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KEYVAULT_"))}
    environment["PYTHONPATH"] = str(place)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--import-mode=importlib"]
    return subprocess.run([*command, str(TESTS)], cwd=place, env=environment, check=False).returncode


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="keyvault-wheel-") as folder:
        return run_alone(Path(folder))


if __name__ == "__main__":
    sys.exit(main())

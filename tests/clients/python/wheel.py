"""The wheel of the Python client: `python -m tests.clients.python.wheel` (`make test-wheel`) tests it alone.

It downloads the packages of `clients/python/requirements.txt`, which has their hashes, and builds the wheel. From these
files only, pip installs the wheel alone, and with each extra, into empty environments: whatever its metadata does not
name is missing there. At last it runs the client's tests, in a folder without the rest of the repository.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
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

USES: dict[str, Sequence[str]] = {
    "": ("-c", "import keyvault_client.adapters.asgi, keyvault_client.adapters.wsgi"),
    "[audit]": ("-m", "keyvault_client.audit_check", "--help"),
    "[sealed]": ("-m", "keyvault_client", "rotate-agent", "--help"),
    "[local]": ("-c", "import keyvault_client.local"),
}
"""For the wheel alone and with each extra: arguments of Python with which it must succeed."""


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


def download(folder: Path) -> None:
    """Download the pinned packages into a folder."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "--require-hashes", "-r", CLIENT / "requirements.txt", "-d", folder], check=True)


def install(place: Path, packages: Path, *requirements: str) -> str:
    """Install into an empty environment what a folder has of the requirements. Return the environment's Python."""
    venv.create(place, with_pip=False)
    python = str(place / "bin/python")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", python]
    subprocess.run([*pip, "install", "--no-index", "--find-links", packages, *requirements], check=True)
    return python


def run_alone(folder: Path) -> int:
    """Install the wheel as its users do, and run its tests. Return pytest's exit status."""
    wheel, packages = build(folder / "dist"), folder / "packages"
    download(packages)
    for extra, arguments in USES.items():
        python = install(folder / f"environment{extra}", packages, f"{wheel}{extra}")
        # Isolated, so that Python finds nothing of this repository.
        subprocess.run([python, "-I", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    python = install(folder / "tests", packages, f"{wheel}[audit,local,sealed]", "pytest")
    return run_tests(folder / "alone", python)


def run_tests(place: Path, python: str) -> int:
    """Copy the client's tests into a folder, and run them there. Return pytest's exit status."""
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

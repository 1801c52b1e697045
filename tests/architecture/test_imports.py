"""What the contracts of `.importlinter`, which `make check` verifies, cannot see by themselves."""

import configparser
import subprocess
import sys

from tests.architecture.checkout import CODE, ROOT, python_files, relative

WITHOUT_LAYER = {
    "keyvault.migrations": "written by makemigrations, imported by Django only",
    "rotation.migrations": "the same",
}
PURE = ("keyvault.domain", "keyvault.access", "keyvault.wire", "keyvault.hotpath", "rotation.domain")
ADAPTERS = "keyvault.hotpath.adapters"
"""The one package of the hot path that knows Django and psycopg."""

FRAMEWORKS = ("django", "rest_framework", "celery", "hvac")


def contract(name: str, option: str) -> list[str]:
    """The lines of one option of one contract."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    return parser[f"importlinter:contract:{name}"][option].split("\n")[1:]


def top_modules() -> set[str]:
    """The modules and packages directly inside keyvault and rotation."""
    found = {path for package in CODE for path in (ROOT / package).iterdir()}
    return {
        relative(path.with_suffix("")).replace("/", ".")
        for path in found
        if path.suffix == ".py" or (path / "__init__.py").exists()
    } - {f"{package}.__init__" for package in CODE}


def pure_modules() -> list[str]:
    """Every module of the pure packages, by the name it is imported under."""
    names = (relative(path.with_suffix("")).replace("/", ".") for path in python_files(*CODE))
    modules = (name.removesuffix(".__init__") for name in names)
    return [
        module
        for module in modules
        if any(module == package or module.startswith(f"{package}.") for package in PURE)
        and not module.startswith(ADAPTERS)
    ]


def test_imports_every_package_has_a_layer() -> None:
    """A package that no contract names could import anything."""
    layered = {word.strip("()") for line in contract("layers", "layers") for word in line.split() if word != "|"}
    assert top_modules() - layered - set(WITHOUT_LAYER) == set()


def test_imports_every_pure_module_is_under_contract() -> None:
    promised = contract("pure-packages", "source_modules")
    missing = [
        module
        for module in pure_modules()
        if module != "keyvault.hotpath"
        and not any(module == package or module.startswith(f"{package}.") for package in promised)
    ]
    assert missing == []


def test_imports_of_pure_modules_leave_the_frameworks_unloaded() -> None:
    """The contracts read the source; this sees what is loaded, by parents' `__init__` files too."""
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    command = [sys.executable, "-c", code, *pure_modules()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(FRAMEWORKS) & set(done.stdout.split()) == set()

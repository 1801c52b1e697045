"""Who may import whom: the contracts of `.importlinter`, and what they cannot see by themselves."""

import configparser
import subprocess
import sys

from .checkout import CODE, ROOT, expect_content, python_files, relative

UNRANKED = {
    "keyvault.migrations": "written by makemigrations, imported by nobody but Django",
    "rotation.migrations": "the same",
}
PURE = (
    "keyvault.domain",
    "keyvault.access",
    "keyvault.wire",
    "keyvault.client",
    "keyvault.hotpath",
    "rotation.states",
    "rotation.policy",
)
PURE_BUT_FOR = {
    "keyvault.hotpath.loader": "puts the hot path together from the services, which know Django",
    "keyvault.hotpath.stores": "reads rows for the hot path, through Django and by psycopg",
}
FRAMEWORKS = ("django", "rest_framework", "celery", "hvac")


def contract(name: str, option: str) -> list[str]:
    """The lines of one option of one contract."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    return parser[f"importlinter:contract:{name}"][option].split("\n")[1:]


def rooms() -> set[str]:
    """The modules and packages directly inside keyvault and rotation."""
    found = {path for house in CODE for path in (ROOT / house).iterdir()}
    return {
        relative(path.with_suffix("")).replace("/", ".")
        for path in found
        if path.suffix == ".py" or (path / "__init__.py").exists()
    } - {f"{house}.__init__" for house in CODE}


def pure_modules() -> list[str]:
    """Every module of the pure rooms, by the name it is imported under."""
    names = (relative(path.with_suffix("")).replace("/", ".") for path in python_files(*CODE))
    modules = (name.removesuffix(".__init__") for name in names)
    return [
        module
        for module in modules
        if any(module == room or module.startswith(f"{room}.") for room in PURE) and module not in PURE_BUT_FOR
    ]


def test_imports_of_the_whole_house_keep_the_contracts() -> None:
    expect_content("lint-imports", "--no-logo")


def test_imports_every_room_has_a_rank() -> None:
    """A room that no contract names could import anything."""
    ranked = {word.strip("()") for line in contract("stairs", "layers") for word in line.split() if word != "|"}
    assert rooms() - ranked - set(UNRANKED) == set()


def test_imports_every_pure_room_is_under_contract() -> None:
    """A pure room is pure from its first day; of one with exceptions, each pure module is named."""
    promised = contract("pure-rooms", "source_modules")
    missing = [
        module
        for module in pure_modules()
        if not any(module == room or module.startswith(f"{room}.") for room in promised)
        and not any(exception.startswith(f"{module}.") for exception in PURE_BUT_FOR)
    ]
    assert missing == []


def test_imports_of_pure_modules_leave_the_frameworks_unloaded() -> None:
    """The contracts read the source; this sees what really gets loaded, by parents' `__init__` files too."""
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    command = [sys.executable, "-c", code, *pure_modules()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(FRAMEWORKS) & set(done.stdout.split()) == set()

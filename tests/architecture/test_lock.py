"""The lock files are complete, have hashes, and contain no trace of the machine that made them."""

import re
from importlib.metadata import packages_distributions

import pytest

from tests.architecture.checkout import CODE, ROOT, python_files

LOCKS = ("requirements.txt", "tests/requirements.txt")
APART = (
    "tests/bench/requirements.txt",
    "tests/gateways/requirements.txt",
    "tests/tools/requirements.txt",
    "docs/requirements.txt",
    "clients/python/requirements.txt",
)
"""Locks of environments of their own: of the servers that the benchmark compares with, of `make gateways`, of
`make audit`, of the site, of `make test-wheel`."""
PIN = re.compile(r"(?P<name>[a-z0-9-]+)(?:\[[a-z0-9,-]+\])?==(?P<version>[^ ;\\]+)(?P<condition> ; [^\\]+)?")
IMPORT = re.compile(r"^ *(?:from|import) (\w+)(?:\.\w+)*(?: import|$| as)", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def requirements(lock: str) -> list[str]:
    """The requirements of a lock, each with its continuation lines joined and its comments dropped."""
    lines = [line for line in (ROOT / lock).read_text().splitlines() if not line.lstrip().startswith("#")]
    return [line.strip() for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def pins(lock: str) -> dict[str, set[tuple[str, str]]]:
    """Name to versions, each with the condition under which it counts."""
    found: dict[str, set[tuple[str, str]]] = {}
    for requirement in requirements(lock):
        pin = PIN.match(requirement)
        assert pin, requirement
        found.setdefault(pin["name"], set()).add((pin["version"], (pin["condition"] or "").strip()))
    return found


def answered(lock: str, mark: str) -> set[str]:
    """The names that a lock says it holds because that source asked for them."""
    found, name = set(), ""
    for line in (ROOT / lock).read_text().splitlines():
        if pin := PIN.match(line):
            name = pin["name"]
        elif line.strip(" #").removeprefix("via ") == mark:
            found.add(name)
    return found


def asked(source: str) -> set[str]:
    """The names that a human-edited source asks for, as locks spell them."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / source).read_text().splitlines())
    names = (re.match(r"[A-Za-z0-9._-]+", line) for line in lines if line and not line.startswith("-"))
    return {normalized(name[0]) for name in names if name}


def normalized(name: str) -> str:
    """The name of a distribution as locks spell it."""
    return re.sub(r"[._-]+", "-", name).lower()


def imported(*folders: str) -> set[str]:
    """The distributions whose modules the files of these folders import."""
    distributions = packages_distributions()
    texts = (path.read_text() for path in python_files(*folders))
    modules = {module for text in texts for module in IMPORT.findall(text)}
    return {normalized(name) for module in modules for name in distributions.get(module, ())}


@pytest.mark.parametrize("lock", [*LOCKS, *APART])
def test_lock_holds_only_hashed_pins(lock: str) -> None:
    """No index, link or path of the machine that made it, and no requirement that pip could not verify."""
    strange = [line for line in requirements(lock) if not PIN.match(line) or not HASH.search(line)]
    assert strange == []


@pytest.mark.parametrize("lock", [*LOCKS, *APART])
def test_lock_names_no_address_or_folder_of_a_machine(lock: str) -> None:
    """Comments too: a resolver's header can carry the options it was called with."""
    trace = re.compile(r"://|--(?:extra-)?index|--find-links|--trusted-host|\bfile:|/home/|/root/")
    text = (ROOT / lock).read_text()
    assert [line for line in text.splitlines() if trace.search(line)] == []


@pytest.mark.parametrize(
    ("source", "lock", "mark"),
    [
        ("requirements.in", "requirements.txt", "-r requirements.in"),
        ("requirements.in", "tests/requirements.txt", "-r tests/../requirements.in"),
        ("tests/requirements.in", "tests/requirements.txt", "-r tests/requirements.in"),
        ("tests/bench/requirements.in", "tests/bench/requirements.txt", "-r tests/bench/requirements.in"),
        ("tests/tools/requirements.in", "tests/tools/requirements.txt", "-r tests/tools/requirements.in"),
        ("docs/requirements.in", "docs/requirements.txt", "-r docs/requirements.in"),
    ],
)
def test_lock_answers_exactly_what_its_source_asks_for(source: str, lock: str, mark: str) -> None:
    """A source that was edited without `make lock` is noticed, in both directions."""
    assert answered(lock, mark) == asked(source)


@pytest.mark.parametrize(
    ("folders", "sources"),
    [(CODE, ["requirements.in"]), (("tests",), ["requirements.in", "tests/requirements.in"])],
    ids=["service", "tests"],
)
def test_lock_source_asks_for_every_imported_distribution(folders: tuple[str, ...], sources: list[str]) -> None:
    """A distribution that only another one requires disappears when that one no longer does."""
    assert sorted(imported(*folders) - {name for source in sources for name in asked(source)}) == []


def test_lock_of_the_tests_holds_the_versions_that_run() -> None:
    """The tests run with the versions that are shipped."""
    runtime, tested = (pins(lock) for lock in LOCKS)
    assert {name: tested.get(name) for name in runtime} == runtime

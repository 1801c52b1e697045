"""The pages say what is true: their tables, and the paths, commands, options and tests that they name."""

import re
from pathlib import Path

import pytest
from django.core.management import get_commands, load_command_class

from keyvault.wire.problems import problems_page
from tests.architecture.pages import parts

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
ERRORS = ROOT / "ERRORS.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "keyvault" / "README.md",
    ROOT / "rotation" / "README.md",
    ROOT / "deploy" / "README.md",
    ROOT / "deploy" / "webhooks.md",
]


@pytest.mark.parametrize("name", [part.name for part in parts()])
def test_docs_written_part_equals_the_code(name: str) -> None:
    """Run `python -m tests.architecture.test_docs` to write them anew."""
    (part,) = (part for part in parts() if part.name == name)
    assert part.read() == part.text


def test_docs_errors_page_equals_the_code() -> None:
    """Every code with its cause and cure. Run `python -m tests.architecture.test_docs` to write it anew."""
    assert ERRORS.read_text() == f"{problems_page()}\n"


def test_docs_links_and_paths_exist() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
    for path in re.findall(r"`((?:api|services|access|domain|wire)/[a-z_/]+\.py)", README):
        assert (ROOT / "keyvault" / path).exists(), path
    for path in re.findall(r"`(rotation/[a-z_/]+)\.[a-z_]+`", README):
        assert (ROOT / f"{path}.py").exists(), path


def test_docs_commands_exist() -> None:
    """Every one in the README's table of commands, and every option that it names there."""
    commands = get_commands()
    table = README.split("| `python manage.py …` | does |")[1].split("\n\n")[0]
    for row in table.splitlines():
        name = ""
        for named in re.findall(r"`([^`]+)`", row):
            # A further `--option` in the same row is one of the command before it.
            name = name if named.startswith("--") else named.split()[0]
            assert name in commands, named
            parser = load_command_class(commands[name], name).create_parser("manage.py", name)
            options = set(re.findall(r"--[a-z-]+", named))
            assert options <= set(parser._option_string_actions), named


def test_docs_commands_named_elsewhere_exist() -> None:
    commands = set(get_commands())
    for page in PAGES:
        named = set(re.findall(r"`(?:python )?manage\.py ([a-z_]+)", page.read_text()))
        assert named <= commands, (page, named - commands)


def test_docs_verbs_of_make_exist() -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", page.read_text(), re.MULTILINE))
        assert named <= verbs, (page, named - verbs)


def test_docs_tests_that_are_named_exist() -> None:
    for page in PAGES:
        for path, test in re.findall(r"`(tests/[a-z_/]+\.py)::([a-z_0-9]+)`", page.read_text()):
            assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{test}"


def test_docs_every_invariant_names_tests_that_prove_it() -> None:
    """The eight of ROTATION.md, each with its own."""
    page = (ROOT / "rotation" / "README.md").read_text()
    chapter = page.split("## Invariants\n")[1].split("\n## ")[0]
    told = re.split(r"^\*\*(\d)\. ", chapter, flags=re.MULTILINE)
    proofs = {
        int(number): re.findall(r"^- `tests/[^`]+::", text, re.MULTILINE)
        for number, text in zip(told[1::2], told[2::2], strict=True)
    }
    assert sorted(proofs) == list(range(1, 9))
    assert all(proofs.values())


if __name__ == "__main__":
    for written in parts():
        written.write()
    ERRORS.write_text(f"{problems_page()}\n")

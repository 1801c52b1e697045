"""Documentation agrees with the code: generated tables, links, paths, commands, options, targets and tests."""

import re
from pathlib import Path

import pytest
from django.apps import apps
from django.core.management import get_commands, load_command_class
from django.db.migrations.recorder import MigrationRecorder
from django.db.models import Model

from keyvault.project.configuration import SETTINGS
from tests.architecture import reference
from tests.architecture.checkout import python_files
from tests.architecture.pages import ERRORS, errors_page, parts

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
COMMANDS = ROOT / "docs" / "commands.md"
PAGES_OF_PACKAGES = [
    ROOT / "keyvault" / "README.md",
    ROOT / "keyvault" / "admin" / "README.md",
    ROOT / "keyvault" / "hotpath" / "README.md",
    ROOT / "rotation" / "README.md",
    ROOT / "tests" / "simulator" / "README.md",
]
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *PAGES_OF_PACKAGES,
    ROOT / "deploy" / "README.md",
    ROOT / "deploy" / "vault" / "README.md",
    ROOT / "deploy" / "webhooks.md",
    *sorted((ROOT / "clients").glob("README.md")),
    *sorted((ROOT / "clients").glob("*/README.md")),
]
TOP_FOLDERS = "keyvault|rotation|clients|tests|deploy|docs"
OF_CLIENTS = {"KEYVAULT_VERIFIER", "KEYVAULT_OPTIONS", "KEYVAULT_SERVICE_TOKEN"}
"""Settings of the Django adapter of `clients/python`, and the variable of the Traefik sample."""
WORD = re.compile(r"[A-Za-z_]\w*")
NAME = re.compile(r"_?(?:[A-Z][a-z]+(?:[A-Z]\w*)+|[a-z]+(?:_[a-z0-9]+)+|[A-Z]+(?:_[A-Z]+)+)")
"""A class of two words, or a function or a constant."""


@pytest.mark.parametrize("name", [part.name for part in parts()])
def test_docs_generated_part_equals_the_code(name: str) -> None:
    """Run `python -m tests.architecture.test_docs` to write it."""
    (part,) = (part for part in parts() if part.name == name)
    assert part.read() == part.text


def test_docs_errors_page_equals_the_code() -> None:
    """Run `python -m tests.architecture.test_docs` to write it."""
    assert ERRORS.read_text() == errors_page()


@pytest.mark.parametrize("page", reference.pages(), ids=lambda page: page.stem)
def test_docs_page_of_the_reference_equals_the_code(page: Path) -> None:
    """Run `python -m tests.architecture.test_docs` to write it."""
    assert page.read_text() == reference.pages()[page]()


def test_docs_links_lead_to_files_and_headings() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, heading = link.partition("#")
            if ":" in path:
                continue
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name} links to {link}"
            assert not heading or heading in _headings(target), f"{page.name} links to {link}"


def _headings(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub derives them from its headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_docs_code_blocks_begin_as_the_site_reads_them() -> None:
    """Guarantee: no page of the site lacks what follows a code block. GitHub accepts more after the language."""
    for page in PAGES:
        for begin in re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)[::2]:
            assert re.fullmatch(r'[a-z]*(?: title="[\w.-]+")?', begin), (page, begin)


def test_docs_paths_exist() -> None:
    """A path in backticks starts at the root, or at `keyvault` or its templates. The text of a link is not checked."""
    for page in PAGES:
        text = page.read_text()
        for path in re.findall(rf"(?<!\[)`((?:{TOP_FOLDERS})/[\w./-]*)`", text):
            assert any(place.exists() for place in (ROOT / path, page.parent / path)), f"{page.name} names {path}"
        for path in re.findall(r"(?<!\[)`(\w+/[\w/]+\.(?:py|txt|html))`", text):
            places = (ROOT / "keyvault" / path, ROOT / "keyvault" / "templates" / path, ROOT / path, page.parent / path)
            assert any(place.exists() for place in places), f"{page.name} names {path}"


def test_docs_statements_of_sql_name_existing_columns() -> None:
    """Guarantee: what an operator deletes by hand exists. One page has each statement."""
    models: list[type[Model]] = [*apps.get_models(), MigrationRecorder.Migration]
    tables = {model._meta.db_table: model for model in models}
    named = [each for page in PAGES for each in re.findall(r"`DELETE FROM (\w+) WHERE (\w+) = '", page.read_text())]
    assert sorted(named) == [("django_migrations", "app"), ("keyvault_serviceprocess", "name")]
    for table, column in named:
        assert column in {field.column for field in tables[table]._meta.fields}


def test_docs_names_of_code_exist() -> None:
    """A class or a function that a page for engineers names in backticks is a word of the code."""
    files = [*python_files("keyvault", "rotation", "tests"), *(ROOT / "keyvault" / "templates").rglob("*.html")]
    code = {path.stem for path in files}.union(*(WORD.findall(path.read_text()) for path in files))
    for page in (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md", *PAGES_OF_PACKAGES):
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        named = {word for span in re.findall(r"`([^`\n]+)`", text) for word in WORD.findall(span)}
        assert {word for word in named if NAME.fullmatch(word)} <= code, page


def test_docs_security_page_names_existing_tests() -> None:
    """`file: test` names a test of a file under `tests/`."""
    named = re.findall(r"`([\w/]+\.py): (test_\w+)`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) > 30
    missing = [(file, test) for file, test in named if f"def {test}(" not in (ROOT / "tests" / file).read_text()]
    assert missing == []


def test_docs_names_in_the_contributing_tables_are_in_their_files() -> None:
    """A row that starts with one Python file names constants, classes and functions of that file."""
    for row in (ROOT / "CONTRIBUTING.md").read_text().splitlines():
        files = re.findall(r"`([\w/]+\.py)`", row)
        if row.startswith("| `") and len(files) == 1:
            code = (ROOT / files[0]).read_text()
            names = re.findall(r"`(_?[A-Z]\w+|_?[a-z]+_[a-z_]+)`", row)
            assert [name for name in names if not re.search(rf"\b{name}\b", code)] == [], row


def test_docs_commands_and_their_options_exist() -> None:
    """Guarantee: the page lists every command of ours, and each one with options that it has."""
    commands = get_commands()
    listed = set()
    for row in re.findall(r"^\| (`.+)$", COMMANDS.read_text(), re.MULTILINE):
        name = ""
        for named in re.findall(r"`([^`]+)`", row):
            if named.startswith("make "):
                continue
            # A further `--option` in the same row belongs to the command before it.
            name = name if named.startswith("--") else named.split()[0]
            assert name in commands, named
            listed.add(name)
            assert set(re.findall(r"--[a-z-]+", named)) <= _options(name), named
    own = {name for name, app in commands.items() if app in ("keyvault", "rotation")}
    refused = {"changepassword", "createsuperuser", "flush", "loaddata"}
    assert own - refused == listed


def test_docs_commands_named_elsewhere_exist() -> None:
    """Commands in code blocks are checked with their options, those in sentences by name."""
    commands = set(get_commands())
    for page in PAGES:
        text = page.read_text()
        named = set(re.findall(r"`(?:python )?manage\.py ([a-z_]+)", text))
        assert named <= commands, (page, named - commands)
        for name, rest in re.findall(r"python manage\.py ([a-z_]+)((?:\\\n|[^|>`&\n])*)", text):
            assert name in commands, (page, name)
            assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= _options(name), (page, name, rest)


def _options(name: str) -> set[str]:
    parser = load_command_class(get_commands()[name], name).create_parser("manage.py", name)
    return set(parser._option_string_actions)


def test_docs_tour_sets_every_variable_before_it_is_used() -> None:
    """Guarantee: the tour works when its blocks are pasted one after another."""
    known: set[str] = set()
    for block in re.findall(r"^```sh\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            used = set(re.findall(r"\$([A-Za-z_]+)", line))
            assert used <= known, line
            known |= set(re.findall(r"^([A-Z_]+)=", line))


def test_docs_settings_named_in_pages_exist() -> None:
    known = {name for setting in SETTINGS for name in setting.names()} | OF_CLIENTS
    for page in PAGES:
        named = set(re.findall(r"KEYVAULT_(?!TEST_)[A-Z_]+(?![A-Z_…])", page.read_text())) - {"KEYVAULT_"}
        assert named <= known, (page, named - known)


def test_docs_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:^    |^|`|=\w+ )make ([a-z-]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, (page, named - targets)


def test_docs_tests_that_are_named_exist() -> None:
    for page in PAGES:
        for path, test in re.findall(r"`(tests/[a-z_/]+\.py)::([a-z_0-9]+)`", page.read_text()):
            assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{test}"


def test_docs_every_invariant_names_tests_that_prove_it() -> None:
    """Each of the eight has proofs of its own."""
    page = (ROOT / "rotation" / "README.md").read_text()
    chapter = page.split("## Invariants\n")[1].split("\n## ")[0]
    chapters = re.split(r"^\*\*(\d)\. ", chapter, flags=re.MULTILINE)
    proofs = {
        int(number): re.findall(r"^- `tests/[^`]+::", text, re.MULTILINE)
        for number, text in zip(chapters[1::2], chapters[2::2], strict=True)
    }
    assert sorted(proofs) == list(range(1, 9))
    assert all(proofs.values())


if __name__ == "__main__":
    for generated in parts():
        generated.write()
    ERRORS.write_text(errors_page())
    for path, write in reference.pages().items():
        path.write_text(write())

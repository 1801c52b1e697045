"""The README says what is true: its table of settings, the paths and commands that it names."""

import re
from pathlib import Path

from django.core.management import get_commands

from keyvault.project.configuration import settings_table
from keyvault.wire.problems import problems_page

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
ERRORS = ROOT / "ERRORS.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "keyvault" / "README.md",
    ROOT / "rotation" / "README.md",
    ROOT / "deploy" / "README.md",
]


def test_docs_settings_table_equals_the_code() -> None:
    """Run `python -m tests.house.test_docs` to write it anew."""
    assert _between_markers(README) == settings_table()


def test_docs_errors_page_equals_the_code() -> None:
    """Every code with its cause and cure. Run `python -m tests.house.test_docs` to write it anew."""
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
    commands = set(get_commands())
    table = README.split("| `python manage.py …` | does |")[1].split("\n\n")[0]
    named = {row.strip("| `").split()[0] for row in re.findall(r"`[a-z_]+[^`]*`", table)}
    assert named <= commands, named - commands


def _between_markers(text: str) -> str:
    return text.split("<!-- settings -->\n")[1].split("\n<!-- /settings -->")[0]


if __name__ == "__main__":
    before, rest = README.split("<!-- settings -->\n")
    after = rest.split("<!-- /settings -->", 1)[1]
    (ROOT / "README.md").write_text(f"{before}<!-- settings -->\n{settings_table()}\n<!-- /settings -->{after}")
    ERRORS.write_text(f"{problems_page()}\n")

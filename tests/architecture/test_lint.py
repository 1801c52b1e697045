"""The linters and the type checker report nothing."""

import re

import pytest

from tests.architecture.checkout import CODE, comments, expect_content, python_files, relative

CHECKED = (*CODE, "tests", "manage.py")
SUPPRESSION = re.compile(r"#\s*(?:noqa|type:\s*ignore|pragma|pylint|ruff|mypy|nosec)\b")
EXPLAINED = re.compile(r"#\s*(?:noqa:\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*|type:\s*ignore\[[a-z, -]+\])\W+\w.{5,}")


def test_lint_ruff_finds_nothing() -> None:
    expect_content("ruff", "check", "--no-fix", *CHECKED)


def test_lint_every_file_is_formatted() -> None:
    expect_content("ruff", "format", "--check", *CHECKED)


@pytest.mark.timeout(600)  # without its cache, beside another worker on two cores, mypy needs a minute or two
def test_lint_mypy_strict_finds_nothing() -> None:
    expect_content("mypy", *CHECKED)


def test_lint_every_suppression_names_a_code_and_a_reason() -> None:
    """A suppression without a code and a reason cannot be reviewed."""
    unexplained = [
        f"{relative(path)}:{number}: {comment}"
        for path in python_files(*CODE, "tests")
        for number, comment in comments(path)
        if SUPPRESSION.search(comment) and not EXPLAINED.search(comment)
    ]
    assert unexplained == []

"""Every suppression of a finding is explained. `make check` runs ruff, mypy and the import contracts."""

import re

from tests.architecture.checkout import CODE, comments, python_files, relative

SUPPRESSION = re.compile(r"#\s*(?:noqa|type:\s*ignore|pragma|pylint|ruff|mypy|nosec)\b")
EXPLAINED = re.compile(r"#\s*(?:noqa:\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*|type:\s*ignore\[[a-z, -]+\])\W+\w.{5,}")


def test_lint_every_suppression_names_a_code_and_a_reason() -> None:
    """A suppression without a code and a reason cannot be reviewed."""
    unexplained = [
        f"{relative(path)}:{number}: {comment}"
        for path in python_files(*CODE, "tests")
        if SUPPRESSION.search(path.read_text())  # To split a file into tokens takes much longer than to search it.
        for number, comment in comments(path)
        if SUPPRESSION.search(comment) and not EXPLAINED.search(comment)
    ]
    assert unexplained == []

"""The table of guards fits the tree. `make mutations` removes them; here nothing runs."""

import ast
import re

from tests.environment import DATABASES, ROOT

from .guards import GUARDS, Guard


def test_guards_occur_exactly_once_in_their_files() -> None:
    assert [fault for guard in GUARDS if (fault := guard.find_fault(ROOT))] == []


def test_guards_removed_leave_other_code_that_can_be_read() -> None:
    """Otherwise the test would fail because of broken syntax, and would prove nothing about the guard."""
    for guard in GUARDS:
        source = (ROOT / guard.file).read_text()
        assert ast.dump(ast.parse(guard.mutate(source))) != ast.dump(ast.parse(source)), guard.name


def test_guards_name_tests_that_exist() -> None:
    assert [guard.test for guard in GUARDS if not _exists(guard.test)] == []
    assert {guard.database for guard in GUARDS} <= set(DATABASES)


def _exists(test: str) -> bool:
    path, _, name = test.partition("::")
    function = name.partition("[")[0]
    return re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE) is not None


def test_guards_have_different_names() -> None:
    assert len({guard.name for guard in GUARDS}) == len(GUARDS)


def test_guard_whose_text_is_gone_or_ambiguous_has_moved() -> None:
    gone = Guard("a-guard", "Makefile", "no such text", "", "", "")
    assert gone.find_fault(ROOT) == (
        "a-guard has moved: its text occurs 0 times in Makefile. Update tests/mutations/guards.py."
    )
    assert Guard("a-guard", "Makefile", "make", "", "", "").find_fault(ROOT) is not None
    assert Guard("a-guard", "no/such/file.py", "x", "", "", "").find_fault(ROOT) is not None

"""Every error code is brought about by some test: a code that nothing answers with would be a promise in a table."""

from pathlib import Path

from keyvault.domain.errors import ErrorCode

TESTS = Path(__file__).resolve().parents[1]
NOT_BROUGHT_ABOUT = ("access/", "wire/test_problems.py", "entry_points/test_every_code.py")
"""Where codes are computed or listed, and no door is asked."""


def test_every_code_is_named_by_a_test_that_brings_it_about() -> None:
    tests = {str(path.relative_to(TESTS)): path.read_text() for path in TESTS.rglob("test_*.py")}
    texts = [text for name, text in tests.items() if not name.startswith(NOT_BROUGHT_ABOUT)]
    unnamed = [code.value for code in ErrorCode if not any(f'"{code.value}"' in text for text in texts)]
    assert unnamed == []

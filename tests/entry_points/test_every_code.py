"""Some test provokes every published error code, so no code is documented that the service never returns."""

from pathlib import Path

from keyvault.domain.errors import ErrorCode

TESTS = Path(__file__).resolve().parents[1]
NOT_PROVOKING = ("access/", "wire/test_problems.py", "entry_points/test_every_code.py")
"""Tests that compute or list codes without a request to an entry point."""

MATRIX = Path(__file__).with_name("golden_matrix.txt")
"""test_golden_matrix.py provokes every code of this file at every entry point that can express it."""


def test_every_code_is_named_by_a_test_that_provokes_it() -> None:
    tests = {str(path.relative_to(TESTS)): path.read_text() for path in TESTS.rglob("test_*.py")}
    texts = [text for name, text in tests.items() if not name.startswith(NOT_PROVOKING)]
    in_matrix = {line.split()[1] for line in MATRIX.read_text().splitlines() if not line.startswith("#")}
    unnamed = [code.value for code in ErrorCode if not any(f'"{code.value}"' in text for text in texts)]
    assert set(unnamed) <= in_matrix

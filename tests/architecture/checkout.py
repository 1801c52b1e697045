"""The checkout for the architecture tests: its files, and its own tools."""

import ast
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ("keyvault", "rotation")


def relative(path: Path) -> str:
    """A file's name as an engineer would write it."""
    return path.relative_to(ROOT).as_posix()


def python_files(*folders: str) -> Iterator[Path]:
    """Every Python file of these folders, in a stable order."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call in a file, with the last word of what is called: `x.reveal()` is `reveal`."""
    for node in ast.walk(ast.parse(path.read_text(), relative(path))):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id, node
            elif isinstance(node.func, ast.Attribute):
                yield node.func.attr, node


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Every comment in a file, with its line."""
    with path.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def expect_content(tool: str, *arguments: str) -> None:
    """Run one of this environment's tools on the checkout; what it complains about is the test's failure."""
    executable = Path(sys.executable).with_name(tool)
    done = subprocess.run(
        [executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"{tool} {' '.join(arguments)}\n{done.stdout}{done.stderr}", pytrace=False)

"""The checkout for the architecture tests: its files, and its own tools."""

import ast
import tokenize
from collections.abc import Iterator
from pathlib import Path

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

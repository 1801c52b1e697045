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


def calls(path: Path, name: str) -> list[ast.Call]:
    """Return the calls of `name` in a file, where the last word counts: `x.reveal()` is a call of `reveal`."""
    source = path.read_text()
    if name not in source:  # To parse a file takes much longer than to search it.
        return []
    found = [node for node in ast.walk(ast.parse(source, relative(path))) if isinstance(node, ast.Call)]
    return [call for call in found if getattr(call.func, "id", getattr(call.func, "attr", "")) == name]


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Every comment in a file, with its line."""
    with path.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string

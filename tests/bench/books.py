"""Processes that have one database open and take commands: a line of text for each, answered with a line of JSON."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.environment import ROOT

Book = subprocess.Popen[str]


@contextmanager
def open_book(module: str, environ: Mapping[str, str]) -> Iterator[Book]:
    with subprocess.Popen(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env=dict(environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as book:
        try:
            yield book
        finally:
            # It holds no data to keep.
            book.kill()


def ask(book: Book, command: str) -> Any:
    """Send a command; return the answer. Raises RuntimeError when the process has ended."""
    send(book, command)
    return receive(book, command)


def send(book: Book, command: str) -> None:
    assert book.stdin
    book.stdin.write(f"{command}\n")
    book.stdin.flush()


def receive(book: Book, command: str) -> Any:
    assert book.stdout
    line = book.stdout.readline()
    if not line:
        raise RuntimeError(f"the process of {command!r} has ended with {book.wait()}")
    return json.loads(line)

"""Mask every secret in a support attachment."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from keyvault.domain.redaction import redact_stream

_CHUNK_CHARACTERS = 1 << 16


class Command(BaseCommand):
    help = "Mask secrets in standard input or a file of any size: `manage.py redact < support.log > clean.log`."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", nargs="?", type=Path)

    def handle(self, *args: Any, **options: Any) -> None:
        # Bytes that are not UTF-8 pass through unchanged.
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape", newline="")  # type: ignore[union-attr]  # a real stream
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape", newline="")  # type: ignore[union-attr]  # a real stream
        if options["file"] is None:
            self._filter(sys.stdin)
            return
        try:
            with options["file"].open(encoding="utf-8", errors="surrogateescape", newline="") as file:
                self._filter(file)
        except OSError as error:
            raise CommandError(f"{options['file']}: {error.strerror}") from None

    def _filter(self, source: IO[str]) -> None:
        for clean in redact_stream(_chunks(source)):
            sys.stdout.write(clean)
        sys.stdout.flush()


def _chunks(source: IO[str]) -> Iterator[str]:
    while chunk := source.read(_CHUNK_CHARACTERS):
        yield chunk

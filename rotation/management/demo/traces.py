"""Looking for secrets where none may be: in every file that the service has written."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from keyvault.domain.keystring import SHAPED
from keyvault.domain.plaintext import Plaintext

SECRET_AND_CHECKSUM = 49
"""The characters of a key string that are no public handle."""

_SHAPED = re.compile(SHAPED.pattern.encode())
_TROUBLE = re.compile(r"Traceback \(most recent call last\)|\"level\": \"(?:ERROR|CRITICAL)\"")


def find_secrets(folder: Path, secrets: Sequence[Plaintext]) -> Iterator[str]:
    """Where one of the secrets stands readable, whole or without its handle, or anything else of that shape."""
    wanted = [text.reveal().encode() for text in secrets]
    wanted += [text[-SECRET_AND_CHECKSUM:] for text in wanted]
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for text in wanted:
            if text in content:
                yield f"{path.relative_to(folder)}: a secret that was issued"
        for match in _SHAPED.finditer(content):
            yield f"{path.relative_to(folder)}: {match['head'].decode()}… with what follows"


def find_trouble(logs: Path) -> Iterator[str]:
    """Lines of the logs that tell of an error."""
    for path in sorted(logs.glob("*.log")):
        for line in path.read_text(errors="replace").splitlines():
            if _TROUBLE.search(line):
                yield f"{path.name}: {line[:300]}"

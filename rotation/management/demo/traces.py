"""Search every file that the service has written for secrets."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from keyvault.domain.keystring import SHAPED
from keyvault.domain.plaintext import Plaintext

SECRET_AND_CHECKSUM = 49
"""Length of a key string's secret part with its checksum, in characters."""

_SHAPED = re.compile(SHAPED.pattern.encode())
_LOGGED_ERROR = re.compile(r"Traceback \(most recent call last\)|\"level\": \"(?:ERROR|CRITICAL)\"")


def find_secrets(folder: Path, secrets: Sequence[Plaintext]) -> Iterator[str]:
    """Yield each readable secret, whole or without its public part, and any other text shaped like a key."""
    wanted = [text.reveal().encode() for text in secrets]
    wanted += [text[-SECRET_AND_CHECKSUM:] for text in wanted]
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for text in wanted:
            if text in content:
                yield f"{path.relative_to(folder)}: a secret that was issued"
        for match in _SHAPED.finditer(content):
            yield f"{path.relative_to(folder)}: {match['head'].decode()}… with its secret part"


def find_logged_errors(logs: Path) -> Iterator[str]:
    """Yield the log lines that report an error."""
    for path in sorted(logs.glob("*.log")):
        for line in path.read_text(errors="replace").splitlines():
            if _LOGGED_ERROR.search(line):
                yield f"{path.name}: {line[:300]}"

"""Find credential strings and key ids in pasted text, such as log lines. Keeps no secret: only public ids."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from keyvault.domain.ids import KEY_ID_DIGITS
from keyvault.domain.keystring import SHAPED, StringKind, parse_keystring

_KIND = re.compile("|".join(StringKind))
_BARE_ID = re.compile(rf"(?<![0-9A-Za-z])[0-9A-Za-z]{{{KEY_ID_DIGITS}}}(?![0-9A-Za-z])")


@dataclass(frozen=True, slots=True)
class LeakedId:
    """The public id of a credential string in a text, or text shaped like a key id.

    Args:
        line: number of the line, from 1.
        kind: of the credential string; None: a bare id.
        is_whole: the string is complete and its checksum is valid.
        is_alone: nothing else is in the line.
    """

    line: int
    public_id: str
    kind: StringKind | None
    is_whole: bool = False
    is_alone: bool = False


def find_leaked_ids(text: str, key_prefix: str) -> Iterator[LeakedId]:
    """Yield the ids in the order of the lines. Underscores of a credential string may be escaped, see `SHAPED`."""
    for number, line in enumerate(text.splitlines(), 1):
        yield from _find_in_line(line, number, key_prefix)


def _find_in_line(line: str, number: int, key_prefix: str) -> Iterator[LeakedId]:
    rest = []
    begin = 0
    for match in SHAPED.finditer(line):
        head = match["head"]
        kind = _KIND.search(head)
        if kind is not None:
            whole = line[max(0, match.start() - len(key_prefix)) : match.end()]
            is_whole = parse_keystring(whole, key_prefix) is not None
            yield LeakedId(number, head[-KEY_ID_DIGITS:], StringKind(kind[0]), is_whole)
        rest.append(line[begin : match.start()])
        begin = match.end()
    for part in (*rest, line[begin:]):
        for found in _BARE_ID.finditer(part):
            yield LeakedId(number, found[0], None, is_alone=found[0] == line.strip())

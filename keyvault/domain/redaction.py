"""What must never leave: secrets found by the shape of their value, wherever they stand.

By value and not by field name, since a name does not travel with a copied line. Masks keep what support
needs: the kind, the environment and the key id, which is public; never a character of the secret.
"""

import re
from collections.abc import Iterable, Iterator

from keyvault.domain.keystring import SHAPED
from keyvault.domain.plaintext import MASK

_LONGEST_MATCH = 65_536 + 256
_LONGEST_LINE = 1 << 20

# A credential header as a wire dump, a WSGI environ, JSON (escaped or not), a Python repr or a curl line
# shows it. Its value ends with the line or with a quote; the scheme stays readable, what follows does not.
_HEADER = re.compile(
    r"(?P<head>(?:authorization|x[-_]api[-_]key|x[-_]service[-_]token)"
    r"(?:\\*[\"']\]?\)?\s*,\s*b?\\*[\"']|\\*[\"']?\]?\s*(?:=>|[:=])\s*(?:b?\\*[\"'])?\s*)"
    r"(?:(?:bearer|basic|apikey|digest|token)\s+)?)"
    r"(?P<value>[^\s\"'\\,;][^\"'\\\r\n]{0,65535})",
    re.IGNORECASE,
)
_OTHERS = (
    re.compile(r"(?P<head>\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{16,4096}", re.IGNORECASE),
    # A sealed secret (HPKE, RFC 9180, see design API.md): `sealed.` and base64url parts.
    re.compile(r"(?P<head>\bsealed\.)[A-Za-z0-9_-]{8,4096}(?:\.[A-Za-z0-9_-]{8,4096})?"),
    # Vault and OpenBao tokens: service, batch, recovery; new and old prefix.
    re.compile(r"(?P<head>\b(?:hv[sbr]|s|b|r)\.)[A-Za-z0-9_-]{20,512}"),
    # The password of a database or broker URL.
    re.compile(r"(?P<head>\b[a-z][a-z0-9+.-]{1,31}://[^\s:/@]{0,255}:)[^\s/@]{1,1024}(?=@)", re.IGNORECASE),
)


def redact(text: str) -> str:
    """The text with every secret masked. Idempotent: masked text stays as it is."""
    text = SHAPED.sub(_mask, text)
    text = _HEADER.sub(_mask_header, text)
    for pattern in _OTHERS:
        text = pattern.sub(_mask, text)
    return text


def redact_stream(chunks: Iterable[str]) -> Iterator[str]:
    """Redacts text of any size in bounded memory, wherever the chunks and the lines are cut.

    Whole lines are let go as they come. A line longer than 1 MiB is let go in windows, never cut inside
    anything that is to be masked.
    """
    held = ""
    for chunk in chunks:
        held += chunk
        end = held.rfind("\n") + 1
        if end == 0 and len(held) > _LONGEST_LINE:
            end = _safe_cut(held)
        if end:
            yield redact(held[:end])
            held = held[end:]
    if held:
        yield redact(held)


def _mask(match: re.Match[str]) -> str:
    return match["head"] + MASK


def _mask_header(match: re.Match[str]) -> str:
    value = match["value"].rstrip()
    if value.endswith(MASK) and (value == MASK or SHAPED.fullmatch(value.removesuffix(MASK) + "0")):
        return match[0]
    return _mask(match)


def _safe_cut(text: str) -> int:
    """A place near the end that lies inside no match, with room behind it for the longest match to begin."""
    cut = len(text) - _LONGEST_MATCH
    for pattern in (SHAPED, _HEADER, *_OTHERS):
        # A match that spans the cut began at most one longest match before it.
        for match in pattern.finditer(text, max(0, cut - _LONGEST_MATCH)):
            if match.start() < cut < match.end():
                cut = match.start()
    return cut

r"""What must never leave: secrets found by the shape of their value, wherever they stand.

By value and not by field name, since a name does not travel with a copied line; the values of the credential
headers alone go by the header's name. Masks keep what support needs: the kind, the environment and the key
id, which is public; never a character of the secret.

Each pattern is the `head`, which stays, and as much of a secret as tells it for certain; what else belongs
to the secret follows, however long. No pattern looks past the end of a line, and none that ends at a quote
takes a JSON string's own: a redacted JSON line is still one.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from keyvault.domain.keystring import SHAPED, SHAPED_HEAD
from keyvault.domain.plaintext import MASK

_FARTHEST = 4096
"""No pattern needs to see more than this to be certain."""


@dataclass(frozen=True, slots=True)
class _Secret:
    begins: re.Pattern[str]
    goes_on: re.Pattern[str]
    whole: re.Pattern[str]


def _secret(begins: str, goes_on: str, flags: re.RegexFlag = re.NOFLAG) -> _Secret:
    goes_on = f"(?:{goes_on})*+"
    return _Secret(re.compile(begins, flags), re.compile(goes_on), re.compile(begins + goes_on, flags))


_ANY_CASE = re.IGNORECASE | re.MULTILINE
_BLANKS = r"[ \t]{0,64}"
_QUOTE = r"b?\\{0,16}[\"']"
_NAME = r"(?:authorization|x[-_]api[-_]key|x[-_]service[-_]token)"
_IS = rf"{_BLANKS}(?:=>|[:=]){_BLANKS}\[?{_BLANKS}"
# A scheme stays readable, and so does the public part of a key string, masked before or not.
_HANDLE = rf"(?:[a-z0-9]{{0,16}}{SHAPED_HEAD}(?=[0-9A-Za-z]|\*\*\*))?+"
_FIRST = rf"(?:(?:bearer|basic|apikey|digest|token)[ \t]{{1,64}})?{_HANDLE}"

_SECRETS = (
    # A credential header in a dump of the wire: the rest of the line.
    _secret(rf"(?P<head>^(?:[<>] )?[\w-]{{0,32}}{_NAME}{_BLANKS}:{_BLANKS}{_FIRST})\S", r"[^\r\n]", _ANY_CASE),
    # In JSON, a Python repr, a WSGI environ: the quoted string, with whatever is escaped in it.
    _secret(
        rf"(?P<head>(?<!\\)\"[\w-]{{0,32}}{_NAME}\"\]?{_IS}b?\"{_FIRST})(?:[^\"\\\r\n]|\\[^\r\n])",
        r"[^\"\\\r\n]|\\[^\r\n]",
        _ANY_CASE,
    ),
    _secret(
        rf"(?P<head>(?<!\\)'[\w-]{{0,32}}{_NAME}'\]?{_IS}b?'{_FIRST})(?:[^'\"\\\r\n]|\\[^\r\n])",
        r"[^'\"\\\r\n]|\\[^\r\n]",
        _ANY_CASE,
    ),
    # A pair, as lists of headers have them.
    _secret(
        rf"(?P<head>[(\[]{_BLANKS}b?(?P<quote>\\{{0,16}}[\"'])[\w-]{{0,32}}{_NAME}(?P=quote)"
        rf"{_BLANKS},{_BLANKS}{_QUOTE}{_FIRST})[^\s\"'\\,;:[\]{{}}()]",
        r"[^\"'\\\r\n]",
        _ANY_CASE,
    ),
    # Anywhere else (escaped JSON, a curl line, a log's `name=value`): up to a quote or the end of the line.
    _secret(
        rf"(?P<head>{_NAME}(?:\\{{0,16}}[\"'])?\]?{_IS}(?:{_QUOTE})?{_BLANKS}{_FIRST})"
        r"(?!(?:null|none|true|false)\b)[^\s\"'\\,;:[\]{}()]",
        r"[^\"'\\\r\n]",
        _ANY_CASE,
    ),
    # The two schemes by themselves; what follows has to look random, for "basic responsibilities" are none.
    _secret(
        rf"(?P<head>\b(?i:bearer|basic)[ \t]{{1,64}}{_HANDLE})"
        r"(?=[A-Za-z./-]{0,64}[0-9_~+=]|[A-Za-z./-]{0,64}[a-z][A-Z])[A-Za-z0-9._~+/=-]{16}",
        r"[A-Za-z0-9._~+/=-]",
    ),
    # A sealed secret (HPKE, RFC 9180, see design API.md): `sealed.` and base64url parts.
    _secret(r"(?P<head>\bsealed\.)(?=[a-z_-]{0,64}[0-9A-Z])[A-Za-z0-9_-]{8}", r"[A-Za-z0-9_.-]"),
    # Vault and OpenBao tokens (service, batch, recovery), and those of before Vault 1.10.
    _secret(
        r"(?P<head>\b(?:hv[sbr]\.|[sbr]\.(?=[a-z]{0,64}[0-9A-Z])))[A-Za-z0-9_-]{20}",
        r"[A-Za-z0-9_-]",
    ),
    # The password of a database or broker URL, up to the last @ of the authority.
    _secret(
        r"(?P<head>://[^\s:/@\"\\]{0,255}:)[^\s/@\"\\]{1,512}(?:@[^\s/@\"\\]{1,512}){0,3}(?=@)",
        r"(?!)",
    ),
    # Key strings, wherever they stand; last, for a header's name may be glued to one.
    _secret(SHAPED.pattern, r"[0-9A-Za-z]"),
)


def redact(text: str) -> str:
    """The text with every secret masked. Idempotent: masked text stays as it is."""
    for secret in _SECRETS:
        text = secret.whole.sub(_mask, text)
    return text


def redact_stream(chunks: Iterable[str]) -> Iterator[str]:
    """Redacts text of any size in bounded memory: what `redact` makes of the whole, wherever it is cut.

    Whole lines are let go as they come.
    """
    passes = [_Pass(secret) for secret in _SECRETS]
    for chunk in chunks:
        if text := _through(passes, chunk, is_last=False):
            yield text
    if text := _through(passes, "", is_last=True):
        yield text


def _mask(match: re.Match[str]) -> str:
    return match["head"] + MASK


def _through(passes: Iterable["_Pass"], text: str, *, is_last: bool) -> str:
    for each in passes:
        text = each.feed(text, is_last=is_last)
    return text


class _Pass:
    """One pattern's way through a stream. Holds what may be the beginning of a secret, and one character before."""

    def __init__(self, secret: _Secret) -> None:
        self._secret = secret
        self._held = ""
        self._at = 0
        self._is_inside = False

    def feed(self, chunk: str, *, is_last: bool) -> str:
        text, at = self._held + chunk, self._at
        certain = len(text) if is_last else max(text.rfind("\n") + 1, len(text) - _FARTHEST)
        clean: list[str] = []
        while True:
            if self._is_inside:
                at = self._secret.goes_on.match(text, at).end()  # type: ignore[union-attr]  # it may match nothing
                if text[at:] in {"", "\\"} and not is_last:
                    break  # An escape may be cut in two.
                self._is_inside = False
            match = self._secret.begins.search(text, at)
            if match is None or match.start() >= certain:
                clean.append(text[at:certain])
                at = max(at, certain)
                break
            clean += (text[at : match.start()], _mask(match))
            at, self._is_inside = match.end(), True
        before = max(0, at - 1)
        self._held, self._at = text[before:], at - before
        return "".join(clean)

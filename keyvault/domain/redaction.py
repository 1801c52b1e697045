r"""What must never leave: secrets found by the shape of their value or by the name that they stand under.

Masks keep what support needs: the kind, the environment and the key id, which is public; never a character of the
secret. Ids, types, counts and dates stay readable, whatever word is in their name: `key_id`, `token_id`,
`idempotency_key`, `public_key`, `order_token`.

Each pattern is the `head`, which stays, and as much of a secret as tells it for certain; what else belongs
to the secret follows, however long. Key strings alone are looked for over more than one line. None that ends at a
quote takes a JSON string's own: a redacted JSON line is still one.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from keyvault.domain.ids import KEY_ID_DIGITS
from keyvault.domain.keystring import CHECKSUM_DIGITS, SECRET_DIGITS, SHAPED, SHAPED_HEAD, StringKind, StringScope
from keyvault.domain.plaintext import MASK

_FARTHEST = 4096
"""No pattern needs to see more than this to be certain, in characters."""

_LONGEST_PIECE = 160
"""What goes on with a secret is judged in pieces of at most so many characters."""


def _mask(match: re.Match[str]) -> str:
    return match["head"] + MASK


@dataclass(frozen=True, slots=True)
class _Secret:
    """One pattern. `begins`: the head and enough to be certain; `goes_on`: what else belongs to the secret.

    `needles`: a text without any of them, in lower case, has no such secret. `unfinished`: of a pattern that looks
    past the end of a line, how a text ends in which one may have begun.
    """

    begins: re.Pattern[str]
    goes_on: re.Pattern[str]
    whole: re.Pattern[str]
    needles: tuple[str, ...]
    mask: Callable[[re.Match[str]], str]
    unfinished: re.Pattern[str] | None


def _secret(
    begins: str,
    goes_on: str,
    needles: tuple[str, ...],
    *,
    any_case: bool = False,
    mask: Callable[[re.Match[str]], str] = _mask,
    unfinished: re.Pattern[str] | None = None,
) -> _Secret:
    # ASCII, so that ignoring case finds what the needles, in lower case, find.
    flags = re.ASCII | re.MULTILINE | (re.IGNORECASE if any_case else re.NOFLAG)
    goes_on = f"(?:{goes_on})*+"
    whole = re.compile(begins + goes_on, flags)
    return _Secret(re.compile(begins, flags), re.compile(goes_on, re.ASCII), whole, needles, mask, unfinished)


_BLANKS = r"[ \t]{0,64}"
_QUOTE = r"b?\\{0,16}[\"']"
_HEADER = r"(?:authorization|x[-_]api[-_]key|x[-_]service[-_]token|cookie)"
_HEADER_NEEDLES = ("authorization", "api-key", "api_key", "service-token", "service_token", "cookie")
_SECRET_KEYS = ("api", "private", "secret", "access", "signing", "encryption", "master")
# What the name of a member, a parameter or a variable ends with. An order's token and a page's are no secrets.
_MEMBER = (
    r"(?:passw(?:or)?d|passphrase|pwd|secret|credential|session(?:[-_]?id)?"
    r"|(?<!order)(?<!order[-_])(?<!page)(?<!page[-_])token"
    rf"|(?:{'|'.join(_SECRET_KEYS)})[-_.]?key)"
)
_MEMBER_NEEDLES = (
    *("passw", "passphrase", "pwd", "secret", "credential", "session", "token"),
    *(f"{kind}{between}key" for kind in _SECRET_KEYS for between in ("", "-", "_", ".")),
)
_NAMED = rf"[\w.-]{{0,32}}(?:{_HEADER}|{_MEMBER})"
_NAMED_NEEDLES = (*_MEMBER_NEEDLES, "authorization", "cookie")
_IS = rf"{_BLANKS}(?:=>|[:=]){_BLANKS}\[?{_BLANKS}"
_NO_VALUE = r"(?!-?(?:null|none|true|false|nan|infinity)(?![^\s\"'\\&;,:[\]{}()]))"
_UNDERSCORE = r"(?:_|%(?:25){0,8}5[Ff])"
# A scheme stays readable, and so does the public part of a secret, masked before or not.
_HANDLE = rf"(?:(?:[a-z0-9]{{0,16}}{SHAPED_HEAD}|whsec{_UNDERSCORE}|hv[sbr]\.|sealed\.)(?=[0-9A-Za-z]|\*\*\*))?+"
_FIRST = rf"(?:(?:bearer|basic|apikey|digest|token)[ \t]{{1,64}})?{_HANDLE}"


def _quoted(depth: int) -> _Secret:
    """A member of JSON and its string, as JSON escapes both when it was put into a string, `depth` times over.

    A backslash of the innermost JSON is `escapes` of them here, and its quote has one fewer before it.
    """
    escapes = 2**depth
    quote = rf"\\{{{escapes - 1}}}\"" if depth else '"'
    piece = rf"[^\"\\\r\n]|\\{{{2 * escapes}}}|\\{{{2 * escapes - 1}}}\"|\\{{{escapes}}}[^\"\\\r\n]"
    return _secret(
        rf"(?P<head>(?<!\\){quote}{_NAMED}{quote}\]?{_IS}b?{quote}{_FIRST})(?:{piece})",
        piece,
        _NAMED_NEEDLES,
        any_case=True,
    )


def _mask_number(match: re.Match[str]) -> str:
    """A string, so that JSON stays JSON."""
    return f"{match['head']}{match['quote']}{MASK}{match['quote']}"


# --- key strings over more than one line --------------------------------------------------------------------

# A soft end (quoted-printable's, a shell's), the end of the line as itself or escaped in JSON, the marks of a quoted
# mail, an indentation. Bounded, for a whole key to be seen within `_FARTHEST`.
_BREAK = r"[ \t]{0,8}(?:=|\\{1,4})?[ \t]{0,2}(?:\r\n|\n|\r|(?:\\{1,4}r)?\\{1,4}n)(?:[ \t]{0,2}>){0,4}[ \t]{0,16}"
_MAY_BREAK = f"(?:{_BREAK})?+"
_DIGIT = "[0-9A-Za-z]"
_AFTER_KEY_ID = SECRET_DIGITS + CHECKSUM_DIGITS


def _broken(word: str) -> str:
    return "".join(_MAY_BREAK + letter for letter in word)


def _any_broken(words: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(_broken, words))})"


def _letters(words: Iterable[str]) -> list[str]:
    """What may stand at each place of one of the words."""
    return [f"[{''.join(sorted(set(place)))}]" for place in zip(*words, strict=True)]


def _unfinished_key() -> re.Pattern[str]:
    """The end of a text that may be the beginning of a key string, or all of it but for what follows it."""
    rest = r"\Z"
    places = [*_letters(StringKind), "_", *_letters(StringScope), "_", *[_DIGIT] * (KEY_ID_DIGITS + _AFTER_KEY_ID)]
    for place in reversed(places):
        piece = _MAY_BREAK + place
        rest = rf"(?:{piece}{rest}|(?!{piece})[ \t=\\rn\r\n>]{{0,64}}\Z)"
    return re.compile(f"_{rest}", re.ASCII)


def _mask_broken(match: re.Match[str]) -> str:
    """On one line, for the patterns that follow."""
    return re.sub(_BREAK, "", match["head"]) + MASK


_SECRETS = (
    # A key string of the right length that was broken; first, for the others end with the line.
    _secret(
        rf"(?!_[a-z]{{3}}_[a-z]{{3}}_{_DIGIT}{{{KEY_ID_DIGITS + _AFTER_KEY_ID}}})"
        rf"(?P<head>_{_any_broken(StringKind)}{_MAY_BREAK}_{_any_broken(StringScope)}{_MAY_BREAK}_"
        rf"(?:{_MAY_BREAK}{_DIGIT}){{{KEY_ID_DIGITS}}})(?:{_MAY_BREAK}{_DIGIT}){{{_AFTER_KEY_ID}}}(?!{_DIGIT})",
        r"(?!)",
        ("\n", "\r", "\\n"),
        mask=_mask_broken,
        unfinished=_unfinished_key(),
    ),
    # Secrets of webhooks, of which `whsec_` is public.
    _secret(
        rf"(?P<head>(?<![A-Za-z0-9])whsec{_UNDERSCORE})(?:[A-Za-z0-9+/=_%-]|\\{{1,16}}/){{8}}",
        r"[A-Za-z0-9+/=_%-]|\\{1,16}/",
        ("whsec",),
    ),
    # A credential header in a dump of the wire: the rest of the line.
    _secret(
        rf"(?P<head>^(?:[<>] )?[\w-]{{0,32}}{_HEADER}{_BLANKS}:{_BLANKS}{_FIRST})\S",
        r"[^\r\n]",
        _HEADER_NEEDLES,
        any_case=True,
    ),
    # In JSON, a list of strings: all of it.
    _secret(
        rf"(?P<head>(?<!\\)\"{_NAMED}\"{_BLANKS}:{_BLANKS}\[{_BLANKS}\"{_FIRST})(?:[^\"\\\r\n]|\\[^\r\n])",
        rf"[^\"\\\r\n]|\\[^\r\n]|\"{_BLANKS},{_BLANKS}\"",
        _NAMED_NEEDLES,
        any_case=True,
    ),
    # In JSON, in JSON within JSON: the quoted string, with whatever is escaped in it.
    *map(_quoted, range(4)),
    # In a Python repr, a WSGI environ.
    _secret(
        rf"(?P<head>(?<!\\)'{_NAMED}'\]?{_IS}b?'{_FIRST})(?:[^'\"\\\r\n]|\\[^\r\n])",
        r"[^'\"\\\r\n]|\\[^\r\n]",
        _NAMED_NEEDLES,
        any_case=True,
    ),
    # A number under such a name.
    _secret(
        rf"(?P<head>(?<!\\)(?P<quote>\\{{0,16}}[\"']){_NAMED}(?P=quote)\]?{_IS})-?[0-9]",
        r"[0-9.eE+-]",
        _NAMED_NEEDLES,
        any_case=True,
        mask=_mask_number,
    ),
    # A pair, as lists of headers have them, and tuples of anything.
    _secret(
        rf"(?P<head>(?:[(\[]{_BLANKS}b?(?P<quote>\\{{0,16}}[\"'])[\w-]{{0,32}}{_HEADER}(?P=quote)"
        rf"|\({_BLANKS}b?(?P<quotes>\\{{0,16}}[\"'])[\w.-]{{0,32}}{_MEMBER}(?P=quotes))"
        rf"{_BLANKS},{_BLANKS}{_QUOTE}{_FIRST})[^\s\"'\\,;:[\]{{}}()]",
        r"[^\"'\\\r\n]",
        _NAMED_NEEDLES,
        any_case=True,
    ),
    # A header anywhere else (a curl line, a log's `name=value`): up to a quote or the end of the line.
    _secret(
        rf"(?P<head>{_HEADER}(?:\\{{0,16}}[\"']\]?{_IS}(?![ \t\[]{{0,64}}-?[0-9])|\]?{_IS})"
        rf"(?:{_QUOTE})?{_BLANKS}{_NO_VALUE}{_FIRST})"
        rf"[^\s\"'\\,;:[\]{{}}()]",
        r"[^\"'\\\r\n]",
        _HEADER_NEEDLES,
        any_case=True,
    ),
    # A variable or a parameter: quoted, or up to what ends it in a form or a shell. The quote may end a string of
    # JSON, which none of `,:]}` may then follow.
    _secret(
        rf"(?P<head>{_MEMBER}[ \t]{{0,4}}=[ \t]{{0,4}}\\{{0,16}}[\"']{_FIRST})[^\s\"'\\,:\]}}]",
        r"[^\"'\\\r\n]",
        _MEMBER_NEEDLES,
        any_case=True,
    ),
    _secret(
        rf"(?P<head>{_MEMBER}[ \t]{{0,4}}=[ \t]{{0,4}}{_NO_VALUE}{_FIRST})[^\s\"'\\&;,:=<>[\]{{}}()]",
        r"[^\s\"'\\&;,]",
        _MEMBER_NEEDLES,
        any_case=True,
    ),
    # A line of YAML: quoted, or all of it.
    _secret(
        rf"(?P<head>^{_BLANKS}(?:-[ \t]{{1,4}})?[\w.-]{{0,32}}{_MEMBER}:[ \t]{{1,64}}[\"']{_FIRST})[^\"'\\\r\n]",
        r"[^\"'\\\r\n]",
        _MEMBER_NEEDLES,
        any_case=True,
    ),
    _secret(
        rf"(?P<head>^{_BLANKS}(?:-[ \t]{{1,4}})?[\w.-]{{0,32}}{_MEMBER}:[ \t]{{1,64}}{_NO_VALUE}{_FIRST})"
        rf"[^\s\"'\\|>&!,;:[\]{{}}()]",
        r"[^\r\n]",
        _MEMBER_NEEDLES,
        any_case=True,
    ),
    # curl's cookies: quoted, or one word.
    _secret(
        r"(?P<head>(?<!\S)(?:-b|--cookie)[ \t=]{1,8}\\{0,16}[\"'])(?=[^\s\"'\\=;]{1,256}=)[^\"'\\\r\n]",
        r"[^\"'\\\r\n]",
        ("-b", "--cookie"),
    ),
    _secret(
        r"(?P<head>(?<!\S)(?:-b|--cookie)[ \t=]{1,8})(?=[^\s\"'\\=;]{1,256}=)[^\s\"'\\]",
        r"[^\s\"'\\]",
        ("-b", "--cookie"),
    ),
    # The two schemes by themselves; what follows has to look random, for "basic responsibilities" are none.
    _secret(
        rf"(?P<head>\b(?i:bearer|basic)[ \t]{{1,64}}{_HANDLE})"
        r"(?=[A-Za-z./-]{0,64}[0-9_~+=]|[A-Za-z./-]{0,64}[a-z][A-Z])[A-Za-z0-9._~+/=-]{16}",
        r"[A-Za-z0-9._~+/=-]",
        ("bearer", "basic"),
    ),
    # A sealed secret (HPKE, RFC 9180, see keyvault.domain.sealing): `sealed.` and base64url parts.
    _secret(r"(?P<head>\bsealed\.)(?=[a-z_-]{0,64}[0-9A-Z])[A-Za-z0-9_-]{8}", r"[A-Za-z0-9_.-]", ("sealed.",)),
    # Vault and OpenBao tokens (service, batch, recovery), and those of before Vault 1.10.
    _secret(
        r"(?P<head>\b(?:hv[sbr]\.|[sbr]\.(?=[a-z]{0,64}[0-9A-Z])))[A-Za-z0-9_-]{20}",
        r"[A-Za-z0-9_-]",
        ("s.", "b.", "r."),
    ),
    # The password of a database or broker URL, up to the last @ of the authority.
    _secret(
        r"(?P<head>://[^\s:/@\"\\]{0,255}:)[^\s/@\"\\]{1,512}(?:@[^\s/@\"\\]{1,512}){0,3}(?=@)",
        r"(?!)",
        ("://",),
    ),
    # Key strings, wherever they stand; last, for a header's name may be glued to one.
    _secret(SHAPED.pattern, _DIGIT, tuple(StringKind)),
)


_NEEDLES = tuple(dict.fromkeys(secret.needles for secret in _SECRETS))
_NUMBERED = tuple((secret, _NEEDLES.index(secret.needles)) for secret in _SECRETS)
"""Each pattern with the number of its needles, which several share: most lines of a log have none of them."""


def redact(text: str) -> str:
    """The text with every secret masked. Idempotent: masked text stays as it is."""
    lowered = text.lower()
    there = [any(needle in lowered for needle in needles) for needles in _NEEDLES]
    for secret, number in _NUMBERED:
        if there[number]:
            text = secret.whole.sub(secret.mask, text)
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
        certain = len(text) if is_last else self._certain(text, at)
        clean: list[str] = []
        while True:
            if self._is_inside:
                at = self._secret.goes_on.match(text, at).end()  # type: ignore[union-attr]  # it may match nothing
                if not is_last and _is_undecided(text, at):
                    break
                self._is_inside = False
            match = self._secret.begins.search(text, at)
            if match is None or match.start() >= certain:
                clean.append(text[at:certain])
                at = max(at, certain)
                break
            clean += (text[at : match.start()], self._secret.mask(match))
            at, self._is_inside = match.end(), True
        before = max(0, at - 1)
        self._held, self._at = text[before:], at - before
        return "".join(clean)

    def _certain(self, text: str, at: int) -> int:
        """Where what may still be the beginning of a secret stands: whole lines are let go, but for a key's."""
        certain, unfinished = max(text.rfind("\n") + 1, len(text) - _FARTHEST), self._secret.unfinished
        found = None if unfinished is None else unfinished.search(text, max(at, len(text) - _FARTHEST))
        return certain if found is None else min(certain, found.start())


_ENDS = re.compile(r"[\\\"', \t]*+\Z")


def _is_undecided(text: str, at: int) -> bool:
    """Whether the piece that would go on with the secret may be cut in two: an escape, what stands between two."""
    return len(text) - at < _LONGEST_PIECE and _ENDS.match(text, at) is not None

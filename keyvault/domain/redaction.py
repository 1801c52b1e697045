r"""Redaction of secrets in text. A secret is found by the shape of its value or by the name of its field.

A mask keeps what support needs: the kind, the environment and the public key id; never a character of the
secret. Ids, types, counts and dates stay readable, also under a name such as `key_id`, `token_id`,
`idempotency_key`, `public_key` or `order_token`.

Each pattern matches a `head`, which stays, and enough of the secret to be certain. The rest of the secret follows at
any length. Only key strings, PEM private keys and name-value objects are matched across lines. A pattern that ends at a
quote never consumes the quote of a JSON string, so that a redacted JSON line stays valid JSON.

No group has a possessive quantifier: Python before 3.11.5 matches such groups wrongly (CPython issue 106052).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from keyvault.domain.ids import KEY_ID_DIGITS
from keyvault.domain.keystring import CHECKSUM_DIGITS, SECRET_DIGITS, SHAPED, SHAPED_HEAD, StringKind, StringScope
from keyvault.domain.plaintext import MASK

_MAX_LOOKBACK = 4096
"""Maximum length of the text that decides whether a secret begins, in characters."""

_MAX_JWT_HEADER = 3072
"""Maximum length of the header of a JWT that is recognized, in characters."""

_MAX_PIECE_LENGTH = 160
"""Maximum length of one repetition of `goes_on`, in characters."""


def _mask(match: re.Match[str]) -> str:
    return match["head"] + MASK


@dataclass(frozen=True)
class _Secret:
    """One pattern. `begins`: the head, and enough of the secret to be certain; `goes_on`: the rest of the secret.

    `needles`: a lower-cased text without any of them contains no such secret. `unfinished`, for a multi-line pattern:
    matches the end of a text in which a secret may have begun. Patterns are compiled when a text needs them, because
    all of them take longer than the rest of the imports of a short command.
    """

    begin_text: str
    goes_on_text: str
    flags: re.RegexFlag
    needles: tuple[str, ...]
    mask: Callable[[re.Match[str]], str]
    unfinished_text: str | None

    @cached_property
    def begins(self) -> re.Pattern[str]:
        return re.compile(self.begin_text, self.flags)

    @cached_property
    def goes_on(self) -> re.Pattern[str]:
        return re.compile(self.goes_on_text, re.ASCII)

    @cached_property
    def whole(self) -> re.Pattern[str]:
        return re.compile(self.begin_text + self.goes_on_text, self.flags)

    @cached_property
    def unfinished(self) -> re.Pattern[str] | None:
        return None if self.unfinished_text is None else re.compile(self.unfinished_text, self.flags)


def _secret(
    begins: str,
    goes_on: str,
    needles: tuple[str, ...],
    *,
    any_case: bool = False,
    mask: Callable[[re.Match[str]], str] = _mask,
    unfinished: str | None = None,
) -> _Secret:
    # ASCII, so that case-insensitive matching agrees with the lower-case needles.
    flags = re.ASCII | re.MULTILINE | (re.IGNORECASE if any_case else re.NOFLAG)
    return _Secret(begins, f"(?:{goes_on})*", flags, needles, mask, unfinished)


_BLANKS = r"[ \t]{0,64}"
_QUOTE = r"b?\\{0,16}[\"']"
# Between a name and its value. `_IS` may also end with the bracket of a list.
_IS_A = rf"{_BLANKS}(?:=>|[:=]){_BLANKS}"
_HEADER = r"(?:authorization|x[-_]api[-_]key|x[-_]service[-_]token|cookie)"
_HEADER_NEEDLES = ("authorization", "api-key", "api_key", "service-token", "service_token", "cookie")
_SECRET_KEYS = ("api", "private", "secret", "access", "signing", "encryption", "master", "session")
# The end of a secret member's, parameter's or variable's name. Order tokens and page tokens are not secret.
_MEMBER = (
    r"(?:passw(?:or)?d(?:[0-9]|[-_]?(?:confirm(?:ation)?|hash))?|passphrase|pwd|secret(?:[-_]?(?:value|id))?|credential"
    r"|session(?:[-_]?id)?|jwt|__secure-device"
    r"|(?<!order)(?<!order[-_])(?<!page)(?<!page[-_])token"
    rf"|(?:{'|'.join(_SECRET_KEYS)})[-_.]?key)"
)
_MEMBER_NEEDLES = (
    *("passw", "passphrase", "pwd", "secret", "credential", "session", "jwt", "token", "__secure-device"),
    *(f"{kind}{between}key" for kind in _SECRET_KEYS for between in ("", "-", "_", ".")),
)
_NAMED = rf"[\w.-]{{0,32}}(?:{_HEADER}|{_MEMBER})"
# Names whose strings are secret, but whose numbers are counts. A list named `credentials` holds kinds or ids.
_COLLECTIVE = rf"(?:passwords|credentials(?!\\{{0,16}}[\"']\]?{_IS_A}\[))"
_NAMED_STRING = rf"[\w.-]{{0,32}}(?:{_HEADER}|{_MEMBER}|{_COLLECTIVE})"
# The name of the device cookie on a site without HTTPS. Outside of cookies it is an ordinary word.
_DEVICE = r"(?<![\w.-])device"
_NAMED_NEEDLES = (*_MEMBER_NEEDLES, "authorization", "cookie")
_IS = rf"{_IS_A}\[?{_BLANKS}"
_NO_VALUE = r"(?!-?(?:null|none|true|false|nan|infinity)(?![^\s\"'\\&;,:[\]{}()]))"
_UNDERSCORE = r"(?:_|%(?:25){0,8}5[Ff])"
# The beginning of a word, also after a percent-encoded character, which ends with a letter or a digit.
_WORD = rf"(?:(?<![A-Za-z0-9])|{'|'.join(rf'(?<=%{percent}[0-9A-Fa-f][0-9A-Fa-f])' for percent in ('', '25', '2525'))})"
# An authentication scheme stays readable, and so does the public part of a secret, already masked or not.
_PUBLIC_PART = rf"(?:[a-z0-9]{{0,16}}{SHAPED_HEAD}|whsec{_UNDERSCORE}|hv[sbr]\.|sealed\.)(?=[0-9A-Za-z]|\*\*\*)"
_HANDLE = rf"(?:{_PUBLIC_PART}|(?!{_PUBLIC_PART}))"
_FIRST = rf"(?:(?:bearer|basic|apikey|digest|token)[ \t]{{1,64}})?{_HANDLE}"


def _json_string(depth: int) -> tuple[str, str]:
    """Return the quote of a string inside `depth` levels of JSON strings, and one piece of its content.

    A backslash of the innermost JSON appears as `escapes` backslashes. A quote of it appears after one backslash fewer.
    """
    escapes = 2**depth
    quote = rf"\\{{{escapes - 1}}}\"" if depth else '"'
    piece = rf"[^\"\\\r\n]|\\{{{2 * escapes}}}|\\{{{2 * escapes - 1}}}\"|\\{{{escapes}}}[^\"\\\r\n]"
    return quote, piece


def _quoted(depth: int) -> _Secret:
    """Match a JSON member and its string inside `depth` levels of JSON strings."""
    quote, piece = _json_string(depth)
    return _secret(
        rf"(?P<head>(?<!\\){quote}{_NAMED_STRING}{quote}\]?{_IS}b?{quote}{_FIRST})(?:{piece})",
        piece,
        _NAMED_NEEDLES,
        any_case=True,
    )


def _named_value(depth: int) -> _Secret:
    """Match `"name": "password", "value": "…"`, as in a HAR file, inside `depth` levels of JSON strings."""
    quote, piece = _json_string(depth)
    line_end = r"(?:\\{1,16}r)?(?:\\{1,16}n(?:\\{1,16}t){0,16})?" if depth else r"(?:\r?\n)?"
    is_string = rf"{quote}{_BLANKS}:{_BLANKS}{quote}"
    name = rf"(?<!\\){quote}name{is_string}(?:{_NAMED_STRING}|device){quote}{_BLANKS},{_BLANKS}"
    return _secret(
        rf"(?P<head>{name}{line_end}{_BLANKS}{quote}value{is_string}{_FIRST})(?:{piece})",
        piece,
        (*_NAMED_NEEDLES, "device"),
        any_case=True,
        unfinished=None if depth else rf"{name}\r?\n[^\n]*+\Z",
    )


def _mask_number(match: re.Match[str]) -> str:
    """Replace a number by a string, so that JSON stays valid."""
    return f"{match['head']}{match['quote']}{MASK}{match['quote']}"


# --- key strings over more than one line --------------------------------------------------------------------

# A soft line break (quoted-printable, shell), a line end (plain or escaped in JSON), the marks of a quoted mail, an
# indentation; or a terminal's color, escaped in JSON or in a repr. Bounded, so that a whole key fits within
# `_MAX_LOOKBACK`.
_LINE_BREAK = r"[ \t]{0,8}(?:=|\\{1,4})?[ \t]{0,2}(?:\r\n|\n|\r|(?:\\{1,4}r)?\\{1,4}n)(?:[ \t]{0,2}>){0,4}[ \t]{0,16}"
_ESCAPED_COLOR = r"\\{1,4}(?:u001[Bb]|x1[Bb]|033)\[[0-9;]{0,16}m"
_BREAK = rf"(?:{_LINE_BREAK}|{_ESCAPED_COLOR})"
_MAY_BREAK = f"(?:{_BREAK})?"
_DIGIT = "[0-9A-Za-z]"
_AFTER_KEY_ID = SECRET_DIGITS + CHECKSUM_DIGITS


def _broken(word: str) -> str:
    return "".join(_MAY_BREAK + letter for letter in word)


def _any_broken(words: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(_broken, words))})"


def _letters(words: Iterable[str]) -> list[str]:
    """Return a character class for each position of the words."""
    return [f"[{''.join(sorted(set(place)))}]" for place in zip(*words, strict=True)]


def _unfinished_key() -> str:
    """Match the end of a text that may be an incomplete key string, or a complete one whose end is undecided."""
    rest = r"\Z"
    places = [*_letters(StringKind), "_", *_letters(StringScope), "_", *[_DIGIT] * (KEY_ID_DIGITS + _AFTER_KEY_ID)]
    for place in reversed(places):
        piece = _MAY_BREAK + place
        rest = rf"(?:{piece}{rest}|(?!{piece})[ \t=\\rn\r\n>ux0-9Bb[;m]{{0,64}}\Z)"
    return f"_{rest}"


def _mask_broken(match: re.Match[str]) -> str:
    """Join the head to one line, for the patterns that follow."""
    return re.sub(_BREAK, "", match["head"]) + MASK


# --- key strings with percent-encoded letters and digits -----------------------------------------------------

_PERCENT = "%(?:25){0,8}"
_ANY_DIGIT = rf"(?:{_DIGIT}|{_PERCENT}(?:3[0-9]|[46][1-9A-Fa-f]|[57][0-9Aa]))"


def _any_encoded(words: Iterable[str]) -> str:
    """Match one of the words, each of its letters plain or percent-encoded."""
    return f"(?:{'|'.join(''.join(map(_encoded, word)) for word in words)})"


def _encoded(letter: str) -> str:
    code = "".join(f"[{digit.upper()}{digit}]" if digit.isalpha() else digit for digit in f"{ord(letter):x}")
    return f"(?:{letter}|{_PERCENT}{code})"


_ESCAPE = "\x1b"
# A terminal's color may split a name or a secret, so it is dropped first. The pattern includes incomplete colors before
# it: otherwise the remaining text could form a new color.
_COLOR = _secret(rf"(?P<head>)(?:{_ESCAPE}\[?[0-9;]{{0,16}}){{1,8}}m", r"(?!)", (_ESCAPE,), mask=lambda match: "")

_SECRETS = (
    _COLOR,
    # A key string of the right length, broken across lines. It comes first, because the other patterns end with the
    # line.
    _secret(
        rf"(?!_[a-z]{{3}}_[a-z]{{3}}_{_DIGIT}{{{KEY_ID_DIGITS + _AFTER_KEY_ID}}})"
        rf"(?P<head>_{_any_broken(StringKind)}{_MAY_BREAK}_{_any_broken(StringScope)}{_MAY_BREAK}_"
        rf"(?:{_MAY_BREAK}{_DIGIT}){{{KEY_ID_DIGITS}}})(?:{_MAY_BREAK}{_DIGIT}){{{_AFTER_KEY_ID}}}(?!{_DIGIT})",
        r"(?!)",
        ("\n", "\r", "\\n", "u001b", "x1b", "\\033"),
        mask=_mask_broken,
        unfinished=_unfinished_key(),
    ),
    # A PEM private key (RFC 7468), also with JSON escapes. It comes before the patterns that end with the line. A
    # hyphen inside belongs to a header (RFC 1421); five of them end the key.
    _secret(
        r"(?P<head>-----BEGIN (?:[A-Z0-9]{1,16} ){0,3}PRIVATE KEY-----)",
        r"[A-Za-z0-9+/=:,.*> \t\r\n]|-(?=[A-Za-z0-9])|\\{1,16}(?:[nrt/]|u00[0-9A-Fa-f]{2})",
        ("private key",),
    ),
    # Webhook secrets; the prefix `whsec_` is public.
    _secret(
        rf"(?P<head>{_WORD}whsec{_UNDERSCORE})(?:[A-Za-z0-9+/=_%-]|\\{{1,16}}/){{8}}",
        r"[A-Za-z0-9+/=_%-]|\\{1,16}/",
        ("whsec",),
    ),
    # A credential header in an HTTP dump: the rest of the line.
    _secret(
        rf"(?P<head>^(?:[<>] )?[\w-]{{0,32}}{_HEADER}{_BLANKS}:{_BLANKS}{_FIRST})\S",
        r"[^\r\n]",
        _HEADER_NEEDLES,
        any_case=True,
    ),
    # In JSON, a list of strings: all of it.
    _secret(
        rf"(?P<head>(?<!\\)\"{_NAMED_STRING}\"{_BLANKS}:{_BLANKS}\[{_BLANKS}\"{_FIRST})(?:[^\"\\\r\n]|\\[^\r\n])",
        rf"[^\"\\\r\n]|\\[^\r\n]|\"{_BLANKS},{_BLANKS}\"",
        _NAMED_NEEDLES,
        any_case=True,
    ),
    # In JSON, also nested in strings of JSON: the quoted string, with its escapes.
    *map(_quoted, range(4)),
    # In JSON, an object with a name and a value.
    *map(_named_value, range(4)),
    # In the repr of a Python dictionary, such as a WSGI environ: the quoted string.
    _secret(
        rf"(?P<head>(?<!\\)'{_NAMED_STRING}'\]?{_IS}b?'{_FIRST})(?:[^'\"\\\r\n]|\\[^\r\n])",
        r"[^'\"\\\r\n]|\\[^\r\n]",
        _NAMED_NEEDLES,
        any_case=True,
    ),
    # A number whose name is a secret's.
    _secret(
        rf"(?P<head>(?<!\\)(?P<quote>\\{{0,16}}[\"']){_NAMED}(?P=quote)\]?{_IS})-?[0-9]",
        r"[0-9.eE+-]",
        _NAMED_NEEDLES,
        any_case=True,
        mask=_mask_number,
    ),
    # A name-value pair in a list of headers, or in any tuple.
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
    # A variable or a parameter: quoted, or up to its delimiter in a form or a shell. The quote may end a string of
    # JSON, so none of `,:]}` may follow it.
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
    # The device cookie on a site without HTTPS.
    _secret(
        rf"(?P<head>{_DEVICE}={_NO_VALUE})[^\s\"'\\&;,:=<>[\]{{}}()]",
        r"[^\s\"'\\&;,]",
        ("device=",),
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
    # An authentication scheme without a header. The value must look random, unlike "basic responsibilities".
    _secret(
        rf"(?P<head>\b(?i:bearer|basic)[ \t]{{1,64}}{_HANDLE})"
        r"(?=[A-Za-z./-]{0,64}[0-9_~+=]|[A-Za-z./-]{0,64}[a-z][A-Z])[A-Za-z0-9._~+/=-]{16}",
        r"[A-Za-z0-9._~+/=-]",
        ("bearer", "basic"),
    ),
    # A sealed secret as text: `sealed.` and base64url parts.
    _secret(
        rf"(?P<head>{_WORD}sealed\.)(?=[a-z_-]{{0,64}}[0-9A-Z])[A-Za-z0-9_-]{{8}}", r"[A-Za-z0-9_.-]", ("sealed.",)
    ),
    # Vault and OpenBao tokens (service, batch, recovery), also in the format before Vault 1.10.
    _secret(
        rf"(?P<head>{_WORD}(?:hv[sbr]\.|[sbr]\.(?=[a-z]{{0,64}}[0-9A-Z])))[A-Za-z0-9_-]{{20}}",
        r"[A-Za-z0-9_-]",
        ("s.", "b.", "r."),
    ),
    # A JWT (RFC 7519): two parts that begin like a JSON object in base64url, and the rest. The first part has no second
    # beginning, so that the time is proportional to the length of the text.
    _secret(
        rf"(?P<head>eyJ)(?:(?!eyJ)[A-Za-z0-9_-]){{1,{_MAX_JWT_HEADER}}}\.eyJ[A-Za-z0-9_-]",
        r"[A-Za-z0-9_.-]",
        ("eyj",),
    ),
    # The password of a database or broker URL, up to the last @ of the authority.
    _secret(
        r"(?P<head>://[^\s:/@\"\\]{0,255}:)[^\s/@\"\\]{1,512}(?:@[^\s/@\"\\]{1,512}){0,3}(?=@)",
        r"(?!)",
        ("://",),
    ),
    # A key string with percent-encoded letters and digits, which need no escape.
    _secret(
        rf"(?P<head>{_encoded('_')}{_any_encoded(StringKind)}{_encoded('_')}{_any_encoded(StringScope)}{_encoded('_')}"
        rf"{_ANY_DIGIT}{{{KEY_ID_DIGITS}}}){_ANY_DIGIT}",
        _ANY_DIGIT,
        ("%",),
    ),
    # Key strings anywhere. Last, because a header's name may directly precede one.
    _secret(SHAPED.pattern, _DIGIT, tuple(StringKind)),
)


_NEEDLES = tuple(dict.fromkeys(needle for secret in _SECRETS for needle in secret.needles))
"""The needles of all patterns, each once. Most log lines contain none."""


def redact(text: str) -> str:
    """Mask every secret in a text, and drop the colors of a terminal. Idempotent: masked text stays unchanged."""
    if _ESCAPE in text:
        text = _COLOR.whole.sub("", text)
    lowered = text.lower()
    present = {needle for needle in _NEEDLES if needle in lowered}
    if present:
        for secret in _SECRETS:
            if not present.isdisjoint(secret.needles):
                text = secret.whole.sub(secret.mask, text)
    return text


def redact_stream(chunks: Iterable[str]) -> Iterator[str]:
    """Redact text of any size in bounded memory. The result equals `redact` on the whole text, for any chunking.

    Yields complete lines as they arrive.
    """
    passes = [_StreamMask(secret) for secret in _SECRETS]
    for chunk in chunks:
        if text := _feed_all(passes, chunk, is_last=False):
            yield text
    if text := _feed_all(passes, "", is_last=True):
        yield text


def _feed_all(passes: Iterable["_StreamMask"], text: str, *, is_last: bool) -> str:
    for stream_mask in passes:
        text = stream_mask.feed(text, is_last=is_last)
        if not text and not is_last:
            break  # No text is left for the following patterns.
    return text


class _StreamMask:
    """One pattern applied to a stream. Holds back a possible beginning of a secret, and one character before it."""

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
        """Return the offset from which a secret may still begin. Complete lines are final, except in a key string."""
        certain, unfinished = max(text.rfind("\n") + 1, len(text) - _MAX_LOOKBACK), self._secret.unfinished
        found = None if unfinished is None else unfinished.search(text, max(at, len(text) - _MAX_LOOKBACK))
        return certain if found is None else min(certain, found.start())


_ENDS = re.compile(r"(?:[\\\"', \t-]*+(?:u[0-9A-Fa-f]{0,3})?|%[0-9A-Fa-f]{0,17}+)\Z")


def _is_undecided(text: str, at: int) -> bool:
    """Return whether a chunk boundary may split the next piece of the secret: an escape, or a separator."""
    return len(text) - at < _MAX_PIECE_LENGTH and _ENDS.match(text, at) is not None

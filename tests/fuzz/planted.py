"""Secrets planted in log lines of many shapes. The redacted line must show no part of them."""

import base64
import json
import logging
import re
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pprint import pformat
from random import Random
from urllib.parse import quote, unquote, urlencode

from keyvault.domain.keystring import mint_keystring
from keyvault.domain.redaction import redact
from keyvault.project.logs import RedactedJSONFormatter
from tests.domain.minting import ALPHANUMERIC, SORTS

WINDOW = 6
"""Number of consecutive characters of a secret that count as shown. Fewer coincide by chance in 100,000 lines."""

_PUNCTUATION = "-._~+/=!@#$^*"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Secret:
    """`hidden`: the part of the text that must not be shown. `name`: the name of its field or header."""

    text: str
    hidden: str
    name: str


@dataclass(frozen=True)
class UnredactedSecret:
    """A secret that redaction has left in a line."""

    seed: int
    shape: str
    secret: Secret
    line: str

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.shape}: {self.secret.hidden!r} of {self.secret.name} is in {self.line!r}"


# --- secrets ------------------------------------------------------------------------------------------------


def _key_string(random: Random) -> Secret:
    key_prefix = random.choice(["kv", "a", "acme2"])
    text = mint_keystring(key_prefix, *random.choice(SORTS), random.randbytes).text.reveal()
    return Secret(text, text[text.rindex("_") + 17 :], random.choice(["key", "value", "x", "api_key", "X-Api-Key"]))


def _webhook_secret(random: Random) -> Secret:
    hidden = base64.b64encode(random.randbytes(32)).decode()
    return Secret(f"whsec_{hidden}", hidden, random.choice(["secret", "signing_secret", "value"]))


def _vault_token(random: Random) -> Secret:
    hidden = "".join(random.choices(ALPHANUMERIC, k=90))
    return Secret(f"hv{random.choice('sbr')}.{hidden}", hidden, random.choice(["token", "VAULT_TOKEN", "value"]))


def _jwt(random: Random) -> Secret:
    header, payload = (
        base64.urlsafe_b64encode(json.dumps({name: random.randbytes(24).hex()}).encode()).decode().rstrip("=")
        for name in ("kid", "sub")
    )
    hidden = base64.urlsafe_b64encode(random.randbytes(32)).decode().rstrip("=")
    return Secret(f"{header}.{payload}.{hidden}", hidden, random.choice(["jwt", "id_token", "value"]))


def _password(random: Random) -> Secret:
    """A secret that only its field's name identifies."""
    first = random.choice(string.ascii_letters)
    hidden = first + "".join(random.choices(ALPHANUMERIC + _PUNCTUATION, k=random.randint(11, 40)))
    names = ["password", "client_secret", "api_key", "access-token", "X-Api-Key", "X-Service-Token", "secret_id"]
    return Secret(hidden, hidden, random.choice(names))


_SHAPED = (_key_string, _key_string, _webhook_secret, _vault_token, _jwt)
_ALL = (*_SHAPED, _password)


# --- shapes -------------------------------------------------------------------------------------------------


def _record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    record = logging.LogRecord("tests", logging.INFO, __file__, 1, message, arguments, None)
    record.__dict__.update(extra)
    return record


def _with_traceback(error: Exception, cause: Exception | None = None) -> logging.LogRecord:
    try:
        raise error from cause
    except type(error):
        return logging.LogRecord("tests", logging.ERROR, __file__, 1, "it failed", (), sys.exc_info())


def _with_note(error: Exception, note: str) -> logging.LogRecord:
    error.add_note(note)
    return _with_traceback(error)


def _wrap(random: Random, text: str) -> str:
    """Break a line, as mail programs, terminals and shells do."""
    width, end = random.randint(8, 40), random.choice(["\n", "\r\n", "\n    ", "=\n", "\\\n", "\n> "])
    return end.join(text[at : at + width] for at in range(0, len(text), width))


def _color(random: Random) -> str:
    return f"\x1b[{random.choice(['0', '1;31', '38;5;208', ''])}m"


def _split_by_color(random: Random, text: str) -> str:
    at = sorted(random.sample(range(1, len(text)), 3))
    pieces = [text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True)]
    return _color(random).join(pieces)


def _escape_some(random: Random, text: str) -> str:
    """Percent-encode letters and digits that need no escape, once or twice."""
    percent = random.choice(["%", "%25"])
    share = random.choice([0.1, 0.5, 1.0])
    return "".join(f"{percent}{ord(each):02X}" if random.random() < share else quote(each, safe="") for each in text)


def _environ_name(name: str) -> str:
    return "HTTP_" + name.upper().replace("-", "_")


Shape = Callable[[Random, Secret], "str | logging.LogRecord"]

ANYWHERE: Mapping[str, Shape] = {
    "f-string": lambda random, secret: f"sent {secret.text} to the gateway",
    "argument": lambda random, secret: _record("sent %s after %d ms", secret.text, 12),
    "repr": lambda random, secret: _record("sent %r", secret.text),
    "bytes repr": lambda random, secret: _record("sent %r", secret.text.encode()),
    "list in a dict": lambda random, secret: _record("sent %s", {"a": [1, {"b": (secret.text, None)}]}),
    "extra": lambda random, secret: _record("sent", subject=[secret.text]),
    "URL path": lambda random, secret: f"GET /v1/{quote(secret.text, safe='')}/x HTTP/1.1 404",
    "URL query": lambda random, secret: f"GET /?a=1&{urlencode({'q': secret.text})}&b=2 HTTP/1.1 200",
    "URL query, escaped twice": lambda random, secret: f"GET /?next={quote(urlencode({'q': secret.text}), safe='')}",
    "traceback": lambda random, secret: _with_traceback(ValueError(f"cannot read {secret.text}")),
    "traceback with a cause": lambda random, secret: _with_traceback(RuntimeError("x"), KeyError(secret.text)),
    "exception note": lambda random, secret: _with_note(ValueError("x"), f"sent {secret.text}"),
    "exception arguments": lambda random, secret: _record("failed: %r", OSError(5, "denied", secret.text)),
    "colored": lambda random, secret: f"{_color(random)}sent {_color(random)}{secret.text}{_color(random)} ok",
    "celery arguments": lambda random, secret: (
        f"Task keyvault.tasks.x[4b1f] received: args=({secret.text!r}, 1) kwargs={{'to': {secret.text!r}}}"
    ),
    "SQL parameters": lambda random, secret: (
        f"(0.003) UPDATE keyvault_key SET label = %s WHERE id = %s; args=({secret.text!r}, 7); alias=default"  # noqa: S608  a line of a log
    ),
    "SQL literal": lambda random, secret: f"INSERT INTO t (a, b) VALUES (1, '{secret.text}'), (2, NULL)",  # noqa: S608  likewise
    "PostgreSQL detail": lambda random, secret: f"DETAIL:  Failing row contains (7, {secret.text}, null, 2026-11-23).",
    "HTML": lambda random, secret: f'<input type="text" value="{secret.text}"><p>{secret.text}</p>',
}
"""Shapes in which only the value identifies the secret."""

NAMED: Mapping[str, Shape] = {
    "dict": lambda random, secret: _record("sent %s", {"a": 1, secret.name: secret.text, "b": None}),
    "keyword": lambda random, secret: f"connect(host='db', {secret.name.replace('-', '_')}={secret.text!r}, port=5432)",
    "JSON": lambda random, secret: json.dumps({"a": 1, secret.name: secret.text, "b": "c"}),
    "JSON, indented": lambda random, secret: json.dumps({"a": {secret.name: secret.text}, "b": "c"}, indent=2),
    "JSON in JSON": lambda random, secret: json.dumps({"body": json.dumps({secret.name: secret.text, "b": "c"})}),
    "JSON bytes": lambda random, secret: _record("body %r", json.dumps({secret.name: secret.text}).encode()),
    "form": lambda random, secret: f"a=1&{urlencode({secret.name: secret.text})}&b=2",
    "header dump": lambda random, secret: (
        f"POST / HTTP/1.1\r\nHost: a\r\nX-Api-Key: {secret.text}\r\nAuthorization: Bearer {secret.text}\r\n\r\n{{}}"
    ),
    "headers as pairs": lambda random, secret: _record(
        "%r", [(b"host", b"a"), (b"x-api-key", secret.text.encode()), (b"accept", b"*/*")]
    ),
    "WSGI environ": lambda random, secret: _record(
        "%s", pformat({_environ_name("X-Api-Key"): secret.text, "wsgi.version": (1, 0)}, width=200)
    ),
    "curl": lambda random, secret: f"curl -sS -H 'X-Api-Key: {secret.text}' https://keys.example/v1/keys/verify",
    "environment variable": lambda random, secret: (
        f"export {secret.name.upper().replace('-', '_')}={secret.text}\nPATH=/"
    ),
    "YAML": lambda random, secret: f"a: 1\n  {secret.name}: {secret.text}\nb: c\n",
    "Basic authentication": lambda random, secret: (
        "Authorization: Basic " + base64.b64encode(f"user{'x' * random.randint(0, 2)}:{secret.text}".encode()).decode()
    ),
    "database URL": lambda random, secret: f"postgres://keyvault:{quote(secret.text, safe='')}@db.example/keyvault",
}
"""Shapes with the name of the secret. A password, which has no shape of its own, is planted in these only."""

KEY_STRINGS: Mapping[str, Shape] = {
    "several lines": lambda random, secret: f"key:\n{_wrap(random, secret.text)}\n\nend",
    "several lines in JSON": lambda random, secret: json.dumps({"text": f"{_wrap(random, secret.text)}\n"}),
    "split by ANSI": lambda random, secret: f"sent {_split_by_color(random, secret.text)} ok",
    "split by ANSI, repr": lambda random, secret: _record("sent %r", _split_by_color(random, secret.text)),
    "split by ANSI, JSON": lambda random, secret: json.dumps({"text": _split_by_color(random, secret.text)}),
    "percent-encoded": lambda random, secret: f"GET /x?q={_escape_some(random, secret.text)}&b=1",
}
"""Shapes that change the secret itself. Only this service's own keys and tokens are found in them."""

SHAPES: list[tuple[str, Shape, tuple[Callable[[Random], Secret], ...]]] = [
    *((name, shape, _SHAPED) for name, shape in ANYWHERE.items()),
    *((name, shape, _ALL) for name, shape in NAMED.items()),
    *((name, shape, (_key_string,)) for name, shape in KEY_STRINGS.items()),
]


# --- the search ---------------------------------------------------------------------------------------------


def find_leaks(seeds: Iterable[int]) -> Iterator[UnredactedSecret]:
    """Plant one secret for each seed, in the shapes in turn, and yield those that redaction leaves."""
    formatter = RedactedJSONFormatter()
    for seed in seeds:
        name, shape, kinds = SHAPES[seed % len(SHAPES)]
        random = Random(seed)  # noqa: S311  repeatable, and no real secret
        secret = random.choice(kinds)(random)
        planted = shape(random, secret)
        lines = []
        if isinstance(planted, str):
            # Attachments of support requests are redacted as text, without the formatter.
            lines.append(redact(planted))
            planted = _record(planted)
        lines.append(formatter.format(planted))
        for line in lines:
            if _is_shown(secret.hidden, line):
                yield UnredactedSecret(seed, name, secret, line)
                break


def _is_shown(hidden: str, line: str) -> bool:
    """Return whether a reader of the line learns a part of the secret, also after decoding the line."""
    joined = re.sub(r"[\s\\=>]|\\[nr]", "", _ANSI.sub("", line.replace("\\u001b", "\x1b").replace("\\x1b", "\x1b")))
    texts = (line, joined, unquote(unquote(line)))
    if any(hidden[at : at + WINDOW] in text for text in texts for at in range(len(hidden) - WINDOW + 1)):
        return True
    return any(piece in line for piece in _encoded_pieces(hidden))


def _encoded_pieces(hidden: str) -> Iterator[str]:
    """Yield windows of the secret in base64, for each of the three positions at which it may begin."""
    for shift in range(3):
        encoded = base64.b64encode(b"x" * shift + hidden.encode()).decode().rstrip("=")[4:-4]
        yield from (encoded[at : at + 8] for at in range(len(encoded) - 7))

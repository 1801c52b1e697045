"""Unusual requests: `generate(seed)` makes the same one for the same seed and keys."""

import random
from collections.abc import Callable, Mapping

from .oracle import Known, Sent, with_checksum

Header = tuple[bytes, bytes]

ORDER = "0" * 22
PATHS = (
    ("GET", f"/merchants/orders/{ORDER}"),
    ("POST", "/merchants/orders"),
    ("GET", "/client/configuration"),
    ("POST", "/customers/c-1/access-tokens"),
    ("DELETE", f"/customers/access-tokens/{ORDER}"),
    ("GET", "/customers/me"),
    ("POST", "/credentials/acknowledge"),
    ("POST", "/credentials/revoke-self"),
)
WEIGHTS = (2, 1, 1, 1, 1, 3, 2, 1)
ELSEWHERE = (
    "/sandbox/nowhere",
    "/production/merchants",
    "/sandbox/credentials/acknowledge/x",
    "/nowhere",
    "/v1/nowhere",
)
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW")
SPELLINGS = (b"X-Api-Key", b"X-Api-Key", b"X-Api-Key", b"x-api-key", b"X-API-KEY", b"x-aPI-kEY")
ORIGINS = (b"https://shop.example", b"null", b"", b"http://127.0.0.1")
QUERIES = (b"a=b", b"", b"x=%2f..%ff", b"key=kv_prv_sbx_short", b"?", b"x=\xc3\xa9", b"a=1;b=2&a=3", b"x-api-key=a")
NOISE: tuple[Header, ...] = (
    (b"Cookie", b"session=0123456789abcdef"),
    (b"X-Forwarded-For", b"192.0.2.1, 198.51.100.2"),
    (b"X-Forwarded-Host", b"evil.example"),
    (b"X-Original-URI", b"/sandbox/client/configuration"),
    (b"X-Merchant-Id", b"globex"),
    (b"X-Request-Id", b"mine"),
    (b"Accept", b"text/html"),
    (b"X-HTTP-Method-Override", b"DELETE"),
    (b"User-Agent", b"\xff\xfe fuzz"),
    (b"X-Service-Token", b"x"),
)


def generate(seed: int, known: Mapping[str, Known]) -> Sent:
    draw = random.Random(seed)  # noqa: S311  repeatable on purpose
    texts = sorted(known, key=lambda text: (known[text].kind, known[text].environment, known[text].standing))
    method, path = _line(draw)
    for _ in range(draw.choices((0, 1, 2), (65, 27, 8))[0]):
        path = draw.choice(MUTATIONS)(draw, path)
    target = path + _query(draw, texts)
    # A good key would revoke itself there, and later requests would be judged differently.
    if b"revoke-self" in target:
        texts = [text for text in texts if known[text].standing == "revoked"]
    headers = [*_key_headers(draw, texts, path), *_bearers(draw, texts)]
    if draw.random() < 0.2:
        headers.append((b"Origin", draw.choice(ORIGINS)))
    headers += draw.sample(NOISE, draw.choices((0, 1, 2), (60, 30, 10))[0])
    draw.shuffle(headers)
    return Sent(method, target, tuple(headers))


def _line(draw: random.Random) -> tuple[bytes, bytes]:
    method, path = draw.choices(PATHS, WEIGHTS)[0]
    path = f"/{draw.choices(('sandbox', 'production'), (80, 20))[0]}{path}"
    if draw.random() < 0.12:
        path = draw.choice(ELSEWHERE)
    elif draw.random() < 0.05:
        method, path = "GET", "/v1/credentials"
    if draw.random() < 0.2:
        method = draw.choice(METHODS)
    return method.encode(), path.encode()


def _query(draw: random.Random, texts: list[str]) -> bytes:
    if draw.random() < 0.7:
        return b""
    if draw.random() < 0.3:
        key = draw.choice(texts).encode()
        escaped = draw.choice((key, key[:40], key.replace(b"_", b"%5F"), key.replace(b"_", b"%255f")))
        return draw.choice((b"?k=", b"?", b"?a=b&x=")) + escaped
    return b"?" + draw.choice(QUERIES)


# --- credentials ------------------------------------------------------------------------------------------


def _value(draw: random.Random, texts: list[str], path: bytes) -> bytes:
    """Return a real key in half of the cases, mostly one of the environment, and else a text that resembles one."""
    scope = "_prd_" if path.startswith(b"/production") else "_sbx_"
    text = draw.choice([text for text in texts if scope in text] or texts if draw.random() < 0.8 else texts)
    if draw.random() < 0.6:
        return text.encode()
    kind, scope, digits = draw.choice(("prv", "pub")), draw.choice(("sbx", "prd")), _random_digits(draw, 59)
    made = draw.choice(
        (
            with_checksum(text[:-7] + ("0" if text[-7] != "0" else "1")),  # the wrong secret of a key that exists
            with_checksum(f"kv_{kind}_{scope}_{digits}"),  # an unknown key
            text[:-1] + ("0" if text[-1] != "0" else "1"),  # a typing error
            with_checksum(f"kv_cat_{scope}_{digits}"),
            with_checksum(f"kv_svc_all_{digits}"),
            with_checksum(f"kv_{kind}_all_{digits}"),
            with_checksum(f"xy_{kind}_{scope}_{digits}"),
            text.upper(),
            text.swapcase(),
            text[:-1],
            f"{text}0",
            f"{text} {text}",
            f'"{text}"',
            f"Bearer {text}",
            text[-65:],
            "",
            "  \t ",
            "null",
            "kv_prv_sbx_",
            "{}[]<>%00%0d%0a'--",
            "a" * 5000,
        )
    ).encode()
    return draw.choice((made, made, made, made + b"\xe9", b"\xc3\xa9", b"\xff" + made, b" \t" + made + b"\t"))


def _key_headers(draw: random.Random, texts: list[str], path: bytes) -> list[Header]:
    name, value = draw.choice(SPELLINGS), _value(draw, texts, path)
    shape = draw.choices(
        ("one", "none", "twice", "comma", "underscore", "both"),
        (70, 6, 7, 4, 5, 8),
    )[0]
    if shape == "none":
        return []
    if shape == "twice":
        return [(name, value), (draw.choice(SPELLINGS), draw.choice((value, b"", _value(draw, texts, path))))]
    if shape == "comma":
        return [(name, draw.choice((value + b",", b"," + value, value + b", " + value)))]
    if shape == "underscore":
        return [(draw.choice((b"X_Api_Key", b"x_api_key", b"X-Api_Key", b"X_API-KEY")), value)]
    if shape == "both":
        return [(name, value), (draw.choice((b"X_Api_Key", b"X_API_KEY")), draw.choice(texts).encode())]
    return [(name, value)]


def _bearers(draw: random.Random, texts: list[str]) -> list[Header]:
    if draw.random() < 0.6:
        return []
    token = with_checksum(f"kv_cat_sbx_{_random_digits(draw, 59)}").encode()
    values = (b"Bearer " + token, b"bearer  " + token, b"Bearer", b"", b"Basic dTpw", token, b"Bearer \xff")
    header = (b"Authorization", draw.choice((*values, b"Bearer " + draw.choice(texts).encode())))
    return draw.choices(
        ([header], [header, header], [(b"Authorization", header[1] + b", x")], [(b"Authorization_", header[1])]),
        (70, 10, 10, 10),
    )[0]


def _random_digits(draw: random.Random, count: int) -> str:
    return "".join(draw.choices("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", k=count))


# --- paths ------------------------------------------------------------------------------------------------

Mutation = Callable[[random.Random, bytes], bytes]


def _insert(*what: bytes, before: bytes = b"") -> Mutation:
    """Insert one of these at a random place, or before a random occurrence of `before`."""

    def mutate(draw: random.Random, path: bytes) -> bytes:
        places = [at for at in range(1, len(path) + 1) if path.startswith(before, at)] or [len(path)]
        at = draw.choice(places)
        return path[:at] + draw.choice(what) + path[at:]

    return mutate


def _escape(draw: random.Random, path: bytes) -> bytes:
    at = draw.randrange(1, len(path)) if len(path) > 1 else 0
    return path[:at] + draw.choice((b"%%%02x", b"%%%02X", b"%%25%02x")) % path[at] + path[at + 1 :]


def _escape_slash(draw: random.Random, path: bytes) -> bytes:
    at = draw.choice([at for at in range(1, len(path)) if path.startswith(b"/", at)] or [len(path)])
    return path[:at] + draw.choice((b"%2f", b"%2F", b"%5c", b"%252f")) + path[at + 1 :]


def _change_case(draw: random.Random, path: bytes) -> bytes:
    at = draw.randrange(1, len(path)) if len(path) > 1 else 0
    return path[:at] + path[at : at + 1].swapcase() + path[at + 1 :]


MUTATIONS: tuple[Mutation, ...] = (
    _escape,
    _escape_slash,
    _change_case,
    _insert(b"/", before=b"/"),
    _insert(b"/..", b"/.", b"/...", b"/sandbox/..", before=b"/"),
    _insert(b";x", b";", b";jsessionid=1", before=b"/"),
    _insert(b"%ff", b"%c3%28", b"%00", b"%20", b"%", b"%zz"),
    _insert(b"\xff", b"\xc3\xa9", b"\xe2\x80\xae"),
    _insert(b"#x", b"#"),
    _insert(b"a" * 2000),
    _insert(b"/", b"/x", b"//", b".json", b"*", b"@", b"|", b"{}"),
)

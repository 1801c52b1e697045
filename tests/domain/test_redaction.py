"""Secrets are masked in every form that they have in logs and support attachments."""

import io
import json
import random
import re
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice, pairwise, product
from pprint import pformat
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keyvault.domain import redaction
from keyvault.domain.keystring import checksum
from keyvault.domain.plaintext import MASK
from keyvault.domain.redaction import redact, redact_stream

from .minting import ALPHANUMERIC, SORTS, keystrings, mint

KEY = mint(seed="a key")
HANDLE = KEY[:27]
SECRET = KEY[27:]
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
OPAQUE = "hunter2-hunter2"
"""A secret that only the header's name identifies."""

NAMES = ["Authorization", "authorization", "X-Api-Key", "x-api-key", "X_API_KEY", "X-Service-Token"]

RENDERINGS: dict[str, Callable[[str, str], str]] = {
    "dump of the wire": lambda name, value: f"GET / HTTP/1.1\r\nHost: a\r\n{name}: {value}\r\nAccept: */*\r\n\r\n",
    "curl -v": lambda name, value: f"> GET / HTTP/1.1\n> {name}: {value}\n> Accept: */*\n",
    "no blank": lambda name, value: f"{name}:{value}\n",
    "many blanks": lambda name, value: f"{name} : \t  {value}  \n",
    "curl, single quotes": lambda name, value: f"curl -H '{name}: {value}' -H 'Accept: */*' http://a/",
    "curl, double quotes": lambda name, value: f'curl --header "{name}: {value}" http://a/',
    "JSON": lambda name, value: json.dumps({"a": 1, name: value, "b": "c"}),
    "compact JSON": lambda name, value: json.dumps({"a": 1, name: value, "b": "c"}, separators=(",", ":")),
    "indented JSON": lambda name, value: json.dumps({"a": 1, name: value, "b": "c"}, indent=2),
    "JSON with lists": lambda name, value: json.dumps({"headers": {name: [value]}, "b": "c"}),
    "JSON pairs": lambda name, value: json.dumps([["a", "b"], [name, value], ["c", "d"]]),
    "JSON in JSON": lambda name, value: json.dumps({"body": json.dumps({name: value, "b": "c"}), "d": "e"}),
    "JSON thrice": lambda name, value: json.dumps(json.dumps(json.dumps({name: value, "b": "c"}))),
    "wire in JSON": lambda name, value: json.dumps({"sent": f"GET /\r\n{name}: {value}\r\nAccept: x", "b": "c"}),
    "wire in a repr": lambda name, value: repr(f"GET /\r\n{name}: {value}\r\nAccept: x".encode("latin-1", "replace")),
    "curl in JSON": lambda name, value: json.dumps({"ran": f"curl -H '{name}: {value}' http://a/", "b": "c"}),
    "WSGI environ": lambda name, value: repr({"HTTP_" + name.upper().replace("-", "_"): value, "wsgi.x": (1, 0)}),
    "pprint of an environ": lambda name, value: pformat(
        {"HTTP_" + name.upper().replace("-", "_"): value, "x": "y"}, width=200
    ),
    "Python repr": lambda name, value: repr({name: value, "b": "c"}),
    "pairs of a repr": lambda name, value: repr([("a", "b"), (name, value), ("c", "d")]),
    "pairs of bytes": lambda name, value: repr([(b"a", b"b"), (name.encode(), value.encode("latin-1", "replace"))]),
    "call": lambda name, value: f"request.headers.set({name!r}, {value!r})",
    "assignment": lambda name, value: f"request.headers[{name!r}] = {value!r}",
    "keyword": lambda name, value: f"{name}={value}",
    "Ruby hash": lambda name, value: f'{{"{name}" => "{value}", "b" => "c"}}',
    "YAML": lambda name, value: f'{name}: "{value}"\nb: c\n',
    "Go map": lambda name, value: f"map[Accept:[*/*] {name}:[{value}]]",
    "in prose": lambda name, value: f"we sent {name}: {value}\nand got 401",
}

# What a header's value may be made of: here without quotes, commas and backslashes at the beginning, since
# no credential has them there.
OPENING = ALPHANUMERIC + "-._~+/="
opaque = st.builds(str.__add__, st.sampled_from(OPENING), st.text(OPENING + "@#$&!*", min_size=7, max_size=40)).filter(
    lambda value: value.lower() not in {"null", "none", "true", "false"}
)


def leaks(value: str, text: str) -> bool:
    """Whether any five consecutive characters of it are readable."""
    return any(value[at : at + 5] in text for at in range(len(value) - 4))


# --- key strings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sort", SORTS, ids="_".join)
@pytest.mark.parametrize("key_prefix", ["kv", "a", "acme2", "a123456789abcdef"])
@pytest.mark.parametrize("is_checksum_right", [True, False], ids=["right checksum", "wrong checksum"])
def test_redact_key_string_of_any_kind_shows_its_handle_only(
    sort: tuple[str, str], key_prefix: str, is_checksum_right: bool
) -> None:
    """Keys of all four kinds and any key prefix, with any checksum: the rest is public, and enough for support."""
    text = mint(*sort, key_prefix=key_prefix)  # type: ignore[arg-type]  # of its two types
    if not is_checksum_right:
        text = text[:-1] + ("A" if text[-1] != "A" else "B")
        assert checksum(text[:-6]) != text[-6:]
    handle = text[: text.rindex("_") + 17]
    assert redact(f"key={text};") == f"key={handle}{MASK};"


@given(keystrings, st.integers(1, 48))
def test_redact_key_string_cut_short_shows_no_digit_of_its_secret(text: str, cut: int) -> None:
    """If a logger cuts a line in the middle of a secret, the remaining half is masked, too."""
    handle = text[: text.rindex("_") + 17]
    assert redact(text[:-cut]) == handle + MASK


@given(keystrings, st.text(ALPHANUMERIC, min_size=1, max_size=2000))
def test_redact_key_string_glued_to_more_digits_shows_none_of_them(text: str, more: str) -> None:
    handle = text[: text.rindex("_") + 17]
    assert redact(f"{text}{more} end") == f"{handle}{MASK} end"


@given(st.text(max_size=40), keystrings, st.text(max_size=40))
@example("%", mint(), "%")
@example("Bearer ", mint(), "")
@example("kv_prv_sbx_", mint(), "")
@example(mint() + "_", mint(), mint())
def test_redact_key_string_in_any_text_leaks_nothing(before: str, text: str, after: str) -> None:
    """A secret is masked between any other characters."""
    secret = text[text.rindex("_") + 17 :]
    assert secret[:8] not in redact(before + text + after)


@pytest.mark.parametrize(
    "escape", ["%5F", "%5f", "%255F", "%25255f", "%" + "25" * 8 + "5F", "\\u005f", "\\u005F", "\\\\u005f"]
)
def test_redact_key_string_escaped_in_a_url_or_in_json_is_masked(escape: str) -> None:
    """Each hop may escape an escaped text again; the secret's own digits need no escape."""
    assert redact(f"GET /a?key={KEY.replace('_', escape)} 200") == f"GET /a?key={HANDLE.replace('_', escape)}*** 200"


@pytest.mark.parametrize("percent", ["%", "%25", "%" + "25" * 8])
@pytest.mark.parametrize("places", [slice(0, None), slice(40, 41), slice(0, 12), slice(30, None, 2)], ids=str)
def test_redact_key_string_with_needless_escapes_is_masked(percent: str, places: slice) -> None:
    """A URL may escape any letter or digit, and its reader decodes it (RFC 3986, 2.3)."""
    escaped = list(KEY)
    escaped[places] = [f"{percent}{ord(letter):02x}" for letter in escaped[places]]
    text = f"GET /a?q={''.join(escaped)}&b=%41 200"
    clean = f"GET /a?q={''.join(escaped[:27])}***&b=%41 200"
    assert redact(text) == clean
    assert "".join(redact_stream(text)) == clean


@pytest.mark.parametrize("color", ["\x1b[0m", "\x1b[38;5;208m", "\x1b[m", "\x1b[1;\x1b[0m"])
@pytest.mark.parametrize("at", [4, 20, 40, 75])
def test_redact_key_string_split_by_a_color_is_masked(color: str, at: int) -> None:
    """Terminals color parts of a line, such as the differences between two."""
    text = f"{color}sent {KEY[:at]}{color}{KEY[at:]}{color} ok"
    assert redact(text) == f"sent {HANDLE}*** ok"
    assert "".join(redact_stream(text)) == redact(text)
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize("render", [repr, json.dumps, lambda text: json.dumps(json.dumps(text))])
@pytest.mark.parametrize("at", [4, 20, 40, 75])
def test_redact_key_string_split_by_an_escaped_color_is_masked(render: Callable[[str], str], at: int) -> None:
    text = render(f"sent {KEY[:at]}\x1b[31m{KEY[at:]} ok")
    clean = redact(text)
    assert MASK in clean
    assert not leaks(SECRET, clean)
    assert "".join(redact_stream(text)) == clean


def test_redact_names_split_by_colors_still_tell_their_secret() -> None:
    """structlog colors the name and the value apart."""
    line = f"\x1b[36mpass\x1b[1mword\x1b[0m=\x1b[35m{OPAQUE}\x1b[0m \x1b[36mid\x1b[0m=7"
    assert redact(line) == "password=*** id=7"


def test_redact_key_id_alone_stays() -> None:
    """The key id is public: support finds the key by it."""
    line = f"POST /v1/keys/{HANDLE[-16:]}/revoke 202 {HANDLE}"
    assert redact(line) == line


# --- headers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rendering", RENDERINGS)
@pytest.mark.parametrize(
    "value",
    [KEY, f"Bearer {KEY}", OPAQUE, f"Basic {OPAQUE}", f"Bearer {JWT}", "dXNlcjpwYXNz=="],
    ids=["key", "Bearer key", "opaque", "Basic opaque", "Bearer JWT", "padded"],
)
def test_redact_header_in_any_rendering_is_masked(rendering: str, value: str) -> None:
    """A credential header's value leaves in none of the forms that logs and attachments show headers in."""
    secret = value.rpartition(" ")[2].removeprefix(HANDLE)
    for name in NAMES:
        clean = redact(RENDERINGS[rendering](name, value))
        assert not leaks(secret, clean), name
        assert MASK in clean, name
        assert redact(clean) == clean, name


@given(st.sampled_from(sorted(RENDERINGS)), st.sampled_from(NAMES), st.sampled_from(["", "Bearer ", "Basic "]), opaque)
@example("JSON", "Authorization", "Basic ", "Bearer-bearer")
def test_redact_header_of_any_value_is_masked(rendering: str, name: str, scheme: str, value: str) -> None:
    """The name of the header is enough, even if the value does not look like a secret."""
    clean = redact(RENDERINGS[rendering](name, scheme + value))
    frame = RENDERINGS[rendering](name, scheme)
    assert not any(value[at : at + 5] in clean and value[at : at + 5] not in frame for at in range(len(value) - 4))


@pytest.mark.parametrize("rendering", ["JSON", "compact JSON", "indented JSON", "JSON with lists", "JSON pairs"])
@pytest.mark.parametrize(
    "value", ['a"secret', "a\\secret", "a\nsecret", "cafésecret", 'a\\"secret', "'secret'", "secret\\"]
)
def test_redact_header_with_escapes_in_json_is_masked_to_its_end(rendering: str, value: str) -> None:
    """A quote or a backslash inside a value does not end it, and the rest is still JSON."""
    clean = redact(RENDERINGS[rendering]("X-Api-Key", value))
    if rendering != "JSON pairs" or not set(value) & set("\"\\\n'é"):
        assert "secret" not in clean
    json.loads(clean)


def test_redact_header_with_parameters_is_masked_to_the_end_of_its_line() -> None:
    line = 'Authorization: Digest username="bob", realm="a", response="6629fae49393a05397450978507c4ef1"\r\nHost: a'
    assert redact(line) == "Authorization: Digest ***\r\nHost: a"


def test_redact_header_keeps_what_support_needs() -> None:
    """The mask shows which key it was, in which environment, and how it was sent."""
    assert redact(f"Authorization: Bearer {KEY}\n") == f"Authorization: Bearer {HANDLE}***\n"
    assert redact(f"X-Api-Key: {KEY}\r\n") == f"X-Api-Key: {HANDLE}***\r\n"
    assert redact(f"x-api-key={KEY} status=401") == f"x-api-key={HANDLE}***"
    assert redact(f'{{"X-Api-Key": "{KEY}", "status": 401}}') == f'{{"X-Api-Key": "{HANDLE}***", "status": 401}}'
    assert redact(f"curl -H 'X-Api-Key: {KEY}' http://a/") == f"curl -H 'X-Api-Key: {HANDLE}***' http://a/"


def test_redact_header_on_the_next_line_is_not_touched() -> None:
    text = "Authorization: Bearer abc\r\nX-Request-Id: R1\r\nHost: pay.example\r\n"
    assert redact(text) == "Authorization: Bearer ***\r\nX-Request-Id: R1\r\nHost: pay.example\r\n"


# --- other secrets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f"token Bearer {JWT}.", "token Bearer ***"),
        (f"bearer {KEY}", f"bearer {HANDLE}***"),
        ("basic dXNlcjpwYXNzd29yZA==", "basic ***"),
        (f"got {JWT} in the answer", "got eyJ*** in the answer"),
        (f"/?next=a%3D{JWT}&b=1", "/?next=a%3DeyJ***&b=1"),
        (json.dumps({"text": f"îyJ0 got\n{JWT}", "b": 1}), '{"text": "\\u00eeyJ0 got\\neyJ***", "b": 1}'),
        (f"id_{JWT}, eyJ{JWT}", "id_eyJ***, eyJeyJ***"),
        ("got sealed.AbC0123456789_-xyz in the answer", "got sealed.*** in the answer"),
        ("got sealed.AbC0123456789_-xyz.def0123456789XYZ;", "got sealed.***;"),
        ("VAULT_TOKEN=hvs.CAESIJ0123456789abcdefghij_-klm", "VAULT_TOKEN=hvs.***"),
        ("hvb.AAAAAQJnVzc0123456789abcdefghij", "hvb.***"),
        ("hvr.0123456789abcdefghijklmn", "hvr.***"),
        ("token s.Y2fQn6uqkjmVCfWkGu1tYqVR ok", "token s.*** ok"),
        ("token b.AAAAAQKr0123456789abcdefghijkl ok", "token b.*** ok"),
        ("postgres://kv:hunter2@db.example/kv", "postgres://kv:***@db.example/kv"),
        ("redis://:hunter2@db.example:6379/0", "redis://:***@db.example:6379/0"),
        ("amqp://kv:hun@ter@2@mq.example//", "amqp://kv:***@mq.example//"),
        ("postgres+psycopg://kv:p%40ss@[::1]:5432/kv?x=y@z", "postgres+psycopg://kv:***@[::1]:5432/kv?x=y@z"),
        (f"redis://kv:{KEY}@h/0", "redis://kv:***@h/0"),
    ],
)
def test_redact_secret_of_another_sort_is_masked(text: str, clean: str) -> None:
    """Sealed secrets, Vault and OpenBao tokens, JWTs, passwords in URLs, and tokens without context."""
    assert redact(text) == clean
    assert redact(clean) == clean


# --- webhook secrets and cookies ---------------------------------------------------------------------------

WEBHOOK_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw+/8="


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f"secret {WEBHOOK_SECRET} was given", "secret whsec_*** was given"),
        (f'{{"a": "{WEBHOOK_SECRET}", "b": 1}}', '{"a": "whsec_***", "b": 1}'),
        (f"webhook_secret={WEBHOOK_SECRET}&b=1", "webhook_secret=whsec_***&b=1"),
        (f"WEBHOOK={WEBHOOK_SECRET.replace('/', chr(92) + '/')}", "WEBHOOK=whsec_***"),
        (f"/?s={WEBHOOK_SECRET.replace('_', '%5F').replace('/', '%2F').replace('+', '%2B')} ok", "/?s=whsec%5F*** ok"),
        (f"Bearer {WEBHOOK_SECRET}", "Bearer whsec_***"),
    ],
)
def test_redact_webhook_secret_is_masked(text: str, clean: str) -> None:
    """Guarantee: the secret, which could forge messages to the merchant, never appears."""
    assert redact(text) == clean
    assert redact(clean) == clean


COOKIES = f"sessionid={OPAQUE}; csrftoken=Zu8tYq; other=choc0late"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f"GET / HTTP/1.1\r\nCookie: {COOKIES}\r\nHost: a", "GET / HTTP/1.1\r\nCookie: ***\r\nHost: a"),
        (f"< Set-Cookie: {COOKIES}; Path=/; HttpOnly\n", "< Set-Cookie: ***\n"),
        (json.dumps({"Cookie": COOKIES, "a": 1}), '{"Cookie": "***", "a": 1}'),
        (json.dumps({"Set-Cookie": [COOKIES, "b=c"], "a": 1}), '{"Set-Cookie": ["***"], "a": 1}'),
        (
            json.dumps({"body": json.dumps({"cookie": COOKIES, "a": 1})}),
            json.dumps({"body": '{"cookie": "***", "a": 1}'}),
        ),
        (repr({"HTTP_COOKIE": COOKIES, "a": 1}), "{'HTTP_COOKIE': '***', 'a': 1}"),
        (f"curl -b '{COOKIES}' http://a/", "curl -b '***' http://a/"),
        (f'curl --cookie "{COOKIES}" http://a/', 'curl --cookie "***" http://a/'),
        ("curl -b other=choc0late http://a/", "curl -b *** http://a/"),
        ("curl --cookie=other=choc0late http://a/", "curl --cookie=***"),
        ("sent session=eyJhbG and more", "sent session=*** and more"),
        ("__Host-session=eyJhbG; csrftoken=Zu8tYq", "__Host-session=***; csrftoken=***"),
        (json.dumps({"sessionid": OPAQUE, "csrftoken": OPAQUE}), '{"sessionid": "***", "csrftoken": "***"}'),
        ("sent __Secure-device=eyJhbG:1:x; a=b", "sent __Secure-device=***; a=b"),
        ("sent device=eyJhbG:1:x; a=b", "sent device=***; a=b"),
        (json.dumps({"__Secure-device": OPAQUE, "a": 1}), '{"__Secure-device": "***", "a": 1}'),
    ],
)
def test_redact_cookies_are_masked(text: str, clean: str) -> None:
    """Until the session ends, the session's cookie gives the access of its operator."""
    assert redact(text) == clean
    assert redact(clean) == clean


# --- members, parameters and variables named like secrets ---------------------------------------------------

SECRET_NAMES = [
    *("password", "Password", "passwd", "db_password", "PASSWORD", "new-password", "passphrase", "pwd"),
    *("secret", "clientSecret", "client_secret", "CLIENT_SECRET", "webhook-secret", "secretKey", "signing_key"),
    *("token", "access_token", "accessToken", "refresh_token", "id-token", "csrfmiddlewaretoken", "X-Vault-Token"),
    *("api_key", "apikey", "apiKey", "api-key", "stripe.api_key", "private_key", "privateKey", "PRIVATE-KEY"),
    *("master_key", "credential", "authorization", "cookie", "x-api-key", "sessionid", "session_key", "sessionKey"),
    *("new_password1", "password2", "password_confirm", "passwordConfirmation", "password_hash", "passwordHash"),
    *("secret_value", "secretValue", "__Secure-device"),
    *("secret_id", "SECRET_ID", "secretId", "secret-id", "vault_secret_id", "jwt", "userJwt", "id_jwt"),
]
COLLECTIVE_NAMES = ["passwords", "oldPasswords", "credentials", "db_credentials"]
COOKIE_NAMES = ["__Host-session", "__Secure-device", "device", "csrftoken", "sessionid"]
READABLE_NAMES = [
    *("key_id", "token_id", "tokenId", "credential_id", "secret_name", "secret_version", "idempotency_key"),
    *("public_key", "recipient_public_key", "token_type", "order_token", "orderToken", "next_page_token", "key"),
    *("password_changed_at", "api_keys_issued", "tokens", "secretary", "cookies_accepted", "authorization_url"),
    *("device", "device_id", "password_hash_algorithm", "secret_values_seen"),
    *("secret_id_accessor", "secret_id_ttl", "secret_id_num_uses", "jwt_issuer"),
]
NAMES_BESIDE_A_VALUE = [*SECRET_NAMES, *COOKIE_NAMES, *COLLECTIVE_NAMES, "Set-Cookie"]
VALUES = [OPAQUE, 'a"b\\c', "ends in \\", "two\nlines", "café", "x", "***", "a, 'b' & {c}", '\\\\"\\"']


def nested(value: object, depth: int) -> str:
    """Return JSON in a string of JSON, nested this many times."""
    text = json.dumps(value)
    for _ in range(depth):
        text = json.dumps({"body": text, "status": 401})
    return text


def unnested(text: str, depth: int) -> Any:
    value = json.loads(text)
    for _ in range(depth):
        assert value["status"] == 401
        value = json.loads(value["body"])
    return value


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_redact_json_member_named_like_a_secret_is_masked_whole(value: str, depth: int) -> None:
    """The name is enough, whatever the value looks like and however often the JSON was put into a string."""
    for name in SECRET_NAMES:
        before = {"a": "before", name: value, "b": ["after", 1]}
        clean = redact(nested(before, depth))
        assert unnested(clean, depth) == {**before, name: MASK}
        assert redact(clean) == clean


@pytest.mark.parametrize("value", [1234, -1.5e9, 0])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_redact_json_number_named_like_a_secret_becomes_the_mask(value: float, depth: int) -> None:
    clean = redact(nested({"password": value, "b": value}, depth))
    assert unnested(clean, depth) == {"password": MASK, "b": value}
    assert redact(clean) == clean


@pytest.mark.parametrize("value", [None, True, False, "", {}, [], {"a": 1}])
@pytest.mark.parametrize("depth", [0, 1])
def test_redact_json_member_that_holds_no_secret_stays(value: object, depth: int) -> None:
    """Support must see whether a secret is present or absent."""
    text = nested({"password": value, "b": 1}, depth)
    assert redact(text) == text


@pytest.mark.parametrize("name", COLLECTIVE_NAMES)
def test_redact_json_strings_under_a_collective_name_are_masked(name: str) -> None:
    """Strings are masked. Numbers are counts, and the members of objects have names of their own."""
    kinds = ["private", "public"]  # An endpoint's accepted kinds are a list named `credentials`.
    for value, masked in ((OPAQUE, MASK), (kinds, kinds if "credentials" in name else [MASK])):
        clean = redact(json.dumps({"a": 1, name: value, "b": "c"}))
        assert json.loads(clean) == {"a": 1, name: masked, "b": "c"}
        assert redact(clean) == clean
    for readable in (3, [{"id": "cred_1"}], [1, 2], None):
        text = json.dumps({name: readable, "tokens": 3})
        assert redact(text) == text
    assert redact(f"{name}=3 tokens=3") == f"{name}=3 tokens=3"


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "layout",
    [{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": "\t"}],
    ids=["plain", "compact", "spaces", "tab"],
)
def test_redact_value_next_to_the_name_of_a_secret_is_masked(layout: dict[str, Any], depth: int) -> None:
    """HAR files list headers, cookies and form fields as objects with a name and a value."""
    values = (OPAQUE, 'a"b\\c', "__Host-session=hunter2; __Secure-device=hunter2", "***")
    for name, value in product(NAMES_BESIDE_A_VALUE, values):
        pairs = [{"name": "Accept", "value": "x"}, {"name": name, "value": value, "path": "/"}]
        masked = [pairs[0], {**pairs[1], "value": MASK}]
        text = json.dumps(pairs, **layout)
        text = nested(text, depth - 1) if depth else text
        clean = redact(text)
        inner = unnested(clean, depth - 1) if depth else clean
        assert json.loads(inner) == masked
        assert redact(clean) == clean
        if value == OPAQUE:  # One is enough: a stream by characters takes long.
            assert "".join(redact_stream(text)) == clean


def test_redact_value_next_to_the_name_of_a_secret_is_masked_after_crlf() -> None:
    for name in NAMES_BESIDE_A_VALUE:
        text = json.dumps({"name": name, "value": OPAQUE}, indent=2).replace("\n", "\r\n")
        assert json.loads(redact(text)) == {"name": name, "value": MASK}
        assert "".join(redact_stream(text)) == redact(text)


@pytest.mark.parametrize("name", ["key_id", "Accept", "tokens", "user_device", "password_changed_at"])
def test_redact_value_next_to_another_name_stays(name: str) -> None:
    for indent in (None, 2):
        text = json.dumps([{"name": name, "value": OPAQUE}, {"name": "password", "value": ""}], indent=indent)
        assert redact(text) == text


PEM_BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSj/gEAAoIBAQ+7\n" * 4 + "q1w2E3r4T5y6==\n"


@pytest.mark.parametrize("kind", ["", "RSA ", "EC ", "ENCRYPTED ", "OPENSSH "])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\n> ", " ", "\n    "])
@pytest.mark.parametrize("depth", [None, 0, 1, 2])
def test_redact_pem_private_key_is_masked(kind: str, newline: str, depth: int | None) -> None:
    begin, end = f"-----BEGIN {kind}PRIVATE KEY-----", f"-----END {kind}PRIVATE KEY-----"
    for headers in ("", "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,0A1B2C\n\n"):
        pem, masked = f"{begin}\n{headers}{PEM_BODY}{end}".replace("\n", newline), f"{begin}{MASK}{end}"
        text = f"got {pem}\nnext" if depth is None else nested({"a": f"got {pem}", "b": 1}, depth)
        if depth:
            text = text.replace("+", "\\u002b" if depth == 1 else "+")
        clean = redact(text)
        assert clean == (f"got {masked}\nnext" if depth is None else nested({"a": f"got {masked}", "b": 1}, depth))
        assert redact(clean) == clean
        assert "".join(redact_stream(text)) == clean


@pytest.mark.parametrize("before", ["private_key: ", "  private_key: |\n  ", "PRIVATE_KEY=", 'PRIVATE_KEY="', ""])
def test_redact_pem_private_key_under_a_name_or_cut_short_leaks_nothing(before: str) -> None:
    pem = f"{before}-----BEGIN PRIVATE KEY-----\n{PEM_BODY}"
    for text in (pem, pem[:-40], pem + "-----END PRIVATE KEY-----\n"):
        clean = redact(text)
        assert not leaks(PEM_BODY.replace("\n", ""), clean)
        assert redact(clean) == clean


def test_redact_pem_public_key_and_certificate_stay() -> None:
    text = "".join(
        f"-----BEGIN {kind}-----\n{PEM_BODY}-----END {kind}-----\n" for kind in ("PUBLIC KEY", "CERTIFICATE")
    )
    assert redact(text) == text


@pytest.mark.parametrize("depth", [0, 1])
def test_redact_json_member_that_support_needs_stays_readable(depth: int) -> None:
    """Ids, counts, names and types are no secrets, whatever word they contain."""
    for name in READABLE_NAMES:
        text = nested({name: "0123456789abcdef", "b": 7, f"{name}_count": 5}, depth)
        assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("POST /a?b=1&api_key=abc&c=d HTTP/1.1", "POST /a?b=1&api_key=***&c=d HTTP/1.1"),
        ("grant_type=password&password=hunter2&username=bob", "grant_type=password&password=***&username=bob"),
        ("client_secret=hunter%202;x=1", "client_secret=***;x=1"),
        ("role_id=abc secret_id=6a174c20-f6de-a53c-74d2-6018fcceff64", "role_id=abc secret_id=***"),
        ("role_id: abc\nSECRET_ID: 6a174c20-f6de\n", "role_id: abc\nSECRET_ID: ***\n"),
        ("POST /login?role=a&jwt=abc&c=d HTTP/1.1", "POST /login?role=a&jwt=***&c=d HTTP/1.1"),
        ("SECRET=hunter2\nHOST=a\n", "SECRET=***\nHOST=a\n"),
        ("export DB_PASSWORD='hunter 2' HOST=a", "export DB_PASSWORD='***' HOST=a"),
        ('DB_PASSWORD="hunter 2"\n', 'DB_PASSWORD="***"\n'),
        ("KEYVAULT_MASTER_KEY=AAAA=", "KEYVAULT_MASTER_KEY=***"),
        ("password: hunter 2\nuser: bob\n", "password: ***\nuser: bob\n"),
        ("db:\n  password: 'hunter 2'\n  - token: abc\n", "db:\n  password: '***'\n  - token: ***\n"),
        (repr({"password": "hunter 2", "b": "c"}), "{'password': '***', 'b': 'c'}"),
        (repr([("client_secret", "hunter2"), ("b", "c")]), "[('client_secret', '***'), ('b', 'c')]"),
        (json.dumps({"cmd": "DB_PASSWORD=hunter2 run"}), '{"cmd": "DB_PASSWORD=*** run"}'),
    ],
)
def test_redact_secret_of_a_form_of_the_environment_or_of_yaml_is_masked(text: str, clean: str) -> None:
    assert redact(text) == clean
    assert redact(clean) == clean


# --- key strings over more than one line --------------------------------------------------------------------

BREAKS = {
    "plain": "\n",
    "CRLF": "\r\n",
    "mail, quoted-printable": "=\r\n",
    "mail, quoted": "\n> ",
    "mail, quoted twice": "\n>> ",
    "mail, quoted twice with blanks": "\r\n> > ",
    "quoted-printable in a quote": "=\n> ",
    "shell": "\\\n",
    "shell, indented": " \\\n    ",
    "YAML": "\n      ",
    "tab": "\n\t",
    "escaped in JSON": "\\n",
    "quoted-printable in JSON": "=\\r\\n",
    "escaped twice": "\\\\r\\\\n",
}


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_redact_key_string_over_two_lines_leaks_nothing(name: str, is_streamed: bool) -> None:
    """Mail clients and terminals break a key anywhere: the part on the second line is masked, too."""
    for at in (*range(3, 76, 5), 26, 27, 28, 75):
        text = f"here: {KEY[:at]}{BREAKS[name]}{KEY[at:]} and more\nnext line\n"
        clean = "".join(redact_stream(text)) if is_streamed else redact(text)
        assert clean.endswith("*** and more\nnext line\n")
        assert not leaks(SECRET, clean)
        assert redact(clean) == clean


@given(st.lists(st.integers(4, 75), min_size=1, max_size=6, unique=True), st.sampled_from(sorted(BREAKS)), keystrings)
def test_redact_key_string_over_many_lines_leaks_nothing(cuts: list[int], name: str, text: str) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    broken = BREAKS[name].join(text[start:end] for start, end in pairwise(places))
    clean = redact(f"a {broken}, b")
    assert clean.endswith("***, b")
    assert not leaks(text[text.rindex("_") + 17 :], clean)


@given(
    st.lists(st.sampled_from([KEY[:40], KEY[40:], KEY[:9], KEY[9:], "\n", "=\r\n", "\n> ", " ", "_", KEY]), max_size=9),
    st.lists(st.integers(0, 700), max_size=8),
)
def test_redact_stream_of_broken_keys_cut_anywhere_is_redact_of_the_whole(parts: list[str], cuts: list[int]) -> None:
    """A key on two lines is found even if a read ends between them."""
    text = "".join(parts)
    assert "".join(redact_stream(chunks_of(text, cuts))) == redact(text)


def test_redact_header_with_a_key_over_two_lines_leaks_nothing() -> None:
    text = f"X-Api-Key: {KEY[:50]}\n  {KEY[50:]}\r\nHost: a"
    assert redact(text) == f"X-Api-Key: {HANDLE}***\r\nHost: a"


def test_redact_key_string_cut_short_leaves_the_next_line_alone() -> None:
    """A logger cut the line: what follows is another line and no part of the key."""
    assert (
        redact(f"sent {KEY[:60]}\n2026-11-21T12:00:00Z INFO next\n")
        == f"sent {HANDLE}***\n2026-11-21T12:00:00Z INFO next\n"
    )


# --- what is not touched ----------------------------------------------------------------------------------

PROSE = [
    "Basic responsibilities of a bearer: understanding authentication.",
    "basic well-documented/self-explanatory things",
    "The bearer misunderstood the Authorization header, and so did x-api-key users.",
    "authorization failed; x-api-key was not sent",
    "Vary: Origin, Authorization",
    "Access-Control-Allow-Headers: authorization, x-api-key",
    "s.find_everything_in_the_whole_house() or b.some_rather_long_attribute",
    "see https://example.com:8443/a/b?c=d@e and http://h/x:y@z",
    "mail bob@example.com at 10:30, or ssh://git@example.com/repo",
    "sealed.segments_of_the_tube were opened",
    "eyJ is how a JWT begins, and eyJhbGciOiJIUzI1NiJ9 is a header without a payload",
    "the secret id of a role, and its jwt: both are words; secret_id_ttl=7776000",
    "kv_prv_sbx_ is how a private sandbox key begins",
    "2026-11-21T12:00:00Z INFO key_id=AAAAAAAAAAAAAAAA state=active",
    '{"code": "credential_missing", "detail": "no authorization", "check": 1}',
    '{"missing": ["authorization"], "status": 401}',
    '{"message": "bad authorization:"}',
    '{"authorization": null, "x-api-key": "", "b": "c"}',
    '{"password": null, "has_secret": true, "token": "", "token_type": "bearer"}',
    "Vary: Cookie, X-Api-Key; set no cookie, and no password",
    "the token of the order, a secret and its password: all are words",
    "whsec_ is how a webhook secret begins",
    "git checkout -b feature/cookies && ls -b",
    "if token == other_token or password != b: raise",
    "request_id=R1 key_id=AAAAAAAAAAAAAAAA token_id=tok_1 order_token=ord_1 idempotency_key=abc",
    "a_pub_\nsbx_ line\nthat ends",
    "naïve café 日本語 \U0001f511 \ud800",
]


@pytest.mark.parametrize("text", PROSE, ids=lambda text: text[:30].encode("ascii", "replace").decode())
def test_redact_plain_prose_stays_as_it_is(text: str) -> None:
    """A redactor that eats its surroundings is one that people switch off."""
    assert redact(text) == text


def test_redact_json_stays_json() -> None:
    """The lines of a JSON log stay JSON, with the same content except the secret."""
    line = {"message": f"sent X-Api-Key: {KEY}", "authorization": f"Bearer {OPAQUE}", "status": 401, "who": "acme"}
    clean = json.loads(redact(json.dumps(line)))
    assert clean == {**line, "message": f"sent X-Api-Key: {HANDLE}***", "authorization": "Bearer ***"}


# Fragments that meet in unfortunate ways: names, quotes, escapes, separators, ends of strings.
FRAGMENTS = [
    *NAMES,
    *("password", "api_key", "clientSecret", "Set-Cookie", "cookie", "session", "token=", "token: ", "curl -b a=b"),
    *("whsec_", WEBHOOK_SECRET, "1234", "-1.5e9", '\\\\\\"', "=\\n", "=\n> ", KEY[:40], KEY[40:], "&", ";"),
    *('"', "'", "\\", '\\"', "b'", ": ", "=", " => ", "[", "]", "(", ")", "{", "}", ", ", "\n", "\r\n", "\\n", " "),
    *("Bearer ", "Basic ", MASK, "***", HANDLE, KEY, JWT, OPAQUE, "://a:", "@", "/", "sealed.", "hvs.", "s.", "é"),
    *('"name": "', '"value": "', '"name":"Cookie",\n', '","value":"', "device", "__Secure-device=", "passwords"),
    *("secret_id", "jwt", "eyJ", ".eyJ"),
    *("-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "-----", "-", "\\u002b", "\\\\u00"),
    *("\ud800", "null", ">", "kv_", "_prv_", "sbx_", "%5F", "A" * 40, "0a0a0a0a0a0a0a0a0a0a0a0a"),
]
tangles = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@given(tangles)
@example(f"Authorization: Bearer {KEY}")
@example(f"Bearer {KEY}")
@example(f"x-api-key={HANDLE}*** {OPAQUE}")
@example("Authorization: ***" + "A" * 70_000)
@example("bearer 0" + "A" * 70_000)
def test_redact_twice_is_redact_once(text: str) -> None:
    """Masked text stays as it is, so that logs can be redacted again on their way to support."""
    once = redact(text)
    assert redact(once) == once


@given(tangles)
def test_redact_tangled_text_leaks_no_key(text: str) -> None:
    assert SECRET not in redact(text)


def test_patterns_have_no_possessive_group() -> None:
    """Python before 3.11.5 moves on over text that such a group did not match (CPython issue 106052)."""
    possessive = re.compile(r"(?<!\\)\)(?:[?*+]|\{[0-9,]+\})\+|\(\?>")
    assert possessive.search("(?:a|b)?+")
    assert possessive.search("(?:ab){1,8}+")
    texts = [
        text
        for secret in redaction._SECRETS
        for text in (secret.begin_text, secret.goes_on_text, secret.unfinished_text)
    ]
    assert [text for text in (*texts, redaction._ENDS.pattern) if text and possessive.search(text)] == []


scalars = st.none() | st.booleans() | st.integers() | st.floats()


@given(
    st.dictionaries(tangles, tangles | scalars | st.lists(tangles | scalars, max_size=3), max_size=4),
    st.sampled_from([None, 2]),
)
@example({"": "Bearer éAuthorization"}, None)
def test_redact_tangled_json_stays_json(value: dict[str, object], indent: int | None) -> None:
    """Guarantee: no client text can break out of a line of the JSON log."""
    clean = redact(json.dumps(value, indent=indent))
    assert isinstance(json.loads(clean), dict)
    assert SECRET not in clean


# --- streams ----------------------------------------------------------------------------------------------


def chunks_of(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


@given(st.lists(tangles | st.text(max_size=20), max_size=6).map("".join), st.lists(st.integers(0, 10_000), max_size=12))
def test_redact_stream_cut_anywhere_is_redact_of_the_whole(text: str, cuts: list[int]) -> None:
    """The result does not depend on where reads end: in a secret's prefix, in its body or in an escape."""
    assert "".join(redact_stream(chunks_of(text, cuts))) == redact(text)


@given(tangles)
def test_redact_stream_of_single_characters_is_redact_of_the_whole(text: str) -> None:
    assert "".join(redact_stream(text)) == redact(text)


@given(
    st.lists(tangles | st.sampled_from(["x" * 3000, "y " * 2500, "A" * 5000, "\\" * 4097]), max_size=8),
    st.lists(st.integers(0, 100_000), max_size=20),
)
def test_redact_stream_of_a_long_line_cut_anywhere_is_redact_of_the_whole(parts: list[str], cuts: list[int]) -> None:
    """The same for lines that are longer than the redactor's buffer."""
    text = "".join(parts).replace("\n", " ").replace("\r", " ")
    clean = "".join(redact_stream(chunks_of(text, cuts)))
    assert clean == redact(text)
    assert SECRET not in clean


LONG = {
    "escapes": '{"X-Api-Key": "' + '\\\\\\"ab' * 2500 + '", "b": "c"}',
    "glued words": "xbearer 0aaaaaaaaaaaaaaaa" * 500,
    "words": "bearer 0aaaaaaaaaaaaaaaa xs.Y2fQn6uqkjmVCfWkGu1t s.Y2fQn6uqkjmVCfWkGu1tYqVR " * 150,
    "keys": (KEY + "." + KEY + " ") * 80,
    "quoted headers": ("'x-api-key': 'a\\\\' + \\'x-api-key': 'b', \\\\'x-api-key\\': 'c' ") * 200,
    "JWTs": f"{JWT} eyJ{JWT}" * 100,
    "one long line of headers": "\n" + "> Authorization: a" * 800,
}


@pytest.mark.parametrize("name", LONG)
def test_redact_stream_of_a_long_line_cut_at_every_sort_of_place_is_redact_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is cut in an escape, in a word or in a key. The redactor keeps enough of the text before the cut."""
    monkeypatch.setattr(redaction, "_MAX_LOOKBACK", 512)  # Enough for these, and many more cuts.
    text = LONG[name]
    clean = redact(text)
    for size in (*range(1021, 1034), 4096, 5000):
        assert "".join(redact_stream(text[at : at + size] for at in range(0, len(text), size))) == clean


@given(keystrings, st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 700))
def test_redact_stream_key_string_across_chunks_leaks_nothing(text: str, before: int, after: int, size: int) -> None:
    """A secret that spans two reads is masked, wherever the first one ends."""
    whole = "-" * before + text + "-" * after
    clean = "".join(redact_stream(whole[at : at + size] for at in range(0, len(whole), size)))
    assert clean == "-" * before + text[: text.rindex("_") + 17] + MASK + "-" * after


def test_redact_stream_lets_whole_lines_go_as_they_come() -> None:
    """`tail -f … | manage.py redact` shows each line as soon as it is written."""
    clean = redact_stream(iter(["first\n", f"second {KEY}\nthi", "rd\n"]))
    assert next(clean) == "first\n"
    assert next(clean) == f"second {HANDLE}***\n"
    assert next(clean) == "third\n"
    assert list(clean) == []


@pytest.mark.parametrize("chunks", [[], [""], ["", "", ""]])
def test_redact_stream_of_nothing_is_nothing(chunks: list[str]) -> None:
    assert list(redact_stream(chunks)) == []


def lines(megabytes: int) -> Iterator[str]:
    """Yield a log in reads of 64 KiB, regardless of its lines."""
    filler = "2026-11-21T12:00:00Z INFO GET /merchants/orders/abc123 status=200 request_id=0123456789abcdef\n" * 40
    block = (f"{filler}X-Api-Key: {KEY}\n" * 40)[: 1 << 17]
    for _ in range(megabytes * 8):
        yield block[: 1 << 16]
        yield block[1 << 16 :]


def giant_line(megabytes: int) -> Iterator[str]:
    """One line of a dump, with a secret every few thousand characters."""
    block = (("lorem ipsum dolor sit amet " * 150 + f"'X-Api-Key': '{KEY}' ") * 40)[: 1 << 16]
    return (block for _ in range(megabytes * 16))


def giant_header(megabytes: int) -> Iterator[str]:
    """One secret without an end."""
    yield "Authorization: Bearer "
    yield from islice(iter(lambda: "A" * (1 << 16), ""), megabytes * 16)


@pytest.mark.parametrize("source", [lines, giant_line, giant_header])
def test_redact_stream_of_any_size_keeps_to_its_memory(source: Callable[[int], Iterator[str]]) -> None:
    """An attachment of hundreds of megabytes, or of one endless line, takes no more memory than a small one."""
    for _ in redact_stream(islice(source(1), 4)):
        pass  # Fill the permanent caches before the measurement.
    tracemalloc.start()
    try:
        for clean in redact_stream(source(1)):
            assert SECRET not in clean
            assert len(clean) < 1 << 18
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 << 18


def test_redact_stream_of_an_endless_secret_lets_nothing_of_it_out() -> None:
    assert "".join(redact_stream(giant_header(1))) == "Authorization: Bearer ***"


HOSTILE = {
    "names": "authorization",
    "quotes": '"authorization": "',
    "brackets": "([('x-api-key",
    "blanks": "bearer" + " " * 70,
    "urls": "://a:b@",
    "colons": "://a:b:c",
    "almost keys": "kv_prv_sbx_",
    "letters": "a",
    "backslashes": "\\",
    "vault": "s.hvs.b.",
    "members": '"password": "',
    "members in JSON": '\\\\"password\\\\": \\\\"',
    "parameters": "token=",
    "long names": "a-" * 40 + "token",
    "lists": '"cookie": ["a", "',
    "numbers": '"pin_token": 1',
    "keys over lines": "_prv_sbx_" + "A\n> " * 60,
    "ends of lines": "_\n>  \t",
    "soft ends": "_p=\\r\\n" + " " * 16,
    "yaml": "\n  password: ",
    "webhook secrets": "whsec_",
    "curl": " -b a",
    "digits": "A1",
    "pairs": '"name":"token","value":"',
    "names of pairs": '"name":"token",\n',
    "names of pairs in JSON": '\\\\"name\\\\":\\\\"token\\\\",',
    "private keys": "-----BEGIN RSA PRIVATE KEY-----a-",
    "hyphens": "-",
    "devices": "__secure-device",
    "colors": "\x1b[0",
    "escaped colors": "_p\\x1b[0m",
    "beginnings of JWTs": "eyJ",
    "beginnings of JWTs with a dot": "eyJ.",
    "headers of JWTs": "eyJ" + "a" * 3072,
    "needless escapes": "%5f%70",
    "almost escapes": "%25%25",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HOSTILE)
def test_redact_hostile_text_takes_time_by_its_length(name: str) -> None:
    """No text makes a pattern so slow that it blocks the log: a quarter megabyte takes a short time."""
    redact(HOSTILE[name] * ((1 << 18) // len(HOSTILE[name])))


def test_redact_shuffled_log_leaks_nothing() -> None:
    """Many secrets in every form, mixed into one attachment that is read in pieces of odd sizes."""
    chance = random.Random(20261121)  # noqa: S311  the same mixture each time
    parts, secrets = [], []
    for seed in range(300):
        key = mint(*SORTS[seed % len(SORTS)], key_prefix=("kv", "acme")[seed % 2], seed=seed)
        secrets.append(key[key.rindex("_") + 17 :])
        rendering = chance.choice(sorted(RENDERINGS))
        parts.append(RENDERINGS[rendering](chance.choice(NAMES), chance.choice(["", "Bearer "]) + key))
    text = "\n".join(parts)
    source = io.StringIO(text)
    clean = "".join(redact_stream(iter(lambda: source.read(chance.randint(1, 200)), "")))
    assert clean == redact(text)
    assert not [secret for secret in secrets if secret[:6] in clean]

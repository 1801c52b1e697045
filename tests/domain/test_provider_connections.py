"""What may be stored as a provider's credentials; no refusal repeats any of it."""

import json
import re
import secrets
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.environments import ConnectionMode
from keyvault.domain.errors import RequestInvalidError
from keyvault.domain.ids import mint_id
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.provider_connections import (
    MAX_BYTES,
    connection_path,
    read_credentials,
    read_provider,
)

TEST, LIVE = ConnectionMode.TEST, ConnectionMode.LIVE
PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQ\n-----END PRIVATE KEY-----"


def read(text: str, mode: ConnectionMode = TEST) -> str:
    return read_credentials(Plaintext(text), mode).reveal()


def fault_of(text: str, mode: ConnectionMode = TEST) -> str:
    with pytest.raises(RequestInvalidError) as refused:
        read(text, mode)
    (fault,) = refused.value.faults
    assert fault.pointer == "/secret"
    return fault.detail


@pytest.mark.parametrize(
    "text", ["s", "a secret of words", PEM, '{"user": "acme", "password": "p"}', '["no object, so a text"]', "é" * 4096]
)
def test_credentials_that_fit_are_kept_as_they_are(text: str) -> None:
    assert read(text) == text


def test_credentials_lose_the_blanks_around_them_and_a_browser_s_line_ends() -> None:
    """A file ends with a line end, and a form's text has two characters for each: neither belongs to the secret."""
    assert read(f"  {PEM}\n".replace("\n", "\r\n")) == PEM


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        (" \r\n\t", "empty"),
        ("x" * (MAX_BYTES + 1), "at most 8192 bytes"),
        ("é" * 4097, "at most 8192 bytes"),
        ("a\x00b", "NUL"),
        ("\ud800", "UTF-8"),
        ("{", "JSON object of texts"),
        ("{}", "JSON object of texts"),
        ('{"a": 1}', "JSON object of texts"),
        ('{"a": ""}', "JSON object of texts"),
        ('{"a": {"b": "c"}}', "JSON object of texts"),
        ('{"a": ["b"]}', "JSON object of texts"),
        ('{"a": "b", "a": "c"}', "unique names"),
        ('{"a": "b"} and more', "JSON object of texts"),
        ('{"a":' * 1600, "JSON object of texts"),
    ],
)
def test_credentials_that_do_not_fit_are_refused_with_the_reason(text: str, said: str) -> None:
    assert said in fault_of(text)


@pytest.mark.parametrize("kind", ["pk", "rk", "sk"])
@pytest.mark.parametrize(("mode", "other"), [(TEST, LIVE), (LIVE, TEST)])
@pytest.mark.parametrize("shape", ["{}", '{{"key": "{}", "more": "x"}}'])
def test_credentials_plainly_of_the_other_mode_are_refused(
    kind: str, mode: ConnectionMode, other: ConnectionMode, shape: str
) -> None:
    """A live key never comes into sandbox, nor a test key into production, where its own prefix says what it is."""
    assert f"{other} key" in fault_of(shape.format(f"{kind}_{other}_51Hx"), mode)
    assert read(shape.format(f"{kind}_{mode}_51Hx"), mode)


@pytest.mark.parametrize("text", ["live", "a live_key", "task_live_1", "whsec_live", "sk_live_"])
def test_credentials_that_say_nothing_of_their_mode_are_kept(text: str) -> None:
    assert read(text, TEST) == text


REFUSED = ["{}" + "x" * MAX_BYTES, '{{"a": "{}", ', '{{"a": 1, "b": "{}"}}', "\x00{}", "sk_live_1{}"]


@given(st.text(max_size=40), st.sampled_from(REFUSED))
def test_credentials_refused_are_in_no_message_and_no_traceback(text: str, shape: str) -> None:
    """Guarantee: the error and its chained exceptions contain no part of the secret."""
    marker = secrets.token_hex(8)
    with pytest.raises(RequestInvalidError) as refused:
        read(shape.format(marker + text))
    assert marker not in "".join(traceback.format_exception(refused.value)) + repr(refused.value.faults)
    assert refused.value.__context__ is None


@given(st.dictionaries(st.text(max_size=8), st.text(min_size=1, max_size=20), min_size=1, max_size=8))
def test_credentials_of_any_flat_object_are_kept(pairs: dict[str, str]) -> None:
    text = json.dumps({name: f"-{value}" for name, value in pairs.items()})
    assert read(text) == text


@pytest.mark.parametrize("text", ["stripe", "pay-2", "a", "1" * 64])
def test_provider_is_a_slug(text: str) -> None:
    assert read_provider(text) == text


@pytest.mark.parametrize("text", ["", "Stripe", "a b", "a/b", "-a", "sk_live_1", "a" * 65, "stripe\n"])
def test_provider_that_is_no_slug_is_refused_unrepeated(text: str) -> None:
    """Somebody may have put the secret into the wrong field."""
    with pytest.raises(RequestInvalidError) as refused:
        read_provider(text)
    assert not text or text not in str(refused.value) + str(refused.value.faults[0].detail).replace("a-z", "")


@given(st.integers(min_value=1, max_value=2**63 - 1))
def test_path_of_a_connection_is_told_from_a_credential_s(account: int) -> None:
    """The two share a mount: neither is ever stored over the other."""
    path = connection_path(account, mint_id("con", secrets.token_bytes))
    assert re.fullmatch(rf"{account}/con_[0-9A-Za-z]{{20}}", path)

"""Web origins: one spelling each, as browsers send it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.origins import find_origin_fault, is_origin, to_domain


@pytest.mark.parametrize(
    "origin",
    [
        "https://shop.example",
        "https://shop.example:8443",
        "https://a",
        "https://xn--bcher-kva.example",
        "https://192.0.2.1",
        "https://[2001:db8::1]:8443",
        "http://localhost",
        "http://localhost:3000",
        "http://127.0.0.1:80" + "80",
        "http://[::1]:3000",
    ],
)
def test_origin_as_browsers_write_it_is_one(origin: str) -> None:
    assert is_origin(origin)
    assert find_origin_fault(origin) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "*",
        "https://*.example",
        "https://",
        "shop.example",
        "//shop.example",
        "https://shop.example/",
        "https://shop.example/x",
        "https://shop.example?",
        "https://shop.example#",
        "https://user@shop.example",
        "https://Shop.example",
        "HTTPS://shop.example",
        "https://shop.example:443",
        "https://shop.example:0443",
        "https://shop.example:0",
        "https://shop.example:65536",
        "https://shop.example:",
        "https://shop..example",
        "https://.example",
        "https://shop.example.",
        "https://-shop.example",
        "https://shop_1.example",
        "https://bücher.example",
        "https://shop.example\n",
        " https://shop.example",
        "https://a,https://b",
        'https://a"',
        "http://shop.example",
        "http://localhost:80",
        "http://localhost.example",
        "ftp://shop.example",
        "https://" + "a" * 64,
        "https://" + "a." * 200 + "example",
    ],
)
def test_origin_of_any_other_spelling_is_none(text: str) -> None:
    """A list is compared character by character, so it may contain only what browsers send."""
    assert not is_origin(text)
    assert find_origin_fault(text) is not None


@given(st.text(max_size=80))
def test_origin_never_holds_what_json_escapes_or_a_list_is_cut_at(text: str) -> None:
    """A listed origin can be searched for as quoted text."""
    if is_origin(text):
        assert text.isascii()
        assert not set('"\\,% _*') & set(text)


@pytest.mark.parametrize(
    ("origin", "domain"),
    [
        ("http://127.0.0.1:8000", "http://localhost:8000"),
        ("http://127.0.0.1", "http://localhost"),
        ("http://[::1]:8000", "http://localhost:8000"),
        ("http://localhost:8000", "http://localhost:8000"),
        ("https://keys.example", "https://keys.example"),
        ("https://127.0.0.1.example", "https://127.0.0.1.example"),
    ],
)
def test_origin_of_this_machine_gets_a_domain(origin: str, domain: str) -> None:
    assert to_domain(origin) == domain

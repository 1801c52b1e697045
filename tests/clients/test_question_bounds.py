"""The client and the service accept the same questions."""

import json

import pytest
from keyvault_client.decisions import (
    are_contexts_acceptable,
    are_headers_acceptable,
    canonical_address,
    is_path_acceptable,
)

from keyvault.domain.errors import RequestInvalidError
from keyvault.hotpath.messages.requests import read_verify

LENGTHS = (1, 64, 65, 128, 129, 500, 501, 8192, 8193)
TEXTS = ("", *("a" * length for length in LENGTHS), "a\0", "a\ud800", "\U0001f511", "\u00e9" * 500)
ADDRESSES = (
    "",
    "192.0.2.1",
    "::1",
    "2001:DB8::1",
    "::ffff:192.0.2.1",
    "fe80::1%1",
    "192.0.2.1:80",
    "192.0.2",
    "1" * 65,
)


def is_accepted(**members: str) -> bool:
    """Whether the service can read a question with these members."""
    line = {"method": "GET", "path": "/a"}
    try:
        read_verify(json.dumps({"key": None, "environment": "sandbox"} | line | members).encode())
    except RequestInvalidError:
        return False
    return True


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: f"{text[:2]!a} {len(text)}")
def test_client_accepts_the_texts_that_the_service_accepts(text: str) -> None:
    """Guarantee: the memory of a LocalVerifier decides no question that the service refuses for a text."""
    assert are_headers_acceptable(text, "") == is_accepted(user_agent=text)
    assert are_headers_acceptable("", text) == is_accepted(origin=text)
    assert are_headers_acceptable("shop/1", text) == is_accepted(user_agent="shop/1", origin=text)
    assert are_contexts_acceptable(text, None) == is_accepted(merchant=text)
    assert are_contexts_acceptable(None, text) == is_accepted(store=text)
    # The catalog has no empty path.
    assert is_path_acceptable(text) == is_accepted(path=text) or text == ""


@pytest.mark.parametrize("text", ADDRESSES)
def test_client_accepts_the_addresses_that_the_service_accepts(text: str) -> None:
    """Guarantee: an address has one form, whether the memory or the service decided."""
    assert (canonical_address(text) is not None) == is_accepted(client_ip=text)
    if is_accepted(client_ip=text):
        line = {"key": None, "environment": "sandbox", "endpoint": "a", "client_ip": text}
        assert canonical_address(text) == read_verify(json.dumps(line).encode()).client_ip

"""Credentials and request ids in headers: read strictly, never chosen from, never trusted."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.wire.headers import came_twice, clean_client_request_id, mint_request_id, read_bearer
from tests.domain.minting import drawn_from, mint

TOKEN = mint()


@pytest.mark.parametrize(
    ("authorization", "token"),
    [
        (f"Bearer {TOKEN}", TOKEN),
        (f"bearer {TOKEN}", TOKEN),
        (f"BEARER {TOKEN}", TOKEN),
        (f"Bearer   {TOKEN}", TOKEN),
        (f"Bearer {TOKEN}  ", TOKEN),
        ("Bearer a b", "a b"),
        ("Bearer é", "é"),
    ],
)
def test_bearer_token_is_what_stands_behind_the_scheme(authorization: str, token: str) -> None:
    assert read_bearer(authorization) == token


def test_bearer_header_absent_is_none() -> None:
    """Absent is told from wrong: only the first is "no token was sent"."""
    assert read_bearer(None) is None


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        " ",
        "Bearer",
        "Bearer ",
        "Bearer    ",
        TOKEN,
        f" Bearer {TOKEN}",
        f"Bearer\t{TOKEN}",
        f"Bearer\n{TOKEN}",
        f"Bearer:{TOKEN}",
        f"Bearer={TOKEN}",
        f"Basic {TOKEN}",
        f"ApiKey {TOKEN}",
        f"Token {TOKEN}",
        f"Bearerx {TOKEN}",
        f"xBearer {TOKEN}",
        f"Вearer {TOKEN}",  # noqa: RUF001  a Cyrillic letter is the point
        f"Bearer {TOKEN}, Bearer {TOKEN}",
        f"Bearer {TOKEN},",
        f"Bearer ,{TOKEN}",
        f"Bearer, Bearer {TOKEN}",
        f"Basic x, Bearer {TOKEN}",
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_bearer_header_of_any_other_form_proves_nothing(authorization: str) -> None:
    """Another scheme, a joined header, none at all: never a token, and never None."""
    assert read_bearer(authorization) == ""


@given(st.text())
def test_bearer_any_header_is_read_without_a_fault(authorization: str) -> None:
    token = read_bearer(authorization)
    assert token is not None
    if token:
        assert authorization.lower().startswith("bearer ")
        assert "," not in token
        assert token in authorization


@given(st.text(st.characters(exclude_characters=","), min_size=1), st.text())
def test_bearer_header_joined_with_another_is_refused(token: str, other: str) -> None:
    """Servers join repeated headers with a comma: which of the two was meant is never guessed."""
    assert read_bearer(f"Bearer {token}, {other}") == ""


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, False), ("", False), (TOKEN, False), ("a,b", True), (",", True), (f",{TOKEN}", True), ("Basic x, y", True)],
)
def test_credential_header_with_a_comma_came_twice(value: str | None, expected: bool) -> None:
    assert came_twice(value) is expected


@pytest.mark.parametrize("value", ["a", "A-b_c.9", "0" * 64, "550e8400-e29b-41d4-a716-446655440000"])
def test_client_request_id_that_is_plain_is_kept(value: str) -> None:
    assert clean_client_request_id(value) == value


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "0" * 65,
        "a b",
        " a",
        "a\n",
        "a\r\nX: y",
        "a\x00",
        "é",
        "٣",
        'a"',
        "a\\",
        "a/b",
        "a,b",
        "a\x1b[2K",
        "\ud800",
    ],
    ids=ascii,
)
def test_client_request_id_that_is_not_plain_is_dropped(value: str | None) -> None:
    """A client writes nothing into our logs but a short plain word."""
    assert clean_client_request_id(value) is None


@given(st.text(max_size=80))
def test_client_request_id_kept_is_harmless(value: str) -> None:
    kept = clean_client_request_id(value)
    assert kept is None or re.fullmatch(r"[A-Za-z0-9._-]{1,64}", kept)
    assert kept in {None, value}


def test_request_id_is_ours_and_cannot_be_guessed() -> None:
    """22 base62 digits, 130 bits, from the randomness that is given; a client's own id never becomes ours."""
    minted = [mint_request_id(drawn_from(seed)) for seed in range(200)]
    assert len(set(minted)) == 200
    assert all(re.fullmatch(r"[0-9A-Za-z]{22}", each) for each in minted)
    assert mint_request_id(drawn_from(1)) == minted[1]

"""Credentials and request ids in headers: parsed strictly; of several values none is chosen."""

import re
from ipaddress import IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.wire.headers import (
    clean_client_request_id,
    client_address,
    is_repeated,
    join_headers,
    mint_request_id,
    read_bearer,
    read_preference_wait,
)
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
def test_bearer_token_is_the_text_after_the_scheme(authorization: str, token: str) -> None:
    assert read_bearer(authorization) == token


def test_bearer_header_absent_is_none() -> None:
    """An absent header is None, unlike a malformed one."""
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
    """A malformed header gives an empty token, which never verifies, and not None."""
    assert read_bearer(authorization) == ""


@given(st.text())
def test_bearer_of_any_header_raises_nothing(authorization: str) -> None:
    token = read_bearer(authorization)
    assert token is not None
    if token:
        assert authorization.lower().startswith("bearer ")
        assert "," not in token
        assert token in authorization


@given(st.text(st.characters(exclude_characters=","), min_size=1), st.text())
def test_bearer_header_joined_with_another_is_refused(token: str, other: str) -> None:
    """Servers join repeated headers with a comma: the service never guesses which one was meant."""
    assert read_bearer(f"Bearer {token}, {other}") == ""


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, False), ("", False), (TOKEN, False), ("a,b", True), (",", True), (f",{TOKEN}", True), ("Basic x, y", True)],
)
def test_credential_header_with_a_comma_counts_as_repeated(value: str | None, expected: bool) -> None:
    assert is_repeated(value) is expected


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
    """The id that a client sends is kept only if it is a short plain word."""
    assert clean_client_request_id(value) is None


@given(st.text(max_size=80))
def test_client_request_id_kept_is_harmless(value: str) -> None:
    kept = clean_client_request_id(value)
    assert kept is None or re.fullmatch(r"[A-Za-z0-9._-]{1,64}", kept)
    assert kept in {None, value}


def test_request_id_is_generated_and_unpredictable() -> None:
    """22 base62 digits, 130 bits, from the given randomness; the id that a client sends is never used."""
    minted = [mint_request_id(drawn_from(seed)) for seed in range(200)]
    assert len(set(minted)) == 200
    assert all(re.fullmatch(r"[0-9A-Za-z]{22}", each) for each in minted)
    assert mint_request_id(drawn_from(1)) == minted[1]


@pytest.mark.parametrize(
    ("sent", "joined"),
    [
        ([], {}),
        ([(b"X-Api-Key", b"a")], {"x-api-key": "a"}),
        ([(b"x-api-key", b"a"), (b"X-API-KEY", b"")], {"x-api-key": "a,"}),
        ([(b"x-api-key", b""), (b"x-api-key", b"")], {"x-api-key": ","}),
        ([(b"x_api_key", b"a")], {}),
        ([(b"x_api-key", b"a"), (b"x-api-key", b"b"), (b"X_API_KEY", b"c")], {"x-api-key": "b"}),
        ([(b"x-a", b"\xff\xc3\xa9")], {"x-a": "\xff\xc3\xa9"}),
    ],
)
def test_headers_joined_keep_every_byte_and_no_underscore(sent: list[tuple[bytes, bytes]], joined: object) -> None:
    assert join_headers(sent) == joined


@given(st.lists(st.tuples(st.sampled_from([b"x-api-key", b"X-Api-Key", b"x_api_key"]), st.binary(max_size=9))))
def test_headers_joined_reveal_every_repetition(sent: list[tuple[bytes, bytes]]) -> None:
    """Guarantee: no value of a repeated credential header can pass as the only one."""
    values = [value.decode("latin-1") for name, value in sent if b"_" not in name]
    joined = join_headers(sent).get("x-api-key")
    assert joined == (",".join(values) if values else None)
    assert len(values) < 2 or is_repeated(joined)


PEER = "198.51.100.7"


@pytest.mark.parametrize(
    ("remote", "forwarded", "proxies", "address"),
    [
        (PEER, None, 0, PEER),
        (PEER, "192.0.2.1", 0, PEER),
        ("::ffff:198.51.100.7", None, 0, PEER),
        ("2001:DB8:0::1", None, 0, "2001:db8::1"),
        ("", None, 0, None),
        (None, None, 0, None),
        ("unix:", None, 0, None),
        (PEER, "192.0.2.1", 1, "192.0.2.1"),
        (PEER, "203.0.113.9, 192.0.2.1", 1, "192.0.2.1"),
        (PEER, "203.0.113.9,192.0.2.1 ,\t10.0.0.1", 2, "192.0.2.1"),
        (PEER, "192.0.2.1:443", 1, "192.0.2.1"),
        (PEER, "[2001:DB8::1]:443", 1, "2001:db8::1"),
        (PEER, "[2001:db8::1]", 1, "2001:db8::1"),
        (PEER, "2001:db8::1", 1, "2001:db8::1"),
        (PEER, "2001:db8::1:443", 1, "2001:db8::1:443"),
        (PEER, "[::ffff:192.0.2.1]:1", 1, "192.0.2.1"),
        (PEER, "::ffff:c000:201", 1, "192.0.2.1"),
        # Fewer entries than proxies, or an invalid address: None, and never the next entry.
        (PEER, None, 1, None),
        (PEER, "", 1, None),
        (PEER, "192.0.2.1", 2, None),
        (PEER, "192.0.2.1,", 1, None),
        (PEER, "192.0.2.1, unknown", 1, None),
        (PEER, "192.0.2.1, _hidden", 1, None),
        (PEER, "192.0.2.1:", 1, None),
        (PEER, "192.0.2.1:http", 1, None),
        (PEER, "192.0.2.1:999999", 1, None),
        (PEER, "[192.0.2.1]", 1, None),
        (PEER, "[2001:db8::1", 1, None),
        (PEER, "[2001:db8::1]x", 1, None),
        (PEER, "2001:db8::1]", 1, None),
        (PEER, "fe80::1%eth0", 1, None),
        (PEER, "192.0.2.01", 1, None),
        (PEER, "192.0.2.0/24", 1, None),
        (PEER, "٣.0.2.1", 1, None),
        (PEER, "for=192.0.2.1", 1, None),
    ],
)
def test_client_address_is_the_one_that_the_trusted_proxies_report(
    remote: str | None, forwarded: str | None, proxies: int, address: str | None
) -> None:
    assert client_address(remote, forwarded, proxies) == address


@given(st.text(), st.lists(st.ip_addresses(), min_size=1, max_size=4))
def test_client_address_is_not_changed_by_entries_of_a_client(forged: str, appended: list[IPv6Address]) -> None:
    """Guarantee: a proxy appends its entry, so entries further left, sent by the client, are ignored."""
    proxies = ", ".join(map(str, appended))
    honest = client_address(PEER, proxies, len(appended))
    assert client_address(PEER, f"{forged}, {proxies}", len(appended)) == honest
    assert honest is not None


@given(st.text(), st.one_of(st.none(), st.text("0123456789abcdef.:[], %/", max_size=60)), st.integers(0, 4))
def test_client_address_of_any_headers_is_canonical_or_none(remote: str, forwarded: str | None, proxies: int) -> None:
    address = client_address(remote, forwarded, proxies)
    if address is not None:
        parsed = ip_address(address)
        assert str(parsed) == address
        assert not (isinstance(parsed, IPv6Address) and parsed.ipv4_mapped)


# --- Prefer: wait -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefer", "seconds"),
    [
        ("wait=5", 5),
        ("wait=0", 0),
        ("wait=007", 7),
        ("WAIT = 5", 5),
        ("\twait=5 ", 5),
        ("wait=5; x=y", 5),
        ("wait=5;", 5),
        ("respond-async, wait=10", 10),
        ("respond-async,wait=10,", 10),
        ('note="a, wait=3; \\" wait=4", wait=6', 6),
        ("wait=5, wait=7", 5),
        ("waiting=9, wait=1", 1),
        ("wait=" + "9" * 5000, 999_999_999),
    ],
)
def test_preference_wait_is_the_first_number_of_seconds(prefer: str, seconds: int) -> None:
    """RFC 7240: names without regard to case, several preferences in a list, the first of two that are the same."""
    assert read_preference_wait(prefer) == seconds


@pytest.mark.parametrize(
    "prefer",
    [
        None,
        "",
        ",",
        "respond-async",
        "wait",
        "wait=",
        "wait=-1",
        "wait=+5",
        "wait=1.5",
        "wait=5s",
        'wait="5"',
        "wait=\u0665",
        "wait=5 6",
        "wait\n=5",
        "=5",
        "5",
        "wait=x, wait=5",
        "respond-async; wait=5",
        'note="wait=5',
        '", wait=5',
    ],
)
def test_preference_wait_that_cannot_be_read_is_none(prefer: str | None) -> None:
    """A preference is optional: a malformed one is ignored, not refused."""
    assert read_preference_wait(prefer) is None


@given(st.text(max_size=200) | st.text('wait=5;", \\', max_size=50))
def test_preference_wait_of_any_text_is_a_small_number_or_none(prefer: str) -> None:
    seconds = read_preference_wait(prefer)
    assert seconds is None or 0 <= seconds <= 999_999_999


@given(st.integers(0, 999_999_999), st.lists(st.sampled_from(["respond-async", 'note="a, b"', "handling=lenient", ""])))
def test_preference_wait_is_found_among_other_preferences(seconds: int, others: list[str]) -> None:
    assert read_preference_wait(", ".join([*others, f"wait={seconds}", "wait=1"])) == seconds

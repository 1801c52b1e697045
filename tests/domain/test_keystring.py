"""Key strings: the published format is parsed, and any other text is refused."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keyvault.domain import keystring
from keyvault.domain.keystring import (
    KEY_PREFIX_PATTERN,
    MAX_LENGTH,
    SHAPED,
    StringKind,
    StringScope,
    checksum,
    mint_keystring,
    parse_keystring,
)

from .minting import ALPHANUMERIC, SORTS, drawn_from, key_prefixes, keystrings, mint

# Made without this code: `printf %s "$head" | gzip -c | tail -c8 | od -An -tu4` for the CRC-32, and base62 by
# the shell's own division.
EXAMPLE = "kv_prv_sbx_0123456789ABCDEFabcdefghijklmnopqrstuvwxyz0123456789ABCDEFG1XoQMJ"
PADDED_EXAMPLE = "acme1_svc_all_zzzzzzzzzzzzzzzz00000000000000000000000000000000000000000004AtY1A"

CONTRACT = re.compile(
    r"(?P<key_prefix>[a-z][a-z0-9]{0,15})_(?P<kind>pub|prv|cat|svc)_(?P<scope>sbx|prd|all)_"
    r"(?P<key_id>[0-9A-Za-z]{16})(?P<secret>[0-9A-Za-z]{43})(?P<crc>[0-9A-Za-z]{6})"
)
SORT = st.sampled_from(SORTS)


def crc32(text: str) -> int:
    """CRC-32 bit by bit, as its definition has it (reflected, polynomial 0x04C11DB7)."""
    register = 0xFFFFFFFF
    for byte in text.encode("ascii"):
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0xEDB88320 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def base62(number: int) -> str:
    digits = ""
    for _ in range(6):
        digits = ALPHANUMERIC[number % 62] + digits
        number //= 62
    return digits


def signed(head: str) -> str:
    """Generate any text with a correct checksum, so that a refusal has another reason."""
    return head + base62(crc32(head))


# --- the format -------------------------------------------------------------------------------------------


def test_keystring_example_made_elsewhere_is_read() -> None:
    """The format is the one of the contract, not only consistent with itself."""
    found = parse_keystring(EXAMPLE, "kv")
    assert found is not None
    assert (found.kind, found.scope, found.key_id) == ("prv", "sbx", "0123456789ABCDEF")
    assert found.text.reveal() == EXAMPLE
    service = parse_keystring(PADDED_EXAMPLE, "acme1")
    assert service is not None
    assert (service.kind, service.scope, service.key_id) == ("svc", "all", "z" * 16)


def test_keystring_examples_have_the_checksum_of_the_definition() -> None:
    assert signed(EXAMPLE[:-6]) == EXAMPLE
    assert signed(PADDED_EXAMPLE[:-6]) == PADDED_EXAMPLE


@given(SORT, key_prefixes, st.integers())
def test_keystring_minted_has_the_contract_s_format(
    sort: tuple[StringKind, StringScope], key_prefix: str, seed: int
) -> None:
    minted = mint_keystring(key_prefix, *sort, drawn_from(seed))
    parts = CONTRACT.fullmatch(minted.text.reveal())
    assert parts is not None
    assert (parts["key_prefix"], parts["kind"], parts["scope"], parts["key_id"]) == (key_prefix, *sort, minted.key_id)
    assert parts["crc"] == base62(crc32(minted.text.reveal()[:-6]))


@given(SORT, key_prefixes, st.integers())
def test_keystring_minted_is_read_back(sort: tuple[StringKind, StringScope], key_prefix: str, seed: int) -> None:
    minted = mint_keystring(key_prefix, *sort, drawn_from(seed))
    found = parse_keystring(minted.text.reveal(), key_prefix)
    assert found is not None
    assert (found.kind, found.scope, found.key_id) == (*sort, minted.key_id)
    assert found.text.reveal() == minted.text.reveal()


@given(st.text(ALPHANUMERIC + "_", max_size=90))
def test_keystring_checksum_covers_all_that_stands_before_it(head: str) -> None:
    assert checksum(head) == base62(crc32(head))


def test_keystring_parts_share_no_randomness() -> None:
    """The public id reveals nothing about the secret: both are drawn independently."""

    def other_secret(count: int) -> bytes:
        return drawn_from("an id" if count == 16 else "another secret")(count)

    def other_id(count: int) -> bytes:
        return drawn_from("another id" if count == 16 else "a secret")(count)

    def usual(count: int) -> bytes:
        return drawn_from("an id" if count == 16 else "a secret")(count)

    first, second, third = (
        mint_keystring("kv", StringKind.PRIVATE, StringScope.SANDBOX, source).text.reveal()
        for source in (usual, other_secret, other_id)
    )
    assert (first[:27], first[27:70]) == (second[:27], third[27:70])
    assert first[27:70] != second[27:70]
    assert first[:27] != third[:27]


def test_keystring_many_minted_are_all_different() -> None:
    source = drawn_from("many")
    minted = [mint_keystring("kv", StringKind.PRIVATE, StringScope.SANDBOX, source) for _ in range(500)]
    assert len({each.key_id for each in minted}) == 500
    assert len({each.text.reveal()[27:70] for each in minted}) == 500


def test_keystring_shows_no_secret_in_its_repr() -> None:
    """The representation of a presented key contains only its public id."""
    found = parse_keystring(EXAMPLE, "kv")
    assert EXAMPLE[27:] not in repr(found)
    assert "0123456789ABCDEF" in repr(found)


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sort", SORTS, ids="_".join)
def test_keystring_with_any_one_character_changed_is_refused(sort: tuple[StringKind, StringScope]) -> None:
    """No typing error of one character, at any position, causes a look-up."""
    text = mint(*sort)
    for position, right in enumerate(text):
        for wrong in ALPHANUMERIC + "_-":
            if wrong != right:
                assert parse_keystring(text[:position] + wrong + text[position + 1 :], "kv") is None


@given(keystrings, st.data())
def test_keystring_with_a_character_more_less_or_swapped_is_refused(text: str, data: st.DataObject) -> None:
    key_prefix = text.partition("_")[0]
    at = data.draw(st.integers(0, len(text) - 1))
    assert parse_keystring(text[:at] + text[at + 1 :], key_prefix) is None
    assert parse_keystring(text[:at] + data.draw(st.sampled_from(ALPHANUMERIC)) + text[at:], key_prefix) is None
    if at < len(text) - 7 and text[at] != text[at + 1]:
        assert parse_keystring(text[:at] + text[at + 1] + text[at] + text[at + 2 :], key_prefix) is None


@given(keystrings, key_prefixes)
def test_keystring_with_another_key_prefix_is_refused(text: str, key_prefix: str) -> None:
    """A key of another installation is refused, even with a correct checksum."""
    assert (parse_keystring(text, key_prefix) is not None) == text.startswith(f"{key_prefix}_")


@pytest.mark.parametrize("kind", ["PRV", "pri", "key", "", "prv_"])
def test_keystring_of_an_unknown_kind_is_refused(kind: str) -> None:
    assert parse_keystring(signed(f"kv_{kind}_sbx_{'A' * 59}"), "kv") is None


@pytest.mark.parametrize("scope", ["SBX", "prod", "any", "", "_"])
def test_keystring_of_an_unknown_scope_is_refused(scope: str) -> None:
    assert parse_keystring(signed(f"kv_prv_{scope}_{'A' * 59}"), "kv") is None


@pytest.mark.parametrize("kind", ["pub", "prv", "cat"])
def test_keystring_of_all_environments_is_for_service_tokens_only(kind: str) -> None:
    """Guarantee: no merchant key is valid in both environments: none is minted and none is parsed."""
    assert parse_keystring(signed(f"kv_{kind}_all_{'A' * 59}"), "kv") is None
    assert parse_keystring(signed(f"kv_svc_all_{'A' * 59}"), "kv") is not None
    with pytest.raises(ValueError, match="one environment"):
        mint_keystring("kv", StringKind(kind), StringScope.ALL, drawn_from(0))


@pytest.mark.parametrize("digits", [0, 15, 58, 60, 100])
def test_keystring_of_another_length_is_refused(digits: int) -> None:
    assert parse_keystring(signed(f"kv_prv_sbx_{'A' * digits}"), "kv") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "kv",
        f" {EXAMPLE}",
        f"{EXAMPLE} ",
        f"{EXAMPLE}\n",
        f"{EXAMPLE}\r\n",
        f"{EXAMPLE}\x00",
        f"\x00{EXAMPLE}",
        f"\ufeff{EXAMPLE}",
        f"{EXAMPLE[:40]}\x00{EXAMPLE[41:]}",
        f"{EXAMPLE[:40]}\ud800{EXAMPLE[41:]}",
        f"{EXAMPLE[:40]}é{EXAMPLE[41:]}",
        EXAMPLE.replace("0", "\u0660"),
        EXAMPLE.replace("A", "\uff21"),
        EXAMPLE.replace("_", "-"),
        EXAMPLE.upper(),
        EXAMPLE.lower(),
        f"{EXAMPLE},{EXAMPLE}",
        EXAMPLE + EXAMPLE,
        "\ud800" * 76,
        "kv_prv_sbx_" + "\x00" * 65,
    ],
    ids=repr,
)
def test_keystring_malformed_is_refused_without_a_fault(text: str) -> None:
    """Any text may be presented: NUL, lone surrogates and look-alike digits are refused without an error."""
    assert parse_keystring(text, "kv") is None


@given(st.one_of(st.text(), st.text(st.characters(categories=["Cs", "Cc", "Nd"]))))
@example("kv_prv_sbx_" + "é" * 65)
def test_keystring_any_text_is_read_or_refused_never_a_fault(text: str) -> None:
    assert parse_keystring(text, "kv") is None


def test_keystring_over_long_text_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of megabytes costs nothing: it is refused before its beginning is parsed."""
    longest = mint(key_prefix="a" * 16)
    assert parse_keystring(longest, "a" * 16) is not None
    monkeypatch.setattr(keystring, "_openings", None)
    assert parse_keystring(longest + "A" * (MAX_LENGTH + 1 - len(longest)), "a" * 16) is None
    assert parse_keystring(EXAMPLE + "A" * 1_000_000, "kv") is None


@pytest.mark.parametrize("key_prefix", ["", "1a", "Kv", "k_v", "k-v", "a" * 17, "é", "kv\n"])
def test_keystring_minted_with_an_invalid_key_prefix_is_refused(key_prefix: str) -> None:
    with pytest.raises(ValueError, match="key prefix"):
        mint_keystring(key_prefix, StringKind.PRIVATE, StringScope.SANDBOX, drawn_from(0))
    assert KEY_PREFIX_PATTERN.fullmatch(key_prefix) is None


# --- what looks like one ----------------------------------------------------------------------------------


@given(keystrings, st.text(max_size=30), st.text(max_size=30))
def test_keystring_anywhere_in_a_text_is_noticed(text: str, before: str, after: str) -> None:
    """A leak scanner finds a key between any other characters."""
    assert SHAPED.search(before + text + after) is not None


@given(keystrings, st.integers(1, 48))
def test_keystring_cut_or_mistyped_is_still_noticed(text: str, cut: int) -> None:
    wrong = text[:-1] + ("A" if text[-1] != "A" else "B")
    assert SHAPED.search(wrong) is not None
    assert SHAPED.search(text[:-cut]) is not None
    for escape in ("%5F", "%255F", "%25255f", "\\u005f", "\\\\u005F"):
        assert SHAPED.search(text.replace("_", escape)) is not None


@given(keystrings)
def test_keystring_s_public_part_alone_is_not_noticed(text: str) -> None:
    """The key id is public: naming it in a URL or a log is no exposure."""
    key_id = text.rpartition("_")[2][:16]
    assert SHAPED.search(f"/v1/keys/{key_id}/revoke") is None
    assert SHAPED.search(text[: text.rindex("_") + 17]) is None

"""Key material at rest: the form of a digest, and a comparison that reveals only its result."""

import hashlib
import hmac
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from keyvault.domain.digests import (
    BLOCK_BYTES,
    DECOY_DIGEST,
    DECOY_VERSION,
    DIGEST_BYTES,
    PEPPER_BYTES,
    PEPPER_SET,
    Mac,
    Peppers,
    PepperSet,
)
from keyvault.domain.environments import Environment
from keyvault.domain.plaintext import Plaintext

from .minting import ALPHANUMERIC, keystrings, mint

ONE, TWO = b"1" * PEPPER_BYTES, b"2" * PEPPER_BYTES
SANDBOX = Peppers(PepperSet.SANDBOX, {1: ONE, 2: TWO})

peppers = st.binary(min_size=PEPPER_BYTES, max_size=PEPPER_BYTES)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many MACs were made, and how many comparisons in constant time."""
    done: Counter[str] = Counter()

    def counted(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            done[name] += 1
            return real(*args)

        return call

    monkeypatch.setattr(Mac, "digest", counted("macs", Mac.digest))
    monkeypatch.setattr(hmac, "compare_digest", counted("comparisons", hmac.compare_digest))
    return done


def test_digest_is_the_contract_s_hmac_sha256_of_the_whole_string() -> None:
    """HMAC-SHA256(pepper, whole string), as RFC 2104 spells it out, and nothing less of the string."""
    text = mint()
    pad = ONE.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in pad) + text.encode()).digest()
    outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in pad) + inner).digest()
    assert SANDBOX.digest(Plaintext(text), 1) == (outer, 1)
    assert len(outer) == DIGEST_BYTES


def test_digest_uses_the_newest_pepper_by_default() -> None:
    text = Plaintext(mint())
    assert SANDBOX.current_version == 2
    assert SANDBOX.digest(text) == SANDBOX.digest(text, 2) != SANDBOX.digest(text, 1)


@given(st.binary(max_size=BLOCK_BYTES), st.binary(max_size=300))
def test_mac_is_the_standard_library_s(key: bytes, text: bytes) -> None:
    assert Mac(key).digest(text) == hmac.digest(key, text, "sha256")


def test_mac_of_a_key_that_had_to_be_hashed_first_is_none() -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        Mac(b"k" * (BLOCK_BYTES + 1))


@given(keystrings, peppers)
def test_digest_matches_the_string_it_was_made_of(text: str, pepper: bytes) -> None:
    own = Peppers(PepperSet.SANDBOX, {1: pepper})
    assert own.matches(Plaintext(text), *own.digest(Plaintext(text)))


@given(keystrings, st.integers(0, 90), st.sampled_from(ALPHANUMERIC))
def test_digest_does_not_match_a_string_that_differs_anywhere(text: str, at: int, digit: str) -> None:
    """The digest covers the whole: key prefix, kind, environment, id, secret and checksum."""
    at = min(at, len(text) - 1)
    assume(text[at] != digit)
    other = text[:at] + digit + text[at + 1 :]
    assert not SANDBOX.matches(Plaintext(other), *SANDBOX.digest(Plaintext(text)))


@given(keystrings, peppers, peppers)
def test_digest_does_not_match_under_another_pepper(text: str, pepper: bytes, other: bytes) -> None:
    """Without the peppers, a copy of the database proves no key."""
    assume(pepper != other)
    digest, version = Peppers(PepperSet.SANDBOX, {1: pepper}).digest(Plaintext(text))
    assert not Peppers(PepperSet.SANDBOX, {1: other}).matches(Plaintext(text), digest, version)


def test_digest_of_one_version_does_not_match_as_another() -> None:
    """Only the version that made a digest is tried, not every version."""
    text = Plaintext(mint())
    digest, _ = SANDBOX.digest(text, 1)
    assert SANDBOX.matches(text, digest, 1)
    assert not SANDBOX.matches(text, digest, 2)


@pytest.mark.parametrize("version", [DECOY_VERSION, -1, 3, 2**40])
def test_digest_of_an_unknown_version_never_matches(version: int) -> None:
    """A record with an unknown pepper version proves no key, whatever its digest."""
    text = Plaintext(mint())
    for digest in (DECOY_DIGEST, SANDBOX.digest(text, 1)[0], SANDBOX.digest(text, 2)[0], b""):
        assert not SANDBOX.matches(text, digest, version)


def test_digest_made_with_the_decoy_pepper_does_not_match_either() -> None:
    """Guarantee: the decoy pepper, which is public in the source, matches no key."""
    text = mint()
    decoy_pepper = hashlib.sha256(b"keyvault/decoy-pepper").digest()
    made = hmac.digest(decoy_pepper, text.encode(), "sha256")
    assert not SANDBOX.matches(Plaintext(text), made, DECOY_VERSION)
    assert not SANDBOX.matches(Plaintext(text), made, 1)


@pytest.mark.parametrize("digest", [b"", b"\0" * 32, b"x", b"\0" * 64], ids=len)
def test_digest_of_another_length_does_not_match_and_raises_nothing(digest: bytes) -> None:
    assert not SANDBOX.matches(Plaintext(mint()), digest, 1)


@pytest.mark.parametrize(
    ("digest", "version"),
    [
        pytest.param(SANDBOX.digest(Plaintext(mint()), 1)[0], 1, id="right"),
        pytest.param(SANDBOX.digest(Plaintext(mint(seed="other")), 1)[0], 1, id="wrong"),
        pytest.param(DECOY_DIGEST, DECOY_VERSION, id="decoy"),
        pytest.param(DECOY_DIGEST, 99, id="unknown version"),
    ],
)
def test_digest_comparison_takes_the_same_steps_for_every_result(
    digest: bytes, version: int, work: Counter[str]
) -> None:
    """Every path computes one MAC and one comparison in constant time, so the time reveals nothing."""
    SANDBOX.matches(Plaintext(mint()), digest, version)
    assert work == {"macs": 1, "comparisons": 1}


def test_peppers_decoy_version_belongs_to_no_pepper() -> None:
    assert DECOY_VERSION < 1
    assert len(DECOY_DIGEST) == DIGEST_BYTES


def test_peppers_repr_names_versions_only() -> None:
    """The representation of a pepper set contains no pepper."""
    shown = f"{SANDBOX} {SANDBOX!r} {[SANDBOX]}"
    assert "versions=[1, 2]" in shown
    assert "1111" not in shown
    assert "2222" not in shown


def test_peppers_each_environment_has_a_set_of_its_own() -> None:
    """Guarantee: sandbox, production and service tokens each have their own pepper set."""
    assert set(PEPPER_SET) == set(Environment)
    assert len({*PEPPER_SET.values(), PepperSet.SERVICE}) == 3 == len(PepperSet)


@given(peppers, st.integers(1, 10))
def test_check_value_detects_swapped_environments(pepper: bytes, version: int) -> None:
    """The same pepper in the wrong set, or as the wrong version, fails its check: a swapped keystore is noticed."""
    values = {
        (each, number): Peppers(each, {number: pepper}).check_value(number)
        for each in PepperSet
        for number in (version, version + 1)
    }
    assert len(set(values.values())) == len(values)


@given(peppers, peppers)
def test_check_value_distinguishes_peppers_and_reveals_none(pepper: bytes, other: bytes) -> None:
    assume(pepper != other)
    value = Peppers(PepperSet.SANDBOX, {1: pepper}).check_value(1)
    assert value != Peppers(PepperSet.SANDBOX, {1: other}).check_value(1)
    assert value == Peppers(PepperSet.SANDBOX, {1: pepper, 2: other}).check_value(1)
    assert len(value) == 16
    assert value not in (pepper[:16], pepper[16:])


def test_check_value_is_no_digest_of_any_key_string() -> None:
    """The label in the MAC has characters that no key string has, so neither can be taken for the other."""
    assert set("keyvault/pepper-check/sandbox/1") - set(ALPHANUMERIC + "_")


def test_peppers_hash_with_the_version_in_force() -> None:
    """A version is loaded before it is used: until every process has it, digests are made with the one before."""
    text = Plaintext(mint())
    waiting = Peppers(PepperSet.SANDBOX, {1: ONE, 2: TWO}, hashing_version=1)
    assert waiting.current_version == 1
    assert waiting.digest(text) == SANDBOX.digest(text, 1)
    assert waiting.matches(text, *SANDBOX.digest(text, 2))


@pytest.mark.parametrize(("version", "lacks"), [(0, False), (1, False), (2, False), (3, True)])
def test_peppers_miss_newer_versions_and_not_retired_ones(version: int, *, lacks: bool) -> None:
    """A newer unknown version is missing; an older unknown version was retired."""
    assert Peppers(PepperSet.SANDBOX, {2: TWO}).lacks(version) is lacks

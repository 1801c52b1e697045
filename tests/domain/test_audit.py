"""The chain of audit entries: every later change of a stored log is found, with its place."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from keyvault.domain.audit import (
    CUSTOMER_TOKEN_SLOTS,
    GENESIS,
    Break,
    ChainedEntry,
    account_chain,
    customer_token_chains,
    entry_bytes,
    entry_hash,
    verify_chain,
)
from keyvault.domain.plaintext import Plaintext

AT = datetime(2026, 11, 21, 12, tzinfo=UTC)
NAME = "account:acme/sandbox"
ENTRY: dict[str, Any] = {
    "chain": NAME,
    "sequence": 1,
    "at": AT,
    "event": "key.revoked",
    "actor": "operator:tam",
    "channel": "console",
    "details": {"key_id": "A" * 16},
}

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)


def written(texts: list[str], chain: str = NAME) -> list[ChainedEntry]:
    """Return a chain with one entry for each text, as the service writes it."""
    entries: list[ChainedEntry] = []
    for sequence, text in enumerate(texts, 1):
        body = entry_bytes(**ENTRY | {"chain": chain, "sequence": sequence, "details": {"text": text}})
        previous = entries[-1].hash if entries else GENESIS
        entries.append(ChainedEntry(chain, sequence, body, previous, entry_hash(previous, body)))
    return entries


def rechained(entries: list[ChainedEntry]) -> list[ChainedEntry]:
    """Renumber and rehash the entries, as an attacker who knows the code would."""
    done: list[ChainedEntry] = []
    for sequence, entry in enumerate(entries, 1):
        previous = done[-1].hash if done else GENESIS
        done.append(replace(entry, sequence=sequence, previous=previous, hash=entry_hash(previous, entry.body)))
    return done


def checked(entries: list[ChainedEntry], head: list[ChainedEntry]) -> Break | None:
    """Verify these entries against the head of the chain `head`."""
    return verify_chain(NAME, entries, len(head), head[-1].hash if head else GENESIS)


def found_at(entries: list[ChainedEntry], head: list[ChainedEntry]) -> int:
    found = checked(entries, head)
    assert found is not None, "nothing was noticed"
    assert found.chain == NAME
    assert found.why
    return found.sequence


chains = st.lists(texts, min_size=1, max_size=12).map(written)
longer_chains = st.lists(texts, min_size=3, max_size=12).map(written)


def index(data: st.DataObject, entries: list[ChainedEntry], start: int = 0, end: int = 0) -> int:
    return data.draw(st.integers(start, len(entries) - 1 + end))


# --- what an entry's bytes are ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chain", "platform"),
        ("sequence", 2),
        ("at", AT + timedelta(microseconds=1)),
        ("event", "key.suspended"),
        ("actor", "operator:admin"),
        ("channel", "rest"),
        ("details", {"key_id": "B" * 16}),
    ],
)
def test_entry_bytes_cover_every_part(name: str, value: object) -> None:
    """Every field of an entry is part of the hashed bytes."""
    assert entry_bytes(**ENTRY | {name: value}) != entry_bytes(**ENTRY)


def test_entry_bytes_are_canonical_and_readable() -> None:
    body = entry_bytes(**ENTRY)
    assert json.loads(body) == {**ENTRY, "at": "2026-11-21T12:00:00.000000+00:00"}
    assert b" " not in body


def test_entry_bytes_refuse_plaintext() -> None:
    """A secret cannot get into the audit log: its type has no canonical form."""
    with pytest.raises(TypeError):
        entry_bytes(**ENTRY | {"details": {"key": Plaintext("secret")}})


def test_entry_hash_is_sha256_over_a_label_the_previous_hash_and_the_bytes() -> None:
    """Stored chains stay verifiable: the formula is restated here."""
    assert entry_hash(b"p" * 32, b"body") == hashlib.sha256(b"keyvault/audit/v1\0" + b"p" * 32 + b"body").digest()
    assert bytes(32) == GENESIS


def test_account_chain_of_one_account_is_never_another_s() -> None:
    """Merchant ids contain neither slash nor colon, so each account has chains of its own, and so has the platform."""
    names = [account_chain(merchant, env) for merchant in ("a", "a-b", "platform") for env in ("sandbox", "production")]
    names += [chain for name in names for chain in customer_token_chains(name)]
    assert len(set(names)) == 6 * (1 + CUSTOMER_TOKEN_SLOTS)
    assert "platform" not in names


def test_entry_bytes_of_one_moment_in_two_zones_differ() -> None:
    """The text is what was written; the service writes UTC only."""
    elsewhere = AT.astimezone(timezone(timedelta(hours=1)))
    assert entry_bytes(**ENTRY | {"at": elsewhere}) != entry_bytes(**ENTRY)


# --- what is found ----------------------------------------------------------------------------------------


@given(st.lists(texts, max_size=12).map(written))
def test_chain_untouched_is_whole(entries: list[ChainedEntry]) -> None:
    assert checked(entries, entries) is None


@given(chains, st.data())
def test_chain_with_an_edited_entry_is_found_there(entries: list[ChainedEntry], data: st.DataObject) -> None:
    """A change of any bit of an entry is found."""
    at = index(data, entries)
    original = list(entries)
    body = bytearray(entries[at].body)
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    entries[at] = replace(entries[at], body=bytes(body))
    assert found_at(entries, original) == at + 1


@given(chains, st.data())
def test_chain_with_an_edited_and_rehashed_entry_is_found_behind_it(
    entries: list[ChainedEntry], data: st.DataObject
) -> None:
    """Guarantee: an altered entry with a corrected hash is found by the next entry, or by the head."""
    at = index(data, entries)
    original = list(entries)
    body = entries[at].body + b" "
    entries[at] = replace(entries[at], body=body, hash=entry_hash(entries[at].previous, body))
    assert found_at(entries, original) == (at + 2 if at + 1 < len(entries) else at + 1)


@given(longer_chains, st.data())
def test_chain_with_an_entry_deleted_in_the_middle_is_found_there(
    entries: list[ChainedEntry], data: st.DataObject
) -> None:
    at = index(data, entries, end=-1)
    assert found_at(entries[:at] + entries[at + 1 :], entries) == at + 1


@given(longer_chains, st.data())
def test_chain_with_a_deleted_entry_and_the_rest_renumbered_is_found_there(
    entries: list[ChainedEntry], data: st.DataObject
) -> None:
    at = index(data, entries, end=-1)
    rest = [replace(entry, sequence=entry.sequence - 1) for entry in entries[at + 1 :]]
    assert found_at(entries[:at] + rest, entries) == at + 1


@given(chains, st.data())
def test_chain_without_its_tail_is_found_at_the_first_missing_entry(
    entries: list[ChainedEntry], data: st.DataObject
) -> None:
    """A removal of the newest or of all entries is found: the head has their number."""
    kept = index(data, entries)
    assert found_at(entries[:kept], entries) == kept + 1


@given(longer_chains, st.data())
def test_chain_with_two_entries_swapped_is_found_at_the_first(entries: list[ChainedEntry], data: st.DataObject) -> None:
    first = index(data, entries, end=-1)
    second = index(data, entries, start=first + 1)
    original = list(entries)
    entries[first], entries[second] = entries[second], entries[first]
    assert found_at(entries, original) == first + 1


@given(longer_chains, st.data())
def test_chain_with_two_entries_swapped_and_renumbered_is_found_at_the_first(
    entries: list[ChainedEntry], data: st.DataObject
) -> None:
    first = index(data, entries, end=-1)
    second = index(data, entries, start=first + 1)
    original = list(entries)
    entries[first], entries[second] = (
        replace(entries[second], sequence=first + 1),
        replace(entries[first], sequence=second + 1),
    )
    assert found_at(entries, original) == first + 1


@given(chains, texts, st.data())
def test_chain_with_an_entry_slipped_in_is_found_there(
    entries: list[ChainedEntry], text: str, data: st.DataObject
) -> None:
    """A correctly hashed entry that is inserted later is found at every position, also at the end."""
    at = index(data, entries, end=1)
    previous = entries[at - 1].hash if at else GENESIS
    body = entry_bytes(**ENTRY | {"sequence": at + 1, "details": {"slipped in": text}})
    extra = ChainedEntry(NAME, at + 1, body, previous, entry_hash(previous, body))
    found = found_at([*entries[:at], extra, *entries[at:]], entries)
    assert found == at + 2


@given(chains, st.data())
def test_chain_with_an_entry_twice_is_found_at_the_second(entries: list[ChainedEntry], data: st.DataObject) -> None:
    at = index(data, entries)
    assert found_at([*entries[: at + 1], *entries[at:]], entries) == at + 2


TAMPERING: dict[str, Callable[[list[ChainedEntry]], list[ChainedEntry]]] = {
    "edited": lambda entries: [replace(entries[0], body=entries[0].body + b" "), *entries[1:]],
    "deleted": lambda entries: entries[1:],
    "reordered": lambda entries: [entries[1], entries[0], *entries[2:]],
    "doubled": lambda entries: [entries[0], *entries],
}


@given(longer_chains, st.sampled_from(sorted(TAMPERING)))
def test_rehashed_chain_is_found_by_its_head(entries: list[ChainedEntry], how: str) -> None:
    """Guarantee: a fully rehashed chain is found unless the attacker also writes the head row."""
    anew = rechained(TAMPERING[how](entries))
    assume(anew != entries)
    assert found_at(anew, entries) >= min(len(anew), len(entries))


@given(chains, st.data())
def test_chain_whose_columns_disagree_is_found_there(entries: list[ChainedEntry], data: st.DataObject) -> None:
    """Guarantee: the searchable columns are a copy; a column that differs from the hashed bytes is found."""
    at = index(data, entries)
    original = list(entries)
    entries[at] = replace(entries[at], columns_agree=False)
    assert found_at(entries, original) == at + 1


@given(chains, st.data())
def test_chain_whose_link_was_altered_is_found_there(entries: list[ChainedEntry], data: st.DataObject) -> None:
    """Guarantee: an altered `previous` column is found, although the entry's hash does not include that column."""
    at = index(data, entries)
    original = list(entries)
    entries[at] = replace(entries[at], previous=data.draw(st.sampled_from([b"", bytes(31), b"x" * 32])))
    assert found_at(entries, original) == at + 1


@given(chains)
def test_chain_of_another_account_does_not_pass_for_this_one(entries: list[ChainedEntry]) -> None:
    """A complete chain that replaces another one, with its head, is found."""
    other = written(["another"] * len(entries), "account:globex/sandbox")
    assert found_at(other, other) == 1
    assert found_at([*entries[:-1], replace(entries[-1], chain="platform")], entries) == len(entries)


@given(chains, st.binary(min_size=32, max_size=32))
def test_chain_under_a_head_with_another_hash_is_broken(entries: list[ChainedEntry], digest: bytes) -> None:
    assume(digest != entries[-1].hash)
    found = verify_chain(NAME, entries, len(entries), digest)
    assert found is not None
    assert found.sequence == len(entries)


def test_chain_that_should_be_empty_and_is_not_is_broken() -> None:
    entries = written(["a"])
    assert verify_chain(NAME, entries, 0, GENESIS) is not None
    assert verify_chain(NAME, [], 0, GENESIS) is None
    assert verify_chain(NAME, [], 0, bytes(31) + b"1") is not None


@given(longer_chains, st.data())
def test_chain_broken_twice_is_found_at_the_first_place(entries: list[ChainedEntry], data: st.DataObject) -> None:
    """The verification names the first entry that cannot be trusted."""
    first = index(data, entries, end=-1)
    second = index(data, entries, start=first + 1)
    original = list(entries)
    for at in (first, second):
        entries[at] = replace(entries[at], body=entries[at].body + b" ")
    assert found_at(entries, original) == first + 1


def test_chain_is_read_once_and_in_passing() -> None:
    """A generator of any length can be verified: only the last hash is kept in memory."""
    entries = written(["a", "b", "c"])
    assert verify_chain(NAME, iter(entries), 3, entries[-1].hash) is None

"""Lines of the revocation log: a written line is read back, and no other text is parsed as a line."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain import revocation_log
from keyvault.domain.revocation_log import (
    CaughtUp,
    Committed,
    ConfirmedLines,
    DamagedLineError,
    Dropped,
    Ended,
    LogLine,
    Opened,
    line_bytes,
    parse_line,
)

AT = datetime(2026, 11, 21, 12, tzinfo=UTC)

names = st.text(max_size=20)
sequences = st.integers(min_value=0, max_value=2**63 - 1)
ends = st.builds(
    Ended,
    sequence=sequences,
    at=st.datetimes(timezones=st.just(UTC)),
    kind=names,
    id=names,
    state=names,
    reason=names,
    unit=names,
    boot=names,
    expires_at=st.none() | st.datetimes(timezones=st.just(UTC)),
)
opened = st.builds(Opened, installation=names, at=st.datetimes(timezones=st.just(UTC)), accepted_by=names, reason=names)
lines = (
    opened
    | ends
    | st.builds(Committed, unit=names)
    | st.builds(Dropped, unit=names)
    | st.builds(CaughtUp, sequence=sequences)
)


@given(lines)
def test_line_comes_back_as_it_was_written(line: LogLine) -> None:
    text = line_bytes(line)
    assert text.endswith(b"\n")
    assert text.count(b"\n") == 1
    assert parse_line(text[:-1]) == line


@given(lines, st.data())
def test_line_with_any_byte_changed_is_damaged(line: LogLine, data: st.DataObject) -> None:
    """A line that is damaged on the disk is never read as a revocation of another key."""
    text = bytearray(line_bytes(line)[:-1])
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedLineError):
        parse_line(bytes(text))


@given(lines, st.data())
def test_line_that_is_cut_off_is_damaged(line: LogLine, data: st.DataObject) -> None:
    """Guarantee: a write that a crash cut short is never read as a complete line."""
    text = line_bytes(line)[:-1]
    with pytest.raises(DamagedLineError):
        parse_line(text[: data.draw(st.integers(0, len(text) - 1))])


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"what":"other"}', b'{"what":"looked"}', b"\xff"])
def test_line_with_an_invalid_body_is_damaged_despite_a_correct_checksum(body: bytes) -> None:
    with pytest.raises(DamagedLineError):
        parse_line(body + b" " + revocation_log._checksum(body))


def test_line_without_an_expiry_never_expires() -> None:
    """Guarantee: a revocation whose expiry is unknown stays in force."""
    body = b'{"at":"2026-11-21T12:00:00+00:00","boot":"","id":"a","kind":"customer_token","reason":"","sequence":1,'
    body += b'"state":"","unit":"","what":"ended"}'
    line = parse_line(body + b" " + revocation_log._checksum(body))
    assert line == Ended(1, AT, "customer_token", "a")
    assert isinstance(line, Ended)
    assert not line.has_expired(datetime.max.replace(tzinfo=UTC))


def test_line_has_expired_from_the_moment_it_names() -> None:
    line = Ended(1, AT, "customer_token", "a", expires_at=AT)
    assert (line.has_expired(AT - timedelta(microseconds=1)), line.has_expired(AT)) == (False, True)


def standing(*read: LogLine, boot: str) -> list[Ended | CaughtUp]:
    found = ConfirmedLines()
    stands = [each for line in read for each in found.add(line)]
    return stands + list(found.list_unfinished(boot))


FIRST = Ended(1, AT, "key", "a", unit="u1", boot="now")
SECOND = Ended(2, AT, "key", "b", unit="u2", boot="now")


def test_standing_is_what_is_known_to_be_committed() -> None:
    """A revocation whose commit failed on this boot was never confirmed to a client, and does not apply."""
    assert standing(FIRST, SECOND, Committed("u2"), boot="now") == [SECOND]


def test_standing_after_the_machine_went_down_is_what_may_have_been_committed() -> None:
    """The note of a commit is not synced: a power cut may take it and leave the commit. Rather too much is revoked."""
    assert standing(FIRST, SECOND, Committed("u2"), boot="later") == [SECOND, FIRST]
    assert standing(FIRST, boot="") == [FIRST], "a machine that does not say counts as another"


def test_standing_is_no_beginning() -> None:
    assert standing(Opened("ours", AT), FIRST, boot="later") == [FIRST]


def test_standing_without_a_unit_was_committed_before_it_was_written() -> None:
    backfilled = replace(FIRST, unit="")
    assert standing(CaughtUp(1), backfilled, boot="now") == [CaughtUp(1), backfilled]


def test_standing_never_is_what_was_dropped() -> None:
    """The same after the machine went down: the caller got an error, and the key stays valid."""
    assert standing(FIRST, SECOND, Dropped("u1"), boot="later") == [SECOND]
    assert standing(Dropped("u1"), boot="later") == []


@pytest.mark.parametrize("marks", [(Dropped("u1"), Committed("u1")), (Committed("u1"), Dropped("u1"))])
def test_standing_is_what_committed_though_it_was_dropped(marks: tuple[LogLine, LogLine]) -> None:
    """A late commit was still confirmed to the caller."""
    assert standing(FIRST, *marks, boot="now") == standing(FIRST, *marks, boot="later") == [FIRST]


def test_pending_revocations_are_the_unsettled_ones_of_this_boot() -> None:
    found = ConfirmedLines()
    for line in (FIRST, replace(FIRST, id="c"), SECOND, replace(SECOND, unit="u3", boot="before"), Dropped("u2")):
        found.add(line)
    assert found.list_unconfirmed("now") == [[FIRST, replace(FIRST, id="c")]]
    assert found.list_unconfirmed("") == [], "a machine that does not say settles nothing"


@given(st.lists(st.sampled_from("abcdef"), unique=True), st.sets(st.sampled_from("abcdef")), st.data())
def test_standing_in_any_order_is_the_same(units: list[str], noted: set[str], data: st.DataObject) -> None:
    """Processes append concurrently: the result does not depend on the order of their lines.

    A commit note always follows the revocations of its own unit.
    """
    ended = [Ended(number, AT, "key", unit, unit=unit, boot="now") for number, unit in enumerate(units)]
    later = data.draw(st.permutations([Committed(unit) for unit in sorted(noted)]))
    expected = {line.id for line in ended if line.unit in noted}
    assert {line.id for line in standing(*ended, *later, boot="now") if isinstance(line, Ended)} == expected

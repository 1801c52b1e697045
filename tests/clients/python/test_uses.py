"""Reports of uses: each use in exactly one stored report, whatever is lost."""

import json

from keyvault_client.local.uses import MAX_REPORTED, MAX_ROWS, LocalReport, LocalUses

KEY = ("0000000000000001", "orders.create", "192.0.2.1", "shop/1", "")


def counted(report: LocalReport) -> int:
    return sum(row["count"] for row in report.rows)


def test_uses_of_a_report_whose_answer_was_lost_are_not_under_its_number() -> None:
    """Guarantee: a number that may be stored already is sent again with the same rows, and later uses get another."""
    uses = LocalUses(1_000.0)
    uses.begin_report(1_000.0)
    lost = uses.next_report()
    assert lost.rows == []
    uses.count(KEY, 1_001.0)
    uses.begin_report(1_002.0)
    assert uses.next_report() is lost
    assert uses.note_stored(lost)
    report = uses.next_report()
    assert (report.number, counted(report), report.flushed_through) == (2, 1, 1_002.0)
    assert not uses.note_stored(report)


def test_uses_only_the_last_report_says_that_everything_is_flushed() -> None:
    """Guarantee: a rotation does not take uses that are still to be reported for silence."""
    uses = LocalUses(1_000.0)
    uses.begin_report(1_000.0)
    uses.note_stored(uses.next_report())
    for number in range(MAX_REPORTED + 1):
        uses.count((f"{number:016d}", *KEY[1:]), 1_001.0)
    uses.begin_report(1_002.0)
    first = uses.next_report()
    assert (len(first.rows), first.flushed_through) == (MAX_REPORTED, 1_000.0)
    assert uses.note_stored(first)
    last = uses.next_report()
    assert (len(last.rows), last.flushed_through) == (1, 1_002.0)


def test_uses_with_long_texts_fit_into_the_largest_body() -> None:
    """Guarantee: a client that sends long user agents cannot make a report too large for the service to read."""
    uses = LocalUses(1_000.0)
    for number in range(MAX_REPORTED):
        uses.count((f"{number:016d}", "e" * 100, "192.0.2.1", "\N{EURO SIGN}" * 500, '"' * 500), 1_000.0)
    uses.begin_report(1_001.0)
    reports = [uses.next_report()]
    while uses.note_stored(reports[-1]):
        reports.append(uses.next_report())
    assert sum(map(counted, reports)) == MAX_REPORTED
    assert all(len(json.dumps({"uses": report.rows})) < 64_000 for report in reports)


def test_uses_that_the_service_refuses_do_not_stop_the_others() -> None:
    uses = LocalUses(1_000.0)
    for number in range(3):
        uses.count((f"{number:016d}", *KEY[1:]), 1_000.0)
    uses.begin_report(1_001.0)
    refused = uses.next_report()
    uses.drop({1})
    report = uses.next_report()
    assert report.number == refused.number
    assert [row["key_id"] for row in report.rows] == [f"{0:016d}", f"{2:016d}"]


def test_uses_of_a_report_refused_for_another_reason_wait_for_the_next() -> None:
    """Guarantee: a report that is refused without a faulty row loses no use, and blocks no later report."""
    uses = LocalUses(1_000.0)
    uses.count(KEY, 1_000.0)
    uses.begin_report(1_001.0)
    refused = uses.next_report()
    uses.drop(set())
    uses.begin_report(1_002.0)
    report = uses.next_report()
    assert (report.number, report.rows, report.flushed_through) == (refused.number, refused.rows, 1_002.0)


def test_uses_of_a_wrong_clock_are_moved_when_it_is_corrected() -> None:
    """Guarantee: after a correction of the clock, no report is later than the service's time."""
    uses = LocalUses(5_000.0)
    uses.begin_report(5_000.0)
    uses.note_stored(uses.next_report())
    for number in range(MAX_REPORTED + 1):
        uses.count((f"{number:016d}", *KEY[1:]), 5_001.0)
    uses.shift(-3_600.0)
    uses.begin_report(1_402.0)
    first = uses.next_report()
    assert first.flushed_through == 1_400.0
    assert {row["first_at"] for row in first.rows} == {"1970-01-01T00:23:21Z"}


def test_uses_that_wait_for_a_report_take_their_room() -> None:
    """Guarantee: while reports fail, the memory of a process does not grow: the service decides, and counts."""
    uses, number = LocalUses(1_000.0), 0
    for minute in range(3):
        while uses.has_room:
            uses.count((f"{number:016d}", *KEY[1:]), 1_000.0 + minute)
            number += 1
        uses.begin_report(1_000.0 + minute)
    assert number == MAX_ROWS
    while uses.note_stored(uses.next_report()):
        pass
    assert uses.has_room

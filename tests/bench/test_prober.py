"""The figures of a watched revocation: the last verifier's first refusal, and grants that came too late."""

import pytest

from .prober import WatchedResponse, WatchedRevocation
from .revoke import HEADS, row, summarize, summarize_all

COMMIT, RETURNED = 10_000_000, 12_000_000


def watched(*answers: tuple[int, float, float, bool], confirmed: tuple[float, ...] = (2.5,)) -> WatchedRevocation:
    """Make a watched revocation.

    Each answer: the verifier, the times of request and answer in milliseconds, and whether it allowed the key.
    `confirmed`: the receipts, in milliseconds since the commit.
    """
    made = [WatchedResponse(one, int(sent * 1e6), int(received * 1e6), yes) for one, sent, received, yes in answers]
    return WatchedRevocation(COMMIT, RETURNED, made, confirmed)


REFUSING = ((0, 9, 11, True), (0, 10, 13, False), (1, 10, 14, True), (1, 14, 15, False), (0, 16, 17, False))


def test_eviction_is_the_last_verifiers_receipt() -> None:
    assert watched(*REFUSING, confirmed=(1.5, 4.5)).evicted_after_ms(2) == 4.5


def test_refusal_is_the_first_one_of_the_last_verifier() -> None:
    assert watched(*REFUSING).refused_after_ms(2) == 5.0


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(watched((0, 10, 13, False), (1, 10, 14, True), confirmed=(2, 3)), id="never refused"),
        pytest.param(watched(*REFUSING, confirmed=(2,)), id="no receipt"),
    ],
)
def test_revocation_that_a_verifier_never_applied_is_lost(seen: WatchedRevocation) -> None:
    assert seen.evicted_after_ms(2) is None
    assert summarize_all([summarize(seen, 2)])["lost"] == 1


def test_stale_after_the_receipt_is_a_grant_for_a_later_request() -> None:
    """A request before the last receipt is not counted, however late its answer comes."""
    seen = watched((0, 12.9, 20, True), (0, 13.1, 14, True), (0, 15, 16, False), confirmed=(1, 3))
    assert summarize(seen, 1)["stale_after_receipt"] == 1


def test_stale_is_a_grant_for_a_request_after_the_revoke_returned() -> None:
    """A grant for an earlier request is not stale, however late it comes."""
    seen = watched((0, 11.9, 20, True), (0, 12.1, 13, True), (0, 13, 14, False))
    summary = summarize(seen, 1)
    assert (summary["after"], summary["stale"], summary["last_stale_ms"]) == (2, 1, pytest.approx(2.1))


def test_sums_count_all_revocations_together() -> None:
    fine = summarize(watched((0, 12.5, 13, False), confirmed=(1,)), 1)
    late = summarize(watched((0, 12.5, 13, True), (0, 13, 15, False), confirmed=(2.75,)), 1)
    summary = summarize_all([fine, fine, late])
    assert (summary["revocations"], summary["after"], summary["stale"], summary["lost"]) == (3, 4, 1, 0)
    assert (summary["p50_ms"], summary["p99_ms"], summary["all_p99_ms"]) == (1.0, 2.75, 2.75)
    assert (summary["refused_p50_ms"], summary["refused_p99_ms"], summary["refused_all_p99_ms"]) == (3.0, 5.0, 5.0)
    shown = row({"place": "here", **summary})
    assert len(shown) == len(HEADS)
    assert shown == [
        "here",
        "3, 3 counted",
        "1",
        "2.75",
        "2.75",
        "3",
        "5",
        "5",
        "4",
        "1, the last one sent 2.5 ms after the commit",
        "0",
    ]


def test_sums_leave_out_disturbed_revocations_where_enough_were_quiet() -> None:
    fine = summarize(watched((0, 12.5, 13, False), confirmed=(1,)), 1)
    disturbed = {**summarize(watched((0, 12.5, 63, False), confirmed=(51,)), 1), "is_quiet": False}
    summary = summarize_all([fine, disturbed])
    assert (summary["revocations"], summary["quiet"], summary["p99_ms"], summary["all_p99_ms"]) == (2, 1, 1.0, 51.0)
    summary = summarize_all([fine, disturbed, disturbed])
    assert (summary["revocations"], summary["quiet"], summary["p99_ms"], summary["all_p99_ms"]) == (3, 3, 51.0, 51.0)

"""What a watched revocation comes to: when the last verifier refused, and who said yes too late."""

import pytest

from .prober import Answered, Watched
from .revoke import row, summed, sums

COMMIT, RETURNED = 10_000_000, 12_000_000


def watched(*answers: tuple[int, float, float, bool]) -> Watched:
    """Each: the verifier, when it was asked and when it answered in milliseconds, and whether it said yes."""
    made = [Answered(one, int(sent * 1e6), int(received * 1e6), yes) for one, sent, received, yes in answers]
    return Watched(COMMIT, RETURNED, made)


def test_eviction_is_the_first_refusal_of_the_last_verifier() -> None:
    seen = watched((0, 9, 11, True), (0, 10, 13, False), (1, 10, 14, True), (1, 14, 15, False), (0, 16, 17, False))
    assert seen.evicted_after_ms(2) == 5.0


def test_eviction_of_a_verifier_that_never_refused_is_lost() -> None:
    seen = watched((0, 10, 13, False), (1, 10, 14, True))
    assert seen.evicted_after_ms(2) is None
    assert sums([summed(seen, 2)])["lost"] == 1


def test_stale_is_a_yes_to_what_was_asked_after_the_revoke_had_returned() -> None:
    """A yes to what was asked before is no lie, however late it comes."""
    seen = watched((0, 11.9, 20, True), (0, 12.1, 13, True), (0, 13, 14, False))
    told = summed(seen, 1)
    assert (told["after"], told["stale"], told["last_stale_ms"]) == (2, 1, pytest.approx(2.1))


def test_sums_count_all_revocations_together() -> None:
    fine = summed(watched((0, 12.5, 13, False)), 1)
    late = summed(watched((0, 12.5, 13, True), (0, 13, 15, False)), 1)
    told = sums([fine, fine, late])
    assert (told["revocations"], told["after"], told["stale"], told["lost"]) == (3, 4, 1, 0)
    assert (told["p50_ms"], told["p99_ms"], told["most_ms"]) == (3.0, 5.0, 5.0)
    assert row({"place": "here", **told}) == [
        "here",
        "3",
        "3",
        "5",
        "5",
        "4",
        "1, the last asked 2.5 ms after the commit",
    ]

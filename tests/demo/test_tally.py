"""The tally of the demo: which answers count as failures and which do not."""

from rotation.management.demo.fleet import Request
from rotation.management.demo.tally import Revocation, count, failures_while_good

REVOCATION = Revocation("new", asked_at=10.0, answered_at=10.1)


def request(
    sent_at: float, answered_at: float, code: str | None = None, key_id: str = "new", fault: str = ""
) -> Request:
    return Request("billing", key_id, sent_at, answered_at, code, fault)


def failures(*requests: Request) -> list[str]:
    return list(count(requests, REVOCATION).failures)


def test_tally_good_traffic_has_no_failure_and_measures_the_first_refusal() -> None:
    tally = count(
        [
            request(1.0, 1.1, key_id="old"),
            request(9.0, 9.1),
            request(9.9, 10.05),
            request(10.2, 10.225, "key_revoked"),
            request(10.15, 10.25, "key_revoked"),
        ],
        REVOCATION,
    )
    assert (tally.requests, tally.failures, tally.refusals) == (5, (), 2)
    assert tally.first_refusal_seconds is not None
    assert round(tally.first_refusal_seconds, 3) == 0.125


def test_tally_either_verdict_is_right_while_the_revocation_is_under_way() -> None:
    assert failures(request(9.9, 10.02), request(10.05, 10.2), request(10.01, 10.02, "key_revoked")) == []


def test_tally_refusal_before_the_revocation_is_a_failure() -> None:
    """Guarantee: the demo fails when the right key is refused for a single moment."""
    (failure,) = failures(request(9.0, 9.1, "key_not_active"))
    assert "refused with key_not_active" in failure
    assert failures_while_good([request(9.0, 9.1, "key_revoked", key_id="old")]) != []


def test_tally_acceptance_after_the_revocation_is_a_failure() -> None:
    """Guarantee: the demo fails when a revoked key is accepted once."""
    (failure,) = failures(request(10.11, 10.12))
    assert "allowed 10 ms after it was revoked" in failure


def test_tally_refusal_for_another_reason_or_of_another_key_is_a_failure() -> None:
    assert failures(request(10.2, 10.3, "credential_invalid")) != []
    assert failures(request(10.2, 10.3, "key_revoked", key_id="old")) != []


def test_tally_missing_verdict_is_a_failure_at_any_time() -> None:
    assert failures(request(1.0, 1.1, fault="TimeoutError: timed out")) != []
    assert failures(request(10.0, 10.05, fault="ConnectionResetError: gone")) != []
    assert failures(request(11.0, 11.1, fault="ConnectionResetError: gone")) != []


def test_tally_revocation_that_traffic_never_noticed_has_no_time() -> None:
    assert count([request(1.0, 1.1)], REVOCATION).first_refusal_seconds is None

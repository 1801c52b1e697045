"""Observed silence and the quarantine as a tripwire: what ends each, and what does not."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from keyvault.domain.keys import KeyKind
from rotation.domain.events import Event
from rotation.domain.plan_fields import AtDeadline, Proof, Reinstatement
from rotation.domain.states import KeyFacts, Move, Wait
from tests.rotation.situation import (
    ACTIVE,
    DAY,
    ENTERED,
    NOW,
    QUARANTINE,
    QUIET,
    SECOND,
    SUSPENDED,
    K,
    S,
    outcome_of,
    plan,
    step,
    used,
)

CARRIES = used(1, 1, NOW)
OLD_USE = NOW - QUIET

# --- the quiet period -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observed", "last_used", "lost", "expected"),
    [
        (None, None, None, "wait"),
        (ENTERED, None, None, "wait"),
        (ENTERED + QUIET - SECOND, None, None, "wait"),
        (ENTERED + QUIET, None, None, "to quarantine"),
        (NOW, NOW - QUIET, None, "to quarantine"),
        (NOW, NOW - QUIET + SECOND, None, "wait"),
        (NOW, NOW, None, "wait"),
        (NOW, None, NOW - QUIET, "to quarantine"),
        (NOW, None, NOW - QUIET + SECOND, "wait"),
        (NOW, NOW - QUIET, NOW - QUIET + SECOND, "wait"),
        (NOW, NOW - QUIET + SECOND, NOW - QUIET, "wait"),
        (NOW, ENTERED - DAY, ENTERED - DAY, "to quarantine"),
    ],
    ids=[
        "no verifier reports",
        "observed: nothing yet",
        "observed: a second short",
        "observed: the whole period",
        "used: long ago",
        "used: a second too late",
        "used: now",
        "verifier lost: long ago",
        "verifier lost: a second too late",
        "verifier lost after the last use",
        "used after a verifier was lost",
        "both before it began",
    ],
)
def test_silence_counts_from_the_last_use_up_to_the_watermark(
    observed: datetime | None, last_used: datetime | None, lost: datetime | None, expected: str
) -> None:
    """The watermark of the slowest live verifier bounds the observation; a lost verifier restarts the period."""
    found = step(
        S.OVERLAP,
        replacement=CARRIES,
        predecessor=KeyFacts(K.ACTIVE, last_used_at=last_used),
        observed_through=observed,
        lost_at=lost,
    )
    assert outcome_of(found) == expected


def test_silence_does_not_grow_by_the_clock_alone() -> None:
    """Without a newer watermark, later times change nothing."""
    for days in (0, 1, 5):
        found = step(S.OVERLAP, NOW + days * DAY, deadline=NOW + 9 * DAY, replacement=CARRIES, observed_through=ENTERED)
        assert outcome_of(found) == "wait"


def test_silence_names_the_next_check() -> None:
    found = step(S.OVERLAP, replacement=CARRIES, predecessor=used(1, 1, NOW - SECOND), observed_through=NOW - SECOND)
    assert isinstance(found, Wait)
    assert found.until == NOW - SECOND + QUIET


def test_silence_is_restarted_by_each_use_of_the_old_key() -> None:
    """A machine that still uses the old key restarts the period with each call."""
    at = ENTERED
    for _ in range(20):
        at += QUIET - SECOND
        known = {"replacement": used(9, 2, at), "observed_through": at, "deadline": NOW + 99 * DAY}
        assert outcome_of(step(S.OVERLAP, at, predecessor=used(1, 1, ENTERED, at - SECOND), **known)) == "wait"
    known = {"replacement": used(9, 2, at + QUIET), "observed_through": at + QUIET, "deadline": NOW + 99 * DAY}
    assert outcome_of(step(S.OVERLAP, at + QUIET, predecessor=used(1, 1, ENTERED, at), **known)) == "to quarantine"


@pytest.mark.parametrize(
    ("replacement", "acknowledged_at", "expected"),
    [
        (ACTIVE, None, "wait"),
        (ACTIVE, NOW, "to quarantine"),
        (CARRIES, None, "to quarantine"),
        (used(1, 1, OLD_USE), None, "to quarantine"),
        (used(1, 1, OLD_USE - SECOND), None, "wait"),
        (used(1, 1, OLD_USE - SECOND), OLD_USE, "to quarantine"),
        (used(1, 1, OLD_USE - SECOND), OLD_USE - SECOND, "wait"),
        (ACTIVE, OLD_USE - SECOND, "wait"),
    ],
)
def test_silence_counts_only_while_the_replacement_carries_the_traffic(
    replacement: KeyFacts, acknowledged_at: datetime | None, expected: str
) -> None:
    """Silence on both keys is an outage: the last key used must be the new one."""
    found = step(
        S.OVERLAP,
        predecessor=KeyFacts(K.ACTIVE, last_used_at=OLD_USE),
        replacement=replacement,
        acknowledged_at=acknowledged_at,
        observed_through=NOW,
    )
    assert outcome_of(found) == expected


@pytest.mark.parametrize("how", ["acknowledged_at", "confirmed_at"])
def test_silence_of_a_dormant_credential_needs_no_traffic(how: str) -> None:
    """Its proof is the merchant's sign of having the replacement, in overlap as before."""
    known = {"plan": plan(proof=Proof.TRAFFIC, is_dormant=True), "observed_through": NOW, how: ENTERED}
    assert outcome_of(step(S.OVERLAP, **known)) == "to quarantine"
    assert outcome_of(step(S.OVERLAP, predecessor=used(1, 1, ENTERED + SECOND), **known)) == "wait"


# --- the quarantine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observed", "tried", "lost", "expected"),
    [
        (None, None, None, "wait"),
        (ENTERED + QUARANTINE - SECOND, None, None, "wait"),
        (ENTERED + QUARANTINE, None, None, "to revoking"),
        (NOW, NOW - QUARANTINE, None, "to revoking"),
        (NOW, NOW - QUARANTINE + SECOND, None, "wait"),
        (NOW, None, NOW - QUARANTINE + SECOND, "wait"),
        (NOW, None, NOW - QUARANTINE, "to revoking"),
    ],
)
def test_quarantine_ends_only_without_attempts_by_known_sources(
    observed: datetime | None, tried: datetime | None, lost: datetime | None, expected: str
) -> None:
    """A known source that still tries the old key prevents its revocation."""
    found = step(
        S.QUARANTINE,
        plan=plan(reinstatement=Reinstatement.NEVER),
        predecessor=KeyFacts(K.SUSPENDED, tried_at=tried, tried_by_known_at=tried),
        observed_through=observed,
        lost_at=lost,
    )
    assert outcome_of(found) == expected


def test_quarantine_is_not_prolonged_by_an_unknown_source() -> None:
    """An unknown source with the old key can neither restore nor prolong it; it raises an alarm, and the key is revoked
    in time.
    """
    found = step(S.QUARANTINE, predecessor=KeyFacts(K.SUSPENDED, tried_at=NOW), observed_through=NOW)
    assert outcome_of(found) == "to revoking"


def test_quarantine_has_no_deadline() -> None:
    """The deadline limits the silence; a started quarantine ends by evidence alone."""
    for days in (2, 9999):
        assert outcome_of(step(S.QUARANTINE, NOW + days * DAY, observed_through=ENTERED)) == "wait"


TRIED = KeyFacts(K.SUSPENDED, tried_at=NOW, tried_by_known_at=NOW)


def test_quarantine_tried_by_a_known_source_reinstates() -> None:
    found = step(S.QUARANTINE, predecessor=TRIED, observed_through=NOW)
    assert isinstance(found, Move)
    assert (found.to, found.event) == (S.OVERLAP, Event.TRIED_BY_KNOWN_SOURCE)


@pytest.mark.parametrize(
    "otherwise",
    [
        {"was_reinstated": True},
        {"plan": plan(reinstatement=Reinstatement.NEVER)},
        {"is_proved": False},
        {"silence_waived": True},
        {"kind": KeyKind.PUBLIC, "deadline": None},
        {"predecessor": replace(TRIED, tried_by_known_at=None)},
    ],
    ids=["once already", "plan says never", "unproved", "deadline revokes", "public key", "unknown source"],
)
def test_quarantine_reinstates_once_and_only_for_a_known_source_of_a_proved_private_key(
    otherwise: dict[str, object],
) -> None:
    found = step(S.QUARANTINE, **{"predecessor": TRIED, "observed_through": NOW, **otherwise})
    assert outcome_of(found) != "to overlap"


@pytest.mark.parametrize("key", [KeyFacts(K.COMPROMISED), KeyFacts(K.DEACTIVATED)], ids=lambda key: key.state)
def test_quarantine_never_reinstates_a_key_that_was_reported_or_revoked(key: KeyFacts) -> None:
    """After a compromise report no attempt reinstates the key; the rotation is over."""
    tried = replace(key, tried_at=NOW, tried_by_known_at=NOW)
    assert outcome_of(step(S.QUARANTINE, predecessor=tried, observed_through=NOW)) == "to completed"


def test_quarantine_of_a_public_key_is_not_prolonged_by_attempts() -> None:
    """The date was approved with the usage shown, so apps that still try the key were considered."""
    known = {"kind": KeyKind.PUBLIC, "deadline": None, "silence_waived": True, "predecessor": TRIED}
    assert outcome_of(step(S.QUARANTINE, observed_through=ENTERED + QUARANTINE, **known)) == "to revoking"
    assert outcome_of(step(S.QUARANTINE, observed_through=ENTERED + QUARANTINE - SECOND, **known)) == "wait"


# --- revoking at the deadline, by an approved plan ----------------------------------------------------------


@pytest.mark.parametrize("silence_waived", [False, True])
def test_quarantine_of_a_suspended_merchant_begins_again_when_it_is_resumed(*, silence_waived: bool) -> None:
    """Nobody notices the refusals of a quarantine while all requests are refused."""
    known = {"silence_waived": silence_waived, "predecessor": SUSPENDED, "observed_through": NOW}
    assert outcome_of(step(S.QUARANTINE, is_suspended=True, **known)) == "wait"
    assert outcome_of(step(S.QUARANTINE, resumed_at=NOW - QUARANTINE + SECOND, **known)) == "wait"
    assert outcome_of(step(S.QUARANTINE, resumed_at=NOW - QUARANTINE, **known)) == "to revoking"


REVOKES = plan(at_deadline=AtDeadline.REVOKE)


@pytest.mark.parametrize("deadline", [NOW, NOW - DAY])
def test_deadline_without_silence_starts_quarantine_only_with_an_approved_plan(deadline: datetime) -> None:
    known = {"deadline": deadline, "predecessor": used(9, 3, NOW), "replacement": CARRIES, "observed_through": NOW}
    assert outcome_of(step(S.OVERLAP, plan=REVOKES, **known)) == "to quarantine"
    assert outcome_of(step(S.OVERLAP, **known)) == "to stalled"


def test_deadline_in_the_future_changes_nothing() -> None:
    found = step(S.OVERLAP, plan=REVOKES, deadline=NOW + SECOND, predecessor=used(9, 3, NOW), observed_through=NOW)
    assert outcome_of(found) == "wait"


def test_deadline_quarantine_runs_in_full_and_is_not_prolonged() -> None:
    """The plan revokes the key at that time, and attempts were refused throughout the quarantine."""
    known = {"plan": REVOKES, "deadline": ENTERED, "silence_waived": True, "predecessor": TRIED}
    assert outcome_of(step(S.QUARANTINE, observed_through=ENTERED + QUARANTINE, **known)) == "to revoking"
    assert outcome_of(step(S.QUARANTINE, observed_through=ENTERED + QUARANTINE - SECOND, **known)) == "wait"
    assert outcome_of(step(S.QUARANTINE, observed_through=NOW, lost_at=NOW - SECOND, **known)) == "wait"


def test_deadline_does_not_shorten_a_quarantine_after_silence() -> None:
    known = {"plan": REVOKES, "deadline": NOW, "observed_through": NOW, "was_reinstated": True}
    held = KeyFacts(K.SUSPENDED, tried_at=NOW, tried_by_known_at=NOW - timedelta(seconds=1))
    assert outcome_of(step(S.QUARANTINE, predecessor=held, **known)) == "wait"
    assert outcome_of(step(S.QUARANTINE, predecessor=SUSPENDED, **known)) == "to revoking"

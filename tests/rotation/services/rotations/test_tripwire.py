"""Quarantine attempts: a known source reinstates the predecessor once; an unknown source raises an alarm only."""

from datetime import datetime, timedelta

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.keys import KeyState
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.revocation import RevocationReason
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Notice, UsageReporter
from keyvault.models.usage import SIGNS_OF_LIFE, UseOutcome
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import AtDeadline, Reinstatement
from rotation.models import EvidenceKind, Rotation
from rotation.services.rotations.interventions import abort_rotation, waive_source
from rotation.services.rotations.reports import find_waits, get_rotation
from tests.clocks import Clock
from tests.rotation import scene
from tests.rotation.steps import advance, begun, key_states, list_due, overlapping, quarantined, revoke, wait

pytestmark = [pytest.mark.database, pytest.mark.django_db]

KNOWN, UNKNOWN = "192.0.2.1", "198.51.100.66"


def in_quarantine(clock: Clock, verifier: UsageLog, **overrides: object) -> Rotation:
    """Return a rotation in quarantine whose predecessor was used from KNOWN."""
    rotation = advance(begun(clock, **overrides), clock)
    scene.use(verifier, rotation.predecessor_id, source=KNOWN)
    clock.tick(1)
    scene.acknowledge_replacement(rotation.rotation_id, clock())
    rotation = wait(rotation, clock, verifier, 6)
    assert wait(rotation, clock, verifier, 6).state == S.QUARANTINE
    return rotation


def attempt(rotation: Rotation, clock: Clock, verifier: UsageLog, source: str) -> Rotation:
    clock.tick(1)
    scene.use(verifier, rotation.predecessor_id, source=source, outcome=UseOutcome.REFUSED)
    return advance(rotation, clock, 3)


def another_verifier(now: datetime) -> UsageLog:
    """Return a live verifier whose clock stands still: it reports a use of this time later."""
    log = UsageLog(now=Clock(now))
    UsageReporter.objects.create(reporter_id=log.reporter_id, started_at=now, flushed_through_at=now, peppers={})
    return log


def alarms() -> list[bool]:
    """Return for each alarm whether the key was reinstated."""
    found = Notice.objects.filter(kind=NoticeKind.USED_IN_QUARANTINE, is_alarm=True).order_by("created_at")
    return [notice.payload["is_reinstated"] for notice in found]


def exposures() -> list[bool]:
    """Return for each alarm whether it reports an exposure."""
    found = Notice.objects.filter(kind=NoticeKind.USED_IN_QUARANTINE, is_alarm=True).order_by("created_at")
    return [notice.payload["is_exposure"] for notice in found]


def test_attempt_from_a_known_source_reinstates_the_predecessor_and_notifies(clock: Clock, verifier: UsageLog) -> None:
    rotation = attempt(in_quarantine(clock, verifier), clock, verifier, KNOWN)
    assert (rotation.state, key_states(rotation)) == (S.OVERLAP, ("active", "active"))
    assert rotation.reinstated_at is not None
    assert rotation.silent_at is None
    assert alarms() == [True]


@pytest.mark.sqlite
def test_attempt_from_another_address_of_a_known_network_reinstates_the_predecessor(
    clock: Clock, verifier: UsageLog
) -> None:
    """A source is a network with a product: an instance of the same client may have another address."""
    rotation = attempt(in_quarantine(clock, verifier), clock, verifier, "192.0.2.77")
    assert (rotation.state, key_states(rotation)) == (S.OVERLAP, ("active", "active"))


@pytest.mark.sqlite
@pytest.mark.parametrize("outcome", SIGNS_OF_LIFE)
@pytest.mark.parametrize("source", [KNOWN, UNKNOWN])
def test_use_that_was_reported_after_the_decision_is_an_attempt(
    clock: Clock, verifier: UsageLog, outcome: UseOutcome, source: str
) -> None:
    """A verifier reports a use seconds later, and may accept the key until it has read its suspension."""
    clock.tick(50)  # The source is known by an earlier minute.
    rotation = in_quarantine(clock, verifier)
    assert advance(rotation, clock).state == S.QUARANTINE
    scene.use(verifier, rotation.predecessor_id, source=source, outcome=outcome)
    rotation = advance(rotation, clock)
    assert rotation.state == (S.OVERLAP if source == KNOWN else S.QUARANTINE)
    if source == KNOWN:
        assert rotation.evidence.get(kind=EvidenceKind.TRIED).seen["last_seen_at"] == format_timestamp(clock())
    assert exposures() == [source == UNKNOWN]


@pytest.mark.sqlite
@pytest.mark.parametrize("seconds", [1, 5])
@pytest.mark.parametrize("source", [KNOWN, UNKNOWN])
def test_use_before_the_quarantine_that_is_reported_in_it_reinstates_the_predecessor(
    clock: Clock, verifier: UsageLog, source: str, seconds: int
) -> None:
    """It contradicts the silence, even within the time that the verifiers had reported; its source was allowed."""
    rotation = in_quarantine(clock, verifier)
    log = another_verifier(clock() - timedelta(seconds=seconds))
    scene.use(log, rotation.predecessor_id, source=source)
    rotation = advance(rotation, clock, 1)
    assert (rotation.state, alarms(), exposures()) == (S.OVERLAP, [True], [False])
    tried = rotation.evidence.get(kind=EvidenceKind.TRIED).seen
    assert [each["last_at"] for each in tried["attempts"]] == [tried["last_seen_at"]]


@pytest.mark.sqlite
def test_use_of_a_waived_source_before_the_quarantine_is_no_attempt(clock: Clock, verifier: UsageLog) -> None:
    """It may use the key until it is suspended, and the evidence of the revocation says that nobody tried it after."""
    rotation = overlapping(clock, verifier)
    scene.use(verifier, rotation.predecessor_id, source=KNOWN)
    (awaited,) = find_waits(rotation, clock()).awaited
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    waive_source(grant, rotation, awaited.name, "it has ended, says their CTO")
    scene.use(verifier, rotation.replacement_id or "")
    rotation = wait(rotation, clock, verifier, 6)
    assert rotation.state == S.QUARANTINE
    log = another_verifier(clock() - timedelta(seconds=1))
    scene.use(log, rotation.predecessor_id, source=KNOWN)
    UsageReporter.objects.filter(reporter_id=log.reporter_id).update(stopped_at=clock())
    rotation = wait(rotation, clock, verifier, 6)
    assert (rotation.state, alarms()) == (S.COMPLETED, [])
    assert rotation.evidence.filter(kind=EvidenceKind.UNTRIED).exists()


@pytest.mark.sqlite
def test_first_use_of_the_predecessor_that_is_reported_in_its_quarantine_reinstates_it(
    clock: Clock, verifier: UsageLog
) -> None:
    rotation = quarantined(clock, verifier)
    scene.use(another_verifier(clock() - timedelta(seconds=4)), rotation.predecessor_id)
    assert advance(rotation, clock, 1).state == S.OVERLAP


@pytest.mark.sqlite
def test_predecessor_is_reinstated_once(clock: Clock, verifier: UsageLog) -> None:
    """The second attempt is refused, and the revocation waits for the attempts to end."""
    rotation = attempt(in_quarantine(clock, verifier), clock, verifier, KNOWN)
    scene.use(verifier, rotation.replacement_id or "")
    rotation = wait(rotation, clock, verifier, 6)
    assert rotation.state == S.QUARANTINE
    rotation = attempt(rotation, clock, verifier, KNOWN)
    assert (rotation.state, key_states(rotation)) == (S.QUARANTINE, ("suspended", "active"))
    rotation = wait(rotation, clock, verifier, 1)
    assert rotation.state == S.QUARANTINE
    assert wait(rotation, clock, verifier, 6).state == S.COMPLETED


@pytest.mark.sqlite
def test_attempts_that_cannot_reinstate_a_key_make_its_rotation_due_until_the_alarm(
    clock: Clock, verifier: UsageLog
) -> None:
    rotation = attempt(in_quarantine(clock, verifier), clock, verifier, KNOWN)
    scene.use(verifier, rotation.replacement_id or "")
    rotation = wait(rotation, clock, verifier, 6)
    assert rotation.state == S.QUARANTINE
    for is_due in (True, False):
        clock.tick(1)
        scene.use(verifier, rotation.predecessor_id, source=KNOWN, outcome=UseOutcome.REFUSED)
        assert (list_due(clock) == [rotation.rotation_id]) == is_due
        assert advance(rotation, clock).alarmed_at is not None
    assert alarms() == [True, False]


def test_attempt_from_an_unknown_source_raises_an_alarm_and_delays_nothing(clock: Clock, verifier: UsageLog) -> None:
    """Guarantee: a finder of a retired key can neither reinstate it nor delay its revocation."""
    rotation = attempt(in_quarantine(clock, verifier), clock, verifier, UNKNOWN)
    assert (rotation.state, key_states(rotation)) == (S.QUARANTINE, ("suspended", "active"))
    assert alarms() == [False]
    notice = Notice.objects.get(kind=NoticeKind.USED_IN_QUARANTINE)
    assert notice.payload["is_exposure"] is True
    assert [each["source"] for each in notice.payload["attempts"]] == ["198.51.100.0/24 test"]
    rotation = attempt(rotation, clock, verifier, UNKNOWN)
    assert alarms() == [False]
    assert wait(rotation, clock, verifier, 2).state == S.COMPLETED


def test_evidence_of_attempts_names_networks_and_no_address(clock: Clock, verifier: UsageLog) -> None:
    """Evidence is permanent. Addresses are deleted after a set time, with the uses and the notices that hold them."""
    rotation = in_quarantine(clock, verifier)
    for source in (UNKNOWN, "198.51.100.67"):
        scene.use(verifier, rotation.predecessor_id, source=source, outcome=UseOutcome.REFUSED)
    rotation = attempt(rotation, clock, verifier, KNOWN)
    tried = rotation.evidence.get(kind=EvidenceKind.TRIED).seen["attempts"]
    assert [(each["source"], each["is_known"]) for each in tried] == [
        ("192.0.2.0/24", True),
        ("198.51.100.0/24", False),
    ]


@pytest.mark.sqlite
def test_plan_that_never_reinstates_keeps_the_quarantine(clock: Clock, verifier: UsageLog) -> None:
    rotation = in_quarantine(clock, verifier, reinstatement=Reinstatement.NEVER)
    rotation = attempt(rotation, clock, verifier, KNOWN)
    assert (rotation.state, key_states(rotation)) == (S.QUARANTINE, ("suspended", "active"))
    assert alarms() == [False]


@pytest.mark.sqlite
def test_compromised_predecessor_is_never_reinstated(clock: Clock, verifier: UsageLog) -> None:
    rotation = in_quarantine(clock, verifier)
    scene.use(verifier, rotation.predecessor_id, source=KNOWN, outcome=UseOutcome.REFUSED)
    revoke(rotation.predecessor, clock, RevocationReason.KEY_COMPROMISE)
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, rotation.predecessor.state) == (S.COMPLETED, KeyState.COMPROMISED)
    assert Notice.objects.filter(kind=NoticeKind.KEY_COMPROMISED).count() == 1


@pytest.mark.sqlite
def test_deadline_with_a_revoking_plan_passes_through_quarantine(clock: Clock, verifier: UsageLog) -> None:
    """This applies to proved rotations with an approved plan only, and starts reversibly."""
    start = clock()
    rotation = advance(begun(clock, at_deadline=AtDeadline.REVOKE, deadline=scene.later(start, 60)), clock)
    scene.acknowledge_replacement(rotation.rotation_id, clock.tick(1))
    while rotation.state in {S.AWAITING_PROOF, S.OVERLAP}:
        scene.use(verifier, rotation.predecessor_id, source=KNOWN)
        rotation = wait(rotation, clock, verifier, 0)
    assert rotation.state == S.QUARANTINE
    assert (rotation.silent_at, rotation.waived_at is None) == (None, False)
    rotation = attempt(rotation, clock, verifier, KNOWN)
    assert rotation.state == S.QUARANTINE
    rotation = wait(rotation, clock, verifier, 6)
    assert rotation.state == S.COMPLETED
    assert [evidence.kind for evidence in rotation.evidence.order_by("created_at", "pk")].count("silent") == 0


@pytest.mark.sqlite
def test_attempt_raises_an_alarm_before_a_quarantine_ends_in_the_same_turn(clock: Clock, verifier: UsageLog) -> None:
    """A quarantine of a revoking plan waits for no attempt, so it may end before a turn has seen the attempt."""
    rotation = advance(begun(clock, at_deadline=AtDeadline.REVOKE, deadline=scene.later(clock(), 60)), clock)
    scene.acknowledge_replacement(rotation.rotation_id, clock.tick(1))
    while rotation.state in {S.AWAITING_PROOF, S.OVERLAP}:
        scene.use(verifier, rotation.predecessor_id, source=KNOWN)
        rotation = wait(rotation, clock, verifier, 0)
    assert rotation.state == S.QUARANTINE
    clock.tick(1)
    scene.use(verifier, rotation.predecessor_id, source=KNOWN, outcome=UseOutcome.REFUSED)
    assert wait(rotation, clock, verifier, 30).state == S.COMPLETED
    assert alarms() == [False]


@pytest.mark.sqlite
def test_deadline_of_an_unproved_rotation_stalls_whatever_the_plan_says(clock: Clock, verifier: UsageLog) -> None:
    """Time alone never revokes."""
    rotation = advance(begun(clock, at_deadline=AtDeadline.REVOKE, deadline=scene.later(clock(), 60)), clock)
    rotation = wait(rotation, clock, verifier, 120)
    assert (rotation.state, key_states(rotation)) == (S.STALLED, ("active", "active"))


def test_attempt_from_an_unknown_source_after_a_known_one_raises_its_own_alarm(
    clock: Clock, verifier: UsageLog
) -> None:
    """Attempts of a known source do not hide those of an unknown one."""
    rotation = in_quarantine(clock, verifier, reinstatement=Reinstatement.NEVER)
    rotation = attempt(rotation, clock, verifier, KNOWN)
    rotation = attempt(rotation, clock, verifier, UNKNOWN)
    exposures = Notice.objects.filter(kind=NoticeKind.USED_IN_QUARANTINE).order_by("created_at")
    assert [notice.payload["is_exposure"] for notice in exposures] == [False, True]
    attempt(rotation, clock, verifier, UNKNOWN)
    assert exposures.count() == 2


@pytest.mark.sqlite
def test_attempt_from_an_unknown_source_that_is_reported_after_the_alarm_of_a_known_one_is_an_exposure(
    clock: Clock, verifier: UsageLog
) -> None:
    """Another verifier may report an earlier attempt after the alarm."""
    rotation = in_quarantine(clock, verifier, reinstatement=Reinstatement.NEVER)
    other = another_verifier(clock())
    attempt(rotation, clock, verifier, KNOWN)
    assert exposures() == [False]
    scene.use(other, rotation.predecessor_id, source=UNKNOWN, outcome=UseOutcome.REFUSED)
    advance(rotation, clock, 1)
    assert exposures() == [False, True]


@pytest.mark.sqlite
def test_attempt_from_an_unknown_source_beside_a_known_one_is_an_exposure(clock: Clock, verifier: UsageLog) -> None:
    """A reinstatement hides no unknown source: later uses of the active key would make it a known one."""
    rotation = in_quarantine(clock, verifier)
    clock.tick(1)
    scene.use(verifier, rotation.predecessor_id, source=UNKNOWN, outcome=UseOutcome.REFUSED)
    rotation = attempt(rotation, clock, verifier, KNOWN)
    assert (rotation.state, alarms(), exposures()) == (S.OVERLAP, [True], [True])
    payload = Notice.objects.get(kind=NoticeKind.USED_IN_QUARANTINE).payload
    assert payload["key_id"] == rotation.predecessor_id
    assert {each["source"].split()[0]: each["is_known"] for each in payload["attempts"]} == {
        "192.0.2.0/24": True,
        "198.51.100.0/24": False,
    }


@pytest.mark.sqlite
def test_attempt_from_an_unknown_source_before_an_abort_is_an_exposure(clock: Clock, verifier: UsageLog) -> None:
    """An abort ends the quarantine, and no turn may have seen the attempt yet."""
    rotation = in_quarantine(clock, verifier)
    clock.tick(1)
    scene.use(verifier, rotation.predecessor_id, source=UNKNOWN, outcome=UseOutcome.REFUSED)
    rotation = get_rotation(rotation.rotation_id)
    abort_rotation(authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock()), rotation, "why")
    assert (rotation.state, key_states(rotation)) == (S.ROLLING_BACK, ("active", "active"))
    assert (alarms(), exposures()) == ([False], [True])
    assert advance(rotation, clock).state == S.ROLLING_BACK

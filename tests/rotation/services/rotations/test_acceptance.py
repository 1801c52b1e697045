"""The staged step: a replacement is delivered only when every live verifier would accept it."""

import pytest

from keyvault.models import Verifier
from keyvault.services.keys.lifecycle import last_sequence
from keyvault.services.recording.signals import changes_confirmed
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.services.rotations.facts import list_unconfirmed
from rotation.services.rotations.reports import describe
from tests.clocks import Clock
from tests.rotation import scene
from tests.rotation.steps import advance, begun, list_due
from tests.verifiers import confirm, fall_silent, make_verifier

pytestmark = pytest.mark.django_db


@pytest.mark.database
def test_unconfirmed_without_verifiers_is_nobody(clock: Clock) -> None:
    key, _ = scene.first_key(clock())
    assert list_unconfirmed(key) == []


def test_unconfirmed_are_live_verifiers_without_the_newest_change_of_the_key(clock: Clock) -> None:
    """A confirmation of an earlier change does not suffice; an expired verifier is not awaited."""
    key, _ = scene.first_key(clock())
    behind, level, silent = (make_verifier(f"verifier-{number}") for number in (1, 2, 3))
    confirm(behind, last_sequence(key) - 1)
    confirm(level, last_sequence(key))
    fall_silent(silent)
    assert list_unconfirmed(key) == ["verifier-1"]


def test_staged_rotation_is_published_once_its_verifier_has_confirmed(clock: Clock, verifier: UsageLog) -> None:
    """The turn does not wait; another worker's turn delivers the key that was confirmed."""
    caching = make_verifier()
    rotation = advance(begun(clock), clock)
    assert (rotation.state, rotation.delivered_at) == (S.STAGED, None)
    assert rotation.replacement is not None
    confirm(caching, last_sequence(rotation.replacement))
    published = advance(rotation, clock)
    assert (published.state, published.replacement_id) == (S.AWAITING_PROOF, rotation.replacement_id)


def test_confirmation_makes_the_turn_due(clock: Clock, verifier: UsageLog) -> None:
    """A confirmation of other changes does not."""
    make_verifier()
    rotation = advance(begun(clock), clock)
    assert rotation.replacement is not None
    sequence = last_sequence(rotation.replacement)
    assert list_due(clock) == []
    changes_confirmed.send(None, above=0, through=sequence - 1, now=clock())
    changes_confirmed.send(None, above=sequence, through=sequence + 1, now=clock())
    other, _ = scene.first_key(clock())
    changes_confirmed.send(None, above=sequence, through=last_sequence(other), now=clock())
    assert list_due(clock) == []
    changes_confirmed.send(None, above=sequence - 1, through=sequence, now=clock())
    assert list_due(clock) == [rotation.rotation_id]


def test_staged_rotation_names_the_verifiers_that_it_waits_for(clock: Clock, verifier: UsageLog) -> None:
    for number in range(1, 6):
        make_verifier(f"verifier-{number}")
    rotation = advance(begun(clock), clock)
    waiting_for = describe(rotation, clock())["waiting_for"]
    assert waiting_for == "every verifier to accept the replacement: verifier-1, verifier-2, verifier-3 and 2 more"


def test_staged_rotation_does_not_wait_for_a_verifier_that_fell_silent(clock: Clock, verifier: UsageLog) -> None:
    """Its memory has expired, so it would read the new key from the database."""
    make_verifier()
    rotation = advance(begun(clock), clock)
    assert rotation.state == S.STAGED
    fall_silent(Verifier.objects.get())
    assert advance(rotation, clock, 3).state == S.AWAITING_PROOF

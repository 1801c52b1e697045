"""A replacement inside a wrapping token: opened by the right one, by a thief, and what the rotation makes of it."""

from typing import Any

import pytest
from django.db.models import QuerySet

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, Operator
from keyvault.backends.base import Wrapped
from keyvault.domain.errors import StateConflictError
from keyvault.domain.issuance import MOST_SUSPICIONS, Delivery
from keyvault.domain.keys import KeyState
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason
from keyvault.models import BreakGlass, Key, KeyUse, Material, Notice, WrappedHandover
from keyvault.services import upkeep
from keyvault.services.keys import revoke_key
from keyvault.services.usage import UsageLog
from keyvault.services.wrapping import CONFIRM_WITHIN
from rotation.events import RotationState as S
from rotation.models import Rotation
from rotation.policy import Proof
from rotation.services import handovers
from rotation.services.engine import advance_rotation
from rotation.services.handovers import (
    confirm_replacement,
    hand_over_replacement,
    suspect_due,
    suspect_replacement,
)
from rotation.services.interventions import collect_replacement, may_be_confirmed
from rotation.services.reports import get_rotation
from tests.factories import grant
from tests.services.rows import dump_tables
from tests.services.wrappings import Wrappings, begin_wrapping

from . import scene
from .scene import Clock

pytestmark = pytest.mark.database


@pytest.fixture
def wraps(db: None, monkeypatch: pytest.MonkeyPatch, settings: Any) -> Wrappings:
    scene.account()
    return begin_wrapping(monkeypatch, settings)


def delivered(clock: Clock) -> Rotation:
    """It has a replacement that is in the backend and waits for its proof."""
    key, _ = scene.issue(scene.account(), clock(), delivery=Delivery.WRAPPED)
    rotation = scene.rotate(key.credential, clock())
    return moved(rotation, clock)


def moved(rotation: Rotation, clock: Clock) -> Rotation:
    advance_rotation(rotation.rotation_id, clock)
    return get_rotation(rotation.rotation_id)


def ask(rotation: Rotation, clock: Clock, by: Operator | None = None) -> Wrapped:
    return hand_over_replacement(allowed(rotation, clock, by), rotation)


def confirm(rotation: Rotation, clock: Clock) -> Rotation:
    return confirm_replacement(allowed(rotation, clock), rotation, rotation.replacement_id or "")


def suspect(rotation: Rotation, clock: Clock) -> str:
    return suspect_replacement(allowed(rotation, clock), rotation, rotation.replacement_id or "")


def allowed(rotation: Rotation, clock: Clock, by: Operator | None = None) -> Any:
    return grant(by or scene.tam(), P.ISSUANCE_COLLECT, rotation.credential.account, at=clock())


def state_of(key_id: str | None) -> KeyState:
    return KeyState(Key.objects.get(pk=key_id).state)


def alarms() -> int:
    return Notice.objects.filter(kind=NoticeKind.HANDOVER_SUSPECTED, is_alarm=True).count()


def test_replacement_is_opened_confirmed_and_its_copy_destroyed(
    wraps: Wrappings, clock: Clock, verifier: UsageLog
) -> None:
    """What its receiver says of the token proves no use: the rotation waits for that as planned."""
    rotation = delivered(clock)
    assert rotation.state == S.AWAITING_PROOF
    wrapped = ask(rotation, clock)
    assert get_rotation(rotation.pk).collected_at is None
    text = wraps.open(wrapped.token)
    assert (rotation.replacement_id or "") in text.reveal()
    for _ in range(2):
        assert confirm(rotation, clock).collected_at is not None
    upkeep.destroy_due()
    assert Key.objects.get(pk=rotation.replacement_id).material == Material.DESTROYED
    assert moved(rotation, clock).state == S.AWAITING_PROOF
    scene.acknowledge_replacement(rotation.pk, clock())
    assert moved(rotation, clock).state == S.OVERLAP
    assert not BreakGlass.objects.exists()
    for secret in (text, wrapped.token):
        assert secret.reveal() not in repr(dump_tables())


def test_replacement_is_for_whoever_asked_and_never_in_clear(wraps: Wrappings, clock: Clock) -> None:
    rotation = delivered(clock)
    with pytest.raises(StateConflictError, match="Only whoever asked"):
        ask(rotation, clock, scene.admin())
    with pytest.raises(StateConflictError, match="never as itself"):
        collect_replacement(allowed(rotation, clock), rotation)


def test_replacement_of_another_delivery_is_not_wrapped(wraps: Wrappings, clock: Clock) -> None:
    key, _ = scene.issue(scene.account(), clock())
    rotation = moved(scene.rotate(key.credential, clock()), clock)
    with pytest.raises(StateConflictError, match="not handed over"):
        ask(rotation, clock)


def test_replacement_asked_for_again_ends_the_unopened_token_with_its_key(wraps: Wrappings, clock: Clock) -> None:
    """No key is handed over twice: another one is made, under the same approval and without an alarm."""
    rotation = delivered(clock)
    first = ask(rotation, clock)
    with pytest.raises(StateConflictError, match="collect that one in a moment"):
        ask(rotation, clock)
    assert wraps.tokens[first.token.reveal()] not in wraps.unopened
    assert state_of(rotation.replacement_id) == KeyState.DEACTIVATED
    again = moved(rotation, clock)
    assert (again.state, again.predecessor_id) == (S.AWAITING_PROOF, rotation.predecessor_id)
    assert (again.replacement_id or "") in wraps.open(ask(again, clock).token).reveal()
    assert alarms() == 0


def test_replacement_that_is_all_there_is_keeps_its_unopened_token(wraps: Wrappings, clock: Clock) -> None:
    """Where no other key would be made, asking again takes nothing from the receiver."""
    rotation = delivered(clock)
    ended = grant(scene.admin(), P.KEYS_REVOKE, rotation.credential.account, at=clock())
    revoke_key(ended, rotation.predecessor, RevocationReason.CESSATION_OF_OPERATION)
    rotation = moved(rotation, clock)
    assert rotation.state == S.COMPLETED
    wrapped = ask(rotation, clock)
    with pytest.raises(StateConflictError, match="out and unopened"):
        ask(rotation, clock)
    assert wraps.open(wrapped.token)


def stolen(rotation: Rotation, clock: Clock, wraps: Wrappings) -> Plaintext:
    return wraps.open(ask(rotation, clock).token)


@pytest.mark.parametrize("noticed_by", ["asking again", "a word", "the sweep"])
def test_replacement_that_a_thief_opened_is_burned_and_another_made(
    wraps: Wrappings, clock: Clock, noticed_by: str
) -> None:
    """The rotation goes on under the same approval, with a replacement that nobody has seen; the old key stays good."""
    rotation = delivered(clock)
    stolen(rotation, clock, wraps)
    if noticed_by == "asking again":
        with pytest.raises(StateConflictError, match="interception"):
            ask(rotation, clock)
    elif noticed_by == "a word":
        assert suspect(rotation, clock) == handovers.SUSPECTED
    else:
        handover = WrappedHandover.objects.get()
        suspect_due(handover.expires_at)
        assert get_rotation(rotation.pk).replacement_id == rotation.replacement_id, "its time is not over yet"
        suspect_due(handover.expires_at + CONFIRM_WITHIN)
    assert state_of(rotation.replacement_id) == KeyState.DEACTIVATED
    begun = get_rotation(rotation.pk)
    assert (begun.state, begun.replacement_id, begun.delivered_at) == (S.SCHEDULED, None, None)
    again = moved(rotation, clock)
    assert again.state == S.AWAITING_PROOF
    assert again.replacement_id not in {None, rotation.replacement_id}
    assert state_of(rotation.predecessor_id) == KeyState.ACTIVE
    assert (again.replacement_id or "") in wraps.open(ask(again, clock).token).reveal()
    assert confirm(again, clock).collected_at is not None
    assert alarms() == 1


def test_replacement_intercepted_when_the_old_key_is_gone_is_made_anew_at_once(wraps: Wrappings, clock: Clock) -> None:
    """The merchant has no key then: nothing cancels what is all that it can hope for."""
    rotation = delivered(clock)
    ended = grant(scene.admin(), P.KEYS_REVOKE, rotation.credential.account, at=clock())
    stolen(rotation, clock, wraps)
    revoke_key(ended, rotation.predecessor, RevocationReason.CESSATION_OF_OPERATION)
    suspect(get_rotation(rotation.pk), clock)
    assert get_rotation(rotation.pk).state == S.EMERGENCY
    again = moved(rotation, clock)
    assert again.replacement_id not in {None, rotation.replacement_id}
    assert state_of(again.replacement_id) == KeyState.ACTIVE


@pytest.mark.parametrize("stage", [S.AWAITING_PROOF, S.COMPLETED])
def test_replacement_that_is_all_the_merchant_has_is_not_ended_by_time(
    wraps: Wrappings, clock: Clock, stage: S
) -> None:
    """A word that merely fails to come leaves nobody without a key, wherever the rotation stands: an alarm alone."""
    rotation = delivered(clock)
    ended = grant(scene.admin(), P.KEYS_REVOKE, rotation.credential.account, at=clock())
    revoke_key(ended, rotation.predecessor, RevocationReason.CESSATION_OF_OPERATION)
    if stage is S.COMPLETED:
        rotation = moved(rotation, clock)
    assert rotation.state == stage
    wraps.open(ask(rotation, clock).token)
    handover = WrappedHandover.objects.get()
    for _ in range(2):
        suspect_due(handover.expires_at + CONFIRM_WITHIN)
    assert state_of(rotation.replacement_id) == KeyState.ACTIVE
    assert alarms() == 1
    with pytest.raises(StateConflictError, match="handed over once"):
        ask(get_rotation(rotation.pk), clock)


def test_replacement_that_is_all_there_is_is_not_ended_by_a_word_that_makes_no_other(
    wraps: Wrappings, clock: Clock
) -> None:
    rotation = delivered(clock)
    ended = grant(scene.admin(), P.KEYS_REVOKE, rotation.credential.account, at=clock())
    revoke_key(ended, rotation.predecessor, RevocationReason.CESSATION_OF_OPERATION)
    rotation = moved(rotation, clock)
    wraps.open(ask(rotation, clock).token)
    assert suspect(rotation, clock) == handovers.SUSPECTED_LAST
    assert state_of(rotation.replacement_id) == KeyState.ACTIVE
    assert alarms() == 1


def test_replacement_ended_by_a_word_when_it_was_all_there_was_is_told(wraps: Wrappings, clock: Clock) -> None:
    rotation = delivered(clock)
    ended = grant(scene.admin(), P.KEYS_REVOKE, rotation.credential.account, at=clock())
    stolen(rotation, clock, wraps)
    revoke_key(ended, rotation.predecessor, RevocationReason.CESSATION_OF_OPERATION)
    suspect(get_rotation(rotation.pk), clock)
    told = Notice.objects.get(kind=NoticeKind.CREDENTIAL_WITHOUT_KEY, is_alarm=True)
    assert told.payload["key_id"] == rotation.replacement_id


def test_replacement_that_nobody_was_given_is_not_proved_by_a_word(wraps: Wrappings, clock: Clock) -> None:
    """What lies in the backend unopened is in nobody's use, whatever an operator was told."""
    key, _ = scene.issue(scene.account(), clock(), delivery=Delivery.WRAPPED)
    dormant = scene.rotate(key.credential, clock.tick(1), proof=Proof.TRAFFIC)
    rotation = moved(dormant, clock)
    assert rotation.approved_plan.is_dormant
    wraps.open(ask(rotation, clock).token)
    assert not may_be_confirmed(get_rotation(rotation.pk))
    confirm(rotation, clock)
    assert may_be_confirmed(get_rotation(rotation.pk))


def test_replacement_intercepted_again_and_again_ends_the_rotation(wraps: Wrappings, clock: Clock) -> None:
    rotation = delivered(clock)
    for _ in range(MOST_SUSPICIONS):
        stolen(get_rotation(rotation.pk), clock, wraps)
        assert suspect(get_rotation(rotation.pk), clock) == handovers.SUSPECTED
        moved(rotation, clock)
    stolen(get_rotation(rotation.pk), clock, wraps)
    assert suspect(get_rotation(rotation.pk), clock) == handovers.SUSPECTED_AGAIN
    assert moved(rotation, clock).state == S.CANCELLED
    assert state_of(rotation.predecessor_id) == KeyState.ACTIVE
    assert alarms() == MOST_SUSPICIONS + 1


def test_replacement_in_use_is_an_alarm_and_goes_on(wraps: Wrappings, clock: Clock) -> None:
    """It may be the merchant who uses it: a person decides."""
    rotation = delivered(clock)
    stolen(rotation, clock, wraps)
    KeyUse(key=rotation.replacement, first_at=clock(), last_at=clock(), count=1).save()
    assert suspect(rotation, clock) == handovers.SUSPECTED_IN_USE
    assert state_of(rotation.replacement_id) == KeyState.ACTIVE
    assert alarms() == 1


@pytest.mark.parametrize("said", ["nothing", "it arrived", "it did not open", "asking again"])
def test_replacement_used_without_a_word_may_still_be_suspected(wraps: Wrappings, clock: Clock, said: str) -> None:
    """Use comes first, and may be a thief's: only whoever collected it can say that it arrived."""
    rotation = delivered(clock)
    stolen(rotation, clock, wraps)
    KeyUse(key=rotation.replacement, first_at=clock(), last_at=clock(), count=1).save()
    for _ in range(2):
        suspect_due(clock())
    assert get_rotation(rotation.pk).collected_at is not None
    assert Key.objects.get(pk=rotation.replacement_id).material == Material.DESTROY_DUE
    if said == "it arrived":
        confirm(rotation, clock)
        with pytest.raises(StateConflictError, match="No wrapping token"):
            suspect(rotation, clock)
    elif said == "it did not open":
        assert suspect(rotation, clock) == handovers.SUSPECTED_IN_USE
    elif said == "asking again":
        with pytest.raises(StateConflictError, match="until a person decides"):
            ask(rotation, clock)
    assert alarms() == (said in {"it did not open", "asking again"})
    assert state_of(rotation.replacement_id) == KeyState.ACTIVE


def test_replacement_that_was_ended_closes_its_handover_without_an_alarm(wraps: Wrappings, clock: Clock) -> None:
    rotation = delivered(clock)
    ask(rotation, clock)
    ended = grant(WORKER, P.ROTATIONS_ADVANCE, rotation.credential.account, at=clock())
    assert rotation.replacement is not None
    revoke_key(ended, rotation.replacement, RevocationReason.SUPERSEDED)
    suspect_due(clock())
    assert WrappedHandover.objects.get().revoked_at is not None
    assert alarms() == 0


def test_replacement_unopened_is_not_suspected(wraps: Wrappings, clock: Clock) -> None:
    rotation = delivered(clock)
    wrapped = ask(rotation, clock)
    with pytest.raises(StateConflictError, match="Nobody has opened"):
        suspect(rotation, clock)
    assert wraps.open(wrapped.token)


def test_replacement_of_a_stalled_rotation_is_burned_and_not_made_anew(wraps: Wrappings, clock: Clock) -> None:
    """Nothing goes on behind the back of whoever looks at why it stalled."""
    rotation = delivered(clock)
    stolen(rotation, clock, wraps)
    QuerySet(Rotation).filter(pk=rotation.pk).update(state=S.STALLED, stalled_from=S.AWAITING_PROOF)
    assert suspect(get_rotation(rotation.pk), clock) == handovers.SUSPECTED_AGAIN
    assert moved(rotation, clock).state == S.CANCELLED

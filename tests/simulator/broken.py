"""Rules that are broken on purpose, one each: the simulator must notice every one of them."""

from dataclasses import replace
from datetime import datetime, timedelta

from keyvault.domain.keys import KeyState
from rotation.domain.events import RotationState
from rotation.domain.pacing import Pace
from rotation.domain.silence import SourceFacts
from rotation.domain.states import Facts, Move, RotationAction, Wait, next_step
from tests.simulator.rules import Rules

S = RotationState


def _judge_by_key(found: tuple[SourceFacts, ...]) -> tuple[SourceFacts, ...]:
    """Take all sources for one: the daily client hides the month-end job."""
    if not found:
        return found
    moved = [source.moved_at for source in found if source.moved_at is not None]
    gaps = [source.gap_seconds for source in found if source.gap_seconds is not None]
    used_at = max(source.used_at for source in found)
    return (SourceFacts("all", used_at, max(moved, default=None), min(gaps, default=0)),)


def _finish_with_first_host(found: tuple[SourceFacts, ...]) -> tuple[SourceFacts, ...]:
    """Await the quiet period only, once one host of a source has used the other key."""
    return tuple(replace(source, gap_seconds=0) if source.has_moved else source for source in found)


def _never_reinstate(facts: Facts, now: datetime) -> Wait | Move | RotationAction:
    return next_step(replace(facts, was_reinstated=True), now)


def _revoke_at_deadline(facts: Facts, now: datetime) -> Wait | Move | RotationAction:
    is_late = facts.deadline is not None and now >= facts.deadline
    if facts.state is S.OVERLAP and is_late and facts.predecessor.state is KeyState.ACTIVE:
        return Move(S.QUARANTINE, "the deadline has passed")
    return next_step(facts, now)


def _skip_quarantine(facts: Facts, now: datetime) -> Wait | Move | RotationAction:
    if facts.state is S.QUARANTINE:
        return Move(S.REVOKING, "it is suspended already")
    return next_step(facts, now)


def _wait_past_deadline(facts: Facts, now: datetime) -> Wait | Move | RotationAction:
    return next_step(replace(facts, deadline=None), now)


def _begin_all(pace: Pace, *, unproved: int, begun_in_last_minute: int) -> int:
    return pace.per_minute


BROKEN: dict[str, Rules] = {
    "silence is judged by key": Rules(merge_sources=_judge_by_key),
    "the minutes of one run are a habit": Rules(occasion=timedelta()),
    "a source has moved with its first host": Rules(merge_sources=_finish_with_first_host),
    "quarantine never reinstates": Rules(next_step=_never_reinstate),
    "the clock revokes at the deadline": Rules(next_step=_revoke_at_deadline),
    "a key is taken away beside one that may be dead": Rules(requires_living_key=False),
    "a dead key may live again": Rules(can_transition=lambda was, to: was is not to),
    "quarantine is skipped": Rules(next_step=_skip_quarantine),
    "a lost message is not sent again": Rules(dispatches_again=False),
    "a campaign does not count its open rotations": Rules(count_to_begin=_begin_all),
    "the deadline has no effect": Rules(next_step=_wait_past_deadline),
}

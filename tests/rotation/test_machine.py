"""A share of the random event sequences, and tests that the watcher detects each violation."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from itertools import count
from typing import Any
from unittest import mock

import pytest
from django.db import connection, models, transaction

from keyvault.domain.keys import KeyState
from keyvault.models import Key
from rotation.domain.events import RotationState
from rotation.domain.states import Facts, Move, RotationAction, Wait, next_step
from rotation.models import LedgerEntry
from rotation.services.rotations import engine, transitions
from rotation.services.rotations.side_effects import Effects
from tests.rotation.machine.playing import play_share, shares
from tests.rotation.machine.scenes import VARIANTS, play, stage
from tests.rotation.machine.watching import ViolationError
from tests.rotation.machine.world import PERIOD, MachineWorld, Variant

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(300)]

S = RotationState
EACH = 6
"""Sequences from each scene. `python -m tests.rotation.machine` plays more."""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("variant", "chain"), list(shares()), ids=lambda value: getattr(value, "name", str(value)))
def test_machine_no_sequence_violates_an_invariant(variant: Variant, chain: int) -> None:
    """The invariants hold under worker deaths, duplicates, operators, traffic, clocks and a failing backend."""
    tally = play_share(variant, chain, EACH, 1, thorough_every=4)
    assert tally.violations == []
    assert tally.sequences >= EACH
    assert tally.steps > tally.sequences


@pytest.mark.database
def test_machine_runs_on_either_database() -> None:
    """The savepoints of the scenes work on PostgreSQL too; sequences finish."""
    tally = play_share(VARIANTS[0], 0, 2, 1, thorough_every=1)
    assert tally.violations == []
    assert {"ended completed", "ended cancelled", "ended rolled_back"} & set(tally.counts)


@pytest.mark.database
def test_machine_replay_meets_the_same_events_at_any_speed() -> None:
    """A step has the same statements, and so the same points of interruption, however much real time passes.

    Hypothesis stops with `Flaky` when the same choices lead to another state.
    """
    assert played_statements(60) == played_statements(0.001)


def played_statements(seconds: float) -> list[str]:
    """Play sequences with a clock that each reading advances by so much.

    Return the statements without savepoints, whose names are new in each run.
    """
    statements: list[str] = []

    def note(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if "SAVEPOINT" not in sql:
            statements.append(sql)
        return execute(sql, params, many, context)

    clock = mock.patch.object(time, "monotonic", side_effect=count(1e9, seconds))
    with clock, connection.execute_wrapper(note):
        play_share(VARIANTS[0], 0, 2, 1)
    return statements


# --- detected violations ----------------------------------------------------------------------------------------


@contextmanager
def played(state: RotationState) -> Iterator[MachineWorld]:
    """Return the world at the last scene in that state, rotated by acknowledgement."""
    with transaction.atomic(), stage() as backend:
        for scene in play(backend, VARIANTS[0], 0):
            if scene.name == state:
                transaction.savepoint_rollback(scene.savepoint)
                backend.restore_from(scene.backend)
                yield scene.world.copied()
        transaction.set_rollback(True)


@contextmanager
def engine_that(judges: Callable[[Facts, datetime], Wait | Move | RotationAction]) -> Iterator[None]:
    """Replace the engine's next step."""
    with mock.patch.object(engine, "next_step", judges):
        yield


def goes(state: RotationState, to: RotationState) -> Callable[[Facts, datetime], Wait | Move | RotationAction]:
    return lambda facts, now: Move(to, "in a hurry") if facts.state is state else next_step(facts, now)


def act(world: MachineWorld) -> None:
    world.pass_time(3)
    world.engine(world.work)


def test_watching_the_real_engine_finds_nothing() -> None:
    with played(S.OVERLAP) as world:
        act(world)


def test_watching_finds_a_quarantine_without_silence() -> None:
    hasty = engine_that(goes(S.OVERLAP, S.QUARANTINE))
    with played(S.OVERLAP) as world, hasty, pytest.raises(ViolationError, match="4: not a whole period"):
        act(world)


def test_watching_finds_a_quarantine_cut_short() -> None:
    hasty = engine_that(goes(S.QUARANTINE, S.REVOKING))
    with played(S.QUARANTINE) as world, hasty, pytest.raises(ViolationError, match="4: not a whole period"):
        act(world)


def test_watching_finds_a_quarantine_after_the_silence_of_a_suspended_merchant() -> None:
    blind = engine_that(lambda facts, now: next_step(replace(facts, is_suspended=False, resumed_at=None), now))
    with played(S.OVERLAP) as world, blind:
        world.people_do(world.suspend_merchant)
        with pytest.raises(ViolationError, match="4: the silence of a suspended"):
            world.pass_quietly(2 * PERIOD.total_seconds())


def test_watching_finds_the_loss_of_the_last_good_key() -> None:
    """Invariant 1, without the two checks that enforce it, in `next_step` and in the transaction."""
    with played(S.OVERLAP) as world:
        world.people_do(lambda: world.suspend(1))
        unchecked = mock.patch.object(transitions, "_require_living")
        hasty = engine_that(goes(S.OVERLAP, S.QUARANTINE))
        with hasty, unchecked, pytest.raises(ViolationError, match="1: the engine left"):
            act(world)


def test_watching_finds_a_side_effect_without_a_ledger_row() -> None:
    with played(S.SCHEDULED) as world:
        unsaved = mock.Mock(return_value=LedgerEntry(pk=0))
        with mock.patch.object(Effects, "_begin", unsaved), pytest.raises(ViolationError, match="3: put"):
            act(world)


def test_watching_finds_a_revived_key() -> None:
    """A trigger prevents such a row, so the watcher is given the key as dead before."""
    with played(S.OVERLAP) as world:
        world.watcher.dead.add(world.key_ids()[1])
        with pytest.raises(ViolationError, match="6: a dead key"):
            world.watcher.check("engine")


def test_watching_finds_a_change_without_an_audit_entry() -> None:
    with played(S.OVERLAP) as world:
        models.QuerySet(Key).filter(pk=world.key_ids()[0]).update(state=KeyState.SUSPENDED, suspended_at=world.now)
        with pytest.raises(ViolationError, match="7: a key became suspended"):
            world.watcher.check("people")


def test_watching_finds_an_expiry_that_was_moved() -> None:
    """A trigger prevents this row too."""
    with played(S.OVERLAP) as world:
        key_id = world.key_ids()[0]
        world.watcher.keys[key_id] = replace(world.watcher.keys[key_id], expires_at=world.now)
        with pytest.raises(ViolationError, match="6: an expiry"):
            world.watcher.check("people")


def test_watching_finds_a_predecessor_that_is_kept_in_quarantine() -> None:
    """The replacement is gone and the backend is down, which the separate transaction covers."""
    with played(S.QUARANTINE) as world:
        world.backend.is_down = True
        world.people_do(lambda: world.revoke(1))
        with mock.patch.object(engine, "lift_quarantine"):
            act(world)
        world.clock.tick(60)  # past the pause after the outage
        with pytest.raises(ViolationError, match="1: the predecessor is kept"):
            world.watcher.require_predecessor_reinstated()
        act(world)
        world.watcher.require_predecessor_reinstated()


def test_watching_finds_a_merchant_with_nothing_to_read() -> None:
    """The dead replacement's copy is destroyed, and the predecessor is not written back."""
    with played(S.OVERLAP) as world:
        world.people_do(lambda: world.compromise(1))
        world.sweep()
        with mock.patch.object(Effects, "write_back"):
            act(world)
        with pytest.raises(ViolationError, match="eventually: the merchant reads"):
            world.watcher.require_nothing_hangs()


def test_watching_finds_a_fault_that_the_engine_swallows() -> None:
    """The engine logs a rotation's fault and continues; here the fault is a violation."""
    broken = engine_that(mock.Mock(side_effect=KeyError("a plan's field")))
    with played(S.OVERLAP) as world, broken, pytest.raises(ViolationError, match="unforeseen: KeyError"):
        act(world)


def test_watching_finds_a_rotation_that_hangs() -> None:
    silent = engine_that(lambda facts, now: Wait(""))
    with played(S.OVERLAP) as world, silent, pytest.raises(ViolationError, match="eventually"):
        world.recover()

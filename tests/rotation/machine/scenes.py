"""The start of sequences: each plan taken along its path by the real engine and kept by savepoints.

Savepoints form a stack: a chain of scenes is built from first to last and played from last to first.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from unittest import mock

from django.db import transaction

from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.services.peppers import ring
from keyvault.services.work import leases
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import AtDeadline, PlanOverrides, Proof, Reinstatement
from rotation.services.rotations import engine
from tests import factories
from tests.rotation.machine.backend import MemoryBackend
from tests.rotation.machine.interrupting import DisruptedError
from tests.rotation.machine.watching import ViolationError
from tests.rotation.machine.world import KNOWN, PERIOD, START, MachineWorld, Variant

S = RotationState
_SHORT = PlanOverrides(quiet_seconds=600, quarantine_seconds=300, proof_count=4, proof_sources=2, soak_seconds=5)
_BY_TRAFFIC = replace(_SHORT, proof=Proof.TRAFFIC)

VARIANTS = (
    Variant("by acknowledgement", replace(_SHORT, proof=Proof.ACK)),
    Variant(
        "by traffic, the predecessor may expire",
        replace(_BY_TRAFFIC, deadline=START + timedelta(days=3), predecessor_may_expire=True, expires_in_days=3),
        expires_in_days=1,
    ),
    Variant(
        "by both, revoked at the deadline",
        replace(
            _SHORT,
            proof=Proof.BOTH,
            deadline=START + timedelta(days=1),
            at_deadline=AtDeadline.REVOKE,
            reinstatement=Reinstatement.NEVER,
        ),
    ),
    Variant(
        "in production",
        replace(_BY_TRAFFIC, quiet_seconds=3_600, quarantine_seconds=600),
        environment=Environment.PRODUCTION,
    ),
    Variant("a public key", replace(_SHORT, proof=Proof.CONFIRMATION), kind=KeyKind.PUBLIC),
    Variant("dormant", _BY_TRAFFIC, is_used=False),
)


@dataclass(frozen=True)
class SavedScene:
    """The world at this point, and the savepoint that holds its rows."""

    name: str
    world: MachineWorld
    backend: MemoryBackend
    savepoint: str


def _approved(world: MachineWorld) -> None:
    if world.state is S.AWAITING_APPROVAL:
        world.people_do(world.approve)


def _delivered(world: MachineWorld) -> None:
    world.engine(world.work)


def _proved(world: MachineWorld) -> None:
    world.prove()
    world.clock.tick(3)
    world.engine(world.work)


def _quarantined(world: MachineWorld) -> None:
    if world.variant.kind is KeyKind.PUBLIC:
        world.people_do(lambda: world.retire(1))
    world.pass_quietly(3601 if world.variant.environment is Environment.PRODUCTION else PERIOD.total_seconds())


def _abandoned(world: MachineWorld) -> None:
    world.people_do(world.abort)
    world.clock.tick(3)
    world.engine(world.work)


def _back_and_quarantined(world: MachineWorld) -> None:
    world.use(0, KNOWN[0], 0)
    for _ in range(2 if world.variant.environment is Environment.SANDBOX else 8):
        world.clock.tick(PERIOD.total_seconds())
        world.flush()
    world.engine(world.work)


CHAINS: tuple[tuple[tuple[RotationState, Callable[[MachineWorld], None]], ...], ...] = (
    (
        (S.SCHEDULED, _approved),
        (S.AWAITING_PROOF, _delivered),
        (S.OVERLAP, _proved),
        (S.QUARANTINE, _quarantined),
    ),
    (
        (S.SCHEDULED, _approved),
        (S.AWAITING_PROOF, _delivered),
        (S.OVERLAP, _proved),
        (S.ROLLING_BACK, _abandoned),
        (S.ROLLING_BACK, _back_and_quarantined),
    ),
)
FIRST_OF_CHAIN = (0, 3)
"""Scenes that the second chain shares with the first are played there."""


def _require_foreseen(*_: object, **__: object) -> None:
    """Replace the engine's log of unforeseen faults. A refused statement is injected and expected."""
    error = sys.exc_info()[1]
    if not isinstance(error, DisruptedError):
        raise ViolationError(f"unforeseen: {type(error).__name__}: {error}") from error


@contextmanager
def stage() -> Iterator[MemoryBackend]:
    """Replace the keystore by an in-memory backend, remove jitter, and raise faults that are otherwise only logged.

    Run inside a transaction.

    The pepper ring refreshes before each new key instead of by real time: the statements of a refresh are events of a
    step (`interrupting.py`), and Hypothesis requires that a replay meets the same events.
    """
    backend = MemoryBackend()
    with (
        mock.patch("keyvault.services.secrets.backend.LocalKeystore", return_value=backend),
        mock.patch.object(leases, "_jitter", return_value=1.0),
        mock.patch.object(ring, "REFRESH_SECONDS", 0.0),
        mock.patch.object(engine._log, "exception", _require_foreseen),
    ):
        factories.forget_keystore()
        try:
            factories.have_peppers()
            yield backend
        finally:
            factories.forget_keystore()


def play(backend: MemoryBackend, variant: Variant, chain: int) -> Iterator[SavedScene]:
    """Yield each scene of a chain, the last one first; rows are restored after each."""
    whole = transaction.savepoint()
    kept = backend.copied()
    world = MachineWorld(variant, backend)
    world.create()
    scenes: list[SavedScene] = []
    for number, (state, way) in enumerate(CHAINS[chain]):
        way(world)
        if world.state is not state:
            raise AssertionError(f"{variant.name}: {world.state} instead of {state}; {world.last_wait}")
        if number >= FIRST_OF_CHAIN[chain]:
            scenes.append(SavedScene(state, world.copied(), backend.copied(), transaction.savepoint()))
    for scene in reversed(scenes):
        yield scene
        transaction.savepoint_rollback(scene.savepoint)
    backend.restore_from(kept)
    transaction.savepoint_rollback(whole)
    transaction.savepoint_commit(whole)

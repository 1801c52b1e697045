"""Play a number of sequences for each plan from each scene."""

from collections.abc import Iterator

from django.db import transaction
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.rotation.machine.rules import SequenceTally, machine_of
from tests.rotation.machine.scenes import CHAINS, VARIANTS, play, stage
from tests.rotation.machine.world import Variant

STEPS = 6

SCENES = 6
"""The scenes from which each plan is played: four forward, two in a rollback."""


def shares() -> Iterator[tuple[Variant, int]]:
    """Yield the independent shares: a plan and one of its two paths."""
    for variant in VARIANTS:
        for chain in range(len(CHAINS)):
            yield variant, chain


def play_share(variant: Variant, chain: int, each: int, seed_: int, *, thorough_every: int = 10) -> SequenceTally:
    """Play `each` sequences from each scene of the path, in a transaction that is rolled back."""
    tally = SequenceTally()
    with transaction.atomic(), stage() as backend:
        for number, scene in enumerate(play(backend, variant, chain)):
            machine = seed(seed_ * 1_000 + number)(machine_of(scene, tally, thorough_every=thorough_every))
            run_state_machine_as_test(
                machine,
                settings=settings(
                    max_examples=each,
                    stateful_step_count=STEPS,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate],
                    derandomize=False,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        transaction.set_rollback(True)
    return tally

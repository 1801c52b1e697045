"""A small share of `make faults ARGS=feed`: real verifier processes on two hosts, cut off from the feed of changes."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.test import override_settings

from keyvault.services.recording.changes import generation
from tests.factories import own_keystore, renew_revocation_log
from tests.faults import feed_cuts
from tests.faults.feed import VICTIMS_OF_A_CUT, perform, running_scene
from tests.faults.results import Result

pytestmark = [pytest.mark.long, pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

CUTS = (feed_cuts.kill_listeners, feed_cuts.freeze, feed_cuts.step_clock)


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """Make a separate data folder, since the generation, log and keystore of other tests belong to other databases."""
    folder = tmp_path / "here"
    folder.mkdir(mode=0o700)
    renew_revocation_log(folder / "revocation_log")
    with own_keystore(folder), override_settings(REVOCATION_LOG=folder / "revocation_log"):
        generation.cache_clear()
        try:
            yield folder
        finally:
            generation.cache_clear()


def test_verifiers_cut_off_from_the_feed_allow_no_stale_key(data: Path, tmp_path: Path) -> None:
    """Guarantee: a cut from the feed never makes a revoked key valid.

    The test kills LISTEN connections, stops a process while a key is revoked, and steps the clock while nothing can be
    confirmed. On the writer's host no process allows the key after the revoke has returned; elsewhere none does after
    the receipt or MAX_STALENESS. Valid keys are refused only for lack of a verdict, and are allowed again.
    """
    result = Result("cuts")
    rng = random.Random(6)  # noqa: S311  not for secrets
    victims = VICTIMS_OF_A_CUT * len(CUTS)
    with running_scene(tmp_path, result, rng, victims=victims, tokens=2, workers=1, rate=150) as scene:
        perform(scene, CUTS)
    assert result.violations == []
    assert result.n == len(CUTS)
    for place in ("same host", "elsewhere"):
        assert result.counts[f"sent after it, {place}"]

"""Verifiers that are cut off from the change feed, in every known way, never allow what was revoked.

Two hosts run verifiers of two processes each. One shares the generation counter of the writer, the other has only the
database, over its own network. All receive requests continuously. `feed_cuts` has the faults.
"""

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from django.conf import settings

from tests.faults.acting import Acts, act_at_random, make_cast, watch_receipts
from tests.faults.answer_checks import Outages, judge
from tests.faults.asking import Asking
from tests.faults.feed_cuts import CUTS
from tests.faults.hosts import Host, copy_data
from tests.faults.inside import UNLIMITED
from tests.faults.programs import GaveUpError
from tests.faults.results import Asked, Result, say
from tests.faults.stage import Stage, heal

VICTIMS_OF_A_CUT = 15
TOKENS = 10
ACT_SECONDS = 0.5


def run(asked: Asked) -> Result:
    result, dice = Result("cuts"), random.Random(asked.seed)  # noqa: S311  a test's own dice
    cuts = dice.sample(CUTS, len(CUTS))
    with staged(asked.folder, result, dice, victims=VICTIMS_OF_A_CUT * len(cuts), tokens=TOKENS, workers=2) as stage:
        stage.postgres = asked.servers["postgres"]
        perform(stage, cuts)
    return result


@contextmanager
def staged(
    folder: Path, result: Result, dice: random.Random, *, victims: int, tokens: int, workers: int, rate: float = 400.0
) -> Iterator[Stage]:
    """Start the hosts, and the threads that send requests and make changes. The responses are checked on exit."""
    outages, stop = Outages(), threading.Event()
    say(f"{victims} keys to revoke are issued")
    cast = make_cast(victims, tokens)
    with ExitStack() as stack:
        hosts = []
        for name, data in (
            ("here", settings.DATA_DIR),
            ("elsewhere", copy_data(settings.DATA_DIR, folder / "elsewhere")),
        ):
            hosts.append(Host(name, data, folder, workers, {**os.environ, **UNLIMITED}))
            stack.callback(hosts[-1].close)
        for host in hosts:
            host.wait_until_ready()
        asking = Asking(hosts, cast.questions, dice.randrange(2**32), rate)
        acts = Acts(cast, asking.attend)
        chance = random.Random(dice.randrange(2**32))  # noqa: S311  a test's own dice
        threads = [
            threading.Thread(target=act_at_random, args=(acts, chance, stop, ACT_SECONDS)),
            threading.Thread(target=watch_receipts, args=(acts, stop)),
        ]
        with asking:
            try:
                for thread in threads:
                    thread.start()
                yield Stage(hosts[0], hosts[1], acts, asking, outages, result, dice, settings.MAX_STALENESS_SECONDS)
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
        judge(result, list(asking.replies), acts, outages, "here", settings.MAX_STALENESS_SECONDS)


def perform(stage: Stage, cuts: Sequence[Callable[[Stage], None]]) -> None:
    try:
        with stage.outage():
            heal(stage)
        for cut in cuts:
            say(f"{cut.__name__.replace('_', ' ')} ({len(stage.asking.replies)} answers, {stage.acts.count} acts)")
            stage.acts.when = cut.__name__
            cut(stage)
            heal(stage)
            stage.result.n += 1
    except GaveUpError as gave_up:
        stage.result.must_be(False, str(gave_up))

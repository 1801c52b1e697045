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

from tests.faults.answer_checks import Outages, judge
from tests.faults.changes import SubjectChanges, change_at_random, make_subjects, watch_receipts
from tests.faults.experiment_process import UNLIMITED
from tests.faults.feed_cuts import CUTS
from tests.faults.feed_scene import FeedScene, await_recovery
from tests.faults.hosts import Host, copy_data
from tests.faults.programs import GaveUpError
from tests.faults.results import Options, Result, say
from tests.faults.sender import RequestSender

VICTIMS_OF_A_CUT = 15
TOKENS = 10
CHANGE_SECONDS = 0.5


def run(options: Options) -> Result:
    result, rng = Result("cuts"), random.Random(options.seed)  # noqa: S311  not for secrets
    cuts = rng.sample(CUTS, len(CUTS))
    with running_scene(
        options.folder, result, rng, victims=VICTIMS_OF_A_CUT * len(cuts), tokens=TOKENS, workers=2
    ) as scene:
        scene.postgres = options.servers["postgres"]
        perform(scene, cuts)
    return result


@contextmanager
def running_scene(
    folder: Path, result: Result, rng: random.Random, *, victims: int, tokens: int, workers: int, rate: float = 400.0
) -> Iterator[FeedScene]:
    """Start the hosts, and the threads that send requests and make changes. The responses are checked on exit."""
    outages, stop = Outages(), threading.Event()
    say(f"{victims} keys to revoke are issued")
    subjects = make_subjects(victims, tokens)
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
        sender = RequestSender(hosts, subjects.requests, rng.randrange(2**32), rate)
        changes = SubjectChanges(subjects, sender.prefer)
        change_rng = random.Random(rng.randrange(2**32))  # noqa: S311  not for secrets
        threads = [
            threading.Thread(target=change_at_random, args=(changes, change_rng, stop, CHANGE_SECONDS)),
            threading.Thread(target=watch_receipts, args=(changes, stop)),
        ]
        with sender:
            try:
                for thread in threads:
                    thread.start()
                yield FeedScene(
                    hosts[0], hosts[1], changes, sender, outages, result, rng, settings.MAX_STALENESS_SECONDS
                )
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
        judge(result, list(sender.replies), changes, outages, "here", settings.MAX_STALENESS_SECONDS)


def perform(scene: FeedScene, cuts: Sequence[Callable[[FeedScene], None]]) -> None:
    try:
        with scene.outage():
            await_recovery(scene)
        for cut in cuts:
            say(
                f"{cut.__name__.replace('_', ' ')} ({len(scene.sender.replies)} answers, {scene.changes.count} changes)"
            )
            scene.changes.when = cut.__name__
            cut(scene)
            await_recovery(scene)
            scene.result.n += 1
    except GaveUpError as gave_up:
        scene.result.must_be(False, str(gave_up))

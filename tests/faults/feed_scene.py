"""The setting of a cut of the feed: the hosts, the threads that send requests and make changes, and the records."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from django.db import connection

from tests.faults.answer_checks import UNAVAILABLE_CODE, Outages
from tests.faults.changes import Ban, SubjectChanges
from tests.faults.hosts import Host
from tests.faults.programs import until
from tests.faults.results import Result
from tests.faults.sender import RequestSender
from tests.faults.servers import Restartable

RIGHT_WITHIN_SECONDS = 4
"""Time after a cut until every good key is allowed again, in seconds."""

RECOVERY_SECONDS = 20


@dataclass(slots=True)
class FeedScene:
    """`here`: the host whose generation counter the changes advance. `postgres` None: it may not be stopped."""

    here: Host
    elsewhere: Host
    changes: SubjectChanges
    sender: RequestSender
    outages: Outages
    result: Result
    rng: random.Random
    staleness: float
    postgres: Restartable | None = None

    @property
    def hosts(self) -> tuple[Host, Host]:
        return self.here, self.elsewhere

    def choose(self) -> Host:
        return self.rng.choice(self.hosts)

    def ban_all(self, what: str, host: Host | None, since: float, bound_seconds: float) -> Ban:
        """Ban every grant for any key, until the caller ends the disturbance and the ban."""
        ban = Ban(
            what, None, since, only=None if host is None else host.name, bound_seconds=bound_seconds, is_notified=False
        )
        self.changes.bans.append(ban)
        return ban

    @contextmanager
    def outage(self, host: Host | None = None, *, is_silent: bool = False) -> Iterator[None]:
        """Accept responses without a verdict from now until a while after. `is_silent`: also missing responses."""
        began = time.monotonic()
        name = None if host is None else host.name
        spans = [self.outages.without_verdict, *([self.outages.without_answer] if is_silent else [])]
        for each in spans:
            each.append((name, began, float("inf")))
        try:
            yield
        finally:
            for each in spans:
                each[each.index((name, began, float("inf")))] = (name, began, time.monotonic() + RIGHT_WITHIN_SECONDS)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def must_see_refusals(self, host: Host | None, since: float) -> None:
        """Check that some request got a response without a verdict."""
        names = {each.name for each in self.hosts} if host is None else {host.name}
        seen = (each for each in list(self.sender.replies) if each.sent_at >= since and each.host in names)
        found = any(each.code == UNAVAILABLE_CODE for each in seen)
        self.result.must_be(found, f"{self.changes.when}: no request in {names} got a 503 without a verdict")


def await_recovery(scene: FeedScene) -> None:
    """Wait until all verifiers have confirmed a new change. Raises GaveUpError."""
    ban: list[Ban] = []

    def is_confirmed() -> bool:
        if not ban or ban[-1].sequence is None:
            if (made := scene.changes.revoke()) is not None:
                ban.append(made)
            return False
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM keyvault_verifier WHERE confirmed_sequence >= %s AND door = 'verifier'"
                " AND stopped_at IS NULL AND seen_at > now() - interval '2 seconds'",
                [ban[-1].sequence],
            )
            return bool(cursor.fetchone()[0] == sum(host.workers for host in scene.hosts))

    until("every verifier to confirm a new change", is_confirmed, RECOVERY_SECONDS)

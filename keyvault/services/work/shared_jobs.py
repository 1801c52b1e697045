"""Jobs that do the work of all environments of a worker. Beat sends their message to the queue of each environment."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

_SAME_ROUND_SECONDS = 1.0
"""Maximum time between the messages of one round, in seconds. Beat sends them together, at least 2 s apart."""


@dataclass(slots=True)
class SharedJobs:
    """The last round of each job in this process. Threads may share an instance."""

    _begun: dict[str, tuple[str, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, job: str, environment: str) -> bool:
        """Return whether to run the job: False if another environment's message of this round has begun it.

        `environment`: the one whose queue had the message. Blank: no message caused the call, and the job always runs.
        """
        if not environment:
            return True
        with self._lock:
            at = monotonic()
            begun_for, begun_at = self._begun.get(job, ("", 0.0))
            if begun_for not in {"", environment} and at - begun_at < _SAME_ROUND_SECONDS:
                return False
            self._begun[job] = environment, at
            return True

    def run(self, job: str, environment: str, work: Callable[[], object]) -> bool:
        """Run the job if `begin` allows it, and return whether it ran. Raises the errors of the job."""
        if not self.begin(job, environment):
            return False
        work()
        return True


shared_jobs = SharedJobs()
"""This process's jobs."""

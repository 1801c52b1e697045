"""Traffic of merchants: each one presents the key that it reads from the secret backend, over HTTP, continuously.

Once a replacement is delivered, a merchant has both keys. For a while it uses them alternately, then only the new one,
like a fleet whose servers switch one by one. While it switches, it uses the old key at least every LONGEST_GAP_SECONDS.
After a longer gap it never uses the old key again. So no longer quiet period can end before the last use, however slow
this machine is. In addition, dry runs present every key that a merchant ever had. They count as no use, so they may
present a key that must be silent.
"""

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from django.db import connections

from keyvault.backends.base import StoredSecret
from keyvault.domain.errors import KeyvaultError
from keyvault.domain.plaintext import Plaintext
from keyvault.management.service import ADDRESS
from keyvault.models import Credential
from keyvault.services.secrets.stored_copies import find_stored

TIMEOUT_SECONDS = 30
TURN_SECONDS = 0.3
LONGEST_GAP_SECONDS = 0.8
"""Maximum gap between uses of the old key, in seconds: shorter than every plan's quiet period by more than a response
takes."""

DRY_SHARE = 0.3
NO_ANSWER = 0


@dataclass(frozen=True, slots=True)
class VerificationAnswer:
    """One verification. `status`: of the decision, else of the call, else NO_ANSWER. `code` "": the key is good.

    Times are seconds since 1970, comparable between all processes of this machine.
    """

    key_id: str
    sent_at: float
    answered_at: float
    is_dry: bool
    status: int
    code: str
    fault: str = ""

    @property
    def is_yes(self) -> bool:
        return self.status == http.HTTPStatus.OK and not self.code


@dataclass(slots=True)
class Merchant:
    """The holder of one credential, with every key that it ever had, the newest last."""

    credential: Credential
    keys: dict[str, Plaintext] = field(default_factory=dict)
    version: int = 0
    using: tuple[str, ...] = ()
    """The current key and the one before it."""

    taken_at: float = 0.0
    used_at: dict[str, float] = field(default_factory=dict)
    turns: int = 0
    old_turns: int = 0
    """Number of requests with the old key while the merchant had both."""

    is_busy: bool = True
    """Whether it reads new keys."""

    def read_key(self) -> None:
        """Use the key that the secret backend holds."""
        stored = find_stored(self.credential)
        if stored is not None and stored.version != self.version:
            self._take(stored)

    def _take(self, stored: StoredSecret) -> None:
        key_id, now, before = stored.labels["key_id"], time.monotonic(), self.using[-1:]
        if key_id not in self.keys:
            # The silence of the old key counts from the first use of the new one.
            self.used_at |= dict.fromkeys(before, now)
        self.keys[key_id] = stored.secret
        self.taken_at, self.version = now, stored.version
        self.using = tuple(dict.fromkeys((*before, key_id)))

    def is_switching(self, now: float, by_turns_seconds: float) -> bool:
        """Return whether it may still use the old key: for a limited time, and not after a long gap."""
        is_time = now - self.taken_at < by_turns_seconds
        return len(self.using) > 1 and is_time and now - self.used_at.get(self.using[0], 0.0) < LONGEST_GAP_SECONDS

    def waits(self, now: float) -> float:
        """Return the time since its last use of any key, in seconds."""
        return now - max(self.used_at.values(), default=0.0)

    def choose(self, now: float, by_turns_seconds: float) -> str:
        """Return the key of its next request."""
        using = self.using
        is_old = self.is_switching(now, by_turns_seconds) and self.turns % 2 == 0
        self.turns += 1
        self.old_turns += is_old
        key_id = using[0] if is_old else using[-1]
        self.used_at[key_id] = now
        return key_id


@dataclass(slots=True)
class MerchantTraffic:
    """A context manager that sends `rate` requests per second in total and keeps every response.

    `by_turns_seconds`: time for which a merchant uses the old key beside a new one.
    """

    merchants: Sequence[Merchant]
    port: int
    token: Plaintext
    rate: float
    seed: int
    threads: int = 4
    by_turns_seconds: float = 1.5
    answers: list[VerificationAnswer] = field(default_factory=list)
    failed_reads: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "MerchantTraffic":
        for merchant in self.merchants:
            merchant.read_key()
        for number in range(self.threads):
            self._start(self._present, number)
        self._start(self._follow)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        def run() -> None:
            try:
                work(*arguments)
            finally:
                connections.close_all()

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _follow(self) -> None:
        while not self._stop.wait(0.05):
            for merchant in self.merchants:
                if merchant.is_busy and not self._stop.is_set():
                    try:
                        merchant.read_key()
                    except KeyvaultError:
                        self.failed_reads += 1  # it continues with its current key, and reads again later

    def _present(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")  # noqa: S311  not for secrets
        mine = list(self.merchants[number :: self.threads]) or list(self.merchants)
        client = VerifierClient(self.port, self.token)
        pause = self.threads / self.rate
        due_at = time.monotonic() + pause * number / self.threads
        while not self._stop.wait(max(0.0, due_at - time.monotonic())):
            merchant = self._find_switching(mine)
            is_dry = merchant is None and rng.random() < DRY_SHARE
            merchant = merchant or rng.choice(mine)
            key_id = rng.choice(list(merchant.keys)) if is_dry else self._choose(merchant)
            self.answers.append(client.ask(key_id, merchant.keys[key_id], number, is_dry=is_dry))
            # After a stall the missed requests are not sent.
            due_at = max(due_at + pause, time.monotonic() - pause)
        client.close()

    def _find_switching(self, mine: Sequence[Merchant]) -> Merchant | None:
        """Return the merchant with both keys that has been silent longest."""
        now = time.monotonic()
        switching = [each for each in mine if each.is_switching(now, self.by_turns_seconds)]
        latest = max(switching, key=lambda each: each.waits(now), default=None)
        return latest if latest is not None and latest.waits(now) >= TURN_SECONDS else None

    def _choose(self, merchant: Merchant) -> str:
        return merchant.choose(time.monotonic(), self.by_turns_seconds)


class VerifierClient:
    """One connection of one thread to the verifier. It is opened again after a fault."""

    def __init__(self, port: int, token: Plaintext) -> None:
        self._connection = http.client.HTTPConnection(ADDRESS, port, timeout=TIMEOUT_SECONDS)
        self._token = token

    def ask(self, key_id: str, key: Plaintext, source: int, *, is_dry: bool) -> VerificationAnswer:
        body = {
            "key": key.reveal(),
            "environment": "sandbox",
            "endpoint": "orders.retrieve",
            "client_ip": f"198.51.100.{source + 1}",
            "user_agent": "faults/1.0",
            "dry_run": is_dry,
        }
        status, code, fault, sent_at = NO_ANSWER, "", "", time.time()
        try:
            self._connection.request(
                "POST",
                "/v1/keys/verify",
                json.dumps(body),
                {"Authorization": f"Bearer {self._token.reveal()}", "Content-Type": "application/json"},
            )
            answer = self._connection.getresponse()
            verdict = json.loads(answer.read())
            # A decision has the status of the response to the client.
            status = int(verdict.get("status", answer.status))
            code = "" if verdict.get("allowed") is True else str(verdict.get("code"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            fault = f"{type(error).__name__}: {error}"
            self._connection.close()
        return VerificationAnswer(key_id, sent_at, time.time(), is_dry, status, code, fault)

    def close(self) -> None:
        self._connection.close()


@contextmanager
def idle(merchants: Sequence[Merchant]) -> Iterator[None]:
    """No merchant reads new keys inside this block."""
    for merchant in merchants:
        merchant.is_busy = False
    try:
        yield
    finally:
        for merchant in merchants:
            merchant.is_busy = True

"""The process that decides: `python -m tests.bench.local_process`. Its order and its figures are JSON."""

import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any
from urllib.parse import urlsplit

from keyvault_client import Question
from keyvault_client.local import LocalVerifier

from .figures import percentile
from .machine import cost
from .seed_keys import key_id_of

ENDPOINT, USER_AGENT = "orders.retrieve", "checkout/2.4"
KNOWN_SECONDS = 60.0
TURNS = 500
"""Decisions between two looks at the clock."""

WARM_SECONDS = 2.0
RECEIPT_SECONDS = 20


@dataclass(slots=True)
class Decider:
    """A LocalVerifier with counts. `allowed`: its grants. `asked`: its questions to the service."""

    verifier: LocalVerifier
    allowed: int = 0
    asked: int = 0
    addresses: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        send = self.verifier._runner.send

        def count(request: Any) -> Any:
            self.asked += 1
            return send(request)

        self.verifier._runner.send = count  # type: ignore[assignment,method-assign]  # only counts

    def decide(self, key: str) -> bool:
        """Decide about one request with the key, as a backend service does."""
        question = Question(key=key, endpoint=ENDPOINT, client_ip=self.addresses[key], user_agent=USER_AGENT)
        is_allowed = self.verifier.verify(question).allowed
        self.allowed += is_allowed
        return is_allowed

    def learn(self, keys: list[str]) -> None:
        """Ask about each key until its record is in memory. Raises RuntimeError."""
        self.addresses |= {key: f"203.0.113.{number % 250 + 1}" for number, key in enumerate(keys)}
        deadline, memory = time.monotonic() + KNOWN_SECONDS, self.verifier._logic.memory
        for key in keys:
            if not self.decide(key):
                raise RuntimeError("a valid key was refused")
        while memory.needs_reading or not {key_id_of(key) for key in keys} <= memory._held.keys():
            if time.monotonic() > deadline:
                raise RuntimeError("the keys' records were not read")
            time.sleep(0.05)


def main() -> int:
    order = json.load(sys.stdin)
    verifier = LocalVerifier(order["url"], "production", order["token"])
    decider = Decider(verifier)
    try:
        decider.learn(order["keys"])
        _decide_for(decider, order["keys"], WARM_SECONDS)
        rounds = [
            {"round": turn, **_measure(decider, order["keys"], order["seconds"], order["core"])}
            for turn in range(1, order["rounds"] + 1)
        ]
        decider.learn(order["to_revoke"])
        revoked = _revoke_all(decider, order)
    finally:
        verifier.close()
    sys.stdout.write(json.dumps({"rounds": rounds, **revoked, "allowed": decider.allowed}))
    return 0


# --- rate and latency -----------------------------------------------------------------------------------------


def _decide_for(decider: Decider, keys: list[str], seconds: float) -> int:
    """Decide about the keys in turn. Returns the number of decisions. Raises RuntimeError when one is a refusal."""
    turn, made, until = cycle(keys), 0, time.perf_counter() + seconds
    decide = decider.decide
    while time.perf_counter() < until:
        for _ in range(TURNS):
            if not decide(next(turn)):
                raise RuntimeError("a valid key was refused")
        made += TURNS
    return made


def _measure(decider: Decider, keys: list[str], seconds: float, core: int | None) -> dict[str, Any]:
    asked, before, began = decider.asked, cost([os.getpid()], core), time.perf_counter()
    made = _decide_for(decider, keys, seconds)
    after, took = cost([os.getpid()], core), time.perf_counter() - began
    asked = decider.asked - asked
    used = after.cpu_seconds - before.cpu_seconds
    others = 0.0 if core is None else max(0.0, after.core_seconds - before.core_seconds - used) / took
    latencies = _time_decisions(decider, keys, made // 10)
    return {
        "per_second": made / took,
        "per_cpu_second": made / used,
        "asked_per_second": asked / took,
        "p50_us": percentile(latencies, 0.5),
        "p99_us": percentile(latencies, 0.99),
        "share": used / took,
        "others": others,
        "steal": (after.stolen_seconds - before.stolen_seconds) / took / (os.cpu_count() or 1),
    }


def _time_decisions(decider: Decider, keys: list[str], count: int) -> list[float]:
    """Return the times of single decisions, in microseconds."""
    turn, found = cycle(keys), []
    for _ in range(count):
        key = next(turn)
        began = time.perf_counter_ns()
        decider.decide(key)
        found.append((time.perf_counter_ns() - began) / 1000)
    return found


# --- revocations ----------------------------------------------------------------------------------------------


def _revoke_all(decider: Decider, order: dict[str, Any]) -> dict[str, Any]:
    """Revoke keys while the process asks about them, and count the grants after each receipt."""
    stale, without_receipt, asked_after, receipts = 0, 0, 0, []
    for key in order["to_revoke"]:
        with _revoking(order["url"], order["token"], key) as outcome:
            while not outcome.is_over.is_set():
                decider.decide(key)
            for _ in range(order["asked_after"]):
                stale += decider.decide(key)
                asked_after += 1
        without_receipt += not outcome.is_complete
        receipts.append(outcome.seconds * 1000)
    return {
        "revocations": len(order["to_revoke"]),
        "without_receipt": without_receipt,
        "asked_after": asked_after,
        "stale": stale,
        "receipt_p50_ms": percentile(receipts, 0.5) if receipts else 0.0,
    }


@dataclass(slots=True)
class _Outcome:
    """A revocation. `is_complete`: every verifier has confirmed it."""

    is_over: threading.Event = field(default_factory=threading.Event)
    is_complete: bool = False
    seconds: float = 0.0


@contextmanager
def _revoking(url: str, token: str, key: str) -> Iterator[_Outcome]:
    """Revoke the key in a thread, and wait there for the receipt."""
    outcome = _Outcome()

    def revoke() -> None:
        began = time.perf_counter()
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=RECEIPT_SECONDS + 10)
        headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
            "Prefer": f"wait={RECEIPT_SECONDS}",
        }
        try:
            body = json.dumps({"reason": "superseded"})
            connection.request("POST", f"/v1/keys/{key_id_of(key)}/revoke", body, headers)
            answer = json.loads(connection.getresponse().read())
            outcome.is_complete = answer["receipt"]["complete"] is True
        finally:
            connection.close()
            outcome.seconds = time.perf_counter() - began
            outcome.is_over.set()

    thread = threading.Thread(target=revoke)
    thread.start()
    try:
        yield outcome
    finally:
        thread.join()


if __name__ == "__main__":
    sys.exit(main())

"""A regional verifier's follower: what it applies, when it confirms, and for how long the memory may decide."""

import threading
import time
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest

from keyvault.backends.central import CentralRefusedError, CentralUnavailableError
from keyvault.services.change_feed.remote_follower import RemoteFollower

NEVER = float("-inf")


class Central:
    """A central service that answers what the test has prepared, and records the calls."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, Mapping[str, object]]] = []

    def get(self, path: str, query: Mapping[str, object], *, seconds: float) -> Any:
        self.calls.append((path, query))
        return self._next()

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        self.calls.append((path, body))
        return self._next()

    def _next(self) -> Any:
        found = self.answers.pop(0)
        if callable(found):
            found()  # what happens while the call is under way
            found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


class Memory:
    """Records what the follower does to the engine, in order."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.confirmed: list[float] = []
        self.bound = 0.0

    def apply(self, subjects: Any) -> None:
        self.done.append(subjects)

    def confirm(self, monotonic: float, wall: float) -> None:
        self.confirmed.append(monotonic)

    def set_bound(self, seconds: float) -> None:
        self.bound = seconds


def page(sequence: int, *changes: tuple[str, str], waited: float = 0.0) -> dict[str, Any]:
    rows = [{"sequence": sequence, "kind": kind, "id": identity, "record": None} for kind, identity in changes]
    return {"sequence": sequence, "changes": rows, "waited_seconds": waited, "staleness_seconds": 10}


def following(central: Central) -> tuple[RemoteFollower, Memory]:
    memory = Memory()
    follower = RemoteFollower(central, "r", memory.apply, memory.confirm, memory.set_bound)  # type: ignore[arg-type]  # a stand-in
    return follower, memory


def test_first_read_clears_the_memory_and_the_next_applies_before_it_confirms() -> None:
    """Guarantee: the region confirms a sequence only after every change up to it is applied."""
    central = Central(page(7), {}, page(9, ("key", "k1")), {})
    follower, memory = following(central)
    follower.read_once()
    follower.confirm_once()
    assert memory.done == [None]
    follower.read_once()
    follower.confirm_once()
    assert memory.done == [None, [("key", "k1")]]
    assert memory.bound == 10
    assert [path for path, _ in central.calls] == ["/v1/changes", "/v1/changes/confirmations"] * 2
    assert central.calls[2][1] == {"reader": "r", "after": 7, "wait": 2}
    assert central.calls[3][1] == {"reader": "r", "sequence": 9}


def test_failed_apply_confirms_nothing() -> None:
    central = Central(page(7), {}, page(9, ("key", "k1")))
    follower, memory = following(central)
    follower.read_once()
    follower.confirm_once()
    follower.apply = lambda subjects: (_ for _ in ()).throw(RuntimeError("broken"))
    with pytest.raises(RuntimeError):
        follower.read_once()
    follower.confirm_once()
    follower.confirm_once()
    assert len(central.calls) == 3
    assert len(memory.confirmed) == 1


def test_memory_is_fresh_from_when_the_read_was_sent() -> None:
    """Guarantee: time on the line makes the memory older; only the wait at the service does not."""
    central = Central(page(7), {}, page(7, waited=2.0))
    follower, memory = following(central)
    follower.read_once()
    follower.confirm_once()
    began = time.monotonic()
    follower.read_once()
    follower.confirm_once()
    assert began + 2.0 <= memory.confirmed[-1] <= time.monotonic() + 2.0
    assert follower.is_fresh


def test_change_of_an_unknown_kind_clears_the_memory() -> None:
    """Guarantee: a change that this release does not know leaves nothing cached that may depend on it."""
    central = Central(page(7), {}, page(8, ("key", "k1"), ("moon", "x")), {})
    follower, memory = following(central)
    follower.read_once()
    follower.confirm_once()
    follower.read_once()
    follower.confirm_once()
    assert memory.done == [None, None]


def test_unknown_reader_starts_again_with_an_empty_memory() -> None:
    """Guarantee: after 410 nothing in memory is used until the feed is read again."""
    central = Central(page(7), {}, CentralRefusedError(410, "cursor_expired"), page(3), {})
    follower, memory = following(central)
    follower.read_once()
    follower.confirm_once()
    follower._try_read()
    assert memory.confirmed[-1] == NEVER
    assert memory.done == [None, None]
    assert not follower.is_fresh
    follower._try_read()
    follower.confirm_once()
    assert "after" not in central.calls[3][1]
    assert central.calls[4][1] == {"reader": "r", "sequence": 3}


def test_failed_read_neither_extends_nor_withdraws_freshness() -> None:
    central = Central(page(7), {}, CentralUnavailableError("The line is down."))
    follower, memory = following(central)
    follower.read_once()
    follower.confirm_once()
    follower._try_read()
    assert len(memory.confirmed) == 1
    assert memory.done == [None]


def test_lost_confirmation_is_sent_again() -> None:
    central = Central(page(7), CentralUnavailableError("cut"), page(7), {})
    follower, _ = following(central)
    follower._try_read()
    with pytest.raises(CentralUnavailableError):
        follower.confirm_once()
    follower._try_read()
    follower.confirm_once()
    assert central.calls[-1] == ("/v1/changes/confirmations", {"reader": "r", "sequence": 7})


def test_reply_to_a_read_from_before_a_new_start_changes_nothing() -> None:
    """Guarantee: two threads read. A late reply of one never makes fresh a memory that the other has dropped."""
    follower: RemoteFollower
    central = Central(page(7), lambda: follower.start_again(), page(9, ("key", "k1")))
    follower, memory = following(central)
    follower.read_once()
    follower.read_once()
    assert memory.done == [None, None]
    assert memory.confirmed[-1] == NEVER
    assert not follower.is_fresh
    assert follower._after is None


def test_overtaken_reply_neither_moves_the_position_back_nor_shortens_freshness() -> None:
    """Guarantee: a later reply counts, and the changes of an earlier one are applied again, which is harmless."""
    follower: RemoteFollower
    central = Central(page(7), lambda: follower.read_once(), page(9, ("key", "k1")), page(8, ("key", "k1")))
    follower, memory = following(central)
    follower.read_once()
    follower.read_once()
    assert memory.done == [None, [("key", "k1")], [("key", "k1")]]
    assert follower._after == 9
    assert len(memory.confirmed) == 2


def test_read_that_the_other_thread_overtook_is_no_reason_to_start_again() -> None:
    """Guarantee: the service refuses a position below the confirmed one. The other thread had confirmed that."""
    follower: RemoteFollower
    central = Central(page(7), lambda: follower.read_once(), page(9), CentralRefusedError(410, "cursor_expired"))
    follower, memory = following(central)
    follower.read_once()
    follower._try_read()
    assert memory.done == [None]
    assert follower.is_fresh


def test_second_thread_never_registers_the_reader() -> None:
    """Guarantee: the service expects an empty memory at a registration, and the first thread may have filled it."""
    central = Central()
    follower, _ = following(central)
    follower.read_once(is_first=False)
    assert central.calls == []


def test_refused_registration_is_repeated_after_pauses() -> None:
    """The service refuses it while receipts still wait for the reader. The follower must not flood the service."""
    central = Central(page(7), {}, *[CentralRefusedError(410, "cursor_expired")] * 5, page(9))
    follower, memory = following(central)
    follower.read_once()
    follower.confirm_once()
    pauses: list[float] = []
    follower._stop = mock.Mock(wait=pauses.append)
    for _ in range(5):
        follower._try_read()
    assert pauses == [0.0, 0.05, 0.1, 0.2]
    assert memory.done == [None, None]
    follower._try_read()
    assert follower.is_fresh


def test_second_thread_ends_no_pause_of_the_first() -> None:
    """Until the reader is registered, it neither reads nor takes the failure for over."""
    central = Central(*[CentralRefusedError(410, "cursor_expired")] * 100)
    follower, _ = following(central)
    follower._try_read()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        follower._stop.set()

    follower._stop = mock.Mock(wraps=threading.Event(), wait=wait)
    follower._read_beside()
    assert waits == [0.1]
    assert follower._failures == 1
    assert len(central.calls) == 1


def test_confirmation_under_way_is_not_sent_a_second_time() -> None:
    follower: RemoteFollower
    central = Central(page(7), lambda: follower.confirm_once(), {}, page(8, ("key", "k1")), {})
    follower, _ = following(central)
    follower.read_once()
    follower.confirm_once()
    follower.read_once()
    follower.confirm_once()
    assert [body["sequence"] for path, body in central.calls if path.endswith("confirmations")] == [7, 8]

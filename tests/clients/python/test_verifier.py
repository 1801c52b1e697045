"""A verifier's connections."""

from typing import Any

import anyio
import pytest
from keyvault_client import AsyncVerifier, Question, Verifier

from .feed_service import TOKEN, key_string
from .scripted_server import ScriptedServer, scripted_server
from .test_hostile_server import ALLOWED


def ask_three_times(server: ScriptedServer) -> list[bool]:
    with Verifier(server.url, "sandbox", TOKEN, timeout=30) as verifier:
        return [verifier.verify(Question(key=key_string(1), endpoint="orders.create")).allowed for _ in range(3)]


async def ask_three_times_async(server: ScriptedServer) -> list[bool]:
    async with AsyncVerifier(server.url, "sandbox", TOKEN, timeout=30) as verifier:
        question = Question(key=key_string(1), endpoint="orders.create")
        return [(await verifier.verify(question)).allowed for _ in range(3)]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_verifier_reuses_its_connection(mode: str) -> None:
    """Guarantee: a question does not pay for a new connection while the service keeps the last one open."""
    replies: list[Any] = [ALLOWED] * 3
    with scripted_server(*replies) as server:
        answers = ask_three_times(server) if mode == "sync" else anyio.run(ask_three_times_async, server)
        assert answers == [True, True, True]
        assert (len(server.received), server.connections) == (3, 1)

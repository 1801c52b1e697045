"""The broker Redis after a loss."""

from typing import Any

import pytest
from kombu import Connection, Consumer, Message, Queue
from redis.exceptions import ConnectionError as RedisConnectionError

from keyvault.project.redis_broker import RedisTransport
from tests.servers.redis import find_redis, redis_server


@pytest.mark.skipif(find_redis() is None, reason="no Redis server on this machine")
def test_message_that_cannot_be_acknowledged_is_reserved_no_longer() -> None:
    """Guarantee: a worker that had reserved all its messages when Redis was lost consumes again."""
    received: list[Message] = []
    with redis_server() as url:
        connection = Connection(url, transport=RedisTransport)
        channel: Any = connection.channel()
        queue = Queue("work", channel=channel)
        queue.declare()
        connection.Producer(channel).publish({}, routing_key="work")
        consumer = Consumer(channel, [queue], on_message=received.append, prefetch_count=1)
        consumer.consume()
        connection.drain_events(timeout=10)
        assert not channel.qos.can_consume()
    (message,) = received
    with pytest.raises(RedisConnectionError):
        message.ack()
    assert channel.qos.can_consume()
    connection.release()

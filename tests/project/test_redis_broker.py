"""The broker Redis: after a loss, and over TLS."""

from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Consumer, Message, Queue
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from keyvault.project import redis_broker
from keyvault.project.redis_broker import RedisTransport
from tests.project.test_celery import describe_connection
from tests.servers.redis import find_redis, redis_server


@pytest.mark.parametrize("settle", ["ack", "reject"])
@pytest.mark.skipif(find_redis() is None, reason="no Redis server on this machine")
def test_message_that_cannot_be_settled_is_reserved_no_longer(settle: str) -> None:
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
        getattr(message, settle)()
    assert channel.qos.can_consume()
    connection.release()


@pytest.mark.skipif(find_redis() is None, reason="no Redis server on this machine")
def test_queue_without_a_worker_is_bounded_and_takes_messages_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: beat fills neither Redis nor the first minutes of the next worker while no worker runs."""
    monkeypatch.setattr(redis_broker, "MAX_MESSAGES", 3)
    with redis_server() as url, Connection(url, transport=RedisTransport) as connection, Redis.from_url(url) as client:
        work, other = (Queue(name, channel=connection.default_channel) for name in ("work", "other"))
        work.declare()
        other.declare()
        producer = connection.Producer()
        for number in range(5):
            producer.publish({"number": number}, routing_key="work")
        producer.publish({}, routing_key="other")
        assert (client.llen("work"), client.llen("other")) == (3, 1)
        message = work.get()
        assert message is not None
        message.ack()
        producer.publish({"number": 5}, routing_key="work")
        assert client.llen("work") == 3


@pytest.mark.skipif(find_redis() is None, reason="no Redis server on this machine")
def test_unreadable_message_is_removed_when_it_is_read() -> None:
    """Guarantee: a damaged message fails its reader once, not again and again."""
    received: list[Message] = []

    def consume(url: str) -> None:
        with Connection(url, transport=RedisTransport) as connection:
            queue = Queue("work", channel=connection.default_channel)
            Consumer(connection.default_channel, [queue], on_message=received.append, no_ack=True).consume()
            connection.drain_events(timeout=10)

    with redis_server() as url:
        with Redis.from_url(url) as client:
            client.lpush("work", b"\x00 no message")
        with Connection(url, transport=RedisTransport) as connection:
            Queue("work", channel=connection.default_channel).declare()
            connection.Producer().publish({"number": 0}, routing_key="work")
        with pytest.raises(ValueError, match="Expecting value"):
            consume(url)
        consume(url)
    assert [message.payload for message in received] == [{"number": 0}]


@pytest.mark.parametrize(("query", "required"), [("", "CERT_REQUIRED"), ("?ssl_cert_reqs=optional", "CERT_OPTIONAL")])
def test_broker_of_a_rediss_url_uses_tls(tmp_path: Path, query: str, required: str) -> None:
    """Guarantee: the password and the messages are never sent in clear text, and the certificate is verified."""
    url, what = f"rediss://:secret@127.0.0.1:6380/0{query}", "[type(c.transport).__name__, c.ssl['ssl_cert_reqs'].name]"
    assert describe_connection(tmp_path, url, what) == ["RedisTransport", required]

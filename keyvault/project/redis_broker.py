"""Redis as the broker: kombu's transport, with bounded queues, whose worker consumes again after an outage of Redis.

A worker reserves a limited number of messages. If Redis is lost while it has reserved them all, each acknowledgement
fails, and the stock transport counts the messages as reserved permanently: the worker never asks for another one.
Without remote control, it has no other connection on which it would notice the loss.

Beat sends several messages a second, also while no worker runs. Without a bound they would fill Redis, which also
counts rate limits. A dropped message loses nothing: the database rows are authoritative.
"""

from typing import Any

from kombu.transport import redis
from kombu.transport.virtual import base

MAX_MESSAGES = 1_000
"""Maximum messages in a queue. Concurrent senders may exceed it by one each."""


class _QoS(redis.QoS):
    def ack(self, delivery_tag: str) -> None:
        """Acknowledge a message. If Redis cannot be reached, raise its error and release the message's reservation."""
        try:
            super().ack(delivery_tag)
        except Exception:
            base.QoS.ack(self, delivery_tag)
            raise

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Reject a message, with the same exception as `ack`."""
        try:
            super().reject(delivery_tag, requeue)
        except Exception:
            base.QoS.ack(self, delivery_tag)
            raise


class _Channel(redis.Channel):
    QoS = _QoS

    def _put(self, queue: str, message: Any, **kwargs: Any) -> None:
        """Put a message into the queue, or drop it if the queue is full."""
        if self._size(queue) < MAX_MESSAGES:
            super()._put(queue, message, **kwargs)


class RedisTransport(redis.Transport):
    """The transport for `redis://` and `rediss://`."""

    Channel = _Channel

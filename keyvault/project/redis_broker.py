"""Redis as the broker: kombu's transport, changed so that a worker consumes again after an outage of Redis.

A worker reserves a limited number of messages. If Redis is lost while it has reserved them all, each acknowledgement
fails, and the stock transport counts the messages as reserved permanently: the worker never asks for another one.
Without remote control, it has no other connection on which it would notice the loss.
"""

from kombu.transport import redis
from kombu.transport.virtual import base


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


class RedisTransport(redis.Transport):
    """The transport for `redis://` and `rediss://`."""

    Channel = _Channel

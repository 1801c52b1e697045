"""PostgreSQL connections with short timeouts, for threads that must not block on a broken network.

The TCP timeouts of every connection (`DATABASES` in the settings) detect a server that stops acknowledging. They do not
detect a proxy that accepts data but never forwards it: a client timeout must abort that connection.
"""

import copy
import os
import socket
from contextlib import suppress
from typing import Any

import psycopg
from django.db import connections

ANSWER_SECONDS = 2.0
"""Maximum wait for one reply, in seconds."""

_LOCK_SECONDS = 0.2
"""Maximum wait for the lock of a SQLite database, in seconds; nothing else blocks there."""

_CONNECT_SECONDS = 2
"""Maximum wait for a connection, in seconds."""


def use_short_timeouts() -> None:
    """Replace the calling thread's connection with one that has short timeouts."""
    replacement = connections.create_connection("default")
    replacement.settings_dict = copy.deepcopy(replacement.settings_dict)
    options = replacement.settings_dict["OPTIONS"]
    if replacement.vendor == "postgresql":
        options["connect_timeout"] = _CONNECT_SECONDS
    else:
        options["timeout"] = _LOCK_SECONDS
    connections["default"] = replacement


def abort_connection(waiting: "psycopg.Connection[Any] | psycopg.AsyncConnection[Any] | None") -> None:
    """Shut down a connection's socket from another thread or the event loop; the waiter gets an OperationalError."""
    if waiting is None:
        return
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(waiting.fileno())) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)

"""Connections to PostgreSQL that are given up soon: a network that drops everything tells nobody.

A server that acknowledges nothing is found by TCP, within the seconds that the settings name for every connection.
Something in between that takes everything and passes on nothing (a proxy that hangs) is found by nobody but who waits:
he hangs up.
"""

import copy
import os
import socket
from contextlib import suppress
from typing import Any

import psycopg
from django.db import connections

ANSWER_SECONDS = 2.0
"""So long one answer is waited for."""

_LOCK_SECONDS = 0.2
"""On SQLite, where all that can be waited for is its one lock."""

_CONNECT_SECONDS = 2


def use_short_timeouts() -> None:
    """The calling thread's own connection is one that gives up soon, from here on."""
    impatient = connections.create_connection("default")
    impatient.settings_dict = copy.deepcopy(impatient.settings_dict)
    options = impatient.settings_dict["OPTIONS"]
    if impatient.vendor == "postgresql":
        options["connect_timeout"] = _CONNECT_SECONDS
    else:
        options["timeout"] = _LOCK_SECONDS
    connections["default"] = impatient


def abort_connection(waited_for: "psycopg.Connection[Any] | psycopg.AsyncConnection[Any] | None") -> None:
    """From another thread than the one that waits, or from the loop: that one gets an OperationalError."""
    if waited_for is None:
        return
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(waited_for.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)

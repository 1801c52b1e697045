"""An empty PostgreSQL database, the secret backend in memory, and no real waiting."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock
from urllib.parse import urlsplit

import psycopg
from django.core.management import call_command

from keyvault.services.usage import recorder
from rotation.services.rotations import interventions
from tests.environment import POSTGRES_URL
from tests.rotation.machine.backend import MemoryBackend
from tests.rotation.machine.scenes import stage


def create_database() -> None:
    """Create and migrate the database that the settings name."""
    name = urlsplit(os.environ["KEYVAULT_DATABASE_URL"]).path.removeprefix("/")
    with psycopg.connect(os.environ[POSTGRES_URL], autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    call_command("migrate", verbosity=0)


@contextmanager
def service() -> Iterator[MemoryBackend]:
    """Make the services usable in this process; yield their secret backend."""
    logging.disable(logging.CRITICAL)
    try:
        with (
            stage() as backend,
            mock.patch.object(interventions, "pause"),
            mock.patch.object(recorder, "sleep"),
        ):
            yield backend
    finally:
        logging.disable(logging.NOTSET)

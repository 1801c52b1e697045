"""What the servers stand on, made when the first of them asks: databases, data folders, keys, the peers."""

import functools
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg

from tests.servers.postgres import postgres_server
from tests.servers.throwaway import FailedServerError, MissingServerError

from . import environments
from .launch import clean_environ, run_to_end

PEER_KEYS = 2000
POSTGRES = ("shared_buffers=1GB",)
"""Of its own memory: a million keys with their indexes take 640 MB, and its default of 128 MB is made to be raised."""


class NotRunError(Exception):
    """This machine lacks something; the text says what."""


@dataclass(frozen=True, slots=True)
class House:
    """An installation of ours: the environment that its processes run in, and the strings of its keys."""

    environ: Mapping[str, str]
    data: Path
    token: str
    keys: list[str]
    revoked: str
    unknown: str
    to_revoke: list[str]


class Site:
    """One run's. `folder` is temporary; everything in it and every server ends with `stack`."""

    def __init__(self, folder: Path, stack: ExitStack, *, keys: int, listed: int, to_revoke: int = 0) -> None:
        self.folder = folder
        self._stack, self._keys, self._listed, self._to_revoke = stack, keys, listed, to_revoke

    @functools.cached_property
    def _postgres(self) -> str:
        try:
            return self._stack.enter_context(postgres_server(*POSTGRES))
        except (MissingServerError, FailedServerError) as error:
            raise NotRunError(str(error)) from None

    def new_database(self, name: str, template: str = "template1") -> str:
        """The URL of one on the throwaway PostgreSQL: empty, or a copy of another."""
        with psycopg.connect(self._postgres, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return urlunsplit(urlsplit(self._postgres)._replace(path=f"/{name}"))

    @functools.cached_property
    def on_postgres(self) -> House:
        return self._furnish("postgres", KEYVAULT_DATABASE_URL=self.new_database("keyvault"))

    @functools.cached_property
    def on_sqlite(self) -> House:
        return self._furnish("sqlite")

    @functools.cached_property
    def peers(self) -> Path:
        """The `bin` of their environment."""
        try:
            return environments.find_peers() / "bin"
        except (OSError, RuntimeError) as error:
            raise NotRunError(str(error)) from None

    @functools.cached_property
    def peers_environ(self) -> dict[str, str]:
        return clean_environ(BENCH_DATABASE=self.new_database("peers"))

    @functools.cached_property
    def peers_stock(self) -> Any:
        out = self.folder / "peers.json"
        command = [str(self.peers / "python"), "-m", "tests.bench.peers.stock", str(out), "--keys", str(PEER_KEYS)]
        run_to_end(command, "the peers cannot be stocked", self.peers_environ)
        return json.loads(out.read_text())

    def _furnish(self, name: str, **settings: str) -> House:
        data, out = self.folder / name, self.folder / f"{name}.json"
        environ = clean_environ(
            KEYVAULT_DATA_DIR=str(data), DJANGO_SETTINGS_MODULE="keyvault.project.settings", **settings
        )
        stock = [sys.executable, "-m", "tests.bench.stock", str(out)]
        stock += ["--keys", str(self._keys), "--listed", str(self._listed), "--to-revoke", str(self._to_revoke)]
        run_to_end(stock, f"{name} cannot be stocked", environ)
        return House(environ, data, **json.loads(out.read_text()))

"""Resources of the measured servers, created on first use: databases, data folders, keys, and the peers."""

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
from tests.servers.redis import redis_server
from tests.servers.throwaway import FailedServerError, MissingServerError

from . import peer_environment
from .launch import clean_environ, run_checked
from .seed_keys import OPERATOR

PEER_KEYS = 2000
POSTGRES = ("shared_buffers=1GB",)
"""Settings of PostgreSQL. A million keys with their indexes take 640 MB; the default buffer has 128 MB."""


class NotRunError(Exception):
    """This machine lacks a program; the text names it."""


@dataclass(frozen=True, slots=True)
class BenchmarkInstallation:
    """A Keyvault installation: the environment of its processes, its data folder, and its key strings."""

    environ: Mapping[str, str]
    data: Path
    token: str
    keys: list[str]
    revoked: str
    unknown: str
    to_revoke: list[str]


class Testbed:
    """The resources of one run. `folder` is temporary; leaving `stack` stops every server and deletes the data."""

    def __init__(self, folder: Path, stack: ExitStack, *, keys: int, listed: int, to_revoke: int = 0) -> None:
        self.folder = folder
        self._stack, self._keys, self._listed, self._to_revoke = stack, keys, listed, to_revoke

    @functools.cached_property
    def _postgres(self) -> str:
        try:
            return self._stack.enter_context(postgres_server(*POSTGRES))
        except (MissingServerError, FailedServerError) as error:
            raise NotRunError(str(error)) from None

    @functools.cached_property
    def redis(self) -> str:
        """The URL of a temporary Redis."""
        try:
            return self._stack.enter_context(redis_server())
        except (MissingServerError, FailedServerError) as error:
            raise NotRunError(str(error)) from None

    def new_database(self, name: str, template: str = "template1") -> str:
        """Create a database on the temporary PostgreSQL, empty or a copy of another; return its URL."""
        with psycopg.connect(self._postgres, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return urlunsplit(urlsplit(self._postgres)._replace(path=f"/{name}"))

    @functools.cached_property
    def on_postgres(self) -> BenchmarkInstallation:
        return self._install("postgres", KEYVAULT_DATABASE_URL=self.new_database("keyvault"))

    @functools.cached_property
    def on_sqlite(self) -> BenchmarkInstallation:
        return self._install("sqlite")

    @functools.cached_property
    def on_sqlite_with_two_limits(self) -> BenchmarkInstallation:
        """The embedded default, where an endpoint has a limit too. No request of the benchmarks exhausts it."""
        installation = self._install("sqlite-two-limits")
        limit = ("--environment", "production", "--endpoint", "orders.retrieve", "--rate", "1000000")
        command = [sys.executable, "manage.py", "set_limit", *limit, "--per-seconds", "1", "--by", OPERATOR]
        run_checked(command, "The endpoint's limit cannot be set", installation.environ)
        return installation

    @functools.cached_property
    def peers(self) -> Path:
        """Return the folder `bin` of the peers' virtual environment."""
        try:
            return peer_environment.ensure_peer_environment() / "bin"
        except (OSError, RuntimeError) as error:
            raise NotRunError(str(error)) from None

    @functools.cached_property
    def peers_environ(self) -> dict[str, str]:
        return clean_environ(BENCH_DATABASE=self.new_database("peers"))

    @functools.cached_property
    def peer_keys(self) -> Any:
        out = self.folder / "peers.json"
        command = [str(self.peers / "python"), "-m", "tests.bench.peers.seed_keys", str(out), "--keys", str(PEER_KEYS)]
        run_checked(command, "The peers' keys cannot be created", self.peers_environ)
        return json.loads(out.read_text())

    def _install(self, name: str, **settings: str) -> BenchmarkInstallation:
        data, out = self.folder / name, self.folder / f"{name}.json"
        environ = clean_environ(
            KEYVAULT_DATA_DIR=str(data), DJANGO_SETTINGS_MODULE="keyvault.project.settings", **settings
        )
        command = [sys.executable, "-m", "tests.bench.seed_keys", str(out)]
        command += ["--keys", str(self._keys), "--listed", str(self._listed), "--to-revoke", str(self._to_revoke)]
        run_checked(command, f"The keys on {name} cannot be created", environ)
        return BenchmarkInstallation(environ, data, **json.loads(out.read_text()))

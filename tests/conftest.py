"""Fixtures of the whole suite, and which tests run on which database.

Importing this file sets Django up in a place of its own (`environment.py`), before any other conftest or test
is imported. Markers: `database` runs on SQLite and on PostgreSQL, `postgres` only there, `redis` and
`openbao` are put on every test that asks for such a server. `sqlite` and `postgres_once` take tests out again.
"""

import gc
import json
import os
import re
import signal
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import django
import hypothesis
import pytest
from django.conf import settings
from pytest_django import DjangoDbBlocker
from redis import Redis

from . import environment, template_database
from .servers.openbao import RunningVault, VaultOnDisk, openbao_on_disk, openbao_server
from .servers.redis import redis_server
from .servers.throwaway import MissingServerError

if TYPE_CHECKING:
    from .backends.vault.installation import InstalledVault

if settings.configured:
    raise pytest.UsageError(
        "Django's settings were loaded before the tests could choose a place for them:"
        " unset DJANGO_SETTINGS_MODULE, drop --ds"
    )
PLACE = environment.lay()
django.setup()

T = TypeVar("T")

TESTS = Path(__file__).parent
PURE = ("domain/", "access/", "wire/", "rotation/domain/")
"""Folders of tests that use neither the database nor a server, as PURE in the Makefile."""

VAULTS = frozenset({"vault", "vault_on_disk"})
"""Fixtures that start a Vault: every test that uses one, directly or indirectly, is marked."""

MARKED = re.compile(r"\bmark\.(?:database|postgres)\b")
"""Marks a test that runs on PostgreSQL, which `_belongs_here` reads from the test itself."""

LONG = re.compile(r"\bmark\.long\b|(?<!key)vault")
"""In each file with a test marked `long`: the mark, or a fixture that needs a Vault."""

# Two workers share two cores, so a slow example says nothing about the code. CI repeats itself exactly.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("suite")


# --------------------------------------------------------------------------------------------- choosing tests

GARBAGE_THRESHOLDS = 20_000, 20, 20
"""Thresholds of the garbage collector while tests run; Python starts with 700, 10 and 10."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt modules and collected tests from garbage collection, because they live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*GARBAGE_THRESHOLDS)
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file without a test for PostgreSQL, or without a long one, in a run of only these.

    A file that the command line names is imported.
    """
    needed = [MARKED] * (PLACE.database == "postgres") + [LONG] * (config.getoption("-m") == "long")
    if not needed or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    return None if all(each.search(text) for each in needed) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this run's database; mark those that need a Redis or a Vault (before `-m` is read)."""
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    seen: set[str] = set()
    for item in items:
        if "redis_server_url" in getattr(item, "fixturenames", ()):
            item.add_marker("redis")
        if not VAULTS.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("openbao")
            item.add_marker("long")
        if item.get_closest_marker("long") and not LONG.search(item.path.read_text()):
            raise pytest.UsageError(
                f"{item.nodeid}: `make test-long` would not read its file; name the mark or the Vault"
            )
        (kept if _belongs_here(item) and not _is_repeated(item, seen) else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
    # The longest first: no worker is left with one of them when the others have finished.
    items.sort(key=_timeout_of, reverse=True)


def _timeout_of(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker is not None else 0


def _belongs_here(item: pytest.Item) -> bool:
    only_postgres = item.get_closest_marker("postgres") is not None
    if PLACE.database == "sqlite":
        return not only_postgres
    if item.get_closest_marker("sqlite") is not None:
        return False
    return only_postgres or item.get_closest_marker("database") is not None


def _is_repeated(item: pytest.Item, seen: set[str]) -> bool:
    """Whether a test marked `postgres_once` is in `seen` with other parameters, in a run on PostgreSQL."""
    if PLACE.database == "sqlite" or item.get_closest_marker("postgres_once") is None:
        return False
    test = item.nodeid.partition("[")[0]
    is_repeated = test in seen
    seen.add(test)
    return is_repeated


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Let each xdist worker load the settings where it chooses to, which is this file and not earlier."""
    del os.environ["DJANGO_SETTINGS_MODULE"]


def pytest_report_header() -> str:
    """Say which database this run is about."""
    return f"database: {PLACE.database}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Leave the counts where `python -m tests` adds them up."""
    counts = {kind: len(reports) for kind, reports in terminalreporter.stats.items() if kind}
    if path := os.environ.get(environment.TALLY):
        Path(path).write_text(json.dumps(counts))


# ----------------------------------------------------------------------------------------------------- timeouts


class TimedOutError(BaseException):
    """A test took longer than its timeout."""


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer() -> Generator[None, object, object]:
    """Let a timeout pass through Hypothesis.

    For Hypothesis, pytest's own exception is a failure of the current example. It repeats the example in time, and
    reports `Flaky` instead of the timeout.
    """
    result = yield
    fail = signal.getsignal(signal.SIGALRM)
    assert callable(fail)

    def time_out(number: int, frame: FrameType | None) -> None:
        try:
            fail(number, frame)
        except pytest.fail.Exception as failure:
            raise TimedOutError(failure.msg) from None

    signal.signal(signal.SIGALRM, time_out)
    return result


# -------------------------------------------------------------------------------------------------- databases


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """`KEYVAULT_DATA_DIR` of this worker, which its tests share: those that count files take `tmp_path`."""
    return PLACE.data_dir


@pytest.fixture(scope="session", autouse=True)
def one_installation() -> Iterator[None]:
    """The tests share a keystore, and so every test's database is of the same installation."""
    with mock.patch(
        "keyvault.services.peppers.installation.mint_installation_id", return_value="installation-of-the-tests"
    ):
        yield


@pytest.fixture(scope="session", autouse=True)
def generation_of_the_data_folder() -> Iterator[None]:
    """A test with a data folder of its own also has its own generation; pytest deletes the folder afterwards."""
    from django.test.signals import setting_changed

    from keyvault.services.recording.changes import generation

    def forget(setting: str, **rest: object) -> None:
        if setting == "DATA_DIR":
            generation.cache_clear()

    setting_changed.connect(forget)
    yield
    setting_changed.disconnect(forget)


@pytest.fixture(scope="session", autouse=True)
def passwords_hashed_cheaply() -> Iterator[None]:
    """Commands and pages hash passwords of tests like `make_operator`, with one iteration."""
    from .factories import cheap_password_hashes

    with cheap_password_hashes():
        yield


@pytest.fixture(scope="session")
def django_db_modify_db_settings() -> None:
    """Test in the database that `KEYVAULT_DATABASE_URL` names.

    Without this, SQLite's would be in memory, where neither another thread nor another process finds it, and
    PostgreSQL's would have a name that only this process knows.
    """
    from django.db import connections

    database = connections["default"].settings_dict
    if PLACE.database == "sqlite":
        # Tests outlive no power cut. The processes that they start keep the setting of production.
        options = database["OPTIONS"]
        options["init_command"] = options["init_command"].replace("synchronous=FULL", "synchronous=OFF")
    test = database["TEST"]
    test["NAME"] = PLACE.database_name
    if PLACE.database == "sqlite":
        template_database.copy_sqlite_template(Path(PLACE.database_name))
    elif not PLACE.is_controller:
        test["TEMPLATE"] = template_database.name_of_postgres_template(PLACE)


@pytest.fixture(scope="session")
def django_db_keepdb() -> bool:
    """Whether the database exists already: on SQLite it is a copy of a migrated file."""
    return PLACE.database == "sqlite"


@pytest.fixture(scope="session", autouse=True)
def static_files_found_once() -> Iterator[None]:
    """Each test client makes the middleware anew; the search for static files is the same each time."""
    from whitenoise.middleware import WhiteNoiseMiddleware

    search = WhiteNoiseMiddleware.add_files_from_finders
    found: dict[str, Any] = {}

    def remember(middleware: WhiteNoiseMiddleware) -> None:
        if not found:
            search(middleware)
            found.update(middleware.files)
        middleware.files.update(found)

    with mock.patch.object(WhiteNoiseMiddleware, "add_files_from_finders", remember):
        yield


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """The test database, which every transactional test leaves as `migrate` made it.

    The reset replaces Django's flush itself: the order of fixtures depends on how a test requests its database.

    The module of the routes reads the environments once. It is imported first, because a test may override them.
    """
    import_module(settings.ROOT_URLCONF)
    from django.db import connections
    from django.test import TransactionTestCase

    from .database_reset import MigratedDatabase

    with django_db_blocker.unblock():
        migrated = MigratedDatabase(connections["default"])

    def restore(case: Any) -> None:
        migrated.restore(connections["default"])

    with pytest.MonkeyPatch.context() as patch:
        # A private name: should Django rename it, every transactional test fails.
        patch.setattr(TransactionTestCase, "_fixture_teardown", restore)
        yield


# ------------------------------------------------------------------------------------------------------ Redis


@pytest.fixture(scope="session")
def redis_server_url() -> Iterator[str]:
    """This worker's own Redis, never emptied: for fixtures that outlive a test, such as a Celery worker."""
    with ExitStack() as stack:
        yield _entered(stack, redis_server(), "redis")


@pytest.fixture
def redis_url(redis_server_url: str) -> str:
    """An empty Redis."""
    with Redis.from_url(redis_server_url) as client:
        client.flushall()
    return redis_server_url


def _entered(stack: ExitStack, server: AbstractContextManager[T], name: str) -> T:
    """The running server. The test is skipped without one, or fails where KEYVAULT_REQUIRE names it."""
    try:
        return stack.enter_context(server)
    except MissingServerError as missing:
        reason = missing.reason
    if name in environment.required_servers():
        pytest.fail(f"{environment.REQUIRE} names {name}, but there is {reason}", pytrace=False)
    pytest.skip(reason)


# ------------------------------------------------------------------------------------------------------ Vault


@pytest.fixture(scope="session")
def vault() -> Iterator[RunningVault]:
    """This worker's own OpenBao or Vault in dev mode, or the one that KEYVAULT_TEST_VAULT_ADDR names."""
    with ExitStack() as stack:
        yield _entered(stack, openbao_server(), "openbao")


@pytest.fixture
def vault_on_disk() -> Iterator[VaultOnDisk]:
    """The test's own, which it may seal, kill and start again."""
    with ExitStack() as stack:
        yield _entered(stack, openbao_on_disk(), "openbao")


@pytest.fixture
def installed_vault(vault: RunningVault, tmp_path: Path) -> "Iterator[InstalledVault]":
    """All mounts, policies, roles and logins of ours on the dev server, under a prefix of the test's own."""
    from .backends.vault.installation import installed

    folder = tmp_path / "vault-logins"
    folder.mkdir(mode=0o700)
    with installed(vault, folder) as made:
        yield made


@pytest.fixture
def vault_service(installed_vault: "InstalledVault", db: None) -> "Iterator[InstalledVault]":
    """The service of this process on that Vault, with the peppers of the test's database in it."""
    from .backends.vault.installation import serving_from

    with serving_from(installed_vault):
        yield installed_vault


# -------------------------------------------------------------------------------------- state of this process


@pytest.fixture(autouse=True)
def fresh_process(request: pytest.FixtureRequest, data_dir: Path) -> Iterator[None]:
    """Forget what an earlier test left in this process. The tests of pure packages reach none of it.

    A test that leaves this process reporting usage fails: the thread would report beside the reporters of later tests.
    """
    if request.path.relative_to(TESTS).as_posix().startswith(PURE):
        yield
        return
    from keyvault.services.usage.recorder import usage_log

    from .process_state import forget_process_state

    forget_process_state(data_dir)
    yield
    assert usage_log._thread is None, "replace `usage_log` and `UsageLog.start`, as tests/api/conftest.py does"

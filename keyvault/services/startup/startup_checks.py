"""Check what a process needs before it serves. A process that could give wrong verdicts does not start."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TypeVar

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import InterfaceError, OperationalError, ProgrammingError, connection
from django.db.migrations.loader import MigrationLoader

from keyvault.backends.base import BackendError
from keyvault.domain.errors import IntegrityError, KeyvaultError
from keyvault.domain.releases import RELEASE, parse_release
from keyvault.models.triggers import missing_triggers
from keyvault.services.peppers.installation import find_oldest_compatible_release, installation_id
from keyvault.services.peppers.ring import list_served_sets, load_peppers
from keyvault.services.revocations.log_opening import (
    format_foreign_log,
    open_revocation_log,
    recover_revocation_log,
)
from keyvault.services.revocations.replay import Comparison, compare_revocation_log
from keyvault.services.startup.metrics import allocate_meter_files
from keyvault.services.work.disk_space import keep_reserve, make_room
from keyvault.wire.planes import Plane

_log = logging.getLogger(__name__)

T = TypeVar("T")


def start_or_exit(who: str, *, needs_peppers: bool = True, plane: Plane | None = None) -> None:
    """Run `require_ready` at process start. Exit with one line that gives the reason.

    `plane`: the only plane of this kind of process.
    """
    try:
        if plane is not None:
            require_plane(plane)
        require_ready(needs_peppers=needs_peppers)
    except ImproperlyConfigured as error:
        sys.exit(f"the {who} does not start: {error}")


def require_plane(plane: Plane) -> None:
    """Raise ImproperlyConfigured if KEYVAULT_PLANES lacks the plane."""
    if plane not in settings.PLANES:
        raise ImproperlyConfigured(
            f"it serves the {plane} plane only, and KEYVAULT_PLANES is {','.join(settings.PLANES)}; "
            f"add {plane}, or do not start it here"
        )


def require_ready(*, needs_peppers: bool = True) -> None:
    """Check the schema, load every served pepper, and check the triggers and the revocation log.

    A set that the backend cannot supply now is loaded later (/readyz triggers it). Requests that need it get a 503
    until then, and the other environment is unaffected. The process does not start if the database is behind the
    revocation log or has another release's schema, or if the log is lost. A process that judges no keys needs no
    peppers.

    Raises ImproperlyConfigured with what is wrong, with which pepper, and what to do.
    """
    # The first process that opens SQLite's database creates two files beside it, even to read.
    make_room()
    with _explain_database_errors():
        require_schema()
        if needs_peppers:
            _load_peppers()
        require_triggers()
        require_current()
        # Before the reserve takes the free space: a meter file that has none kills the process.
        allocate_meter_files()
        keep_reserve()


@contextmanager
def _explain_database_errors() -> Iterator[None]:
    try:
        yield
    except (OperationalError, ProgrammingError, InterfaceError) as error:
        why = str(error).partition("\n")[0]
        is_new = isinstance(error, ProgrammingError) or "no such table" in why
        hint = "; run: manage.py setup" if is_new else ""
        raise ImproperlyConfigured(f"the database cannot be used: {why}{hint}") from error
    finally:
        connection.close()


def require_schema() -> None:
    """Raise ImproperlyConfigured unless this release can run on the database's schema.

    One query checks that Django's migration table exists, and one reads it.
    """
    loader = MigrationLoader(connection)
    applied = set(loader.applied_migrations)
    if not applied:
        raise ImproperlyConfigured("the database is not set up; run: manage.py setup")
    # The loader resolves squashed migrations as `migrate` does.
    missing = sorted(set(loader.graph.nodes) - applied)
    if missing:
        count = "1 migration" if len(missing) == 1 else f"{len(missing)} migrations"
        raise ImproperlyConfigured(
            f"the database is behind this release: it lacks {count}, such as {'.'.join(missing[0])}; "
            "run: manage.py setup"
        )
    require_compatible_release(loader)


def require_compatible_release(loader: MigrationLoader) -> None:
    """Raise ImproperlyConfigured if a newer release has migrated the database to a schema that this one cannot use.

    A migration of an app that this release lacks counts, too: a newer release may have added the app.
    """
    # Migrations squashed long ago are unknown too, but older than the newest one.
    newest: dict[str, str] = {}
    for app, name in loader.graph.nodes:
        newest[app] = max(name, newest.get(app, ""))
    unknown = sorted((app, name) for app, name in loader.applied_migrations if name > newest.get(app, ""))
    if not unknown:
        return
    ahead = f"the database is ahead of this release ({RELEASE}): it has {'.'.join(unknown[0])}"
    oldest = find_oldest_compatible_release()
    if not _is_compatible(oldest):
        needed = oldest or "that the database was set up with"
        raise ImproperlyConfigured(f"{ahead}; start release {needed} or a later one")
    _log.warning("%s; it may run beside the newer release until the upgrade is complete", ahead)


def _is_compatible(oldest: str | None) -> bool:
    try:
        return oldest is not None and parse_release(RELEASE) >= parse_release(oldest)
    except ValueError:
        return False


def _load_peppers() -> None:
    for pepper_set in list_served_sets():
        try:
            load_peppers(pepper_set)
        except BackendError as error:
            why = error.internal or error.detail
            _log.error(
                "not ready: peppers cannot be read yet; run: manage.py check_vault; with a wrapped master key: "
                "--host keystore",
                extra={"set": pepper_set, "why": why},
            )
        except KeyvaultError as error:
            raise ImproperlyConfigured(f"{error.detail} ({error.internal}); run: manage.py show_peppers") from error


def require_triggers() -> None:
    """Raise ImproperlyConfigured unless every trigger is installed and enabled."""
    missing = missing_triggers(connection)
    if missing:
        raise ImproperlyConfigured(
            f"the database lacks {len(missing)} of its triggers, such as {min(missing)}; run: manage.py setup"
        )


def require_current() -> None:
    """Refuse a database restored from a backup, or failed over to a lagging replica: revoked keys would be valid again.

    Adds to the log what only the revocation anchor has, or rebuilds a lost log from it. Creates the log of an
    installation that has issued nothing. Raises ImproperlyConfigured, also if the log is lost.
    """
    path = settings.REVOCATION_LOG
    found = _compare()
    _require_own(found)
    recovery = _append(recover_revocation_log)
    if not _append(open_revocation_log):
        raise ImproperlyConfigured(format_log_loss(recovery.unread))
    if recovery.is_changed:
        found = _compare()
    if found.lost:
        raise ImproperlyConfigured(
            f"the database is behind the revocation log {path}: {len(found.lost)} revoked items are valid again, "
            f"such as {' '.join(min(found.lost))}; run: manage.py replay_revocations"
        )
    if found.counter < found.highest:
        raise ImproperlyConfigured(
            f"the database is behind the revocation log {path}: its newest change is {found.counter}, the "
            f"log's is {found.highest}; run: manage.py replay_revocations"
        )


def _compare() -> Comparison:
    """Compare the revocation log with the database. Raises ImproperlyConfigured if the log is unreadable or damaged."""
    path = settings.REVOCATION_LOG
    try:
        found = compare_revocation_log()
    except OSError as error:
        raise ImproperlyConfigured(f"the revocation log {path} cannot be read: {error.strerror}") from error
    if found.damaged:
        raise ImproperlyConfigured(f"the revocation log {path} is damaged: {format_log_damage(found.damaged)}")
    return found


def _require_own(found: Comparison) -> None:
    """Raise ImproperlyConfigured if the revocation log is not known to belong to this installation."""
    ours = _append(lambda _: installation_id())
    if found.lines and not found.installations:
        raise ImproperlyConfigured(
            f"the revocation log {settings.REVOCATION_LOG} does not name its installation: restore it from its own "
            "backup, or copy the log of another host"
        )
    if theirs := sorted(found.installations - {ours}):
        raise ImproperlyConfigured(format_foreign_log(theirs[0]))


def _append(write: Callable[[datetime], T]) -> T:
    """Call `write` with the current time. Raises ImproperlyConfigured."""
    try:
        return write(datetime.now(UTC))
    except OSError as error:
        raise ImproperlyConfigured(
            f"the revocation log {settings.REVOCATION_LOG} cannot be written: {error.strerror}"
        ) from error
    except IntegrityError as error:
        raise ImproperlyConfigured("the service was not set up; run: manage.py setup") from error


def format_log_loss(unread: str | None) -> str:
    """Explain why nothing starts without the revocation log, and what to do.

    `unread`: why the revocation anchor cannot be read; None: there is none.
    """
    anchor = "there is no revocation anchor" if unread is None else f"the revocation anchor cannot be read ({unread})"
    return (
        f"the revocation log {settings.REVOCATION_LOG} is missing or empty, {anchor}, and this database has issued "
        "keys or tokens: those revoked since a backup was made could be valid again. Restore the log from its own "
        "backup, or on a new host copy another host's, and run: manage.py replay_revocations; with a file of "
        "export_revocations, run: manage.py replay_revocations --from FILE; if all are lost, run: manage.py "
        "replay_revocations --accept-loss --by NAME --approved-by NAME --reason WHY"
    )


def format_log_damage(lines: Sequence[int]) -> str:
    """Explain which lines are damaged, and the manual repair."""
    numbers = ", ".join(map(str, lines[:5])) + (" and others" if len(lines) > 5 else "")
    fault = f"line {numbers} fails its checksum" if len(lines) == 1 else f"lines {numbers} fail their checksums"
    return (
        f"{fault}. Run: manage.py replay_revocations, which applies the intact "
        "lines. Then check manually what the damaged lines named, keep a copy of the file, and remove those lines"
    )

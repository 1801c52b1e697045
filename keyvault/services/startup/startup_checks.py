"""What a process makes sure of before it serves: rather not start than run wrong."""

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
from keyvault.models.triggers import missing_triggers
from keyvault.services.peppers.installation import installation_id
from keyvault.services.peppers.ring import list_served_sets, load_peppers
from keyvault.services.revocations.log_opening import adopt_journal, open_journal
from keyvault.services.revocations.replay import compare_journal

_log = logging.getLogger(__name__)

T = TypeVar("T")


def start_or_exit(who: str, *, needs_peppers: bool = True) -> None:
    """As `require_ready`, for the beginning of a process: it ends with one line that says why."""
    try:
        require_ready(needs_peppers=needs_peppers)
    except ImproperlyConfigured as error:
        sys.exit(f"the {who} does not start: {error}")


def require_ready(*, needs_peppers: bool = True) -> None:
    """Opens the secret backend, loads and checks every pepper of what it serves, and looks for the database's rules.

    A set that the backend does not give now is loaded when it does (/readyz asks); until then whatever needs it is
    answered 503, and the other environment goes on. A database that is behind the journal of revocations serves
    nobody, nor does one without its journal, nor one with the schema of another release. A process that judges nothing
    needs no peppers.

    Raises ImproperlyConfigured, saying in words what is wrong, with which pepper, and what to do.
    """
    with _database_in_words():
        require_schema()
        if needs_peppers:
            _load_peppers()
        require_rules()
        require_current()


@contextmanager
def _database_in_words() -> Iterator[None]:
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
    """Raises ImproperlyConfigured unless the database's migrations are those of this release. One query of Django's
    own table of migrations, after one that looks for the table."""
    loader = MigrationLoader(connection)
    applied = set(loader.applied_migrations)
    if not applied:
        raise ImproperlyConfigured("the database is not set up; run: manage.py setup")
    # With the squashed ones resolved, as `migrate` would apply them.
    missing = sorted(set(loader.graph.nodes) - applied)
    if missing:
        many = "1 migration" if len(missing) == 1 else f"{len(missing)} migrations"
        raise ImproperlyConfigured(
            f"the database is behind this release: it lacks {many}, such as {'.'.join(missing[0])}; "
            "run: manage.py setup"
        )
    # Whatever was squashed long ago is unknown too, but older than the newest one.
    newest: dict[str, str] = {}
    for app, name in loader.graph.nodes:
        newest[app] = max(name, newest.get(app, ""))
    unknown = sorted((app, name) for app, name in applied if app in newest and name > newest[app])
    if unknown:
        raise ImproperlyConfigured(
            f"the database is ahead of this release: it has {'.'.join(unknown[0])}, which this release does not know; "
            "start the release that the database was set up with, or a later one"
        )


def _load_peppers() -> None:
    for pepper_set in list_served_sets():
        try:
            load_peppers(pepper_set)
        except BackendError as error:
            why = error.internal or error.detail
            _log.error("not ready: peppers cannot be read yet; see vault_doctor", extra={"set": pepper_set, "why": why})
        except KeyvaultError as error:
            raise ImproperlyConfigured(f"{error.detail} ({error.internal}); run: manage.py pepper_status") from error


def require_rules() -> None:
    """Raises ImproperlyConfigured unless every trigger of ours is in force."""
    missing = missing_triggers(connection)
    if missing:
        raise ImproperlyConfigured(
            f"the database lacks {len(missing)} of its rules, such as {min(missing)}; run: manage.py setup"
        )


def require_current() -> None:
    """Refuses a database that a backup has put back, or that a replica was behind with: keys revoked since would be
    good again. Makes the journal of an installation that has issued nothing; refuses to start without one that is
    lost. Raises ImproperlyConfigured.
    """
    path = settings.JOURNAL
    try:
        found = compare_journal()
    except OSError as error:
        raise ImproperlyConfigured(f"the revocation journal {path} cannot be read: {error.strerror}") from error
    if found.damaged:
        raise ImproperlyConfigured(f"the revocation journal {path} is damaged: {words_of_damage(found.damaged)}")
    _require_own(found.installations)
    if found.lost:
        raise ImproperlyConfigured(
            f"the database is behind the revocation journal {path}: {len(found.lost)} that were revoked live again, "
            f"such as {' '.join(min(found.lost))}; run: manage.py replay_revocations"
        )
    if found.counter < found.highest:
        raise ImproperlyConfigured(
            f"the database is behind the revocation journal {path}: it ends at change {found.counter}, the journal "
            f"knows of {found.highest}; run: manage.py replay_revocations"
        )
    if found.lines and not found.installations:
        _append(adopt_journal)


def _require_own(installations: set[str]) -> None:
    """Raises ImproperlyConfigured where the journal is lost, or another installation's."""
    if not _append(open_journal):
        raise ImproperlyConfigured(words_of_loss())
    ours = installation_id()
    if theirs := sorted(installations - {ours}):
        raise ImproperlyConfigured(
            f"the revocation journal {settings.JOURNAL} belongs to installation {theirs[0]}, this database to {ours}: "
            "set KEYVAULT_JOURNAL (or KEYVAULT_DATA_DIR) to this installation's own"
        )


def _append(write: Callable[[datetime], T]) -> T:
    """Calls it with the time. Raises ImproperlyConfigured."""
    try:
        return write(datetime.now(UTC))
    except OSError as error:
        raise ImproperlyConfigured(
            f"the revocation journal {settings.JOURNAL} cannot be written: {error.strerror}"
        ) from error
    except IntegrityError as error:
        raise ImproperlyConfigured("the service was not set up; run: manage.py setup") from error


def words_of_loss() -> str:
    """Why nothing starts without the journal, and what to do."""
    return (
        f"the revocation journal {settings.JOURNAL} is missing or empty, and this database has issued keys or tokens: "
        "those revoked since a backup was made could be good again. Put the journal back from its own backup, or on a "
        "new host copy another host's, and run: manage.py replay_revocations; when it is lost for good, run: "
        "manage.py replay_revocations --accept-loss --by NAME --reason WHY"
    )


def words_of_damage(lines: Sequence[int]) -> str:
    """What is wrong, and what somebody has to do about it by hand."""
    told = ", ".join(map(str, lines[:5])) + (" and others" if len(lines) > 5 else "")
    return (
        f"line {told} is not as it was written. Run: manage.py replay_revocations, which ends what the other lines "
        "tell of. Then see by hand to what the damaged ones named, keep a copy of the file, and take them out"
    )

"""The id of this installation, the releases that may run on its database, and whose data the secret backend holds."""

import secrets
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime

from django.db import IntegrityError as DatabaseIntegrityError

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.domain.errors import IntegrityError, StateConflictError
from keyvault.domain.releases import OLDEST_COMPATIBLE_RELEASE, RELEASE, parse_release
from keyvault.models import Installation
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.transaction import recorded

LABEL = "installation"
"""Label of a pepper that holds the installation id."""


def mint_installation_id() -> str:
    return secrets.token_hex(16)


def ensure_installation(now: datetime) -> None:
    """Give this database a permanent installation id at the first run. Safe for concurrent first runs."""
    if Installation.objects.exists():
        return
    grant = authorize(HOST, Permission.OPERATORS_WRITE, now=now)
    new_id = mint_installation_id()
    with (
        suppress(DatabaseIntegrityError),  # A concurrent first run was faster.
        recorded(grant, Permission.OPERATORS_WRITE, "installation.created", installation_id=new_id),
    ):
        Installation(installation_id=new_id, oldest_compatible_release=OLDEST_COMPATIBLE_RELEASE, created_at=now).save()


def record_compatibility(now: datetime) -> None:
    """Record which releases may run on the schema that this release has just migrated to.

    The recorded release never goes back: an older release may run this, too. Does nothing before the first setup.
    """
    row: Installation | None = Installation.objects.first()
    if row is None or parse_release(row.oldest_compatible_release) >= parse_release(OLDEST_COMPATIBLE_RELEASE):
        return
    grant = authorize(HOST, Permission.OPERATORS_WRITE, now=now)
    with (
        suppress(StateConflictError),  # A concurrent setup was faster.
        recorded(
            grant,
            Permission.OPERATORS_WRITE,
            "installation.upgraded",
            release=RELEASE,
            oldest_compatible_release=OLDEST_COMPATIBLE_RELEASE,
        ),
    ):
        row.compare_and_swap(oldest_compatible_release=OLDEST_COMPATIBLE_RELEASE)


def find_oldest_compatible_release() -> str | None:
    """Return the oldest release that may run on this database; None before the first setup.

    Reads one column, since the schema may be that of a newer release.
    """
    return Installation.objects.values_list("oldest_compatible_release", flat=True).first()


def installation_id() -> str:
    """Return the installation id. Raises IntegrityError before `manage.py setup` has run."""
    row: Installation | None = Installation.objects.first()
    if row is None:
        raise IntegrityError("The service was not set up.", internal="no installation id; run manage.py setup")
    return row.installation_id


def require_ours(labels: Mapping[str, str], what: str) -> None:
    """Require labels of this installation. Raises IntegrityError with the owner and what to do.

    `what`: the labeled object, for the error.
    """
    ours, theirs = installation_id(), labels.get(LABEL)
    if theirs != ours:
        whose = f"to installation {theirs}" if theirs else "to an unknown installation"
        raise IntegrityError(
            "The data in the secret backend belongs to another installation.",
            internal=f"{what} belongs {whose}, this database to {ours}: set a KEYVAULT_VAULT_PREFIX (or"
            " KEYVAULT_DATA_DIR) of this installation's own, or restore the database that belongs to it",
        )

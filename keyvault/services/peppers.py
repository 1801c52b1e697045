"""The peppers: made once, kept in the secret backend, loaded into memory, checked against the database."""

import base64
import secrets
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache

from django.conf import settings
from django.db import IntegrityError as DatabaseIntegrityError

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.backends.base import BackendConflictError, BackendMissingError, Mount
from keyvault.domain.digests import PEPPER_BYTES, PEPPER_SET, Peppers, PepperSet
from keyvault.domain.errors import IntegrityError, NotFoundError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import PepperVersion
from keyvault.services.authorization import authorize
from keyvault.services.recording import recorded
from keyvault.services.secret_backends import secret_backend


def list_served_sets() -> list[PepperSet]:
    """Those of the environments that this process serves (KEYVAULT_ENVIRONMENTS), and that of the service tokens."""
    others = {peppers for environment, peppers in PEPPER_SET.items() if environment not in settings.ENVIRONMENTS}
    return [pepper_set for pepper_set in PepperSet if pepper_set not in others]


@cache
def load_peppers(pepper_set: PepperSet) -> Peppers:
    """The set's peppers, kept for the life of the process: verification never asks the backend.

    Raises IntegrityError when a version is missing or is not the one that the digests were made with, and
    NotFoundError, before anything is read, when this process does not serve the set's environment.
    """
    if pepper_set not in list_served_sets():
        raise NotFoundError(f"This process does not serve {pepper_set}.")
    rows = list(PepperVersion.objects.filter(pepper_set=pepper_set))
    if not rows:
        raise IntegrityError("The service was not set up.", internal=f"no {pepper_set} pepper; run manage.py setup")
    peppers = Peppers(pepper_set, {row.number: _read(pepper_set, row.number) for row in rows})
    for row in rows:
        if peppers.check_value(row.number) != bytes(row.check_value):
            raise IntegrityError(
                "A pepper is not the one that the keys were hashed with.",
                internal=f"{pepper_set} pepper {row.number} fails its check: wrong or swapped keystore",
            )
    return peppers


def ensure_peppers(now: datetime) -> None:
    """Makes version 1 of each served set at the first run; repeatable, and safe when two first runs meet."""
    for pepper_set in list_served_sets():
        if not PepperVersion.objects.filter(pepper_set=pepper_set).exists():
            _make_first(pepper_set, now)
        load_peppers(pepper_set)


def _make_first(pepper_set: PepperSet, now: datetime) -> None:
    made = Plaintext(base64.b64encode(secrets.token_bytes(PEPPER_BYTES)).decode())
    labels = {"pepper_set": pepper_set.value, "number": "1"}
    # A conflict: made by a run that died before its row was written, or by one that goes on beside us.
    with suppress(BackendConflictError):
        secret_backend().put(Mount.PEPPERS, pepper_set, made, labels, expected_version=0)
    pepper = _read(pepper_set, 1)
    check_value = Peppers(pepper_set, {1: pepper}).check_value(1)
    grant = authorize(HOST, Permission.OPERATORS_WRITE, now=now)
    with (
        suppress(DatabaseIntegrityError),  # The one beside us was first: its row says the same.
        recorded(grant, Permission.OPERATORS_WRITE, "pepper.created", pepper_set=pepper_set),
    ):
        PepperVersion(pepper_set=pepper_set, number=1, check_value=check_value, created_at=now).save()


def _read(pepper_set: PepperSet, number: int) -> bytes:
    try:
        stored = secret_backend().read(Mount.PEPPERS, pepper_set, number)
    except BackendMissingError as error:
        raise IntegrityError(
            "A pepper is missing from the secret backend.",
            internal=f"{pepper_set} pepper {number} is gone: restore the keystore that belongs to this database",
        ) from error
    return base64.b64decode(stored.secret.reveal())


def pepper_health() -> Mapping[PepperSet, bool]:
    """Which of the served sets are loaded; loads those that are not yet. Never raises."""
    health = {}
    for pepper_set in list_served_sets():
        try:
            load_peppers(pepper_set)
        except Exception:  # noqa: BLE001  whatever the fault, the answer is "not ready"
            health[pepper_set] = False
        else:
            health[pepper_set] = True
    return health

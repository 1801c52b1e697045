"""What a process makes sure of before it serves: rather not start than run wrong."""

import logging

from django.core.exceptions import ImproperlyConfigured
from django.db import connection

from keyvault.backends.base import BackendError
from keyvault.domain.errors import KeyvaultError
from keyvault.models.triggers import missing_triggers
from keyvault.services.peppers import list_served_sets, load_peppers

_log = logging.getLogger(__name__)


def require_ready() -> None:
    """Opens the secret backend, loads and checks every pepper of what it serves, and looks for the database's rules.

    A set that the backend does not give now is loaded when it does (/readyz asks); until then whatever needs it is
    answered 503, and the other environment goes on. Raises ImproperlyConfigured for what no waiting mends, saying in
    words what is wrong with which pepper and what to do.
    """
    for pepper_set in list_served_sets():
        try:
            load_peppers(pepper_set)
        except BackendError as error:
            why = error.internal or error.detail
            _log.error("not ready: peppers cannot be read yet; see vault_doctor", extra={"set": pepper_set, "why": why})
        except KeyvaultError as error:
            raise ImproperlyConfigured(f"{error.detail} ({error.internal}); run: manage.py pepper_status") from error
    missing = missing_triggers(connection)
    connection.close()
    if missing:
        raise ImproperlyConfigured(
            f"the database lacks {len(missing)} of its rules, such as {min(missing)}; run: manage.py setup"
        )

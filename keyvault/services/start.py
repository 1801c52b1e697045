"""What a process makes sure of before it serves: rather not start than run wrong."""

from django.core.exceptions import ImproperlyConfigured
from django.db import connection

from keyvault.domain.errors import KeyvaultError
from keyvault.models.triggers import missing_triggers
from keyvault.services.peppers import list_served_sets, load_peppers


def require_ready() -> None:
    """Opens the keystore, loads and checks every pepper of what it serves, and looks for the database's rules.

    Raises ImproperlyConfigured, saying in words what is wrong and what to do.
    """
    try:
        for pepper_set in list_served_sets():
            load_peppers(pepper_set)
    except KeyvaultError as error:
        raise ImproperlyConfigured(f"{error.detail} ({error.internal})") from error
    missing = missing_triggers(connection)
    connection.close()
    if missing:
        raise ImproperlyConfigured(
            f"the database lacks {len(missing)} of its rules, such as {min(missing)}; run: manage.py setup"
        )

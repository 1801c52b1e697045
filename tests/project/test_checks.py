"""Django's checks, which the commands and workers skip."""

from io import StringIO

import pytest
from django.core.management import call_command


@pytest.mark.django_db
def test_checks_of_django_find_nothing() -> None:
    """Guarantee: no page of the console, model, setting or route is faulty in a way that Django notices."""
    call_command("check", "--database", "default", fail_level="WARNING", stdout=StringIO())

"""Run the missing setup, then create demo merchants and operators; repeatable.

A demo database is one whose first operators are the demo's. Each of them has a person that no other command creates,
and an operator keeps its person.
"""

import os
from collections.abc import Mapping
from io import StringIO
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.db.models import QuerySet

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.access.scopes import EVERYWHERE
from keyvault.domain.errors import StateConflictError
from keyvault.management.json_command import JsonCommand
from keyvault.management.service import find_running_origin
from keyvault.models import Merchant, Operator
from keyvault.services.catalog.base_urls import BASE_URLS
from keyvault.services.merchants.merchants import create_merchant
from keyvault.services.operators.operators import create_operator
from keyvault.services.recording.authorization import authorize

MERCHANTS = {"acme": "Acme Stores", "globex": "Globex Travel"}
OPERATORS = {
    "tam": Role.TECHNICAL_ACCOUNT_MANAGER,
    "approver": Role.APPROVER,
    "admin": Role.KEY_ADMINISTRATOR,
    "auditor": Role.AUDITOR,
    "responder": Role.INCIDENT_RESPONDER,
}

_PERSON = "demo_"
"""Prefix of the persons of the demo's operators."""


def list_demo_operators() -> QuerySet[Operator]:
    """Return the operators that the demo made, by name."""
    rows: QuerySet[Operator] = Operator.objects.filter(person__in=[_PERSON + name for name in OPERATORS])
    return rows.filter(username__in=OPERATORS).order_by("username")


class Command(JsonCommand):
    help = "Create missing demo merchants and operators. `manage.py run` makes their sign-ins ready."

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        call_command("setup", stdout=StringIO())
        if Operator.objects.exists() and not list_demo_operators().exists():
            raise StateConflictError(
                "The database has operators that the demo did not make, so the demo does not use it. Name an empty one "
                "with KEYVAULT_DATABASE_URL, or an empty folder with KEYVAULT_DATA_DIR."
            )
        for merchant_id, name in MERCHANTS.items():
            if not Merchant.objects.filter(merchant_id=merchant_id).exists():
                grant = authorize(HOST, Permission.MERCHANTS_WRITE, now=self.now)
                create_merchant(grant, merchant_id=merchant_id, name=name)
        for username, role in OPERATORS.items():
            if not Operator.objects.filter(username=username).exists():
                create_operator(
                    authorize(HOST, Permission.OPERATORS_ENROLL, now=self.now),
                    username=username,
                    roles=[role],
                    scope=EVERYWHERE,
                    password=None,
                    person=_PERSON + username,
                )
        return {
            "merchants": [
                {"merchant_id": merchant.merchant_id, "name": merchant.name}
                for merchant in Merchant.objects.order_by("merchant_id")
            ],
            "operators": [
                {"username": operator.username, "roles": sorted(operator.roles)} for operator in list_demo_operators()
            ],
            "environments": [
                {"name": name.value, "base_url": url.replace(settings.ORIGIN, _origin(), 1)}
                for name, url in BASE_URLS.items()
                if name in settings.ENVIRONMENTS
            ],
        }


def _origin() -> str:
    """Return the origin of the server. Only `manage.py run` knows its port."""
    running = None if os.environ.get("KEYVAULT_ORIGIN") else find_running_origin()
    origin: str = running or settings.ORIGIN
    return origin

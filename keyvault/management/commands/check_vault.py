"""Diagnose this host's connection to its Vault, and print what to do about each problem."""

import sys
from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.db import OperationalError, ProgrammingError

from keyvault.backends.vault.bootstrap import list_logins, list_scopes
from keyvault.backends.vault.capabilities import ROLES_OF_HOST
from keyvault.backends.vault.diagnosis import Diagnosis
from keyvault.backends.vault.remediation import Finding
from keyvault.management.json_command import JsonCommand
from keyvault.models import PepperVersion
from keyvault.services.peppers.ring import list_served_sets
from keyvault.services.secrets.backend import (
    choose_login,
    read_master_key_text,
    unwrap_master_key,
    vault_layout,
    vault_server,
)


class Command(JsonCommand):
    help = (
        "Check the Vault with the logins of this host, like the service, and print each problem with its remedy; "
        "exit 1 when there is a problem."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--host",
            choices=sorted(ROLES_OF_HOST),
            default="all",
            help="kind of this host, which determines its logins",
        )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if not settings.VAULT_ADDRESS:
            raise CommandError("VAULT_ADDR is not set. Set it to the address of the Vault.", returncode=2)
        roles = ROLES_OF_HOST[options["host"]]
        needed = [each for each in list_logins(list_scopes(settings.ENVIRONMENTS)) if each[0] in roles]
        diagnosis = Diagnosis(
            server=vault_server(),
            layout=vault_layout(),
            login=choose_login,
            folder=None if settings.VAULT_AUTH == "kubernetes" else settings.VAULT_CREDENTIALS_DIR,
            needed=needed,
            check_values={},
            now=self.now,
        )
        if settings.IS_VAULT:
            try:
                diagnosis.check_values = _find_check_values()
            except (OperationalError, ProgrammingError) as error:
                problem = f"It is unavailable or not set up ({error})."
                diagnosis.findings.append(Finding("database", problem, "Check that it is up. Run manage.py setup."))
        diagnosis.run()
        if options["host"] == "keystore" and not diagnosis.findings:
            diagnosis.findings += _check_master_key()
        self.healthy = not diagnosis.findings
        return {
            "healthy": self.healthy,
            "in_use": settings.IS_VAULT or options["host"] == "keystore",
            "checked": diagnosis.checked,
            "findings": [
                {"subject": each.subject, "problem": each.problem, "cure": each.remedy} for each in diagnosis.findings
            ],
        }

    def format_text(self, answer: Mapping[str, Any]) -> str:
        found = "".join(f"{each['subject']}: {each['problem']}\n  {each['cure']}\n" for each in answer["findings"])
        unused = (
            ""
            if answer["in_use"]
            else "\nThe Vault is not in use: KEYVAULT_BACKEND is local, and keys are stored on this host."
        )
        verdict = "no problems" if self.healthy else "see above"
        return f"{found}Checked {', '.join(answer['checked'])}: {verdict}.{unused}"

    def handle(self, *args: Any, **options: Any) -> None:
        super().handle(*args, **options)
        if not self.healthy:
            sys.exit(1)


def _check_master_key() -> list[Finding]:
    """Unwrap this host's master key, if it has one yet."""
    if not settings.MASTER_KEY and not (settings.DATA_DIR / "master.key").exists():
        return []
    try:
        text = read_master_key_text()
    except ImproperlyConfigured as error:
        return [Finding("master key", "Its file cannot be used.", f"{error}.")]
    try:
        unwrap_master_key(text)
    except ImproperlyConfigured as error:
        remedy = "Restore the Vault that wrapped it, or the settings of that Vault. No other key opens the keystore."
        return [Finding("master key", f"It cannot be used: {error}.", remedy)]
    return []


def _find_check_values() -> dict[str, dict[int, bytes]]:
    """Return the check values of each pepper set that this process loads.

    Before the switch to the Vault, the database's peppers are those of the local keystore.
    """
    rows = PepperVersion.objects.filter(destroyed_at=None)
    return {
        pepper_set.value: {row.number: bytes(row.check_value) for row in rows.filter(pepper_set=pepper_set)}
        for pepper_set in list_served_sets()
    }

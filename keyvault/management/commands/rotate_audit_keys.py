"""Create new versions of the local keys that sign the audit log's checkpoints."""

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.management.json_command import JsonCommand
from keyvault.services.audit.signing_keys import rotate_signing_keys
from keyvault.services.recording.authorization import authorize


class Command(JsonCommand):
    help = (
        "Create a new version of each local key that signs the audit log's checkpoints. The service may run: it signs "
        "the next checkpoint with the new version. Former versions still verify earlier checkpoints. A later "
        "checkpoint of a former version is refused. Processes of release 0.2.0 do not know versions: stop them first."
    )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        grant = authorize(HOST, Permission.INSTALLATION_MAINTAIN, now=self.now)
        try:
            versions = rotate_signing_keys(grant)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        return {
            "versions": versions,
            "next": [
                "give auditors the new public keys: manage.py show_audit_keys",
                "make a backup: earlier ones lack the new keys",
                "write a new export of the revocations (manage.py export_revocations), and delete earlier ones",
            ],
        }

"""Create new versions of the local keys that sign the audit log's checkpoints."""

from collections.abc import Mapping
from typing import Any

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.management.json_command import JsonCommand
from keyvault.services.audit.signing_keys import rotate_signing_keys
from keyvault.services.recording.authorization import authorize


class Command(JsonCommand):
    help = (
        "Create a new version of each local key that signs the audit log's checkpoints. The service may run: the next "
        "checkpoint is signed with it. Former versions verify earlier checkpoints, and no later ones."
    )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        versions = rotate_signing_keys(authorize(HOST, Permission.INSTALLATION_MAINTAIN, now=self.now))
        return {
            "versions": versions,
            "next": [
                "give the new public keys to whoever verifies exports: manage.py show_audit_keys",
                "make a backup: earlier ones lack the new keys",
            ],
        }

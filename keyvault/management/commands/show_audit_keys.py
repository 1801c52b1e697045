"""Print the public keys that verify the audit log's checkpoints."""

import json
from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandError

from keyvault.domain.audit_records import public_keys_text
from keyvault.management.json_command import JsonCommand
from keyvault.services.audit.checkpoints import read_public_keys


class Command(JsonCommand):
    help = "Print the public keys that verify the audit log's checkpoints, as a file for the auditor."

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        keys, unavailable = read_public_keys()
        if not keys:
            why = "; ".join(f"{scope}: {reason}" for scope, reason in unavailable.items())
            raise CommandError(
                f"no signer provides its public key: {why}"
                if unavailable
                else "there is no public key yet; the worker creates one when it first signs"
            )
        for scope, reason in unavailable.items():
            self.stderr.write(f"the public key of {scope} is missing: {reason}")
        answer: dict[str, Any] = json.loads(public_keys_text(keys))
        return answer

    def format_text(self, answer: Mapping[str, Any]) -> str:
        return json.dumps(answer, indent=1)

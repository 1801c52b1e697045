"""Ends a key, at once and for ever."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.errors import NotFoundError
from keyvault.domain.revocation import RevocationReason
from keyvault.management.answers import AnsweringCommand
from keyvault.services.keys import get_key, last_sequence, revoke_key


class Command(AnsweringCommand):
    help = "Revokes a key. Needs neither the secret backend nor the broker; repeatable."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("key_id")
        parser.add_argument("--reason", required=True, choices=[reason.value for reason in RevocationReason])
        parser.add_argument("--by", required=True, metavar="OPERATOR")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        key = get_key(options["key_id"])
        if key is None:
            raise NotFoundError(f"There is no key {options['key_id']}.")
        grant = self.grant(self.operator(options["by"]), Permission.KEYS_REVOKE, key.credential.account)
        record = revoke_key(grant, key, RevocationReason(options["reason"]))
        return {"key_id": key.key_id, "state": key.state, "sequence": record.sequence or last_sequence(key)}

"""Collect an issued key, or a rotation's replacement, once."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.errors import NotFoundError
from keyvault.management.mixins import OperatorMixin, add_reveal_option
from keyvault.services.issuance import requests
from rotation.services.rotations.interventions import collect_replacement
from rotation.services.rotations.reports import get_rotation


class Command(OperatorMixin):
    help = "Collect a key, once. In production this is break-glass and must be reviewed."

    operator_help = "the requester; of a rotation, also an operator who did not approve it"

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument("--rotation", metavar="ID")
        what.add_argument("--request", metavar="ID")
        add_reveal_option(parser, "print the key, once", required=True)

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        operator = self.operator(options["by"])
        if options["rotation"]:
            rotation = get_rotation(options["rotation"])
            grant = self.grant(operator, Permission.ISSUANCE_COLLECT, rotation.credential.account)
            return {"key_id": rotation.replacement_id or "", "key": collect_replacement(grant, rotation).reveal()}
        request = requests.get_request(options["request"])
        if request is None:
            raise NotFoundError("There is no such issuance request.")
        grant = self.grant(operator, Permission.ISSUANCE_COLLECT, request.account)
        return {"key_id": request.key_id or "", "key": requests.collect_key(grant, request).reveal()}

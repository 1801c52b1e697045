"""Hands over an issued key, or a rotation's replacement, once; or takes down what became of a wrapping token."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.domain.errors import NotFoundError
from keyvault.domain.issuance import Delivery
from keyvault.management.answers import AnsweringCommand, wrapped_as_json
from keyvault.models import IssuanceRequest
from keyvault.services import handovers, issuance
from rotation.models import Rotation
from rotation.services.handovers import confirm_replacement, hand_over_replacement, suspect_replacement
from rotation.services.interventions import collect_replacement
from rotation.services.reports import get_rotation


class Command(AnsweringCommand):
    help = "Collects a key exactly once. In production a key shown to a person is break-glass, to be reviewed."

    def add_options(self, parser: CommandParser) -> None:
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument("--rotation", metavar="ID")
        what.add_argument("--request", metavar="ID")
        parser.add_argument("--by", required=True, metavar="OPERATOR", help="whoever asked for it")
        does = parser.add_mutually_exclusive_group(required=True)
        does.add_argument(
            "--reveal",
            action="store_true",
            help="print it, this once; or a wrapping token (asked for again, its key is ended and another made)",
        )
        does.add_argument("--arrived", metavar="KEY_ID", help="the wrapping token was opened by its receiver")
        does.add_argument("--not-opened", metavar="KEY_ID", help="the wrapping token did not open for its receiver")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        operator = self.operator(options["by"])
        if options["rotation"]:
            rotation = get_rotation(options["rotation"])
            grant = self.grant(operator, Permission.ISSUANCE_COLLECT, rotation.credential.account)
            return self._of_rotation(grant, rotation, options)
        request = issuance.get_request(options["request"])
        if request is None:
            raise NotFoundError("There is no such request.")
        grant = self.grant(operator, Permission.ISSUANCE_COLLECT, request.account)
        return self._of_request(grant, request, options)

    def _of_rotation(self, grant: Grant, rotation: Rotation, options: Mapping[str, Any]) -> dict[str, Any]:
        if key_id := options["arrived"]:
            confirm_replacement(grant, rotation, key_id)
            return {"key_id": key_id, "outcome": "collected"}
        if key_id := options["not_opened"]:
            return {"key_id": key_id, "outcome": suspect_replacement(grant, rotation, key_id)}
        named = {"key_id": rotation.replacement_id or ""}
        if rotation.credential.delivery == Delivery.WRAPPED:
            wrapped = hand_over_replacement(grant, rotation)
            self.tell_of_wrapping(f"--rotation {rotation.rotation_id}")
            return {**named, "wrapped": wrapped_as_json(wrapped)}
        return {**named, "key": collect_replacement(grant, rotation).reveal()}

    def _of_request(self, grant: Grant, request: IssuanceRequest, options: Mapping[str, Any]) -> dict[str, Any]:
        if key_id := options["arrived"]:
            handovers.confirm_handover(grant, request, key_id)
            return {"key_id": key_id, "outcome": "collected"}
        if key_id := options["not_opened"]:
            return {"key_id": key_id, "outcome": handovers.suspect_handover(grant, request, key_id)}
        named = {"key_id": request.key_id or ""}
        if request.delivery == Delivery.WRAPPED:
            wrapped = handovers.hand_over_wrapped(grant, request)
            self.tell_of_wrapping(f"--request {request.request_id}")
            return {**named, "wrapped": wrapped_as_json(wrapped)}
        return {**named, "key": issuance.collect_key(grant, request).reveal()}

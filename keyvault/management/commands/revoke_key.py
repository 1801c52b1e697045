"""Revoke a key, immediately and permanently."""

import re
from argparse import ArgumentTypeError
from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.errors import NotFoundError
from keyvault.domain.revocation import RevocationReason
from keyvault.domain.timestamps import format_timestamp
from keyvault.management.mixins import OperatorMixin
from keyvault.services.change_feed.receipts import MAX_WAIT_SECONDS, describe_receipt, wait_for_receipt
from keyvault.services.keys.lifecycle import get_key, last_sequence, revoke_key


class Command(OperatorMixin):
    help = "Revoke a key. Needs neither the secret backend nor the broker; repeatable."

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("key_id")
        parser.add_argument("--reason", required=True, choices=[reason.value for reason in RevocationReason])
        parser.add_argument(
            "--wait",
            type=_seconds,
            metavar="SECONDS",
            help=f"maximum wait for the confirmation of every verifier, at most {MAX_WAIT_SECONDS}",
        )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        key = get_key(options["key_id"])
        if key is None:
            raise NotFoundError(f"There is no key {options['key_id']}.")
        grant = self.operator_grant(options, Permission.KEYS_REVOKE, key.credential.account)
        record = revoke_key(grant, key, RevocationReason(options["reason"]))
        sequence = record.sequence or last_sequence(key)
        answer = {"key_id": key.key_id, "state": key.state, "sequence": sequence}
        if options["wait"] is None:
            return answer
        receipt, _ = wait_for_receipt(sequence, options["wait"])
        return {**answer, "receipt": describe_receipt(receipt)}

    def format_text(self, answer: Mapping[str, Any]) -> str:
        text = super().format_text({name: value for name, value in answer.items() if name != "receipt"})
        return f"{text}\n{_format_receipt(answer['receipt'])}" if "receipt" in answer else text


def _format_receipt(receipt: Mapping[str, Any]) -> str:
    lines = [f"receipt: {'complete' if receipt['complete'] else 'not complete: some verifiers have yet to confirm'}"]
    for verifier in receipt["verifiers"]:
        at = verifier["confirmed_at"]
        lines.append(
            f"  - {verifier['verifier_id']}: {verifier['state']}{'' if at is None else f', {format_timestamp(at)}'}"
        )
    return "\n".join(lines)


def _seconds(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ArgumentTypeError(f"{text[:40]!r} is not a whole number of seconds")
    return int(text)

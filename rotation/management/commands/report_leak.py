"""Report leaked keys as compromised, which revokes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from keyvault.management.mixins import OperatorMixin
from rotation.services.rotations.emergency import CompromiseResponse, respond_to_leak


class Command(OperatorMixin):
    help = (
        "Report keys as compromised, which revokes each of them immediately. Needs neither the secret backend nor the "
        "broker. Repeatable."
    )

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("key_ids", nargs="*", metavar="KEY_ID")
        parser.add_argument("--file", metavar="PATH", help="key ids, or the leaked keys themselves, one per line")
        parser.add_argument("--reason", default="")
        parser.add_argument(
            "--replace", action="store_true", help="request a replacement where a credential has no usable key left"
        )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        presented = [*options["key_ids"], *_lines(options["file"])]
        responses = respond_to_leak(
            self.operator(options["by"]),
            presented,
            reason=options["reason"],
            replace=options["replace"],
            now=self.now,
        )
        self.revoked = len([response for response in responses if not response.fault])
        self.not_revoked = len(responses) - self.revoked
        return {
            "revoked": self.revoked,
            "not_revoked": self.not_revoked,
            "keys": [_describe(response) for response in responses],
        }

    def handle(self, *args: Any, **options: Any) -> None:
        self.revoked = self.not_revoked = 0
        super().handle(*args, **options)
        if not self.revoked:
            raise CommandError(f"No key was revoked: none of the {self.not_revoked} is a known key that you may revoke")
        if self.not_revoked:
            raise CommandError(f"Keys not revoked: {self.not_revoked}")


def _lines(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        return Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from error


def _describe(response: CompromiseResponse) -> dict[str, Any]:
    if response.fault:
        return {"key_id": response.key_id, "state": None, "fault": response.fault}
    described = {
        "key_id": response.key_id,
        "state": response.state,
        "sequence": response.sequence,
        "credential_id": response.credential_id,
    }
    if response.rotation_id or response.no_replacement:
        described |= {"rotation_id": response.rotation_id, "no_replacement": response.no_replacement or None}
    return described

"""Store a provider's credentials as a connection of a merchant's account."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.errors import Fault, RequestInvalidError
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.provider_connections import MAX_BYTES
from keyvault.management.mixins import AccountMixin, OperatorMixin
from keyvault.services.secrets.provider_connections import describe_connection, set_connection

_MAX_READ = 2 * MAX_BYTES
"""Maximum size read, in bytes: room for surrounding whitespace. Longer credentials are refused for their size."""


class Command(AccountMixin, OperatorMixin):
    help = (
        "Store a payment provider's credentials in the secret backend and replace the account's earlier ones: test "
        "mode in sandbox, live mode in production. They are never shown again."
    )

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("--provider", required=True, help="a-z, 0-9 and inner hyphens, such as stripe")
        parser.add_argument(
            "--secret-file",
            required=True,
            metavar="PATH",
            help="file with one secret text or a flat JSON object of texts; - for standard input",
        )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        account = self.account(options)
        grant = self.operator_grant(options, Permission.CONNECTIONS_WRITE, account)
        credentials = _read(options["secret_file"])
        return describe_connection(set_connection(grant, account, options["provider"], credentials))


def _read(name: str) -> Plaintext:
    """Read the credentials from the file or from standard input. Raises RequestInvalidError."""
    try:
        if name == "-":
            content = sys.stdin.buffer.read(_MAX_READ)
        else:
            with Path(name).open("rb") as file:
                content = file.read(_MAX_READ)
    except OSError as error:
        fault = f"cannot be read: {error.strerror}"
    else:
        try:
            return Plaintext(content.decode())
        except UnicodeDecodeError:
            fault = "is not UTF-8 text"
    raise RequestInvalidError("There are no credentials to store.", [Fault("/secret_file", fault)])

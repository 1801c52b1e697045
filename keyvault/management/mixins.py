"""Options that several commands share, one mixin each: an account, an acting operator, a requester and an approver.

A command that defines `add_options` calls `super().add_options(parser)` first.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST, OperatorPrincipal
from keyvault.domain.environments import Environment
from keyvault.management.json_command import JsonCommand
from keyvault.models import Account
from keyvault.services.merchants.merchants import find_account
from keyvault.services.recording.authorization import authorize


class AccountMixin(JsonCommand):
    """`--merchant` and `--environment`: an account."""

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--merchant", required=True, metavar="ID")
        parser.add_argument("--environment", required=True, choices=[env.value for env in Environment])
        super().add_options(parser)

    def account(self, options: Mapping[str, Any]) -> Account:
        """Return the account. Raises NotFoundError."""
        return find_account(options["merchant"], options["environment"])


class OperatorMixin(JsonCommand):
    """`--by`: the operator in whose name the command acts."""

    operator_help: ClassVar[str] = "acting operator"

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--by", required=True, metavar="OPERATOR", help=self.operator_help)
        super().add_options(parser)

    def operator_grant(self, options: Mapping[str, Any], permission: Permission, account: Account | None = None) -> Any:
        """Authorize the operator. Raises KeyvaultError."""
        return self.grant(self.operator(options["by"]), permission, account)


class HostOperatorMixin(JsonCommand):
    """`--by` for what the host's owner may do too: without it the command acts in the owner's name."""

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--by", metavar="OPERATOR", help="acting operator (default: the host's owner)")
        super().add_options(parser)

    def operator_grant(self, options: Mapping[str, Any], permission: Permission) -> Any:
        """Authorize the operator or the host's owner. Raises KeyvaultError."""
        if options["by"]:
            return self.grant(self.operator(options["by"]), permission)
        return authorize(HOST, permission, now=self.now)


class ApprovalMixin(JsonCommand):
    """`--requested-by` and `--approved-by`: the operator who requests, and the second person."""

    approver_help: ClassVar[str] = "approver, a second person"

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--requested-by", required=True, metavar="OPERATOR", help="requester")
        parser.add_argument("--approved-by", metavar="OPERATOR", help=self.approver_help)
        super().add_options(parser)

    def requester(self, options: Mapping[str, Any]) -> OperatorPrincipal:
        return self.operator(options["requested_by"])

    def approver(self, options: Mapping[str, Any]) -> OperatorPrincipal:
        return self.operator(options["approved_by"])

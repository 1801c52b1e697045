"""Options that several commands share: functions that add one option, and mixins that also read what they add.

A command with a mixin that defines `add_options` calls `super().add_options(parser)` first.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from django.core.management.base import CommandError, CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST, OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.domain.digests import PepperSet
from keyvault.domain.environments import Environment
from keyvault.domain.errors import StateConflictError
from keyvault.management.json_command import JsonCommand
from keyvault.models import Account, OperatorChange
from keyvault.services.merchants.merchants import find_account
from keyvault.services.operator_changes import approve_change, withdraw_change
from keyvault.services.recording.authorization import authorize


def add_environment_option(parser: CommandParser, *, required: bool = True) -> None:
    parser.add_argument("--environment", required=required, choices=[env.value for env in Environment])


def add_scope_options(parser: CommandParser, *, required: bool = True) -> None:
    """Add `--environment` and `--merchant`, which `read_scope` reads."""
    parser.add_argument(
        "--environment",
        action="append",
        required=required,
        choices=["all", *(env.value for env in Environment)],
        help="repeatable; both environments mean all",
    )
    parser.add_argument("--merchant", action="append", metavar="ID", help="only these merchants; repeatable")


def read_scope(options: Mapping[str, Any]) -> AccessScope:
    named = set(options["environment"] or ["all"])
    environments = frozenset(Environment) if "all" in named else frozenset(map(Environment, named))
    return AccessScope(None if options["merchant"] is None else frozenset(options["merchant"]), environments)


def add_operator_scope_options(parser: CommandParser) -> None:
    """Add the scope of an operator, which `read_operator_scope` reads. No omitted option widens it."""
    add_scope_options(parser, required=False)
    parser.add_argument("--all", action="store_true", help="all merchants and environments")


def has_operator_scope(options: Mapping[str, Any]) -> bool:
    return bool(options["all"] or options["merchant"] or options["environment"])


def read_operator_scope(options: Mapping[str, Any]) -> AccessScope:
    if options["all"] == bool(options["merchant"] or options["environment"]):
        raise CommandError("give --all, or --merchant, --environment or both", returncode=2)
    return EVERYWHERE if options["all"] else read_scope(options)


def add_reveal_option(parser: CommandParser, help_text: str, *, required: bool = False) -> None:
    """Add `--reveal`, without which no command prints a secret. `help_text`: which secret the command prints."""
    parser.add_argument("--reveal", action="store_true", required=required, help=help_text)


def add_role_option(parser: CommandParser, *, required: bool = True) -> None:
    parser.add_argument(
        "--role", action="append", required=required, choices=[role.value for role in Role], help="repeatable"
    )


class AccountMixin(JsonCommand):
    """`--merchant` and `--environment`: an account."""

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--merchant", required=True, metavar="ID")
        add_environment_option(parser)
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

    def operator_grant(
        self,
        options: Mapping[str, Any],
        permission: Permission,
        account: Account | None = None,
        within: AccessScope = EVERYWHERE,
    ) -> Any:
        """Authorize the operator. Raises KeyvaultError."""
        return self.grant(self.operator(options["by"]), permission, account, within=within)


class HostOperatorMixin(JsonCommand):
    """`--by` for what the host's owner may do too: without it the command acts in the owner's name."""

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--by", metavar="OPERATOR", help="acting operator (default: the host's owner)")
        super().add_options(parser)

    def operator_grant(
        self, options: Mapping[str, Any], permission: Permission, within: AccessScope = EVERYWHERE
    ) -> Any:
        """Authorize the operator or the host's owner. Raises KeyvaultError."""
        if options["by"]:
            return self.grant(self.operator(options["by"]), permission, within=within)
        return authorize(HOST, permission, now=self.now)


class ApprovalMixin(JsonCommand):
    """`--requested-by` and `--approved-by`: the operator who requests, and the second person."""

    approver_help: ClassVar[str] = "approver, a second person"

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--requested-by", required=True, metavar="OPERATOR", help="requester")
        parser.add_argument("--approved-by", metavar="OPERATOR", help=self.approver_help)
        super().add_options(parser)

    def requester(self, options: Mapping[str, Any]) -> OperatorPrincipal:
        """Return the requester. Raises NotFoundError, also for an unknown approver, before anything is requested."""
        if options["approved_by"]:
            self.operator(options["approved_by"])
        return self.operator(options["requested_by"])

    def approver(self, options: Mapping[str, Any]) -> OperatorPrincipal:
        return self.operator(options["approved_by"])


class UsernameMixin(JsonCommand):
    """`username`: the operator whom the command creates or changes, in the name of the host's owner."""

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("username")
        super().add_options(parser)

    def operators_grant(self, permission: Permission = Permission.OPERATORS_WRITE) -> Any:
        """Authorize the host's owner to change operators."""
        return authorize(HOST, permission, now=self.now)


class OperatorChangeMixin(UsernameMixin):
    """`--requested-by`, `--approved-by` and `--reason`: a change of an operator that may require two operators.

    Without a requester the command acts in the name of the host's owner, who cannot make such a change.
    """

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("--requested-by", metavar="OPERATOR", help="requester (default: the host's owner)")
        parser.add_argument("--approved-by", metavar="OPERATOR", help="approver, a second person")
        parser.add_argument("--reason", metavar="WHY", help="recorded in the audit log, and shown to the approver")

    def requester_grant(self, options: Mapping[str, Any]) -> Any:
        """Authorize the requester. Raises NotFoundError, also for an unknown approver, before anything is changed."""
        if options["approved_by"]:
            self.operator(options["approved_by"])
        if options["requested_by"]:
            return self.grant(self.operator(options["requested_by"]), Permission.OPERATORS_WRITE)
        return self.operators_grant()

    def decide(self, change: OperatorChange, options: Mapping[str, Any]) -> dict[str, Any]:
        """Approve the change. When that is refused, withdraw it.

        A command line proves no identity, so it leaves no request that its own author could approve in the console.
        """
        try:
            if not options["approved_by"]:
                raise StateConflictError(
                    "This takes a second person. Name the approver with --approved-by, or request it in the console."
                )
            approver = self.operator(options["approved_by"])
            grant = self.grant(approver, Permission.OPERATORS_APPROVE, requester_person=change.requester_person)
            approve_change(grant, change, change.plan_digest)
        except Exception:
            change.refresh_from_db()
            withdraw_change(self.requester_grant(options), change)
            raise
        return {"change_id": change.change_id, "state": change.state}


class PepperSetMixin(JsonCommand):
    """`--set`: a set of peppers, which the command changes in the name of the host's owner."""

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--set", dest="pepper_set", choices=[each.value for each in PepperSet], required=True)
        super().add_options(parser)

    def peppers_grant(self) -> Any:
        """Authorize the host's owner to change peppers."""
        return authorize(HOST, Permission.PEPPERS_WRITE, now=self.now)

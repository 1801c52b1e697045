"""Base class of the commands: one JSON object with `--json`, text otherwise; exit 0, 1 refused, 2 usage.

A command line proves no identity: an action in an operator's name is recorded with the host's user.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from io import StringIO
from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, OperationalError, ProgrammingError

from keyvault.access.decision import OUTSIDE_SCOPE
from keyvault.access.permissions import Permission
from keyvault.access.principals import OperatorPrincipal
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.domain.errors import KeyvaultError, PermissionMissingError, RequestInvalidError
from keyvault.domain.free_text import escape_unprintable
from keyvault.domain.redaction import redact
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Account
from keyvault.services.operators.operators import find_operator
from keyvault.services.operators.role_use import find_used_roles, write_uses
from keyvault.services.recording.authorization import authorize, find_host_user
from keyvault.services.work.disk_space import make_room


class JsonCommand(BaseCommand):
    """A subclass defines `answer`, and optionally `add_options` and `format_text`."""

    # They check the code, which the tests do, and load the console's pages, which takes longer than most commands.
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        self.add_options(parser)

    def add_options(self, parser: CommandParser) -> None:
        """Add the command's own arguments."""

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Run the command and return its result. Raises KeyvaultError to refuse (exit 1)."""
        raise NotImplementedError

    def format_text(self, answer: Mapping[str, Any]) -> str:
        return "\n".join(f"{name}: {_plain(value)}" for name, value in answer.items())

    def handle(self, *args: Any, **options: Any) -> None:
        self.now = datetime.now(UTC)
        self._granted: list[tuple[OperatorPrincipal, Permission]] = []
        # The first process that opens SQLite's database creates two files beside it, even to read.
        make_room()
        try:
            answer = self.answer(options)
        except RequestInvalidError as error:
            faults = "".join(f"\n  {fault.pointer}: {fault.detail}" for fault in error.faults)
            raise CommandError(_as_refusal(f"{error.code}: {error.detail}{faults}")) from error
        except KeyvaultError as error:
            # A user with a shell on the host may read internal details.
            internal = f" ({error.internal})" if error.internal else ""
            raise CommandError(_as_refusal(f"{error.code}: {error.detail}{internal}")) from error
        except (OperationalError, ProgrammingError) as error:
            raise CommandError(f"the database is unavailable or not set up (run manage.py setup): {error}") from error
        self.stdout.write(json.dumps(answer, default=_as_json) if options["json"] else self.format_text(answer))
        self._note_role_uses()

    def _note_role_uses(self) -> None:
        """Record the uses of roles. The command is done and its answer printed, so a failure is only a warning."""
        try:
            for operator, permission in self._granted:
                write_uses(operator.username, find_used_roles(operator, [permission]), self.now)
        except DatabaseError as error:
            self.stderr.write(f"The use of a role was not recorded: {error}")

    def warn_unrevealed(self) -> None:
        """Warn on standard error that the new token was not printed and is stored nowhere."""
        self.stderr.write("Created without --reveal: this token can never be read.")

    def operator(self, username: str) -> OperatorPrincipal:
        return find_operator(username, host_user=find_host_user())

    def unlimited_operator(self, username: str) -> OperatorPrincipal:
        """Return an operator who may answer for the whole installation. Raises PermissionMissingError for another."""
        operator = self.operator(username)
        if operator.scope != EVERYWHERE:
            raise PermissionMissingError(OUTSIDE_SCOPE, internal=f"{operator.actor} has {operator.scope}")
        return operator

    def grant(
        self,
        operator: OperatorPrincipal,
        permission: Permission,
        account: Account | None = None,
        requester_person: str | None = None,
        within: AccessScope = EVERYWHERE,
    ) -> Any:
        grant = authorize(operator, permission, account, now=self.now, requester_person=requester_person, within=within)
        self._granted.append((operator, permission))
        return grant


def call(command: str, *arguments: str) -> dict[str, Any]:
    """Run another command with the same options and return the object of its `--json`. Raises its CommandError."""
    out = StringIO()
    call_command(command, *arguments, "--json", stdout=out)
    answer: dict[str, Any] = json.loads(out.getvalue())
    return answer


def _as_refusal(text: str) -> str:
    """Return the text of a refusal, which may have several lines, without secrets and terminal controls."""
    return "\n".join(map(escape_unprintable, redact(text).split("\n")))


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "".join(f"\n  - {_on_one_line(item)}" for item in value) or "none"
    return _on_one_line(value)


def _on_one_line(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_on_one_line, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{_on_one_line(name)} {_on_one_line(item)}" for name, item in value.items())
    if isinstance(value, datetime):
        return format_timestamp(value)
    # Text of clients, such as a user agent, must neither forge a line nor control the terminal.
    return "-" if value is None else escape_unprintable(str(value))


def _as_json(value: object) -> str:
    if isinstance(value, datetime):
        return format_timestamp(value)
    raise TypeError(f"{type(value).__name__} has no JSON form here")

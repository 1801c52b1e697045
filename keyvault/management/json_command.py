"""How every command answers: one JSON object with `--json`, text otherwise; exit 0, 1 refused, 2 usage.

A command line proves no identity: what it does in an operator's name is recorded with the host's user.
"""

import getpass
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import OperationalError, ProgrammingError

from keyvault.access.permissions import Permission
from keyvault.access.principals import Operator
from keyvault.domain.errors import KeyvaultError, RequestInvalidError
from keyvault.domain.redaction import redact
from keyvault.models import Account
from keyvault.services.merchants.operators import find_operator
from keyvault.services.recording.authorization import authorize


class JsonCommand(BaseCommand):
    """A subclass says its arguments in `add_options`, does its work in `answer`, and may word it in `words`."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
        self.add_options(parser)

    def add_options(self, parser: CommandParser) -> None:
        """Adds the command's own arguments."""

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Does the work and returns what is to be told. Raises KeyvaultError to refuse (exit 1)."""
        raise NotImplementedError

    def words(self, answer: Mapping[str, Any]) -> str:
        return "\n".join(f"{name}: {_plain(value)}" for name, value in answer.items())

    def handle(self, *args: Any, **options: Any) -> None:
        self.now = datetime.now(UTC)
        try:
            answer = self.answer(options)
        except RequestInvalidError as error:
            faults = "".join(f"\n  {fault.pointer}: {fault.detail}" for fault in error.faults)
            raise CommandError(redact(f"{error.code}: {error.detail}{faults}")) from error
        except KeyvaultError as error:
            # Whoever has a shell here may know the inside of it too.
            inside = f" ({error.internal})" if error.internal else ""
            raise CommandError(redact(f"{error.code}: {error.detail}{inside}")) from error
        except (OperationalError, ProgrammingError) as error:
            raise CommandError(f"the database does not answer, or is not set up (manage.py setup): {error}") from error
        self.stdout.write(json.dumps(answer, default=_as_json) if options["json"] else self.words(answer))

    def warn_of_secrecy(self) -> None:
        """On standard error: it is kept nowhere."""
        self.stderr.write("Made without --reveal: nobody can read this token, now or later.")

    def operator(self, username: str) -> Operator:
        return find_operator(username, host_user=getpass.getuser())

    def grant(
        self,
        operator: Operator,
        permission: Permission,
        account: Account | None = None,
        requester_person: str | None = None,
    ) -> Any:
        return authorize(operator, permission, account, now=self.now, requester_person=requester_person)


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "".join(f"\n  - {_plain(item)}" for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    return "-" if value is None else str(value)


def _as_json(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no JSON form here")

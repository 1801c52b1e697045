"""Run the whole service in the foreground with demo data (`make run`)."""

import json
import re
import shlex
from argparse import ArgumentTypeError
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.domain.keystring import StringScope
from keyvault.domain.origins import to_domain
from keyvault.domain.plaintext import Plaintext
from keyvault.management.commands.seed_demo import list_demo_operators
from keyvault.management.json_command import call
from keyvault.management.service import (
    ServiceError,
    local_url,
    lock_data_folder,
    origin_for,
    require_free_port,
    supervise,
    wait_until_ready,
)
from keyvault.management.supervisor import StopRequestedError, stopping_on_signals
from keyvault.models import ServiceToken
from keyvault.services.recording.authorization import authorize
from keyvault.services.sessions.invitations import PreparedSignIn, prepare_sign_in
from keyvault.services.startup.startup_checks import require_ready
from keyvault.services.tokens.service_tokens import create_service_token, revoke_service_token

DEMO_NAME = "make run"
"""Name of the demo's service token and credential; it identifies the tokens of earlier runs."""

LIFETIME_DAYS = 1


class Command(BaseCommand):
    help = (
        "Set up, create demo data, and serve on 127.0.0.1 with a worker until SIGTERM or Ctrl-C. "
        "The demo's passwords, TOTP secrets, token and key are new at each start and printed here only."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--port", type=port_number, default=8000, help="default 8000")

    def handle(self, *args: Any, **options: Any) -> None:
        port: int = options["port"]
        try:
            with stopping_on_signals(), lock_data_folder(port):
                self._serve(port)
        except StopRequestedError as stop:
            self.stderr.write(f"{stop}: all programs have stopped.")
        except ServiceError as error:
            raise CommandError(str(error)) from None

    def _serve(self, port: int) -> None:
        require_free_port(port)
        self._print("Setting up: database, keystore, demo data …")
        call("setup")
        try:
            require_ready()
        except ImproperlyConfigured as error:
            raise CommandError(f"not started: {error}") from None
        seeded = call("seed_demo")
        sign_ins = _prepare_sign_ins()
        curl = _demo_curl(port)
        connections.close_all()
        self._print("Starting the server and the worker …")
        with supervise(port) as service:
            wait_until_ready(service, port)
            self._introduce(port, seeded, sign_ins, curl)
            self._print(f"The logs are in {service.logs}. Press Ctrl-C to stop.")
            while True:
                service.wait(3600)
                service.restart_ended()

    def _introduce(
        self, port: int, seeded: Mapping[str, Any], sign_ins: Mapping[str, PreparedSignIn], curl: str
    ) -> None:
        merchants = ", ".join(f"{merchant['merchant_id']} ({merchant['name']})" for merchant in seeded["merchants"])
        operators = [
            f"  {row['username']:<10} {sign_ins[row['username']].password.reveal():<25}"
            f"{sign_ins[row['username']].totp_seed.reveal()}  {', '.join(row['roles'])}"
            for row in seeded["operators"]
            if row["username"] in sign_ins
        ]
        origin = origin_for(port)
        self._print(
            "",
            f"Keyvault runs at {local_url(port)}",
            "",
            f"  console       {to_domain(origin)}/admin/",
            f"  service plane {origin}/v1/",
            *(f"  {place['name']:<13} {place['base_url']}" for place in seeded["environments"]),
            f"  merchants     {merchants}",
            "",
            "Demo operators: password, TOTP secret, roles (new at each start, shown only here):",
            *operators,
            "",
            "The console asks for the password, then for a code. Add the TOTP secret to an authenticator app, or run:",
            "  echo SECRET | python manage.py show_totp_code",
            "",
            f"Verify a key (demo token and key, valid for {LIFETIME_DAYS} day, shown only here):",
            f"  {curl}",
            "",
        )

    def _print(self, *lines: str) -> None:
        """Write the lines and flush, since a reader of a pipe may wait for them."""
        self.stdout.write("\n".join(lines))
        self.stdout.flush()


def port_number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise ArgumentTypeError(f"{text[:40]!r} is not a port. Use 1 to 65535.")
    return int(text)


def _prepare_sign_ins() -> dict[str, PreparedSignIn]:
    grant = authorize(HOST, Permission.OPERATORS_ENROLL, now=datetime.now(UTC))
    operators = list_demo_operators().filter(is_active=True)
    return {operator.username: prepare_sign_in(grant, operator) for operator in operators}


def _new_token() -> Plaintext:
    """Create a token that can only verify sandbox keys, and revoke those of earlier runs."""
    grant = authorize(HOST, Permission.TOKENS_WRITE, now=datetime.now(UTC))
    for earlier in ServiceToken.objects.filter(name=DEMO_NAME, revoked_at=None):
        revoke_service_token(grant, earlier)
    _, text = create_service_token(
        grant,
        name=DEMO_NAME,
        scope=StringScope.SANDBOX,
        permissions=[Permission.KEYS_VERIFY],
        lifetime_days=LIFETIME_DAYS,
    )
    return text


def _new_key() -> Plaintext:
    """Issue a private sandbox key of acme that expires after LIFETIME_DAYS.

    Keys of earlier runs stay, since a rotation of one may be open. Raises CommandError where the policy of this host
    requires more than one approver.
    """
    issued = call(
        "issue_key",
        *("--merchant", "acme", "--environment", Environment.SANDBOX, "--kind", KeyKind.PRIVATE),
        *("--requested-by", "tam", "--approved-by", "approver", "--label", DEMO_NAME),
        *("--expires-in-days", str(LIFETIME_DAYS), "--reveal"),
    )
    return Plaintext(issued["key"])


def _demo_curl(port: int) -> str:
    """Return a curl command that verifies a new key with a new token, or the reason why there is none."""
    if Environment.SANDBOX not in settings.ENVIRONMENTS:
        served = ", ".join(settings.ENVIRONMENTS)
        return f"(no key was issued: the demo needs the sandbox, and KEYVAULT_ENVIRONMENTS is {served})"
    try:
        return _curl(port, _new_token(), _new_key())
    except CommandError as error:
        return f"(no key was issued: {error})"


def _curl(port: int, token: Plaintext, key: Plaintext) -> str:
    body = {"key": key.reveal(), "environment": Environment.SANDBOX, "endpoint": "orders.retrieve"}
    return shlex.join(
        [
            *("curl", "-sS", f"{local_url(port)}/v1/keys/verify"),
            *("-H", f"Authorization: Bearer {token.reveal()}", "-H", "Content-Type: application/json"),
            *("-d", json.dumps(body)),
        ]
    )

"""Set up the Vault for this service, repair drift, and create the logins of its hosts."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hvac
from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from keyvault.backends.vault.bootstrap import (
    SECRET_ID_DAYS,
    BootstrapOptions,
    bootstrap,
    list_logins,
    list_scopes,
    make_logins,
)
from keyvault.backends.vault.capabilities import ROLES_OF_HOST
from keyvault.backends.vault.client import open_client
from keyvault.backends.vault.layout import VaultRole
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, RequestInvalidError
from keyvault.domain.networks import parse_network
from keyvault.domain.plaintext import Plaintext
from keyvault.management.json_command import JsonCommand
from keyvault.services.secrets.backend import vault_layout, vault_server

WRAP_SECONDS = 86_400
_MAX_TOKEN_LENGTH = 4096


class Command(JsonCommand):
    help = (
        "Create and repair the mounts, policies, signing keys and roles of the named environments and of scope "
        "`service`, and print each change. VAULT_ADDR names the server. Repeatable. The administrator's token is "
        "read from --token-file only."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--environment",
            action="append",
            required=True,
            choices=[env.value for env in Environment],
            help="repeatable",
        )
        parser.add_argument("--token-file", required=True, metavar="PATH", help="- for standard input")
        parser.add_argument("--cidr", action="append", metavar="NETWORK", help="allowed network of logins; repeatable")
        parser.add_argument(
            "--secret-id-days",
            type=int,
            default=SECRET_ID_DAYS,
            metavar="N",
            help=f"lifetime of a secret id in days (default {SECRET_ID_DAYS})",
        )
        parser.add_argument(
            "--kubernetes-namespace",
            metavar="NAME",
            help="use Kubernetes instead of AppRole, for the service accounts <prefix>-web, -worker, -setup and "
            "-keystore",
        )
        parser.add_argument("--dry-run", action="store_true", help="print the changes without applying them")
        parser.add_argument("--logins-folder", type=Path, metavar="DIR", help="create missing logins in this folder")
        parser.add_argument("--host", choices=sorted(ROLES_OF_HOST), help="only the logins of this kind of host")
        parser.add_argument(
            "--role", action="append", choices=[role.value for role in VaultRole], help="only these logins; repeatable"
        )
        how = parser.add_mutually_exclusive_group()
        how.add_argument(
            "--wrap-seconds",
            type=int,
            metavar="N",
            help=f"lifetime of a wrapped secret id in seconds (default {WRAP_SECONDS})",
        )
        how.add_argument("--plain", action="store_true", help="write secret ids unwrapped, for the host that runs this")
        parser.add_argument(
            "--renew-logins", action="store_true", help="destroy their secret ids on all hosts and create new ones"
        )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        folder = options["logins_folder"]
        if folder is None and (options["host"] or options["role"] or options["plain"] or options["renew_logins"]):
            raise CommandError("--host, --role, --plain and --renew-logins need --logins-folder", returncode=2)
        if folder is not None and (options["dry_run"] or options["kubernetes_namespace"]):
            raise CommandError(
                "--logins-folder cannot be combined with --dry-run or --kubernetes-namespace", returncode=2
            )
        if not settings.VAULT_ADDRESS:
            raise CommandError("VAULT_ADDR is not set. Set it to the address of the Vault.", returncode=2)
        choices, changes = _read_options(options), list[str]()
        admin = open_client(vault_server(), _read_token(options["token_file"]))

        def report(change: str) -> None:
            changes.append(change)
            if not options["json"]:
                self.stdout.write(change)  # Immediately: the change stays when a later step fails.

        bootstrap(admin, vault_layout(), options["environment"], report, choices, is_dry_run=options["dry_run"])
        answer: dict[str, Any] = {"dry_run": options["dry_run"], "changes": changes}
        if folder is not None:
            try:
                answer["logins"] = _make_logins(admin, folder, options)
            except OSError as error:
                raise CommandError(f"--logins-folder: {folder} cannot be written ({error.strerror})") from None
        return answer

    def format_text(self, answer: Mapping[str, Any]) -> str:
        count = len(answer["changes"])
        text = f"{count} change{'' if count == 1 else 's'}{' to be made' if answer['dry_run'] else ''}."
        for name in answer.get("logins", ()):
            text += f"\nlogin {name}: created"
        return text


def _make_logins(admin: hvac.Client, folder: Path, options: Mapping[str, Any]) -> list[str]:
    roles = {VaultRole(role) for role in options["role"] or ROLES_OF_HOST[options["host"] or "all"]}
    if options["host"]:
        roles &= ROLES_OF_HOST[options["host"]]
    layout, scopes = vault_layout(), list_scopes(options["environment"])
    names = [layout.login(role, scope) for role, scope in list_logins(scopes) if role in roles]
    wrap_seconds = None if options["plain"] else options["wrap_seconds"] or WRAP_SECONDS
    return make_logins(admin, layout, names, folder, wrap_seconds=wrap_seconds, renew=options["renew_logins"])


def _read_options(options: Mapping[str, Any]) -> BootstrapOptions:
    for name, most in (("secret_id_days", 3_650), ("wrap_seconds", 30 * 86_400)):
        if options[name] is not None and not 1 <= options[name] <= most:
            raise RequestInvalidError("Number out of range.", [Fault(f"/{name}", f"must be 1 to {most}")])
    networks = options["cidr"]
    try:
        parsed = None if networks is None else tuple(str(parse_network(network)) for network in networks)
    except ValueError as error:
        raise RequestInvalidError("Invalid network.", [Fault("/cidr", str(error))]) from None
    namespace = options["kubernetes_namespace"]
    # The Vault accepts any text. With an unknown namespace no pod can log in.
    if namespace is not None and re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", namespace) is None:
        fault = Fault("/kubernetes_namespace", "one name: up to 63 of a-z, 0-9 and inner hyphens")
        raise RequestInvalidError("Invalid namespace.", [fault])
    return BootstrapOptions(parsed, options["secret_id_days"], namespace)


def _read_token(name: str) -> Plaintext:
    """Read the administrator's token. Raises RequestInvalidError."""
    try:
        text = sys.stdin.read(_MAX_TOKEN_LENGTH) if name == "-" else Path(name).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestInvalidError(
            "No administrator token.", [Fault("/token_file", f"cannot be read: {type(error).__name__}")]
        ) from None
    if not text.strip():
        raise RequestInvalidError("No administrator token.", [Fault("/token_file", "is empty")])
    return Plaintext(text.strip())

"""Encrypt the local keystore again under a new master key."""

from argparse import BooleanOptionalAction
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.management.json_command import JsonCommand
from keyvault.services.recording.authorization import authorize
from keyvault.services.secrets.master_key import rotate_master_key


class Command(JsonCommand):
    help = (
        "Encrypt the local keystore and the seeds of active operators' second factors again, under a new master key. "
        "Stop every process of this host first; otherwise the command refuses. It checks first that all of them can "
        "be decrypted, and otherwise changes nothing. If it is killed, run it again. Keep the former key: the command "
        "needs it until it has ended, and so do earlier backups."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--new-key-file",
            metavar="FILE",
            type=Path,
            help="with KEYVAULT_MASTER_KEY: a private file with the new key",
        )
        parser.add_argument(
            "--wrap",
            action=BooleanOptionalAction,
            help="whether the Vault makes the new key and wraps it with the key `master` of the mount "
            "<prefix>-wrapping-service (default: like the present key)",
        )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        grant = authorize(HOST, Permission.INSTALLATION_MAINTAIN, now=self.now)
        try:
            done = rotate_master_key(grant, options["new_key_file"], should_wrap=options["wrap"])
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        steps = [] if done.is_installed else [f"set KEYVAULT_MASTER_KEY to the key in {options['new_key_file']}"]
        return {
            "records": done.records,
            "second_factors": done.second_factors,
            "next": [*steps, "start the service", "make a backup: earlier ones need the former master key"],
        }

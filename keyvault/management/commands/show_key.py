"""Show a key's state and, with a Vault, where the merchant reads it; never its material."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.domain.errors import NotFoundError
from keyvault.management.json_command import JsonCommand
from keyvault.services.keys.credentials import find_delivery_location
from keyvault.services.keys.lifecycle import describe_key, get_key


class Command(JsonCommand):
    help = "Show a key's state, dates and use."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("key_id")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        key = get_key(options["key_id"])
        if key is None:
            raise NotFoundError(f"There is no key {options['key_id']}.")
        return {**describe_key(key), **find_delivery_location(key.credential)}

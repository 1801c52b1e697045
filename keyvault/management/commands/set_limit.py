"""Set the rate limit of an account or of an endpoint, and print the limit in force."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandError, CommandParser

from keyvault.access.limits import Limit, find_limit_fault
from keyvault.access.permissions import Permission
from keyvault.access.scopes import AccessScope
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, RequestInvalidError
from keyvault.management.mixins import OperatorMixin, add_environment_option
from keyvault.models import Account
from keyvault.services.limits.overrides import (
    account_limit_in_force,
    endpoint_limit_in_force,
    set_account_limit,
    set_endpoint_limit,
)
from keyvault.services.merchants.merchants import find_account


class Command(OperatorMixin):
    help = (
        "Set the rate limit of an account (--merchant), of an endpoint for every account of an environment "
        "(--endpoint), or of an endpoint for one account (both). Running servers apply it before the command returns."
    )

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("--merchant", metavar="ID")
        add_environment_option(parser)
        parser.add_argument("--endpoint", metavar="NAME")
        parser.add_argument("--rate", type=int, metavar="N", help="maximum requests per period, also as a burst")
        parser.add_argument("--per-seconds", type=int, metavar="S", help="length of the period in seconds")
        parser.add_argument("--clear", action="store_true", help="restore the default")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        limit = _parse_limit(options)
        environment, endpoint = Environment(options["environment"]), options["endpoint"]
        if options["merchant"] is None and endpoint is None:
            raise CommandError("give --merchant, --endpoint, or both", returncode=2)
        account = find_account(options["merchant"], environment) if options["merchant"] is not None else None
        within = AccessScope(environments=frozenset({environment}))
        grant = self.operator_grant(options, Permission.LIMITS_WRITE, account, within)
        if endpoint is not None:
            set_endpoint_limit(grant, environment, endpoint, limit, account)
        elif account is not None:
            set_account_limit(grant, account, limit)
        return _in_force(environment, endpoint, account)


def _parse_limit(options: Mapping[str, Any]) -> Limit | None:
    """Return the requested limit; None with --clear."""
    rate, per_seconds = options["rate"], options["per_seconds"]
    if options["clear"] and rate is None and per_seconds is None:
        return None
    if options["clear"] or rate is None or per_seconds is None:
        raise CommandError("give --rate and --per-seconds, or --clear", returncode=2)
    if (fault := find_limit_fault(rate, per_seconds)) is not None:
        raise RequestInvalidError("Invalid limit.", [Fault("/rate", fault)])
    return Limit(rate, per_seconds)


def _in_force(environment: Environment, endpoint: str | None, account: Account | None) -> dict[str, Any]:
    if endpoint is None and account is not None:
        found = account_limit_in_force(account)
    else:
        found = endpoint_limit_in_force(environment, endpoint or "", account)
    return {
        "merchant": None if account is None else account.merchant_id,
        "environment": environment,
        "endpoint": endpoint,
        "rate": None if found.limit is None else found.limit.count,
        "per_seconds": None if found.limit is None else found.limit.seconds,
        "source": found.source,
    }

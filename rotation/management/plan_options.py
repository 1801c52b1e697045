"""Plan options shared by every command that requests a rotation."""

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from django.core.management.base import CommandParser

from keyvault.domain.errors import Fault, RequestInvalidError
from rotation.domain.policy import AtDeadline, DeliveryChannel, Proof, Reinstatement
from rotation.services.rotations.planning import PlanOverrides

_NUMBERS = {
    "proof_count": "number of authentications that prove use",
    "proof_sources": "number of distinct sources of these",
    "soak_seconds": "minimum time since the first of these, in seconds",
    "quiet_seconds": "time without a use of the old key, in seconds",
    "quarantine_seconds": "time the old key is suspended before it is revoked, in seconds",
    "expires_in_days": "lifetime of the replacement, in days",
}
_TIMES = {
    "not_before": "the earliest time to begin",
    "deadline": "when an unfinished rotation stalls and both keys stay",
    "retire_at": "for a public key: the date on which the old one is taken out of service",
}
_CHOICES: dict[str, tuple[type[StrEnum], str]] = {
    "proof": (Proof, "how the replacement is proved to be in use"),
    "at_deadline": (AtDeadline, "what a proved rotation does at its deadline"),
    "reinstatement": (Reinstatement, "whether a known source reinstates the quarantined key"),
}


def add_plan_options(parser: CommandParser) -> None:
    parser.add_argument("--reason", default="")
    for name, (kind, text) in _CHOICES.items():
        parser.add_argument(_option(name), choices=[each.value for each in kind], help=text)
    for name, text in _NUMBERS.items():
        parser.add_argument(_option(name), type=int, metavar="N", help=text)
    for name, text in _TIMES.items():
        parser.add_argument(_option(name), metavar="TIME", help=f"{text}; ISO 8601, UTC without an offset")
    parser.add_argument(
        "--webhook",
        action="store_true",
        help="require that the merchant's endpoint accepts the message before delivery counts",
    )


def read_overrides(options: Mapping[str, Any]) -> PlanOverrides:
    """Read the plan overrides. Raises RequestInvalidError for an invalid time."""
    values: dict[str, Any] = {"reason": options["reason"]}
    values |= {name: options[name] for name in _NUMBERS}
    values |= {name: kind(options[name]) for name, (kind, _) in _CHOICES.items() if options[name]}
    values |= {name: read_time(name, options[name]) for name in _TIMES if options[name]}
    if options["webhook"]:
        values["channels"] = (DeliveryChannel.SECRET_BACKEND, DeliveryChannel.WEBHOOK)
    return PlanOverrides(**values)


def read_time(name: str, text: str) -> datetime:
    """Read a time in ISO 8601, UTC unless it has an offset. Raises RequestInvalidError."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        fault = Fault(f"/{name}", "a time in ISO 8601, such as 2027-01-31T09:00:00+01:00")
        raise RequestInvalidError("The time is invalid.", [fault]) from error
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"

"""Plan options shared by every command that requests a rotation."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from django.core.management.base import CommandParser

from keyvault.domain.errors import Fault, RequestInvalidError
from rotation.domain.plan_fields import FIELDS, NUMBERS, DeliveryChannel, FieldType, PlanField, PlanOverrides


def add_plan_options(parser: CommandParser, plan_fields: Iterable[PlanField] = tuple(FIELDS.values())) -> None:
    """Add an option for each field but a window, which the console and REST can set."""
    for field in plan_fields:
        option = f"--{field.name.replace('_', '-')}"
        if field.type is FieldType.CHANNELS:
            parser.add_argument("--webhook", action="store_true", help=f"{field.flag_label}. {field.flag_help}")
        elif field.type is FieldType.FLAG:
            parser.add_argument(option, action="store_true", help=_help(field))
        elif field.type is FieldType.CHOICE:
            parser.add_argument(option, choices=[choice.value for choice in field.choices], help=_help(field))
        elif field.type in NUMBERS:
            parser.add_argument(option, type=int, metavar="N", help=_help(field))
        elif field.type is FieldType.INSTANT:
            parser.add_argument(
                option, metavar="TIME", help=f"{_help(field)} The time is in ISO 8601, UTC without an offset."
            )
        elif field.type is FieldType.NAMES:
            parser.add_argument(option, action="append", metavar="NAME", help=f"{_help(field)} Repeat it for each.")
        elif field.type is FieldType.TEXT:
            parser.add_argument(option, default="", metavar="TEXT", help=_help(field))


def _help(field: PlanField) -> str:
    return field.describe().replace("%", "%%")


def read_overrides(
    options: Mapping[str, Any], plan_fields: Iterable[PlanField] = tuple(FIELDS.values())
) -> PlanOverrides:
    """Read the plan overrides. Raises RequestInvalidError for an invalid time."""
    values: dict[str, Any] = {}
    for field in plan_fields:
        if field.type is FieldType.WINDOW:
            continue
        if field.type is FieldType.CHANNELS:
            if options["webhook"]:
                values[field.name] = (DeliveryChannel.SECRET_BACKEND, DeliveryChannel.WEBHOOK)
        elif (value := options[field.name]) is not None:
            values[field.name] = _read(field, value)
    return PlanOverrides(**values)


def _read(field: PlanField, value: Any) -> Any:
    if field.type is FieldType.INSTANT:
        return read_time(field.name, value)
    if field.type is FieldType.NAMES:
        return tuple(value)
    return field.read_choice(value) if field.type is FieldType.CHOICE else value


def read_time(name: str, text: str) -> datetime:
    """Read a time in ISO 8601, UTC unless it has an offset. Raises RequestInvalidError."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        fault = Fault(f"/{name}", "a time in ISO 8601, such as 2027-01-31T09:00:00+01:00")
        raise RequestInvalidError("The time is invalid.", [fault]) from error
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)

"""The access review: who may do what, and which roles and operators are no longer used."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from enum import StrEnum
from io import StringIO
from typing import Any

from django.db.models import QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.roles import ROLE_PERMISSIONS, Role
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Operator
from keyvault.services.operators.approving_persons import has_factor_at_provider
from keyvault.services.operators.operators import list_operators
from keyvault.services.operators.role_use import is_unused
from keyvault.services.recording.transaction import recorded
from keyvault.services.sessions.second_factors import list_with_second_factor

_BATCH = 500
"""Maximum operators that one query reads."""

_FORMULA = ("=", "+", "-", "@")
"""First characters of a cell that a spreadsheet would compute."""


@dataclass(frozen=True, slots=True)
class RoleAccess:
    """A role of an operator. `is_unused`: neither used nor granted within 90 days.

    `granted_at`: None if the role was granted by a direct write to the database.
    """

    role: Role
    granted_at: datetime | None
    last_used_at: datetime | None
    is_unused: bool

    @property
    def permissions(self) -> list[Permission]:
        return sorted(ROLE_PERMISSIONS[self.role])


class SecondFactor(StrEnum):
    """Where an operator has a second factor, as the export has it. `YES`: here."""

    YES = "yes"
    IDENTITY_PROVIDER = "identity_provider"
    NO = "no"


@dataclass(frozen=True, slots=True)
class OperatorAccess:
    """The permissions of an operator. A disabled operator has none, regardless of its roles."""

    operator: Operator
    second_factor: SecondFactor
    roles: list[RoleAccess]


def list_reviewed() -> QuerySet[Operator]:
    """Return all operators by name, with their roles and the use of these."""
    rows: QuerySet[Operator] = list_operators().prefetch_related("role_uses")
    return rows


def review_access(operators: Iterable[Operator], now: datetime) -> list[OperatorAccess]:
    """Return the access of each of the operators of `list_reviewed`."""
    rows = list(operators)
    secured = list_with_second_factor(rows)
    at_provider = Operator.objects.filter(has_factor_at_provider(), pk__in=[row.pk for row in rows])
    factors = dict.fromkeys(at_provider.values_list("pk", flat=True), SecondFactor.IDENTITY_PROVIDER)
    factors |= dict.fromkeys(secured, SecondFactor.YES)
    return [OperatorAccess(row, factors.get(row.pk, SecondFactor.NO), list(_list_roles(row, now))) for row in rows]


def iterate_access(now: datetime) -> Iterator[OperatorAccess]:
    """Yield the access of every operator, read in batches."""
    rows, last = list_reviewed(), ""
    while batch := review_access(rows.filter(username__gt=last)[:_BATCH], now):
        yield from batch
        last = batch[-1].operator.username


@dataclass(frozen=True, slots=True)
class AccessLine:
    """One line of the export: a role of an operator, or an operator without roles."""

    username: str
    person: str
    state: str
    merchants: str
    environments: str
    created_at: str
    last_sign_in_at: str | None
    second_factor: str
    role: str
    role_granted_at: str | None
    role_last_used_at: str | None
    role_unused: str
    permissions: str


def begin_review_export(grant: Grant) -> Iterator[dict[str, Any]]:
    """Record that the operator exports the access review of the whole installation, and return its lines."""
    with recorded(grant, Permission.OPERATORS_READ, "access_review.exported"):
        pass
    return export_lines(grant.at)


def export_lines(now: datetime) -> Iterator[dict[str, Any]]:
    """Yield the lines of the export."""
    for access in iterate_access(now):
        if not access.roles:
            yield asdict(_line(access, None))
        for role in access.roles:
            yield asdict(_line(access, role))


def format_csv(lines: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the export as CSV, after one with the names of the columns."""
    yield _csv_line([field.name for field in fields(AccessLine)])
    for line in lines:
        yield _csv_line([_plain(value) for value in line.values()])


def _list_roles(operator: Operator, now: datetime) -> Iterator[RoleAccess]:
    uses = {use.role: use for use in operator.role_uses.all()}
    for role in sorted(role for role in Role if role in {group.name for group in operator.groups.all()}):
        if (use := uses.get(role)) is None:
            yield RoleAccess(role, None, None, is_unused=True)
        else:
            yield RoleAccess(role, use.granted_at, use.last_used_at, is_unused(use, now))


def _line(access: OperatorAccess, role: RoleAccess | None) -> AccessLine:
    operator = access.operator
    return AccessLine(
        username=operator.username,
        person=operator.person,
        state="active" if operator.is_active else "disabled",
        merchants=_list_merchants(operator),
        environments=" ".join(sorted(operator.access_scope.environments)),
        created_at=format_timestamp(operator.date_joined),
        last_sign_in_at=format_timestamp(operator.last_login),
        second_factor=access.second_factor,
        role=role.role if role else "",
        role_granted_at=format_timestamp(role.granted_at) if role else None,
        role_last_used_at=format_timestamp(role.last_used_at) if role else None,
        role_unused=("yes" if role.is_unused else "no") if role else "",
        permissions=" ".join(role.permissions) if role else "",
    )


def _list_merchants(operator: Operator) -> str:
    merchants = operator.access_scope.merchants
    return "all" if merchants is None else " ".join(sorted(merchants)) or "none"


def _plain(value: str | None) -> str:
    """Return the text of a cell, in quotes where a spreadsheet would take it for a formula."""
    text = value or ""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _csv_line(cells: list[str]) -> str:
    line = StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()

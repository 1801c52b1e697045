"""Private keys that are older than the cryptoperiod of their environment, for the console's overview."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Case, Exists, IntegerField, OuterRef, Q, QuerySet, Subquery, When

from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.models import Key
from keyvault.models.row_count import RowCount, RowSum
from rotation.models import RotationSchedule

MAX_OVERDUE = 200
"""Maximum keys of an environment that are counted, those activated first."""


def select_period(environment: Environment) -> QuerySet[RotationSchedule]:
    """Select the enabled schedule of the environment, if it has one."""
    rows = RotationSchedule.objects.filter(account__isnull=True, credential__isnull=True)
    return rows.filter(environment=environment, is_enabled=True)


def overdue_counts(periods: Mapping[Environment, int], now: datetime) -> dict[str, Subquery]:
    """Return columns that count keys older than the cryptoperiod of their environment's schedule.

    For each environment: `old_ENVIRONMENT`, the keys of any kind, at most MAX_OVERDUE + 1; and `overdue_ENVIRONMENT`,
    those of them that are private and have no schedule of their account or credential.

    Args:
        periods: cryptoperiod of each environment's schedule, in days.
    """
    counts: dict[str, Subquery] = {}
    for environment, days in periods.items():
        old = _list_old(environment, now - timedelta(days=days))
        counts[f"old_{environment}"] = RowCount(old.values("pk")[: MAX_OVERDUE + 1])
        counts[f"overdue_{environment}"] = RowSum(_mark_overdue(old).values("number")[: MAX_OVERDUE + 1])
    return counts


def _list_old(environment: Environment, before: datetime) -> QuerySet[Key]:
    active = Key.objects.filter(account_environment=environment, state=KeyState.ACTIVE, activated_at__lt=before)
    return active.order_by("activated_at")


def _mark_overdue(old: QuerySet[Key]) -> QuerySet[Any]:
    """Annotate 1 as `number` of the keys to which the environment's schedule applies.

    No condition: the database would read all keys of other kinds before it finds as many as the limit.
    """
    narrower = RotationSchedule.objects.filter(is_enabled=True)
    applies = (
        Q(credential__kind=KeyKind.PRIVATE)
        & ~Q(Exists(narrower.filter(credential=OuterRef("credential"))))
        & ~Q(Exists(narrower.filter(account=OuterRef("credential__account"))))
    )
    return old.annotate(number=Case(When(applies, then=1), default=0, output_field=IntegerField()))

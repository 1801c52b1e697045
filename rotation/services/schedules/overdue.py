"""Private keys that are older than the cryptoperiod of their environment, for the console's overview."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Exists, OuterRef, QuerySet

from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.models import Key
from keyvault.models.row_count import RowCount
from rotation.models import RotationSchedule

MAX_OVERDUE = 500
"""Maximum keys of an environment that are counted, those activated first."""


def select_period(environment: Environment) -> QuerySet[RotationSchedule]:
    """Select the enabled schedule of the environment, if it has one."""
    rows = RotationSchedule.objects.filter(account__isnull=True, credential__isnull=True)
    return rows.filter(environment=environment, is_enabled=True)


def overdue_counts(periods: Mapping[Environment, int], now: datetime) -> dict[str, RowCount]:
    """Return columns that count keys older than the cryptoperiod of their environment's schedule.

    For each environment: `old_ENVIRONMENT`, the keys of any kind, at most MAX_OVERDUE + 1; and `overdue_ENVIRONMENT`,
    those of them that are private and have no schedule of their account or credential.

    Args:
        periods: cryptoperiod of each environment's schedule, in days.
    """
    counts = {}
    for environment, days in periods.items():
        old = _list_old(environment, now - timedelta(days=days))
        counts[f"old_{environment}"] = RowCount(old)
        counts[f"overdue_{environment}"] = RowCount(_list_overdue(old))
    return counts


def _list_old(environment: Environment, before: datetime) -> QuerySet[Any, Any]:
    active = Key.objects.filter(account_environment=environment, state=KeyState.ACTIVE, activated_at__lt=before)
    return active.order_by("activated_at").values("pk")[: MAX_OVERDUE + 1]


def _list_overdue(old: QuerySet[Any, Any]) -> QuerySet[Any, Any]:
    narrower = RotationSchedule.objects.filter(is_enabled=True)
    return (
        Key.objects.filter(pk__in=old, credential__kind=KeyKind.PRIVATE)
        .exclude(Exists(narrower.filter(credential=OuterRef("credential"))))
        .exclude(Exists(narrower.filter(account=OuterRef("credential__account"))))
        .order_by()
        .values("pk")
    )

"""Suspected exposures: verified keys that were presented in a URL or from a browser."""

from collections.abc import Iterable, Sequence
from datetime import timedelta

from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from keyvault.admin.framework.filters import state_filter
from keyvault.admin.framework.widgets import NOTHING, Table, badge, moment, mono
from keyvault.models import UseBucket
from keyvault.models.usage import UseSpan
from keyvault.services.usage.reports import KeyUser

_EXPOSURE_DAYS = 30
"""Time for which the overview shows a suspected exposure, in days."""

_MAX_ROWS = 20


def exposures() -> QuerySet[UseBucket]:
    """Return recent uses that may have exposed the key, newest first. The key itself was verified."""
    since = Now() - timedelta(days=_EXPOSURE_DAYS)
    # The index has the begin of a bucket, which is at most a day before its last use.
    recent = UseBucket.objects.filter(is_exposure=True, span__in=UseSpan, minute__gte=since - timedelta(days=1))
    return recent.filter(last_at__gte=since).order_by("-last_at")


def exposure_tables(users: Sequence[KeyUser]) -> Iterable[Table]:
    """Yield the table of the users that may have exposed the key, or nothing."""
    if users:
        yield Table(
            f"Suspected exposures: latest {_MAX_ROWS}" if len(users) > _MAX_ROWS else "Suspected exposures",
            ["type", "source", "user agent", "endpoint", "uses", "first seen", "last seen"],
            [
                [
                    badge(user.outcome),
                    mono(user.source),
                    user.user_agent or NOTHING,
                    user.endpoint or NOTHING,
                    f"{user.count:,}",
                    moment(user.first_at),
                    moment(user.last_at),
                ]
                for user in users[:_MAX_ROWS]
            ],
        )


EXPOSED_FILTER = state_filter(
    lambda: {"lately": Q(pk__in=exposures().values("context__key"))},
    name="exposed",
    title="suspected exposure",
    labels={"lately": f"in the last {_EXPOSURE_DAYS} days"},
)

"""Suspected exposures: verified keys that were presented in a URL or from a browser."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from django.db.models import Q, QuerySet

from keyvault.admin.framework.filters import state_filter
from keyvault.admin.framework.widgets import NOTHING, Table, badge, moment, mono
from keyvault.models import Key, UseBucket
from keyvault.models.usage import EXPOSURES, UseSpan

_EXPOSURE_DAYS = 30
"""Time for which the front page shows a suspected exposure, in days."""


def exposures() -> QuerySet[UseBucket]:
    """Return recent uses that may have exposed the key, newest first. The key itself was verified."""
    since = datetime.now(UTC) - timedelta(days=_EXPOSURE_DAYS)
    # The index has the begin of a bucket, which is at most a day before its last use.
    recent = UseBucket.objects.filter(is_exposure=True, span__in=UseSpan, minute__gte=since - timedelta(days=1))
    return recent.filter(last_at__gte=since).order_by("-last_at")


def exposure_tables(key: Key) -> Iterable[Table]:
    """Yield the table of all exposures of the key, or nothing."""
    exposed = UseBucket.objects.filter(context__key=key, context__outcome__in=EXPOSURES)
    found = exposed.select_related("context").order_by("-last_at")[:20]
    if found:
        yield Table(
            "Suspected exposures",
            ["type", "source", "user agent", "endpoint", "uses", "last seen"],
            [
                [
                    badge(use.context.outcome),
                    mono(use.context.source),
                    use.context.user_agent or NOTHING,
                    use.context.endpoint or NOTHING,
                    use.count,
                    moment(use.last_at),
                ]
                for use in found
            ],
        )


EXPOSED_FILTER = state_filter(
    lambda: {"lately": Q(pk__in=exposures().values("context__key"))},
    name="exposed",
    title="suspected exposure",
    labels={"lately": f"in the last {_EXPOSURE_DAYS} days"},
)

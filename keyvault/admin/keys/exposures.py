"""Suspected exposures: verified keys that were presented in a URL or from a browser."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from django.db.models import Q, QuerySet

from keyvault.admin.framework.filters import state_filter
from keyvault.admin.framework.widgets import NOTHING, Table, badge, mono, short_moment
from keyvault.models import Key, UseBucket
from keyvault.models.usage import EXPOSURES

_EXPOSURE_DAYS = 30
"""How long a suspected exposure is shown on the front page, in days."""


def exposures() -> QuerySet[UseBucket]:
    """Return recent uses that may have exposed the key, newest first. The key itself was verified."""
    since = datetime.now(UTC) - timedelta(days=_EXPOSURE_DAYS)
    return UseBucket.objects.filter(outcome__in=EXPOSURES, last_at__gte=since).order_by("-last_at")


def exposure_tables(key: Key) -> Iterable[Table]:
    """Yield the table of all exposures of the key, or nothing."""
    found = UseBucket.objects.filter(key=key, outcome__in=EXPOSURES).order_by("-last_at")[:20]
    if found:
        yield Table(
            "Suspected exposures",
            ["type", "source", "user agent", "endpoint", "uses", "last seen (UTC)"],
            [
                [
                    badge(use.outcome),
                    mono(use.source),
                    use.user_agent or NOTHING,
                    use.endpoint or NOTHING,
                    use.count,
                    short_moment(use.last_at),
                ]
                for use in found
            ],
        )


EXPOSED_FILTER = state_filter(
    lambda: {"lately": Q(pk__in=exposures().values("key_id"))},
    name="exposed",
    title="suspected exposure",
    labels={"lately": f"in the last {_EXPOSURE_DAYS} days"},
)

"""Verifiers as rows, made by hand: what a follower would have written, by the database's clock."""

from datetime import datetime, timedelta
from typing import Any

from django.db.models.functions import Now

from keyvault.models import Confirmation, Verifier

STALENESS = timedelta(minutes=5)
"""Lifetime that no test exceeds, so that a verifier stays live."""


def make_verifier(verifier_id: str = "verifier-1", **columns: Any) -> Verifier:
    """Make a live verifier that has confirmed nothing."""
    row = Verifier.objects.create(
        verifier_id=verifier_id,
        **{
            "entry_point": "server",
            "started_at": Now(),
            "seen_at": Now(),
            "staleness_ms": int(STALENESS.total_seconds() * 1000),
            **columns,
        },
    )
    row.refresh_from_db()
    return row


def confirm(verifier: Verifier, sequence: int) -> None:
    """Record that the verifier confirms the sequence now."""
    Verifier.objects.filter(pk=verifier.pk).update(confirmed_sequence=sequence, seen_at=Now())
    Confirmation.objects.create(verifier=verifier, sequence=sequence, at=Now())


def fall_silent(verifier: Verifier, since: timedelta = STALENESS + timedelta(seconds=1)) -> None:
    """Record that the verifier was last seen that long ago."""
    Verifier.objects.filter(pk=verifier.pk).update(seen_at=database_now() - since)


def database_now() -> datetime:
    row = Verifier(verifier_id="clock", entry_point="server", started_at=Now(), seen_at=Now(), staleness_ms=1)
    row.save()
    row.refresh_from_db()
    row.delete()
    return row.seen_at

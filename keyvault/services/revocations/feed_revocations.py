"""Revocations in the change feed, up to the last change below which no row can still appear."""

from django.db import connection
from django.db.models import Max

from keyvault.domain.ids import Subject
from keyvault.models import Change, Verifier
from keyvault.models.recording import RecordedModel
from keyvault.services.recording.revocation_log import ENDING


def find_last_settled() -> int:
    """Return the newest sequence up to which no further change can appear; 0 if none is known.

    On PostgreSQL that is the newest sequence that any verifier has confirmed. On SQLite, which has one writer, it is
    the newest row.
    """
    settled = Change.objects.all()
    if connection.vendor == "postgresql":
        confirmed = Verifier.objects.aggregate(newest=Max("confirmed_sequence"))["newest"]
        settled = settled.filter(sequence__lte=confirmed or 0)
    return settled.order_by("-sequence").values_list("sequence", flat=True).first() or 0


def list_ended(after: int, last: int, limit: int) -> tuple[list[tuple[Subject, RecordedModel]], int]:
    """Return the ended rows of the next changes, and the sequence of the last change that was read."""
    changes = Change.objects.filter(sequence__gt=after, sequence__lte=last, subject_kind__in=ENDING)
    found = list(changes.order_by("sequence")[:limit])
    end = found[-1].sequence if len(found) == limit else last
    ended: list[tuple[Subject, RecordedModel]] = []
    for kind, model in ENDING.items():
        names = {change.subject_id for change in found if change.subject_kind == kind}
        rows = model._default_manager.filter(pk__in=names) if names else ()
        ended += [((kind, str(row.pk)), row) for row in rows if row.has_ended()]
    return ended, end

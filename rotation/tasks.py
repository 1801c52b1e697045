"""Celery tasks. Messages carry ids only; a lost or duplicate message changes nothing."""

from datetime import UTC, datetime

from celery import shared_task

from rotation.services.campaigns.runner import tick
from rotation.services.rotations.engine import advance_all_due
from rotation.services.schedules.starting import begin_due


@shared_task(name="rotation.tasks.advance_due", expires=5)
def advance_due() -> None:
    """Advance due rotations in this task; one message per rotation would delay all other tasks in the queue."""
    advance_all_due()


@shared_task(name="rotation.tasks.begin_scheduled", expires=30)
def begin_scheduled() -> None:
    begin_due(datetime.now(UTC))


@shared_task(name="rotation.tasks.advance_campaigns", expires=30)
def advance_campaigns() -> None:
    tick(datetime.now(UTC))

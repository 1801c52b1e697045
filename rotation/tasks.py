"""Celery tasks, thin: messages carry ids only, and a lost or doubled one changes nothing."""

from datetime import UTC, datetime

from celery import shared_task

from rotation.services.engine import advance_rotation, list_due


@shared_task(name="rotation.tasks.advance_due", expires=30)
def advance_due() -> None:
    for rotation_id in list_due(datetime.now(UTC)):
        advance.apply_async((rotation_id,), expires=30)


@shared_task(name="rotation.tasks.advance")
def advance(rotation_id: str) -> None:
    advance_rotation(rotation_id)

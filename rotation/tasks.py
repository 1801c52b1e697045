"""Celery tasks. Messages carry ids only; a lost or duplicate message changes nothing."""

from datetime import UTC, datetime
from typing import Any

from celery import current_app, shared_task

from keyvault.services.work.shared_jobs import shared_jobs
from keyvault.wire.trace_context import traced
from rotation.services.campaigns.runner import tick
from rotation.services.rotations import engine, side_effects, turns
from rotation.services.rotations.turns import Turn
from rotation.services.schedules.starting import begin_due


@shared_task(name="rotation.tasks.dispatch_due")
def dispatch_due(environment: str = "") -> None:
    """Send one message per due rotation of the environment; blank: of all that this process serves."""
    environments = [environment] if environment else None
    turns.dispatch_due(dispatch=send_turn, environments=environments, count_messages=count_messages)


@shared_task(name="rotation.tasks.advance_rotation")
def advance_rotation(rotation_id: str) -> None:
    engine.advance_rotation(rotation_id, is_dispatched=True)


def send_turn(turn: Turn) -> None:
    """Send the message of one turn. Raises what the broker's client raises, after one attempt."""
    with traced(turn.traceparent):
        advance_rotation.apply_async(
            (turn.rotation_id,), queue=_queue_of(turn.environment, turn.is_urgent), retry=False
        )


def count_messages(environment: str, is_urgent: bool) -> int:
    """Return how many messages wait in the broker's queue. Raises what the broker's client raises."""
    queue = current_app.amqp.queues[_queue_of(environment, is_urgent)]
    with current_app.connection_or_acquire() as connection:
        declared: Any = queue(connection.default_channel).queue_declare()
    return int(declared.message_count)


def _queue_of(environment: str, is_urgent: bool) -> str:
    return f"{'emergencies' if is_urgent else 'rotations'}.{environment}"


@shared_task(name="rotation.tasks.forget_pending")
def forget_pending(environment: str = "") -> bool:
    return shared_jobs.run("forget_pending", environment, lambda: side_effects.forget_due(datetime.now(UTC)))


@shared_task(name="rotation.tasks.begin_scheduled")
def begin_scheduled(environment: str) -> None:
    begin_due(datetime.now(UTC), [environment])


@shared_task(name="rotation.tasks.advance_campaigns")
def advance_campaigns(environment: str = "") -> None:
    """Advance the campaigns of the environment; blank: of all that this process serves."""
    tick(environments=[environment] if environment else None)

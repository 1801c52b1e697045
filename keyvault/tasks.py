"""Celery tasks, thin: which rows are due is in the database, a message only says "look"."""

import logging

from celery import shared_task

from keyvault.services import upkeep, webhook_deliveries

_log = logging.getLogger(__name__)


@shared_task(name="keyvault.tasks.issue_approved", expires=30)
def issue_approved() -> None:
    upkeep.issue_due()


@shared_task(name="keyvault.tasks.deliver_webhooks", expires=30)
def deliver_webhooks() -> None:
    webhook_deliveries.deliver_due()


@shared_task(name="keyvault.tasks.upkeep", expires=30)
def run_upkeep() -> None:
    """What ends keys comes first; no step's fault keeps another from its turn. Raises the first fault at the end."""
    faults = []
    for step in (upkeep.expire_due, upkeep.burn_due, upkeep.destroy_due, upkeep.forget_due):
        try:
            step()
        except Exception as fault:  # noqa: BLE001  whatever it is, it is told here and raised below
            _log.exception("a step of the upkeep failed")
            faults.append(fault)
    if faults:
        raise faults[0]

"""Celery tasks, thin: which rows are due is in the database, a message only says "look"."""

from celery import shared_task

from keyvault.services import upkeep


@shared_task(name="keyvault.tasks.issue_approved", expires=30)
def issue_approved() -> None:
    upkeep.issue_due()


@shared_task(name="keyvault.tasks.upkeep", expires=30)
def run_upkeep() -> None:
    upkeep.expire_due()
    upkeep.destroy_due()

"""Celery tasks: each runs one service. A message carries no data; the database has the due rows."""

import logging
from datetime import UTC, datetime

from celery import shared_task

from keyvault.services import maintenance
from keyvault.services.audit import checkpoints
from keyvault.services.reconciliation import reconciliation
from keyvault.services.webhooks import deliveries

_log = logging.getLogger(__name__)


@shared_task(name="keyvault.tasks.issue_approved")
def issue_approved() -> None:
    maintenance.issue_due()


@shared_task(name="keyvault.tasks.deliver_webhooks")
def deliver_webhooks(environment: str) -> None:
    deliveries.deliver_due(environments=[environment])


@shared_task(name="keyvault.tasks.sign_checkpoints")
def sign_checkpoints() -> None:
    checkpoints.sign_due(datetime.now(UTC))


@shared_task(name="keyvault.tasks.run_maintenance")
def run_maintenance() -> None:
    """Run every maintenance step, those that end keys first.

    A failed step does not stop the others. Raises the first error at the end.
    """
    errors = []
    ends = (
        maintenance.compare_revocation_log,
        maintenance.expire_due,
        maintenance.discard_due,
        maintenance.backfill_revocation_log,
    )
    copies = (
        maintenance.destroy_due,
        maintenance.settle_due,
        maintenance.settle_connections_due,
        maintenance.forget_paths_due,
    )
    for step in (*ends, maintenance.anchor_revocations, *copies, maintenance.renew_peppers, maintenance.forget_due):
        try:
            step()
        except Exception as error:  # noqa: BLE001  logged here, raised below
            _log.exception("a maintenance step failed")
            errors.append(error)
    if errors:
        raise errors[0]


@shared_task(name="keyvault.tasks.watch_backend")
def watch_backend() -> None:
    maintenance.watch_backend()


@shared_task(name="keyvault.tasks.reconcile_backend")
def reconcile_backend() -> None:
    reconciliation.reconcile_due()

"""Celery tasks: each runs one service. A message names an environment only; the database has the due rows.

A task that uses `shared_jobs` does the work of all environments that its worker serves. It returns whether it did: a
message that another one of its round makes superfluous is no success.
"""

import logging
from datetime import UTC, datetime

from celery import shared_task

from keyvault.services import alarm_messages, maintenance
from keyvault.services.audit import checkpoints
from keyvault.services.reconciliation import reconciliation
from keyvault.services.usage import totals
from keyvault.services.webhooks import deliveries
from keyvault.services.work.shared_jobs import shared_jobs

_log = logging.getLogger(__name__)


@shared_task(name="keyvault.tasks.issue_approved")
def issue_approved(environment: str = "") -> bool:
    return shared_jobs.run("issue_approved", environment, maintenance.issue_due)


@shared_task(name="keyvault.tasks.deliver_webhooks")
def deliver_webhooks(environment: str = "") -> bool:
    return shared_jobs.run("deliver_webhooks", environment, deliveries.deliver_due)


@shared_task(name="keyvault.tasks.send_alarms")
def send_alarms(environment: str = "") -> bool:
    return shared_jobs.run("send_alarms", environment, alarm_messages.send_due)


@shared_task(name="keyvault.tasks.sign_checkpoints")
def sign_checkpoints(environment: str = "") -> bool:
    return shared_jobs.run("sign_checkpoints", environment, lambda: checkpoints.sign_due(datetime.now(UTC)))


@shared_task(name="keyvault.tasks.run_maintenance")
def run_maintenance(environment: str = "") -> bool:
    return shared_jobs.run("run_maintenance", environment, _maintain)


def _maintain() -> None:
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
    for step in (*ends, maintenance.anchor_revocations, *copies, maintenance.renew_peppers, maintenance.shred_due):
        try:
            step()
        except Exception as error:  # noqa: BLE001  logged here, raised below
            _log.exception("a maintenance step failed")
            errors.append(error)
    if errors:
        raise errors[0]


@shared_task(name="keyvault.tasks.forget_expired_rows")
def forget_expired_rows(environment: str = "") -> bool:
    return shared_jobs.run("forget_expired_rows", environment, maintenance.forget_due)


@shared_task(name="keyvault.tasks.total_usage")
def total_usage(environment: str = "") -> bool:
    return shared_jobs.run("total_usage", environment, lambda: totals.total_due(datetime.now(UTC)))


@shared_task(name="keyvault.tasks.watch_backend")
def watch_backend(environment: str = "") -> bool:
    return shared_jobs.run("watch_backend", environment, maintenance.watch_backend)


@shared_task(name="keyvault.tasks.reconcile_backend")
def reconcile_backend(environment: str = "") -> bool:
    return shared_jobs.run("reconcile_backend", environment, reconciliation.reconcile_due)

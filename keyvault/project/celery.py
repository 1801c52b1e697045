"""Celery's app. Messages are wake-ups and carry ids only; a lost or doubled one changes nothing."""

import os
from typing import Any

from celery import Celery
from celery.signals import worker_init

from keyvault.project import spool

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
spool.register()

app = Celery("keyvault")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["keyvault", "rotation"])


@worker_init.connect
def _refuse_to_run_wrong(**_: Any) -> None:
    """A worker with the wrong keystore would burn keys and mint others that nobody can verify."""
    from keyvault.services.startup.startup_checks import start_or_exit

    start_or_exit("worker")  # Celery swallows what a signal handler raises, but for this

"""Celery's app. Messages are wake-ups and carry ids only; a lost or doubled one changes nothing."""

import os
import sys
from typing import Any

from celery import Celery
from celery.signals import worker_init
from django.core.exceptions import ImproperlyConfigured

from keyvault.project import spool

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
spool.register()

app = Celery("keyvault")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["keyvault", "rotation"])


@worker_init.connect
def _refuse_to_run_wrong(**_: Any) -> None:
    """A worker with the wrong keystore would burn keys and mint others that nobody can verify."""
    from keyvault.services.start import require_ready

    try:
        require_ready()
    except ImproperlyConfigured as error:
        # Celery swallows what a signal handler raises, but for this.
        sys.exit(f"the worker does not start: {error}")

"""The Celery app. Messages are wake-ups and carry ids only; a lost or repeated one changes nothing."""

import os
from typing import Any

from celery import Celery
from celery.signals import worker_init

from keyvault.project import spool

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
spool.register()

app = Celery("keyvault")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()  # of every installed app


@worker_init.connect
def _check_startup(**_: Any) -> None:
    """Exit if misconfigured: a wrong keystore would discard keys and issue others that nothing can verify."""
    from keyvault.services.startup.startup_checks import start_or_exit

    start_or_exit("worker")  # Celery ignores other exceptions of a signal handler


@worker_init.connect
def _send_turns(**_: Any) -> None:
    """Let this process dispatch the rotations that its own changes make due."""
    from rotation.services.rotations.turns import dispatcher
    from rotation.tasks import send_turn

    dispatcher.send = send_turn

"""Celery's app. Messages are wake-ups and carry ids only; a lost or doubled one changes nothing."""

import os

from celery import Celery

from keyvault.project import spool

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
spool.register()

app = Celery("keyvault")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["keyvault", "rotation"])

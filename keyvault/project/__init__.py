"""The composition root. Celery's app is re-exported here, so that every process that loads the settings binds
`shared_task` to it and not to Celery's default app."""

from keyvault.project.celery import app as celery_app

__all__ = ["celery_app"]

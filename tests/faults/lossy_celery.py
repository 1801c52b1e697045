"""Celery's command line, in a process whose messages may be lost or duplicated, see `message_loss`.

python -m tests.faults.lossy_celery worker|beat [OPTION...]
"""

import sys

import django

django.setup()

from keyvault.project.celery import app
from tests.faults.message_loss import lose_messages

if __name__ == "__main__":
    lose_messages()
    app.start(argv=sys.argv[1:])

"""Celery's command line in a process whose clock differs from PostgreSQL's by FAULTS_SKEW seconds, as it measures it.

python -m tests.faults.skewed worker|beat [OPTION...]
"""

import os
import sys
from datetime import datetime, timedelta

SKEW = "FAULTS_SKEW"


def skew_clock(seconds: float) -> None:
    """Move the time that this process compares with the database's."""
    from keyvault.services.work import clock

    true_time = clock.host_time

    def host_time() -> datetime:
        return true_time() + timedelta(seconds=seconds)

    clock.host_time = host_time


if __name__ == "__main__":
    import django

    django.setup()
    from keyvault.project.celery import app

    skew_clock(float(os.environ.get(SKEW, "0")))
    app.start(argv=sys.argv[1:])

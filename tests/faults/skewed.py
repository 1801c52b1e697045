"""Celery's command line, in a process whose clock differs from the database's by the seconds in the file FAULTS_CLOCK.

With FAULTS_CHECKPOINT_SECONDS it signs the audit log in that interval, so that a missing signature is seen early.

python -m tests.faults.skewed worker|beat [OPTION...]
"""

import os
import sys
from datetime import datetime, timedelta
from pathlib import Path

import django

django.setup()

from keyvault.project.celery import app
from keyvault.services.audit import checkpoints
from keyvault.services.work import clock

if __name__ == "__main__":
    _true_time, _step = clock.host_time, Path(os.environ["FAULTS_CLOCK"])

    def _skewed() -> datetime:
        return _true_time() + timedelta(seconds=float(_step.read_text()))

    clock.host_time = _skewed
    if seconds := os.environ.get("FAULTS_CHECKPOINT_SECONDS"):
        checkpoints.CHECKPOINT_EVERY = timedelta(seconds=float(seconds))
        for name, entry in app.conf.beat_schedule.items():
            if name.startswith("sign-checkpoints"):
                entry["schedule"] = float(seconds)
    app.start(argv=sys.argv[1:])

"""The Celery app's connection to its broker."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from celery.fixups.django import DjangoFixup
from celery.signals import task_postrun, task_prerun, worker_init
from django.conf import settings
from django.db import Error, connection

from keyvault.hotpath.engine.freshness import SWITCH_SECONDS
from keyvault.models import WorkLease
from keyvault.project import celery
from keyvault.project.celery import app
from rotation.tasks import dispatch_due


def describe_connection(data_dir: Path, broker_url: str, what: str) -> Any:
    """Return the JSON value of an expression over `c`, the connection of the Celery app of a new process."""
    code = (
        "import json; from keyvault.project.celery import app; c = app.connection_for_write();"
        f"print(json.dumps({what}))"
    )
    environment = os.environ | {
        "DJANGO_SETTINGS_MODULE": "keyvault.project.settings",
        "KEYVAULT_DATA_DIR": str(data_dir),
        "KEYVAULT_BROKER_URL": broker_url,
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("scheme", ["amqp", "amqps", "pyamqp"])
def test_rabbitmq_that_does_not_reply_is_given_up(tmp_path: Path, scheme: str) -> None:
    """Guarantee: no request, worker or beat waits forever for a broker that has accepted its connection."""
    url = f"{scheme}://keyvault:secret@127.0.0.1:5672//"
    options, connect_seconds = describe_connection(tmp_path, url, "[c.transport_options, c.connect_timeout]")
    assert options == {"read_timeout": 5, "write_timeout": 5}
    assert connect_seconds <= 5


def test_redis_that_does_not_reply_is_given_up(tmp_path: Path) -> None:
    """Without these bounds a worker waits for a lost Redis for minutes; `test_stop.py` stops one that waits."""
    options = describe_connection(tmp_path, "redis://127.0.0.1:1/0", "c.transport_options")
    assert options == {"socket_connect_timeout": 5, "socket_timeout": 5}


def test_entries_of_a_shared_broker_are_sent_for_each_environment(tmp_path: Path) -> None:
    """Guarantee: a worker of one environment takes no message about another one's work."""
    entries = "[[e['task'], e['options']['queue'], list(e['args'])] for e in app.conf.beat_schedule.values()]"
    found = describe_connection(tmp_path, "redis://127.0.0.1:1/0", entries)
    tasks = {task for task, _, _ in found}
    assert sorted((task, queue.partition(".")[2]) for task, queue, _ in found) == sorted(
        (task, environment) for task in tasks for environment in settings.ENVIRONMENTS
    )
    assert all(arguments == [queue.partition(".")[2]] for _, queue, arguments in found)


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_worker_keeps_its_database_connection_between_tasks() -> None:
    """A new connection costs more than most tasks."""
    worker = DjangoFixup(app).worker_fixup
    connection.ensure_connection()
    kept = connection.connection
    for signal, close in ((task_prerun, worker.on_task_prerun), (task_postrun, worker.on_task_postrun)):
        close(dispatch_due)
        signal.send(sender=dispatch_due)
        assert connection.connection is kept


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_worker_replaces_a_broken_database_connection() -> None:
    """Guarantee: after a loss of its connection to the database, a worker's next task has another one."""
    connection.ensure_connection()
    connection.connection.close()
    with pytest.raises(Error):
        WorkLease.objects.exists()
    task_prerun.send(sender=dispatch_due)
    assert not WorkLease.objects.exists()


def test_worker_switches_between_its_threads_often() -> None:
    """Guarantee: a thread that delivers many webhooks does not delay each query of a rotation's turn by 5 ms."""
    before = sys.getswitchinterval()
    try:
        assert celery._switch_threads_often in worker_init._live_receivers(None)  # type: ignore[attr-defined]  # not in the stubs
        celery._switch_threads_often()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    finally:
        sys.setswitchinterval(before)

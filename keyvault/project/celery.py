"""The Celery app. Messages are wake-ups and carry ids only; a lost or repeated one changes nothing."""

import logging
import os
import signal
import sys
import threading
from time import monotonic
from typing import Any

from celery import Celery, Task
from celery.beat import Scheduler, Service
from celery.signals import beat_init, before_task_publish, task_postrun, task_prerun, worker_init, worker_ready

from keyvault.hotpath.engine.freshness import SWITCH_SECONDS
from keyvault.wire.trace_context import TRACEPARENT, current_traceparent, traced

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
# Django's checks load the console's pages, which no worker serves.
os.environ.setdefault("CELERY_SKIP_CHECKS", "1")

app = Celery("keyvault", task_cls="keyvault.project.celery:TracedTask")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()  # of every installed app

_log = logging.getLogger(__name__)


@worker_init.connect
def _check_startup(**_: Any) -> None:
    """Exit if misconfigured: a wrong keystore would discard keys and issue others that nothing can verify."""
    from keyvault.services.startup.metrics import serve_metrics_or_exit
    from keyvault.services.startup.startup_checks import start_or_exit

    start_or_exit("worker")  # Celery ignores other exceptions of a signal handler
    serve_metrics_or_exit("worker")


@beat_init.connect
def _check_beat(sender: Service, **_: Any) -> None:
    """Exit if beat must not run here. Close the connection, because this thread reads nothing else."""
    from django.db import connection

    from keyvault.services.startup.metrics import serve_metrics_or_exit
    from keyvault.services.startup.processes import process_watch
    from keyvault.services.startup.startup_checks import start_or_exit

    start_or_exit("beat", needs_peppers=False)
    connection.close()
    if threading.current_thread() is threading.main_thread():  # in a thread of the worker, that serves them
        serve_metrics_or_exit("beat")
        _stop_at_signal(sender)
    process_watch.report_as("beat")


def _stop_at_signal(beat: Service) -> None:
    """Replace Celery's signal handler, after which beat may go on.

    That handler (Celery 5.7.0) closes the broker's connection, also under a send that it interrupts. The error of that
    send then replaces the exit, and beat logs it as a failed message.
    """

    def stop(*_: Any) -> None:
        beat.stop()  # should an error replace this exit as well
        raise SystemExit

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


@task_prerun.connect
@task_postrun.connect
def _close_old_connections(sender: Any, **_: Any) -> None:
    """Close the thread's database connection if it is broken or older than its maximum age."""
    from django.db import close_old_connections

    if not sender.request.is_eager:
        close_old_connections()


@before_task_publish.connect
def _pass_trace_on(headers: dict[str, Any], **_: Any) -> None:
    if traceparent := current_traceparent():
        headers.setdefault(TRACEPARENT, traceparent)


class TracedTask(Task):  # type: ignore[type-arg]  # it has no arguments at run time
    """A task that runs in the trace of the request that caused it, and counts its duration.

    A task that returns False did no work, so it is not counted.
    """

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from keyvault.backends import meters

        begun_at = monotonic()
        try:
            with traced(self.request.get(TRACEPARENT)):
                result = super().__call__(*args, **kwargs)
        except BaseException:
            meters.note_task(self.name, monotonic() - begun_at, is_done=False)
            raise
        if result is not False:
            meters.note_task(self.name, monotonic() - begun_at, is_done=True)
        return result


class SettingsScheduler(Scheduler):
    """The stock scheduler, which stores no state, without its computations between two messages.

    The stock one (Celery 5.7.0) wakes up 10 ms early and then asks again and again whether the entry is due, and at
    each time compares the schedule with a copy. The entries are those of the settings, which never change.
    """

    def adjust(self, n: float, drift: float = 0.0) -> float:
        return n

    def schedules_equal(self, old_schedules: Any, new_schedules: Any) -> bool:
        return True


@worker_init.connect
def _switch_threads_often(**_: Any) -> None:
    """Shorten the wait for the interpreter: a task waits for it after each query, while another thread computes."""
    sys.setswitchinterval(SWITCH_SECONDS)


@worker_init.connect
def _send_turns(**_: Any) -> None:
    """Let this process dispatch the rotations that its own changes make due."""
    from rotation.services.rotations.turns import dispatcher
    from rotation.tasks import send_turn

    dispatcher.send = send_turn


@worker_ready.connect
def _report_worker(sender: Any, **_: Any) -> None:
    from keyvault.services.startup.processes import process_watch

    process_watch.report_as("worker", sender.hostname)


@worker_ready.connect
def _start_embedded_beat(**_: Any) -> None:
    """Run beat in a thread of the worker if the broker is the file broker, which serves one host."""
    from django.conf import settings

    from keyvault.project.file_broker import remove_parts

    if settings.IS_FILE_BROKER:
        remove_parts(settings.BROKER_DIR)
        threading.Thread(target=_run_beat, name="beat", daemon=True).start()


def _run_beat() -> None:
    """Run beat; when it fails, end the process, so that its supervisor restarts both."""
    app.set_current()
    try:
        Service(app, scheduler_cls=app.conf.beat_scheduler).start()
    finally:
        _log.error("beat has ended; the worker stops")
        os.kill(os.getpid(), signal.SIGTERM)

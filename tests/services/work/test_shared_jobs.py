"""Jobs of which each environment's queue gets a message run once for a round of these messages."""

from collections.abc import Callable
from types import ModuleType

import pytest
from django.utils.module_loading import import_string

from keyvault.backends import meters
from keyvault.project import settings as project_settings
from keyvault.services import maintenance
from keyvault.services.webhooks import deliveries
from keyvault.services.work import shared_jobs
from keyvault.services.work.shared_jobs import SharedJobs
from keyvault.tasks import deliver_webhooks, issue_approved


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time that the jobs see, as its only item."""
    times = [100.0]
    monkeypatch.setattr(shared_jobs, "monotonic", lambda: times[0])
    return times


def test_shared_jobs_run_once_for_the_messages_of_all_environments(times: list[float]) -> None:
    """A worker that serves both environments does not do the same work twice."""
    jobs = SharedJobs()
    for _ in range(3):
        assert jobs.begin("issue", "sandbox")
        assert not jobs.begin("issue", "production")
        assert jobs.begin("expire", "production")
        times[0] += 2
    assert jobs.begin("issue", "production")
    assert not jobs.begin("issue", "sandbox")


def test_shared_jobs_run_for_each_message_of_one_environment(times: list[float]) -> None:
    """Another worker may have taken the other environment's messages, so none of these is left out."""
    jobs = SharedJobs()
    assert [jobs.begin("issue", "production") for _ in range(3)] == [True] * 3


def test_shared_jobs_run_when_they_are_called_without_a_message(times: list[float]) -> None:
    jobs = SharedJobs()
    assert jobs.begin("issue", "sandbox")
    assert jobs.begin("issue", "")


@pytest.mark.parametrize(
    ("task", "module", "work"),
    [(issue_approved, maintenance, "issue_due"), (deliver_webhooks, deliveries, "deliver_due")],
)
def test_shared_jobs_task_of_a_second_environment_does_no_work(
    times: list[float], monkeypatch: pytest.MonkeyPatch, task: Callable[[str], bool], module: ModuleType, work: str
) -> None:
    """Its thread is free for other messages: webhooks hold one of the worker's four threads."""
    runs = []
    monkeypatch.setattr("keyvault.tasks.shared_jobs", SharedJobs())
    monkeypatch.setattr(module, work, lambda: runs.append("run"))
    assert task("sandbox")
    assert not task("production")
    assert runs == ["run"]


@pytest.mark.parametrize(
    "task", sorted({"keyvault.tasks.send_alarms", *(task for task, *_ in project_settings._shared_jobs.values())})
)
def test_shared_jobs_task_of_a_second_environment_is_not_counted_as_done(
    monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    """Guarantee: no message that did nothing hides that the task fails."""
    counted: list[str] = []
    monkeypatch.setattr(SharedJobs, "begin", lambda *_: False)
    monkeypatch.setattr(meters, "note_task", lambda task, seconds, *, is_done: counted.append(task))
    result = import_string(task).apply(("production",))
    assert (result.get(), counted) == (False, [])


def test_shared_jobs_task_that_fails_is_not_counted_as_done_for_a_second_environment(
    times: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: the metrics of a task that always fails show no success, so that the alert about it fires."""
    counted: list[tuple[str, bool]] = []
    monkeypatch.setattr("keyvault.tasks.shared_jobs", SharedJobs())
    monkeypatch.setattr(maintenance, "issue_due", lambda: 1 / 0)
    monkeypatch.setattr(meters, "note_task", lambda task, seconds, *, is_done: counted.append((task, is_done)))
    for environment in ("sandbox", "production"):
        issue_approved.apply((environment,))
    assert counted == [("keyvault.tasks.issue_approved", False)]

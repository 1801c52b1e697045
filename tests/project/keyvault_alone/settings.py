"""The project's settings without rotation."""

from keyvault.project import settings as project

globals().update({name: value for name, value in vars(project).items() if name.isupper()})

INSTALLED_APPS = [app for app in project.INSTALLED_APPS if app != "rotation"]
ROOT_URLCONF = "tests.project.keyvault_alone.urls"
CELERY_BEAT_SCHEDULE = {
    name: entry
    for name, entry in project.CELERY_BEAT_SCHEDULE.items()
    if not str(entry["task"]).startswith("rotation.")
}

"""Set up the service without rotation, start it, import every module, and issue and present one key."""

import importlib
import json
import pkgutil
import sys
from io import StringIO
from typing import Any

# Any import of rotation fails from here on.
sys.modules["rotation"] = None  # type: ignore[assignment]  # how Python marks a module that cannot be imported

import django  # noqa: E402  the import of rotation must fail before

django.setup()

from django.conf import settings  # noqa: E402  the import of rotation must fail before
from django.core.management import call_command  # noqa: E402  the same
from django.test import Client  # noqa: E402  the same

import keyvault  # noqa: E402  the same
from keyvault.project import celery_app  # noqa: E402  the same
from keyvault.services.startup.startup_checks import require_ready  # noqa: E402  the same


def run(name: str, *arguments: str) -> Any:
    """Run a command with `--json` and return its answer."""
    written = StringIO()
    call_command(name, *arguments, "--json", stdout=written)
    return json.loads(written.getvalue())


def import_all() -> int:
    """Import every module of keyvault but those that compose it with rotation."""
    names = [
        module.name
        for module in pkgutil.walk_packages(keyvault.__path__, "keyvault.")
        if not module.name.startswith("keyvault.project.")
    ]
    for name in names:
        importlib.import_module(name)
    return len(names)


def main() -> None:
    call_command("check", fail_level="WARNING", stdout=StringIO())
    call_command("migrate", interactive=False, verbosity=0)
    call_command("setup", stdout=StringIO())
    require_ready()
    modules = import_all()
    celery_app.loader.import_default_modules()
    scheduled = {entry["task"] for entry in settings.CELERY_BEAT_SCHEDULE.values()}
    call_command("seed_demo", stdout=StringIO())
    words = ("--merchant", "acme", "--environment", "sandbox", "--kind", "public")
    key = run("issue_key", *words, "--requested-by", "tam", "--reveal")["key"]
    reply = Client(headers={"X-Api-Key": key, "Host": "localhost"}).get("/sandbox/client/configuration")
    json.dump(
        {"modules": modules, "unknown_tasks": sorted(scheduled - set(celery_app.tasks)), "status": reply.status_code},
        sys.stdout,
    )


main()

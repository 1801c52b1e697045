"""Command lines of `manage.py` in the process of the tests: a process of their own takes a second to start."""

from unittest import mock

from django.core.management import ManagementUtility
from django.db import connections


def run_command_line(*arguments: str) -> int:
    """Run `manage.py ARGUMENTS` and return its exit code. `capsys` has its output.

    Left out of what `manage.py` does: Django is set up already, and the test still needs its connection.
    """
    command = ManagementUtility(["manage.py", *arguments]).fetch_command(arguments[0])
    try:
        with mock.patch.object(connections, "close_all"):
            command.run_from_argv(["manage.py", *arguments])
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    return 0

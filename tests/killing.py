"""The simulated end of a process."""

KILLED_MASTER_KEY_ROTATION = """
import os, signal, sys
from itertools import count
from unittest import mock
from django.core.management import execute_from_command_line
from keyvault.backends import local_rekeying
numbers, real = count(1), local_rekeying.Rekeying._encrypt_record
def encrypt(*arguments):
    real(*arguments)
    if next(numbers) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
local_rekeying.BATCH = 4
with mock.patch.object(local_rekeying.Rekeying, "_encrypt_record", encrypt):
    execute_from_command_line(["manage.py", "rotate_master_key"])
"""
"""Program: `manage.py rotate_master_key`, killed inside the transaction of its Nth record."""


class KilledError(BaseException):
    """Not caught by any handler, like SIGKILL."""

"""Refusal of Django's commands that would bypass the services; the message names the command to run instead.

Only the command line refuses them: `call_command` still works, since Django's test framework flushes with it.
"""

import sys
from typing import NoReturn

USAGE = 2


def refuse(argv: list[str], instead: str) -> NoReturn:
    """Write one line to standard error and exit with status 2."""
    sys.stderr.write(f"{argv[1]} is refused: it would bypass the audit log. {instead}\n")
    sys.exit(USAGE)

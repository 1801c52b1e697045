"""Django's own commands that would go round the services: refused on a command line, each with what to run instead.

Only the command line: `call_command` still runs Django's, since its test framework flushes the test database that way.
"""

import sys
from typing import NoReturn

USAGE = 2


def refuse(argv: list[str], instead: str) -> NoReturn:
    """One line on standard error, and exit 2."""
    sys.stderr.write(f"{argv[1]} is refused: it would write past the audit log. {instead}\n")
    sys.exit(USAGE)

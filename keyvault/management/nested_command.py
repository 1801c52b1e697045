"""One command that uses another: through the same options, and with the answer of its `--json`."""

import json
from io import StringIO
from typing import Any

from django.core.management import call_command


def call(command: str, *arguments: str) -> dict[str, Any]:
    """Raises CommandError, with the command's own words, when it refuses."""
    out = StringIO()
    call_command(command, *arguments, "--json", stdout=out)
    answer: dict[str, Any] = json.loads(out.getvalue())
    return answer

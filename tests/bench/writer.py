"""Revokes keys through the service, one for each line on standard input: `python -m tests.bench.writer`.

Answers each with the moments, of the clock that all processes of a host share, just before COMMIT was sent and when the
service returned. The environment names data folder and database.
"""

import json
import os
import sys
import time
from typing import Any
from unittest import mock

import django


def main() -> int:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
    django.setup()
    from django.db import connection as connected

    from keyvault.access.permissions import Permission
    from keyvault.access.roles import Role
    from keyvault.domain.revocation import RevocationReason
    from keyvault.models import Key
    from keyvault.services.keys import revoke_key
    from tests.factories import grant, the_operator

    admin = the_operator("admin", Role.KEY_ADMINISTRATOR)
    # Private and untyped: what sends COMMIT, after the last statement and before whatever waits for it.
    connection: Any = connected
    commit, commits = connection._commit, []

    def noting_commit() -> Any:
        commits.append(time.monotonic_ns())
        return commit()

    _say({"ready": True})
    with mock.patch.object(connection, "_commit", noting_commit):
        for line in sys.stdin:
            key = Key.objects.select_related("credential__account__merchant").get(key_id=line.strip())
            commits.clear()
            permitted = grant(admin, Permission.KEYS_REVOKE, key.credential.account)
            record = revoke_key(permitted, key, RevocationReason.SUPERSEDED)
            returned = time.monotonic_ns()
            _say({"commit_ns": commits[0], "returned_ns": returned, "sequence": record.sequence})
    return 0


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

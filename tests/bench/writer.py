"""Revokes keys through the service, one for each line on standard input: `python -m tests.bench.writer`.

Answers each with the moments, of the clock that all processes of a host share, just before COMMIT was sent and when the
service returned. A line `receipt N` is answered with the moments, of the clock of day, at which the verifiers confirmed
the change of that sequence. The environment names data folder and database.
"""

import json
import os
import sys
import time
from typing import Any
from unittest import mock

import django

RECEIPT_SECONDS = 10


def main() -> int:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
    django.setup()
    from django.db import connection as connected

    from keyvault.access.permissions import Permission
    from keyvault.access.roles import Role
    from keyvault.domain.revocation import RevocationReason
    from keyvault.models import Key
    from keyvault.services.change_feed.receipts import wait_for_receipt
    from keyvault.services.keys.lifecycle import revoke_key
    from tests.factories import grant, the_operator

    admin = the_operator("admin", Role.KEY_ADMINISTRATOR)
    # Private and untyped: what sends COMMIT, after the last statement and before whatever waits for it.
    connection: Any = connected
    commit, commits = connection._commit, []

    def noting_commit() -> Any:
        commits.append((time.monotonic_ns(), time.time_ns()))
        return commit()

    _say({"ready": True})
    with mock.patch.object(connection, "_commit", noting_commit):
        for line in sys.stdin:
            if line.startswith("receipt "):
                receipt, _ = wait_for_receipt(int(line.split()[1]), RECEIPT_SECONDS)
                at = [each.confirmed_at for each in receipt.verifiers if each.door == "verifier" and each.confirmed_at]
                _say({"confirmed_ns": [round(1e9 * each.timestamp()) for each in at]})
                continue
            key = Key.objects.select_related("credential__account__merchant").get(key_id=line.strip())
            commits.clear()
            permitted = grant(admin, Permission.KEYS_REVOKE, key.credential.account)
            record = revoke_key(permitted, key, RevocationReason.SUPERSEDED)
            returned = time.monotonic_ns()
            commit_ns, commit_day_ns = commits[0]
            told = {"commit_ns": commit_ns, "commit_day_ns": commit_day_ns, "returned_ns": returned}
            _say({**told, "sequence": record.sequence})
    return 0


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

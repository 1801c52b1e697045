"""Revoke keys through the service: `python -m tests.bench.writer`. The environment names data folder and database.

Each line of standard input is a command; its reply is a line of JSON:

- a key id: revoke the key; return the monotonic times just before COMMIT and when the service returned;
- `receipt N`: return the wall clock times at which the verifiers confirmed the change with sequence N.
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
    # The private method sends COMMIT; Django has no public hook right before it.
    connection: Any = connected
    commit, commits = connection._commit, []

    def noting_commit() -> Any:
        commits.append((time.monotonic_ns(), time.time_ns()))
        return commit()

    _reply({"ready": True})
    with mock.patch.object(connection, "_commit", noting_commit):
        for line in sys.stdin:
            if line.startswith("receipt "):
                receipt, _ = wait_for_receipt(int(line.split()[1]), RECEIPT_SECONDS)
                at = [
                    each.confirmed_at
                    for each in receipt.verifiers
                    if each.entry_point == "verifier" and each.confirmed_at
                ]
                _reply({"confirmed_ns": [round(1e9 * each.timestamp()) for each in at]})
                continue
            key = Key.objects.select_related("credential__account__merchant").get(key_id=line.strip())
            commits.clear()
            permitted = grant(admin, Permission.KEYS_REVOKE, key.credential.account)
            record = revoke_key(permitted, key, RevocationReason.SUPERSEDED)
            returned = time.monotonic_ns()
            commit_ns, commit_day_ns = commits[0]
            reply = {"commit_ns": commit_ns, "commit_day_ns": commit_day_ns, "returned_ns": returned}
            _reply({**reply, "sequence": record.sequence})
    return 0


def _reply(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

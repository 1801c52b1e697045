"""Revoke one key in a separate process: `python -m tests.faults.fresh_writer KEY_ID [--dies]`.

With --dies it is killed after its commit, before it has notified the other processes of its host.
"""

import os
import signal
import sys
from unittest import mock

import django

django.setup()

from keyvault.access.permissions import Permission
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Key
from keyvault.services.keys.lifecycle import revoke_key
from keyvault.services.recording import changes
from tests.factories import grant
from tests.rotation.scene import admin


def main(key_id: str, *, dies: bool) -> None:
    key = Key.objects.select_related("credential__account__merchant").get(pk=key_id)
    permitted = grant(admin(), Permission.KEYS_REVOKE, key.credential.account)
    with mock.patch.object(changes, "notify_host", _die if dies else changes.notify_host):
        revoke_key(permitted, key, RevocationReason.SUPERSEDED)


def _die(subjects: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], dies="--dies" in sys.argv)

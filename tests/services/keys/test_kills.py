"""A worker killed with SIGKILL while it issues a key, and the worker that takes over."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keyvault.backends.base import Mount
from keyvault.models import Credential, IssuanceRequest, Key
from keyvault.services.issuance import requests
from keyvault.services.recording.audit_chain import verify_audit
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.work import leases
from tests.factories import issue_request, now, request_key
from tests.services.conftest import make_scene

pytestmark = [pytest.mark.long, pytest.mark.database, pytest.mark.django_db(transaction=True)]

ROOT = Path(__file__).resolve().parents[3]

WORKER = """
import os, signal, sys
import django
django.setup()
from keyvault.services import maintenance
from keyvault.services.issuance import requests
from keyvault.services.recording import transaction

request_id, point = sys.argv[1:]

def die_after(module, name, when=lambda *args: True):
    real = getattr(module, name)
    def and_die(*args, **options):
        result = real(*args, **options)
        if when(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(module, name, and_die)

if point == "staged":
    die_after(requests, "_stage")
elif point == "stored":
    die_after(requests, "store_string")
elif point == "written":
    die_after(transaction, "_commit", lambda unit, *_: unit.records[0].event == "issuance.issued")
elif point == "committed":
    die_after(requests, "issue_approved")
maintenance.issue_one(requests.get_request(request_id))
"""


def kill_worker(request: IssuanceRequest, point: str) -> None:
    """Run a process that issues the request and kills itself at that point."""
    done = subprocess.run(
        [sys.executable, "-c", WORKER, request.pk, point], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("point", "state_after", "discarded"),
    [("staged", "approved", 1), ("stored", "approved", 0), ("written", "approved", 0), ("committed", "issued", 0)],
)
def test_issuance_by_a_killed_worker_is_completed_by_the_next_with_one_active_key(
    point: str, state_after: str, discarded: int
) -> None:
    """Killed after staging, after storing, before the commit or after it: the next worker leaves one active key."""
    scene = make_scene()
    request = request_key(scene.sandbox)
    kill_worker(request, point)
    remaining = requests.get_request(request.pk)
    assert remaining is not None
    assert remaining.state == state_after
    assert not Key.objects.filter(state="active").exists() or state_after == "issued"
    assert leases.claim(f"issuance:{request.pk}", now()) is None, "the killed worker's lease has not expired"
    if state_after == "approved":
        issue_request(remaining, at=now() + leases.LEASE)
    credential = Credential.objects.get()
    keys = sorted(credential.keys.values_list("state", flat=True))
    assert keys == ["active"] + ["destroyed"] * discarded
    path = credential.backend_path
    assert [version.state for version in secret_backend().versions(Mount.SANDBOX, path)] == ["live"]
    assert secret_backend().read(Mount.SANDBOX, path).labels["key_id"] == credential.keys.get(state="active").key_id
    assert IssuanceRequest.objects.get().state == "issued"
    assert verify_audit().first_broken is None

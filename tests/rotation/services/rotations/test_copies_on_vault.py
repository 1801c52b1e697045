"""The full lifecycle of a credential's copies on a real server, each kind of call under its own role."""

from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.backends.base import Mount
from keyvault.backends.vault.layout import SecretsEngine
from keyvault.domain.environments import Environment
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Credential, Notice
from keyvault.services import maintenance
from keyvault.services.offboarding import offboard_merchant
from keyvault.services.reconciliation.reconciliation import reconcile
from keyvault.services.recording.authorization import authorize
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.secrets.stored_copies import find_stored
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.models import Rotation
from rotation.services.rotations.interventions import abort_rotation
from rotation.services.rotations.reports import get_rotation
from tests.backends.vault.installation import InstalledVault
from tests.clocks import Clock
from tests.rotation import scene
from tests.rotation.copies import copy_of, run_maintenance, versions_of
from tests.rotation.services.rotations.test_tripwire import KNOWN, attempt, in_quarantine
from tests.rotation.steps import advance, wait

pytestmark = pytest.mark.django_db


def read_as_root(made: InstalledVault, credential: Credential, version: int) -> dict[str, Any]:
    """Read the path as root, which no role of the service may do."""
    mount = made.layout.mount(SecretsEngine.KEYS, "sandbox")
    answer = made.admin.secrets.kv.v2.read_secret_version(
        credential.backend_path, version=version, mount_point=mount, raise_on_deleted_version=True
    )
    payload: dict[str, Any] = answer["data"]["data"]
    return payload


def paths(mount: Mount = Mount.SANDBOX) -> list[str]:
    return list(secret_backend().list_paths(mount))


def test_vault_copies_through_their_full_lifecycle(
    vault_service: InstalledVault, clock: Clock, verifier: UsageLog
) -> None:
    """Copies are written, hidden in quarantine, restored by the tripwire, hidden again, destroyed after the revocation,
    and forgotten when the merchant is offboarded.
    """
    rotation = in_quarantine(clock, verifier)
    old, new, credential = rotation.predecessor, rotation.replacement, rotation.credential
    payload = read_as_root(vault_service, credential, 2)
    assert len(payload.pop("secret")) > 30
    assert payload == {
        "schema": "1",
        "key_id": rotation.replacement_id,
        "credential_id": credential.credential_id,
        "rotation_id": rotation.rotation_id,
        "environment": "sandbox",
    }
    run_maintenance()
    assert (copy_of(old), copy_of(new)) == (("deleted", "deleted"), ("held", "live"))

    rotation = attempt(rotation, clock, verifier, KNOWN)
    assert rotation.state == S.OVERLAP
    run_maintenance()
    assert copy_of(old) == ("held", "live")

    scene.use(verifier, rotation.replacement_id or "")
    assert wait(rotation, clock, verifier, 6).state == S.QUARANTINE
    run_maintenance()
    assert copy_of(old) == ("deleted", "deleted")
    assert wait(rotation, clock, verifier, 6).state == S.COMPLETED
    assert (copy_of(old), copy_of(new)) == (("destroyed", "destroyed"), ("held", "live"))
    stored = find_stored(credential)
    assert stored is not None
    assert stored.labels["key_id"] == rotation.replacement_id

    grant = authorize(scene.admin(), P.MERCHANTS_OFFBOARD, now=clock())
    offboard_merchant(grant, credential.account.merchant, "contract ended")
    run_maintenance()
    assert versions_of(old) == ["destroyed", "destroyed"]
    maintenance.forget_paths_due()
    assert (versions_of(old), credential.backend_path in paths()) == ([], False)
    assert Credential.objects.get(pk=credential.pk).forgotten_at is not None


def test_vault_rotation_aborted_in_quarantine_reads_the_hidden_copy_again(
    vault_service: InstalledVault, clock: Clock, verifier: UsageLog
) -> None:
    rotation = in_quarantine(clock, verifier)
    run_maintenance()
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    rotation = advance(abort_rotation(grant, get_rotation(rotation.rotation_id), "a bad day"), clock, 3)
    stored = find_stored(rotation.credential)
    assert stored is not None
    assert (stored.version, stored.labels["key_id"]) == (3, rotation.predecessor_id)
    run_maintenance()
    assert versions_of(rotation.predecessor) == ["destroyed", "live", "live"]


def test_vault_reconciler_destroys_own_copies_and_keeps_unattributed_ones(
    vault_service: InstalledVault, clock: Clock, verifier: UsageLog
) -> None:
    """Guarantee, on the real server with the project's roles: an unattributed copy is reported and never changed."""
    rotation: Rotation = wait(in_quarantine(clock, verifier), clock, verifier, 6)
    assert rotation.state == S.COMPLETED
    credential, backend = rotation.credential, secret_backend()
    late = {"key_id": rotation.predecessor_id, "credential_id": credential.credential_id, "environment": "sandbox"}
    backend.put(Mount.SANDBOX, credential.backend_path, Plaintext("late"), late, expected_version=2)
    mount = vault_service.layout.mount(SecretsEngine.KEYS, "sandbox")
    vault_service.admin.secrets.kv.v2.create_or_update_secret(
        credential.backend_path, secret={"password": "somebody's"}, cas=3, mount_point=mount
    )
    vault_service.admin.secrets.kv.v2.create_or_update_secret(
        "team/notes/today", secret={"password": "somebody's"}, cas=0, mount_point=mount
    )

    report = reconcile(Environment.SANDBOX)
    assert report.is_complete
    assert (report.destroyed, report.unattributed, report.failed, report.missing) == (1, 2, 0, 0)
    assert versions_of(rotation.predecessor) == ["destroyed", "live", "destroyed", "live"]
    assert read_as_root(vault_service, credential, 4) == {"password": "somebody's"}
    assert "team/notes/today" in paths()
    assert Notice.objects.get(kind=NoticeKind.BACKEND_UNATTRIBUTED).subject == credential.credential_id

    offboard_merchant(
        authorize(scene.admin(), P.MERCHANTS_OFFBOARD, now=clock()), credential.account.merchant, "contract ended"
    )
    run_maintenance()
    maintenance.forget_paths_due()
    assert reconcile(Environment.SANDBOX).forgotten == 0
    assert versions_of(rotation.predecessor) == ["destroyed", "destroyed", "destroyed", "live"]
    vault_service.admin.secrets.kv.v2.destroy_secret_versions(credential.backend_path, [4], mount_point=mount)
    assert reconcile(Environment.SANDBOX).forgotten == 1
    assert paths() == ["team/notes/today"]


def test_vault_reconciler_restores_a_copy_hidden_by_another_party(
    vault_service: InstalledVault, clock: Clock, verifier: UsageLog
) -> None:
    rotation = wait(in_quarantine(clock, verifier), clock, verifier, 6)
    mount = vault_service.layout.mount(SecretsEngine.KEYS, "sandbox")
    vault_service.admin.secrets.kv.v2.delete_secret_versions(rotation.credential.backend_path, [2], mount_point=mount)
    assert reconcile(Environment.SANDBOX).put_right == 1
    assert copy_of(rotation.replacement) == ("held", "live")
    assert reconcile(Environment.PRODUCTION).paths == 0

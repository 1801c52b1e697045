"""Seeds of second factors under Transit of a real OpenBao: sealed, unsealed, and after a rotation of its key."""

from datetime import timedelta
from pathlib import Path

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.backends.base import BackendError
from keyvault.backends.vault.layout import ENCRYPTION_KEY, SecretsEngine
from keyvault.domain.digests import PepperSet
from keyvault.models import Operator
from keyvault.services.secrets.backend import secret_backend, vault_backend
from keyvault.services.sessions.invitations import prepare_sign_in
from keyvault.services.sessions.second_factors import FactorAttempt, check_code, list_second_factors, totp_code
from tests.admin.desk import dump
from tests.backends.vault.installation import InstalledVault, installed, serving_from
from tests.factories import grant, make_operator, now
from tests.servers.openbao import VaultOnDisk

pytestmark = pytest.mark.django_db

PERIOD = timedelta(seconds=30)


def prepare(username: str) -> tuple[Operator, str, str]:
    """Make an operator with an authenticator app; return it, its seed and the stored ciphertext."""
    make_operator(username, Role.AUDITOR)
    row = Operator.objects.get(username=username)
    seed = prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), row).totp_seed
    (factor,) = list_second_factors(row)
    return Operator.objects.get(username=username), seed.reveal(), factor.data["secret"]


def rotate_key(made: InstalledVault) -> None:
    mount = made.layout.mount(SecretsEngine.FACTORS, PepperSet.SERVICE)
    made.admin.write_data(f"{mount}/keys/{ENCRYPTION_KEY}/rotate", data={})


def test_seed_is_encrypted_by_the_vault_and_checked_after_a_seal_and_a_rotation_of_its_key(
    db: None, vault_on_disk: VaultOnDisk, tmp_path: Path
) -> None:
    """Guarantee: a dump of the database has no seed, and no operator signs in while Vault is sealed."""
    folder = tmp_path / "logins"
    folder.mkdir(mode=0o700)
    with installed(vault_on_disk, folder) as made, serving_from(made):
        tam, seed, stored = prepare("tam")
        assert stored.startswith("vault:v1:")
        assert seed not in dump()
        at = now().replace(second=15, microsecond=0)
        attempt = FactorAttempt(tam, "192.0.2.1")
        code = totp_code(secret_backend().decrypt(stored), at)
        vault_on_disk.seal()
        with pytest.raises(BackendError):
            check_code(attempt, code, at)
        vault_on_disk.unseal()
        for each in (secret_backend, vault_backend):
            each.cache_clear()
        assert check_code(attempt, code, at)
        rotate_key(made)
        assert check_code(attempt, totp_code(secret_backend().decrypt(stored), at + PERIOD), at + PERIOD)
        assert prepare("second")[2].startswith("vault:v2:")

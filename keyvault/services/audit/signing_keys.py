"""Rotate the local keys that sign the audit log's checkpoints, such as after a leak of the keystore."""

from django.conf import settings

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.backends.base import BackendConflictError
from keyvault.backends.vault.layout import SCOPES, SIGNING_KEY, SecretsEngine
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.services.audit.signers import LocalSigner
from keyvault.services.peppers.ring import list_served_sets
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.backend import secret_backend, vault_layout


def rotate_signing_keys(grant: Grant) -> dict[str, int]:
    """Create the next version of each scope's key and return its number by scope. The next checkpoint uses it.

    A former version is not accepted in a checkpoint after one of a later version. The audit entry comes first, so that
    no key changes without one. A run that was killed is started again: a further version does no harm.

    Raises:
        RequestInvalidError: the keys are in a Vault.
        IntegrityError: a key that has signed checkpoints is gone.
        StateConflictError: another run created a version meanwhile.
        BackendUnavailableError, BackendInvalidError, ImproperlyConfigured: the keystore cannot be used.
    """
    if settings.IS_VAULT:
        mount = vault_layout().mount(SecretsEngine.SIGNING, "SCOPE")
        raise RequestInvalidError(
            "With KEYVAULT_BACKEND=vault the keys never leave the Vault, which rotates them: "
            f"bao write -f {mount}/keys/{SIGNING_KEY}/rotate for each scope: {', '.join(SCOPES)}"
        )
    signer = LocalSigner(secret_backend())
    with recorded(grant, Permission.INSTALLATION_MAINTAIN, "audit_keys.rotated"):
        pass
    try:
        return {scope.value: signer.rotate(scope) for scope in list_served_sets()}
    except BackendConflictError as error:
        raise StateConflictError(
            "Another run created a version meanwhile. Run manage.py show_audit_keys; run this again if a scope kept "
            "its version.",
            internal=error.internal,
        ) from error

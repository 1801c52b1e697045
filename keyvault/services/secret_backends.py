"""The secret backend that this process was configured with."""

from functools import cache

from django.conf import settings

from keyvault.backends.base import Mount, SecretBackend
from keyvault.backends.local import LocalKeystore
from keyvault.domain.environments import Environment

MOUNT = {Environment.SANDBOX: Mount.SANDBOX, Environment.PRODUCTION: Mount.PRODUCTION}


@cache
def secret_backend() -> SecretBackend:
    """Opened at the first use. Raises ImproperlyConfigured when it must not be started with what is there."""
    return LocalKeystore(settings.DATA_DIR, settings.MASTER_KEY)

"""The default limit of accounts, as configured."""

from django.conf import settings

from keyvault.access.limits import Limit
from keyvault.domain.environments import Environment


def default_limit(environment: Environment) -> Limit:
    """Return the default limit of an account in this environment."""
    return Limit(*settings.ACCOUNT_LIMITS[environment])

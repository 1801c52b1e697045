"""Entry points that give verdicts on requests with a key."""

from enum import StrEnum

from keyvault.wire.gateways import Dialect


class VerificationEntryPoint(StrEnum):
    """Where a verdict was given, as stored with a refusal. Forward-auth has one entry point per dialect."""

    INTEGRATION = "integration"
    VERIFY = "verify"
    TRAEFIK = Dialect.TRAEFIK
    NGINX = Dialect.NGINX
    ENVOY = Dialect.ENVOY

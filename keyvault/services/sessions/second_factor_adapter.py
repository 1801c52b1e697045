"""allauth's adapter for second factors: our names, and encrypted seeds."""

from urllib.parse import urlsplit

from allauth.mfa.adapter import DefaultMFAAdapter
from django.conf import settings


class SecondFactorAdapter(DefaultMFAAdapter):
    """Names this installation to authenticators. The relying party is the host of the public URL."""

    def get_public_key_credential_rp_entity(self) -> dict[str, str]:
        return {"id": urlsplit(settings.ORIGIN).hostname or "", "name": settings.MFA_TOTP_ISSUER}

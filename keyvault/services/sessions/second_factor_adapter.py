"""allauth's adapter for second factors: our names, and encrypted seeds."""

from urllib.parse import urlsplit

from allauth.mfa.adapter import DefaultMFAAdapter
from django.conf import settings

from keyvault.domain.plaintext import Plaintext
from keyvault.services.secrets.backend import secret_backend


class SecondFactorAdapter(DefaultMFAAdapter):  # type: ignore[misc]  # allauth has no types
    """Names this installation to authenticators, and encrypts seeds with the secret backend.

    The relying party is the domain of the console. `encrypt` and `decrypt` are calls to the backend and must not
    happen inside a database transaction.
    """

    def encrypt(self, text: str) -> str:
        return secret_backend().encrypt(Plaintext(text))

    def decrypt(self, encrypted_text: str) -> str:
        return secret_backend().decrypt(encrypted_text).reveal()

    def get_public_key_credential_rp_entity(self) -> dict[str, str]:
        return {"id": urlsplit(settings.CONSOLE_ORIGIN).hostname or "", "name": settings.MFA_TOTP_ISSUER}

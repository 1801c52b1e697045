"""Verification of the service's webhooks (Standard Webhooks 1.0.0)."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from keyvault.domain.plaintext import Plaintext
from keyvault.wire import webhooks
from keyvault_client.errors import WebhookSecretError, WebhookSignatureError
from keyvault_client.keystrings import as_plaintext


def verify_webhook(
    headers: Mapping[str, str],
    body: bytes,
    secrets: Iterable[str | Plaintext],
    *,
    now: datetime | None = None,
) -> str:
    """Verify a message and return its id. Retries have the same id: process each id once.

    Args:
        headers: of the received request, with names in any case.
        body: the received bytes, unchanged.
        secrets: the secret of the endpoint; the old and the new one during a rotation.
        now: default: the clock of this machine. A message is accepted up to 5 minutes before and after it.

    Raises WebhookSignatureError for a message to refuse, WebhookSecretError for secrets that are not valid.
    """
    known = [as_plaintext(secret) for secret in secrets]
    del secrets
    lowered = {name.lower(): value for name, value in headers.items()}
    failure = "" if known else "there is no secret"
    try:
        for secret in known:
            webhooks.require_secret(secret.reveal())
    except webhooks.SecretInvalidError as error:
        failure = str(error)
    if failure:
        # Outside of the handler: the other exception's traceback has the secret.
        raise WebhookSecretError(failure)
    for secret in known:
        try:
            return webhooks.verify(secret.reveal(), lowered, body, now or datetime.now(UTC))
        except webhooks.SignatureInvalidError as error:
            failure = str(error)
    raise WebhookSignatureError(failure)

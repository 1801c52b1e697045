"""Client of Keyvault for merchants' backends, and for services that accept merchants' API keys."""

from keyvault_client.calls import Response
from keyvault_client.decisions import Decision, Identity, Question
from keyvault_client.errors import (
    AnswerError,
    AuthenticationError,
    CommandFailedError,
    ConflictError,
    DeadlineError,
    InvalidRequestError,
    KeySourceError,
    KeyvaultError,
    NoAnswerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitedError,
    RefusedError,
    SealedError,
    UnavailableError,
    UnexpectedAnswerError,
    WebhookError,
    WebhookSecretError,
    WebhookSignatureError,
)
from keyvault_client.key_sources import CallableKey, EnvironmentKey, FileKey, StaticKey, VaultKey
from keyvault_client.merchant import AsyncMerchantClient, MerchantClient, MerchantOptions
from keyvault_client.verifier import AsyncVerifier, Verifier
from keyvault_client.webhooks import verify_webhook

__all__ = [
    "AnswerError",
    "AsyncMerchantClient",
    "AsyncVerifier",
    "AuthenticationError",
    "CallableKey",
    "CommandFailedError",
    "ConflictError",
    "DeadlineError",
    "Decision",
    "EnvironmentKey",
    "FileKey",
    "Identity",
    "InvalidRequestError",
    "KeySourceError",
    "KeyvaultError",
    "MerchantClient",
    "MerchantOptions",
    "NoAnswerError",
    "NotFoundError",
    "PermissionDeniedError",
    "Question",
    "RateLimitedError",
    "RefusedError",
    "Response",
    "SealedError",
    "StaticKey",
    "UnavailableError",
    "UnexpectedAnswerError",
    "VaultKey",
    "Verifier",
    "WebhookError",
    "WebhookSecretError",
    "WebhookSignatureError",
    "verify_webhook",
]

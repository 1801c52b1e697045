"""A verifier that answers from memory. Requires `pip install keyvault_client[local]`."""

from keyvault_client.local.verifier import AsyncLocalVerifier, LocalVerifier

__all__ = ["AsyncLocalVerifier", "LocalVerifier"]

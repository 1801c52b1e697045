"""Verifiers that answer from memory while the change feed is current. Requires `pip install keyvault_client[local]`."""

from keyvault_client.local.verifier import AsyncLocalVerifier, LocalVerifier

__all__ = ["AsyncLocalVerifier", "LocalVerifier"]

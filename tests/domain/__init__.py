"""Proofs of keyvault/domain."""

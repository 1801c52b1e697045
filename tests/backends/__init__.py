"""Proofs of keyvault/backends."""

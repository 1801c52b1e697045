"""Proofs of keyvault/wire."""

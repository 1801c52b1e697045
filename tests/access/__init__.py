"""Proofs of keyvault/access."""

"""Tests of keyvault/access."""

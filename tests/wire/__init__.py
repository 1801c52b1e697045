"""Tests of keyvault/wire."""

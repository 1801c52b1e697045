"""Tests of keyvault/backends."""

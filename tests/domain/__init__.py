"""Tests of keyvault/domain."""

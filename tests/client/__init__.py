"""Tests of the programs that run outside the service."""

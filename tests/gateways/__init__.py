"""Gateways for real: the shipped samples in front of the real server."""

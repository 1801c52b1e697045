"""A merchant's fleet of processes with the Python client, whose credential is rotated under traffic."""

"""Temporary servers for the tests, such as PostgreSQL, Redis and OpenBao, each deleted after its use."""

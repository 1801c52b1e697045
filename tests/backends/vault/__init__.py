"""The Vault or OpenBao backend, against a fake that fails on demand and against the real server."""

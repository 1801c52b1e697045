"""The backend that is a Vault or an OpenBao: against a fake that fails on demand, and against the real server."""

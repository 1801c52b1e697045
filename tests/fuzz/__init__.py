"""Differential fuzzes: of the whole service against API.md, and of the verifier's server against a stock one."""

"""Differential fuzzing: the whole service against `oracle`, and the verifier's server against a stock one."""

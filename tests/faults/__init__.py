"""Experiments that break processes and servers on purpose, and check what must hold afterwards."""

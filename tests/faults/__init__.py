"""Processes that are killed on purpose, and what must be true after."""

"""The peers, each at its best: run by `.venv/bench`, which has them, and never by the suite.

Nothing of them is imported by name: the project's own environment has neither them nor their types.
"""

"""Mutation check: each guard that matters is removed once, and a test must notice.

`guards` is the table, `python -m tests.mutations` the runner. `test_guards` checks that the table matches the tree.
"""

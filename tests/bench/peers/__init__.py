"""The peers, each in its fastest configuration. They run in `.venv/bench`, not in the test suite.

Their packages are imported dynamically, because the project's own environment has neither them nor their types.
"""

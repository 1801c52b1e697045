"""Benchmarks: this service beside its peers in the same run, and what its size costs. Never part of the suite.

`python -m tests.bench [verify|revoke|growth|signin|scale]` measures, keeps every figure as JSON in `results/` and
writes `results/RESULTS.md` from it. The targets are ratios, which are comparable between machines.
"""

"""Benchmarks: this service beside its peers, on the same core, in the same run. Never part of the suite.

`python -m tests.bench [verify|revoke|growth|all]` measures, keeps every figure as JSON in `results/` and writes
`results/RESULTS.md` from it. The targets are ratios, which are comparable between machines.
"""

"""Benchmarks: the service and its peers in the same run, and the cost of large tables. Not part of the test suite.

`python -m tests.bench [verify|revoke|growth|signin|processes|scale]` measures, stores every figure as JSON in
`results/`, and generates `results/RESULTS.md` from it. The targets are ratios, which are comparable between machines.
"""

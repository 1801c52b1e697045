"""Random event sequences against the real services: worker steps and deaths, operators, use, time, a failing backend.

`python -m tests.rotation.machine --sequences 10000 --seed 1` is the long run; `tests/rotation/test_machine.py` runs a
share of it. `watching.Watcher` checks the invariants after every step.
"""

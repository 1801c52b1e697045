"""Random event sequences against the real services: worker steps, deaths, people's acts, use, time, a failing backend.

`python -m tests.rotation.machine --sequences 10000 --seed 1` is the long one; `tests/rotation/test_machine.py` runs a
share of it. The invariants are those of ROTATION.md, looked at after every step by `watching.Watcher`.
"""

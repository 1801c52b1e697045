"""A long series of random histories of the state machine, see `tests/rotation/machine`.

It runs beside the other experiments, with the processor time that they leave.
"""

import os
import re
import subprocess
import sys

from tests.environment import ROOT
from tests.faults.results import Options, Result

SEQUENCES = 10_000
PROCESSES = 2
LEAST_URGENT = 19


def run(options: Options) -> Result:
    result = Result("histories")
    os.nice(LEAST_URGENT)
    wanted = ("--sequences", str(SEQUENCES), "--seed", str(options.seed), "--processes", str(PROCESSES))
    done = subprocess.run(
        [sys.executable, "-m", "tests.rotation.machine", *wanted],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    sys.stderr.write(done.stdout)
    found = re.search(r"n=(\d+) sequences, (\d+) steps, (\d+) violations", done.stdout)
    if found is not None:
        result.n = int(found[1])
        result.counts |= {"steps": int(found[2]), "violations of an invariant": int(found[3])}
    result.must_be(done.returncode == 0, f"the machine ended with {done.returncode}: {done.stdout[-500:]}")
    result.must_be(result.n >= SEQUENCES, f"only {result.n} of {SEQUENCES} sequences were played")
    return result

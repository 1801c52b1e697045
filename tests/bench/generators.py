"""Which generators of load this machine has, and how each is started: wrk and pacer.c, or pacer.py in their place."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from .launch import run_to_end

SOURCE = Path(__file__).with_name("pacer.c")
ROTATION = Path(__file__).with_name("rotate.lua")
BUNDLED = "pacer.py"

FLAGS = ("-O2", "-std=c11", "-Wall", "-Wextra", "-Werror")

INSTEAD = "comes from the bundled generator in Python, which is at its end before a fast server is"


def find_compiler() -> str | None:
    return shutil.which("cc")


def compile_pacer(compiler: str, folder: Path) -> Path:
    """The program, in that folder. Raises RuntimeError when the compiler refuses."""
    program = folder / "pacer"
    run_to_end([compiler, *FLAGS, "-o", str(program), str(SOURCE)], f"{compiler} does not compile {SOURCE.name}")
    return program


@dataclass(frozen=True, slots=True)
class Generators:
    """`wrk` is for closed loop and `pacer` for open; None: pacer.py does it. `advice`: what the machine lacks."""

    wrk: str | None = None
    pacer: Path | None = None
    advice: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, str]:
        return {"closed": "wrk" if self.wrk else BUNDLED, "open": SOURCE.name if self.pacer else BUNDLED}

    def command(self, port: int, requests: Path, seconds: float, connections: int, rate: float | None) -> list[str]:
        """As fast as the server answers, or open loop at `rate` a second. Each prints its figures as a line of JSON."""
        if rate is None and self.wrk is not None:
            # A fraction of a second is more than wrk understands.
            asked = ["-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "-s", str(ROTATION)]
            return [self.wrk, *asked, f"http://127.0.0.1:{port}", "--", str(requests)]
        if rate is not None and self.pacer is not None:
            return [str(self.pacer), str(port), str(requests), str(seconds), str(connections), str(rate)]
        paced = [] if rate is None else ["--rate", str(rate)]
        asked = [str(port), str(requests), "--seconds", str(seconds), "--connections", str(connections)]
        return [sys.executable, "-m", "tests.bench.pacer", *asked, *paced]


def find_generators(folder: Path) -> Generators:
    """Find the load generators; compile the pacer into the folder."""
    wrk, compiler = shutil.which("wrk"), find_compiler()
    pacer, advice = None, []
    if wrk is None:
        advice.append(f"wrk is not installed (Debian: apt-get install wrk): load in closed loop {INSTEAD}.")
    if compiler is None:
        advice.append(f"cc is not installed (Debian: apt-get install gcc libc6-dev): load in open loop {INSTEAD}.")
    else:
        try:
            pacer = compile_pacer(compiler, folder)
        except RuntimeError as error:
            advice.append(f"{error}\nLoad in open loop {INSTEAD}.")
    return Generators(wrk, pacer, tuple(advice))

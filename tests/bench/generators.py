"""Load generators: wrk (closed loop) and pacer.c (open loop), or pacer.py if this machine lacks them."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from .launch import run_checked

SOURCE = Path(__file__).with_name("pacer.c")
ROTATION = Path(__file__).with_name("rotate.lua")
BUNDLED = "pacer.py"

FLAGS = ("-O2", "-std=c11", "-Wall", "-Wextra", "-Werror")

INSTEAD = "comes from the bundled generator in Python, which is slower than a fast server"


def find_compiler() -> str | None:
    return shutil.which("cc")


def compile_pacer(compiler: str, folder: Path) -> Path:
    """Compile pacer.c into the folder and return the program. Raises RuntimeError with the compiler's output."""
    program = folder / "pacer"
    run_checked([compiler, *FLAGS, "-o", str(program), str(SOURCE)], f"{compiler} does not compile {SOURCE.name}")
    return program


@dataclass(frozen=True, slots=True)
class Generators:
    """The generators of closed loop (`wrk`) and open loop (`pacer`); None: pacer.py. `advice`: what to install."""

    wrk: str | None = None
    pacer: Path | None = None
    advice: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, str]:
        return {"closed": "wrk" if self.wrk else BUNDLED, "open": SOURCE.name if self.pacer else BUNDLED}

    def command(self, port: int, requests: Path, seconds: float, connections: int, rate: float | None) -> list[str]:
        """Return the command of a closed loop, or of an open loop at `rate` per second. It prints one line of JSON."""
        if rate is None and self.wrk is not None:
            # wrk accepts whole seconds only.
            arguments = ["-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "-s", str(ROTATION)]
            return [self.wrk, *arguments, f"http://127.0.0.1:{port}", "--", str(requests)]
        if rate is not None and self.pacer is not None:
            return [str(self.pacer), str(port), str(requests), str(seconds), str(connections), str(rate)]
        paced = [] if rate is None else ["--rate", str(rate)]
        arguments = [str(port), str(requests), "--seconds", str(seconds), "--connections", str(connections)]
        return [sys.executable, "-m", "tests.bench.pacer", *arguments, *paced]


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

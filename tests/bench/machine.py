"""This machine: its cores and versions, and the resources that processes use. Linux only."""

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path

from tests.environment import ROOT
from tests.servers.nginx import find_nginx
from tests.servers.postgres import find_postgres

PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cores:
    """The core of the measured server, and that of load generators and databases. None: they share all cores."""

    server: int | None
    load: int | None

    @property
    def description(self) -> str:
        if self.server is None:
            return "servers, databases and load share one core, so ratios are less accurate"
        return f"servers on CPU {self.server}, load and databases on CPU {self.load}"


def choose_cores() -> Cores:
    mine = sorted(os.sched_getaffinity(0))
    return Cores(mine[0], mine[1]) if len(mine) > 1 else Cores(None, None)


def pinned(command: list[str], *cores: int | None) -> list[str]:
    """Return the command on these cores alone, with everything that it starts; on all cores if one of them is None."""
    taskset = shutil.which("taskset")
    if taskset is None or None in cores:
        return command
    return [taskset, "--cpu-list", ",".join(map(str, cores)), *command]


# --- resources of processes ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor time of a server's processes, of their core and of the machine, since their start.

    Only differences of two readings have a meaning.
    """

    cpu_seconds: float
    core_seconds: float
    stolen_seconds: float


def list_process_tree(server: int) -> list[int]:
    """Return the ids of a process and its descendants."""
    parents = {int(each.name): _parent(each) for each in PROC.iterdir() if each.name.isdecimal()}
    found = [server]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def cost(processes: list[int], core: int | None) -> Cost:
    return Cost(sum(map(_cpu_seconds, processes)), _core_seconds(core), stolen_seconds())


def rss_mb(processes: list[int]) -> float:
    """Return resident memory in MiB; pages that processes share are counted for each."""
    total = 0
    for process in processes:
        if (found := re.search(r"VmRSS:\s+(\d+)", _read(PROC / str(process) / "status"))) is not None:
            total += int(found[1])
    return total / 1024


def list_children(process: int) -> list[int]:
    """Return the ids of a process's children, oldest first."""
    return sorted(child for child in list_process_tree(process) if _parent(PROC / str(child)) == process)


def read_command(process: int) -> str:
    """Return the command line of a process; "" if it has ended."""
    return _read(PROC / str(process) / "cmdline").replace("\0", " ")


def _parent(entry: Path) -> int:
    fields = _read(entry / "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else 0


def _cpu_seconds(process: int) -> float:
    """Return processor seconds: in nanoseconds if the kernel has schedstat, else in clock ticks."""
    tasks = [_read(task / "schedstat").split() for task in _tasks(process)]
    if tasks and all(tasks):
        return sum(int(task[0]) for task in tasks) / 1e9
    fields = _read(PROC / str(process) / "stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def _tasks(process: int) -> list[Path]:
    try:
        return list((PROC / str(process) / "task").iterdir())
    except OSError:
        return []


def _core_seconds(core: int | None) -> float:
    """Return the processor seconds of processes on the core, without interrupts."""
    for line in _read(PROC / "stat").splitlines():
        name, *fields = line.split()
        if name == f"cpu{core}":
            return sum(map(int, fields[:3])) / _TICKS
    return 0.0


def stolen_seconds() -> float:
    """Return the seconds that the host stole from all cores together."""
    fields = _read(PROC / "stat").split()
    return int(fields[8]) / _TICKS


def _read(path: Path) -> str:
    """Return the text of the file; "" if the process has ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


# --- versions -----------------------------------------------------------------------------------------------


def describe(peers: Path | None, bao: Path | None) -> dict[str, str]:
    """Return the hardware and the versions measured. `peers`: virtual environment of the peers, if it exists."""
    versions = {
        "cpu": f"{os.cpu_count()} x {_cpu_model()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "commit": _commit(),
        "ours": ", ".join(
            f"{name} {version(name)}" for name in ("uvloop", "httptools", "msgspec", "granian", "Django")
        ),
        "postgresql": _first_line([str(find_postgres()), "--version"]) if find_postgres() else "none",
        "nginx": _first_line([str(find_nginx()), "-v"]) if find_nginx() else "none",
        "wrk": _first_line(["wrk", "-v"]) if shutil.which("wrk") else "none",
        "openbao": _first_line([str(bao), "version"]) if bao else "none",
    }
    if peers is not None:
        sites = [str(site) for site in peers.glob("lib/python*/site-packages")]
        found = {each.metadata["Name"]: each.version for each in distributions(path=sites)}
        wanted = ("djangorestframework-api-key", "django-rest-knox", "djangorestframework", "Django", "psycopg")
        served = ("granian", "uvicorn", "uvloop", "httptools")
        versions["peers"] = ", ".join(f"{name} {found[name]}" for name in wanted + served if name in found)
    return versions


def name_machine() -> str:
    """Return a name for files: the processor and the number of cores."""
    model = re.sub(r"\(R\)|\(TM\)|CPU|Processor|@.*", " ", _cpu_model())
    return f"{'-'.join(re.findall(r'[a-z0-9]+', model.lower()))}-x{os.cpu_count()}"


def _cpu_model() -> str:
    found = re.search(r"model name\s*:\s*(.+)", _read(PROC / "cpuinfo"))
    return found[1].strip() if found else platform.machine()


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"
    head = _first_line([git, "rev-parse", "--short", "HEAD"])
    return f"{head}, with changes" if _first_line([git, "status", "--porcelain"]) else head


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return next(iter((done.stdout or done.stderr).splitlines()), "").strip()


def require_linux() -> None:
    if sys.platform != "linux":
        sys.exit("The benchmarks run on Linux only: they read /proc and pin processes to cores.")

"""The releases that `releases.toml` lists, and their commits in this checkout."""

import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keyvault.domain.releases import parse_release
from tests.environment import ROOT

RELEASES = ROOT / "releases.toml"


@dataclass(frozen=True, slots=True)
class Release:
    """`migrations`: the newest one of each app."""

    version: str
    commit: str
    migrations: Mapping[str, str]


def read_releases(path: Path = RELEASES) -> list[Release]:
    """Return the releases, the newest last. Raises ValueError for a wrong version, KeyError for a missing value."""
    entries = tomllib.loads(path.read_text())
    return [
        Release(version, entries[version]["commit"], entries[version]["migrations"])
        for version in sorted(entries, key=parse_release)
    ]


def has_history() -> bool:
    """Whether this checkout has all commits: it is a clone, and not a shallow one."""
    return _git("rev-parse", "--is-shallow-repository") == "false\n"


def show_file(commit: str, path: str) -> str | None:
    """Return a file of the commit; None if there is no such commit or file."""
    return _git("show", f"{commit}:{path}")


def list_files(commit: str, folder: str) -> list[str]:
    """Return the names in a folder of the commit."""
    return [Path(line).name for line in (_git("ls-tree", "--name-only", commit, f"{folder}/") or "").splitlines()]


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S607  the developer's own git
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None

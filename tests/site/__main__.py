"""Builds the documentation site and checks it: `make docs`, or `python -m tests.site [FOLDER]`.

Needs no network. FOLDER is `.site` unless given. Exit 1 if a page has a dead link or loads anything from another host.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.environment import ROOT
from tests.site.checks import find_faults
from tests.site.staging import CONFIGURATION, StagingError, stage

ZENSICAL = Path(sys.prefix, "docs", "bin", "zensical")
"""Program of the environment that `make docs` creates from docs/requirements.txt."""


def main(site: Path) -> int:
    with tempfile.TemporaryDirectory(prefix="kv-site-") as name:
        folder = Path(name)
        try:
            stage(folder)
        except StagingError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        command = [str(ZENSICAL), "build", "--clean", "--strict", "--config-file", CONFIGURATION.name]
        if subprocess.run(command, cwd=folder, check=False).returncode != 0:
            return 1
        faults = find_faults(folder / "site")
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(folder / "site", site)
    for fault in faults:
        sys.stderr.write(f"{fault}\n")
    sys.stdout.write(f"{site}: {len(list(site.rglob('*.html')))} pages, {len(faults)} faults\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".site")))

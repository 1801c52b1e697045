"""Build hook: puts the client and the modules of `keyvault` that it imports into one package.

The wheel has no package named `keyvault`, which could be another one where it is installed. The copies are in
`keyvault_client._keyvault`, and every import of `keyvault` is changed to it. Nothing else is changed.
"""

import ast
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = "keyvault_client"
COPIED = "keyvault"
PLACE = f"{PACKAGE}._keyvault"

_IMPORT = re.compile(rb"^(\s*)from keyvault([. ])", re.MULTILINE)


def change_imports(source: bytes) -> bytes:
    """Return the source with its imports of `keyvault` changed to the copies."""
    return _IMPORT.sub(rb"\1from " + PLACE.encode() + rb"\2", source)


def bundled_files() -> dict[str, Path]:
    """Return the files of the wheel: their path in it, and their source in the repository."""
    own = {path.relative_to(HERE).as_posix(): path for path in sorted((HERE / PACKAGE).rglob("*")) if _is_source(path)}
    wanted = [path for path in own.values() if path.suffix == ".py"]
    copies: set[Path] = set()
    while wanted:
        for path in set(_imported_files(wanted.pop())) - copies:
            copies.add(path)
            wanted.append(path)
    place = PLACE.replace(".", "/")
    return own | {f"{place}/{path.relative_to(ROOT / COPIED).as_posix()}": path for path in sorted(copies)}


def write_files(folder: Path) -> None:
    """Write the files of the wheel into a folder."""
    for name, source in bundled_files().items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(change_imports(source.read_bytes()))


def _is_source(path: Path) -> bool:
    return path.is_file() and path.suffix in {".py", ".typed"}


def _imported_files(path: Path) -> Iterator[Path]:
    """Yield the files of `keyvault` that a file imports, with their packages. Raises ValueError for other forms."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import) and any(name.name.split(".")[0] == COPIED for name in node.names):
            raise ValueError(f"{path}:{node.lineno}: use `from keyvault.… import …`")
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == COPIED:
            names = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
            for name in names:
                yield from _files_of(name)


def _files_of(name: str) -> Iterator[Path]:
    module = ROOT / name.replace(".", "/")
    if (module / "__init__.py").is_file():
        yield module / "__init__.py"
    elif module.with_suffix(".py").is_file():
        yield module.with_suffix(".py")
    else:
        return
    for package in module.parents:
        if package == ROOT:
            return
        yield package / "__init__.py"


class Bundle(BuildHookInterface[Any]):
    """Called by hatchling for each wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="keyvault-client-"))
        write_files(self._folder)
        build_data["force_include"][str(self._folder / PACKAGE)] = PACKAGE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self._folder)

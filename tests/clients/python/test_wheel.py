"""The files of the wheel. `make test-wheel` installs it alone, and runs the client's tests there."""

import re
import zipfile
from pathlib import Path

from .wheel import ROOT, build, load_bundle


def test_wheel_has_the_bytes_of_the_repository(tmp_path: Path) -> None:
    """Guarantee: the wheel has what the repository has; of a copied file, only the imports of `keyvault` differ."""
    bundle = load_bundle()
    files = bundle.bundled_files()
    with zipfile.ZipFile(build(tmp_path)) as wheel:
        built = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    assert built.keys() == files.keys()
    assert "keyvault_client/_keyvault/access/decision.py" in built
    for name, source in files.items():
        restored = re.sub(rb"(?m)^(\s*)from keyvault_client\._keyvault([. ])", rb"\1from keyvault\2", built[name])
        assert restored == source.read_bytes(), name


def test_wheel_copies_pure_packages_only() -> None:
    """Guarantee: no service code, and no framework, comes with the wheel."""
    copies = [path for path in load_bundle().bundled_files().values() if path.is_relative_to(ROOT / "keyvault")]
    assert {path.relative_to(ROOT / "keyvault").parts[0] for path in copies} == {
        "__init__.py",
        "access",
        "domain",
        "wire",
    }

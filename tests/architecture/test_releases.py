"""`releases.toml` is true: each version, its commit and its migrations belong together."""

import re
import tomllib
from pathlib import Path

import pytest

from keyvault.domain.releases import RELEASE, parse_release
from tests.environment import ROOT
from tests.upgrade.releases import Release, has_history, list_files, read_releases, show_file


def find_faults(release: Release) -> list[str]:
    """Say what is wrong with an entry, as far as its commit is here."""
    about = show_file(release.commit, "pyproject.toml")
    if about is None:
        return [f"{release.version}: there is no commit {release.commit}"]
    faults = []
    if (version := tomllib.loads(about)["project"]["version"]) != release.version:
        faults.append(f"{release.version}: its commit is of version {version}")
    for app in ("keyvault", "rotation"):
        newest = max(name for name in list_files(release.commit, f"{app}/migrations") if name[:4].isdigit())
        if release.migrations.get(app) != newest.removesuffix(".py"):
            faults.append(f"{release.version}: the newest migration of {app} in its commit is {newest}")
    return faults


def test_releases_are_not_newer_than_this_tree() -> None:
    releases = read_releases()
    assert all(parse_release(release.version) <= parse_release(RELEASE) for release in releases)


def test_releases_have_a_section_of_the_changelog() -> None:
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert {release.version for release in read_releases()} <= set(sections)


def test_releases_name_commits_of_their_version() -> None:
    if not has_history():
        pytest.skip("this checkout has no history")
    assert [fault for release in read_releases() for fault in find_faults(release)] == []


def test_releases_newest_migrations_are_in_this_tree() -> None:
    """Guarantee: a migration that users have applied is never renamed or removed."""
    for release in read_releases():
        for app, name in release.migrations.items():
            assert (ROOT / app / "migrations" / f"{name}.py").exists(), f"{release.version} has {app}.{name}"


def test_releases_with_a_wrong_entry_are_found(tmp_path: Path) -> None:
    if not has_history():
        pytest.skip("this checkout has no history")
    path = tmp_path / "releases.toml"
    path.write_text(
        f'["9.9.9"]\ncommit = "HEAD"\nmigrations = {{ keyvault = "0000_x" }}\n["9.9.10"]\ncommit = "{"0" * 40}"\n'
        "migrations = {}\n"
    )
    wrong, missing = read_releases(path)
    assert [fault.partition(":")[0] for fault in find_faults(wrong)] == ["9.9.9"] * 3
    assert find_faults(missing) == [f"9.9.10: there is no commit {'0' * 40}"]

"""Releases and their order."""

import tomllib
from pathlib import Path

import pytest

from keyvault.domain.releases import OLDEST_COMPATIBLE_RELEASE, RELEASE, parse_release

ROOT = Path(__file__).resolve().parents[2]


def test_release_is_that_of_the_package() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == RELEASE


def test_release_is_compatible_with_its_own_schema() -> None:
    assert parse_release(OLDEST_COMPATIBLE_RELEASE) <= parse_release(RELEASE)


def test_releases_are_ordered_by_number() -> None:
    assert parse_release("0.9.0") < parse_release("0.10.0") < parse_release("1.0.0")


@pytest.mark.parametrize("text", ["", "1", "1.0", "1.0.0.0", "1.0.0rc1", "v1.0.0", "1.0.-1", "1.0.0\n", "\u0661.0.0"])
def test_text_that_is_no_release_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a release"):
        parse_release(text)

"""Secret files: read by one user only, with one line that says what is wrong."""

from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from keyvault.backends.private_files import read_private_file


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "passphrase"
    path.write_text("text\n")
    path.chmod(0o600)
    return path


def test_private_file_is_read_without_its_line_end(secret: Path) -> None:
    assert read_private_file(secret) == "text"


def test_private_file_that_others_may_read_is_refused(secret: Path) -> None:
    secret.chmod(0o640)
    with pytest.raises(ImproperlyConfigured, match="chmod 600"):
        read_private_file(secret)


def test_private_file_that_is_missing_or_empty_is_named(secret: Path) -> None:
    secret.write_text("\n")
    with pytest.raises(ImproperlyConfigured, match="is empty"):
        read_private_file(secret)
    secret.unlink()
    with pytest.raises(ImproperlyConfigured, match="is missing"):
        read_private_file(secret)


def test_private_file_of_another_user_is_named(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: no traceback, which would name no remedy."""

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ImproperlyConfigured, match="cannot be read by the user of this process"):
        read_private_file(secret)

"""Secret files: read by one user only, with one line that says what is wrong."""

import fcntl
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from keyvault.backends import private_files
from keyvault.backends.private_files import new_private_file, read_or_make_master_key, read_private_file


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
    with pytest.raises(ImproperlyConfigured, match=r"is missing; put the file there$"):
        read_private_file(secret)
    with pytest.raises(ImproperlyConfigured, match="no backup of the service contains it"):
        read_or_make_master_key(secret, may_make=False)


def test_private_file_that_is_no_text_is_named_and_not_shown(secret: Path) -> None:
    """Guarantee: no traceback, and no exception that has the content, which may be a key."""
    secret.write_bytes(bytes(range(224, 256)))
    with pytest.raises(ImproperlyConfigured, match="passphrase cannot be read as text") as refused:
        read_private_file(secret)
    assert refused.value.__context__ is None
    with pytest.raises(ImproperlyConfigured, match="cannot be read as text: Is a directory"):
        read_private_file(secret.parent)


def test_private_file_of_another_user_is_named(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: no traceback, which would name no remedy."""

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ImproperlyConfigured, match="cannot be read by the user of this process"):
        read_private_file(secret)


def test_new_file_has_one_writer_at_a_time(tmp_path: Path) -> None:
    """Guarantee: a second writer changes nothing, and no unfinished file gets the final name."""
    path = tmp_path / "archive"
    with new_private_file(path) as file:
        file.write(b"first")
        with pytest.raises(OSError, match="another process writes this file"), new_private_file(path):
            pass
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_new_file_that_another_process_replaced_gets_no_name(tmp_path: Path) -> None:
    partial = tmp_path / "archive.partial"

    def write_while_another_replaces() -> None:
        with new_private_file(tmp_path / "archive"):
            partial.unlink()
            partial.write_bytes(b"unfinished")

    with pytest.raises(OSError, match="another process"):
        write_while_another_replaces()
    assert list(tmp_path.iterdir()) == [partial]


def test_new_file_after_a_killed_writer_is_another_file(tmp_path: Path) -> None:
    """The killed process may have linked its file to the final name, which was changed since."""
    path, partial, former = tmp_path / "archive", tmp_path / "archive.partial", tmp_path / "former"
    former.write_bytes(b"whole")
    former.chmod(0o644)
    partial.hardlink_to(former)
    with new_private_file(path) as file:
        file.write(b"next")
    assert (former.read_bytes(), path.read_bytes()) == (b"whole", b"next")
    assert path.stat().st_mode & 0o777 == 0o600
    assert not partial.exists()


def test_new_file_is_not_lost_to_a_writer_that_opened_it_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: the second writer, which gets the lock when the first one ends, does not touch the finished file."""
    path, lock = tmp_path / "archive", fcntl.flock
    first = new_private_file(path)
    first.__enter__().write(b"first")

    def end_first(descriptor: int, how: int) -> None:
        monkeypatch.undo()
        first.__exit__(None, None, None)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", end_first)
    with pytest.raises(OSError, match="another process"):
        private_files._open_partial(tmp_path / "archive.partial")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]

"""`manage.py redact`: removes secrets from a support attachment."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from hypothesis import given, settings
from hypothesis import strategies as st

from keyvault.domain.redaction import redact
from tests.domain.minting import mint

ROOT = Path(__file__).resolve().parents[2]
KEY = mint(seed="an attachment's")
HANDLE = KEY[:27]
SECRET = KEY[27:]


def filtered(attachment: bytes, *arguments: str) -> bytes:
    """Return the command's output for this standard input, in this process."""
    output = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(attachment)))
        patch.setattr(sys, "stdout", stdout := io.TextIOWrapper(output))
        call_command("redact", *arguments)
        stdout.flush()
        return output.getvalue()


def test_redact_standard_input_is_written_without_its_secrets() -> None:
    """`manage.py redact < support.log` removes every secret and changes nothing else."""
    attachment = (
        f"GET /\r\nX-Api-Key: {KEY}\r\nAuthorization: Bearer {KEY}\r\n\r\nbody é\n".encode() + b"\xff\xfe\x00\n"
    )
    command = [sys.executable, "manage.py", "redact"]
    done = subprocess.run(command, cwd=ROOT, input=attachment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == attachment.replace(SECRET.encode(), b"***")


def test_redact_file_is_written_to_standard_output_and_left_unchanged(tmp_path: Path) -> None:
    attachment = tmp_path / "support.log"
    attachment.write_text(f"sent {KEY}\n")
    assert filtered(b"", str(attachment)) == f"sent {HANDLE}***\n".encode()
    assert attachment.read_text() == f"sent {KEY}\n"


def test_redact_missing_file_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"absent\.log: No such file") as refused:
        filtered(b"", str(tmp_path / "absent.log"))
    assert "\n" not in str(refused.value)


def test_redact_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="Is a directory"):
        filtered(b"", str(tmp_path))


@pytest.mark.parametrize(
    "attachment", [b"", b"\n", b"\r\n", b"\r", b"a\rb\nc\r\n", b"\x00\x80\xff", b"\xef\xbb\xbfa", b"no end"]
)
def test_redact_attachment_without_secrets_is_unchanged(attachment: bytes) -> None:
    """Line ends, NULs and bytes that are not text are kept."""
    assert filtered(attachment) == attachment


@pytest.mark.parametrize("before", [65_536 - 10, 65_536 - 27, 65_536 - 40, 65_536 - 90, 131_072 - 30])
def test_redact_secret_across_two_reads_leaks_nothing(before: int) -> None:
    """The file is read in blocks; a secret across two blocks is still found."""
    attachment = b"-" * before + KEY.encode() + b"\n" + KEY.encode() + b"-" * 70_000
    assert filtered(attachment) == attachment.replace(SECRET.encode(), b"***")


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=30) | st.just(KEY.encode()) | st.just(b"Authorization: Basic aHVudGVyMg==\n")))
def test_redact_any_bytes_equals_the_pure_redactor(parts: list[bytes]) -> None:
    attachment = b"".join(parts)
    clean = filtered(attachment)
    assert clean == redact(attachment.decode(errors="surrogateescape")).encode(errors="surrogateescape")
    assert SECRET.encode() not in clean
    assert b"aHVudGVyMg" not in clean

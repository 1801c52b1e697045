"""`manage.py demo` from beginning to end, and its cleanup when it is stopped."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.environment import REQUIRE, required_servers
from tests.servers.openbao import find_vault

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
SHAPED = re.compile(r"[a-z0-9]+_(?:prv|svc)_(?:sbx|all)_[0-9A-Za-z]{17,}")


@pytest.fixture
def demo(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """The started demo, with its temporary folder inside that of the test."""
    with started(tmp_path) as process:
        yield process


@pytest.fixture
def demo_on_vault(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """The started demo on an OpenBao or Vault that it starts itself, with the binary of the test suite."""
    binary = find_vault()
    if binary is None and "openbao" in required_servers():
        pytest.fail(f"{REQUIRE} names openbao, but there is no bao or vault on PATH", pytrace=False)
    if binary is None:
        pytest.skip("no OpenBao or Vault on this machine")
    with started(tmp_path, KEYVAULT_BACKEND="vault", PATH=f"{binary.parent}:{os.environ['PATH']}") as process:
        yield process


@contextmanager
def started(folder: Path, **environ: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, ROOT / "manage.py", "demo"],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder), "NO_COLOR": "1"} | environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def processes_in(folder: Path) -> list[str]:
    """List the processes whose environment names the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (path / "environ").read_bytes() and path.name != str(os.getpid()):
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return found


def read_until(process: "subprocess.Popen[str]", words: str) -> str:
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if words in line:
            return text
    pytest.fail(f"it ended before it said {words!r}:\n{text}")


@pytest.mark.timeout(300)
def test_demo_tells_the_whole_story_and_cleans_up(demo: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """Guarantee: the valid key is accepted throughout its rotation, and a revoked key is never accepted afterwards."""
    text, _ = demo.communicate()
    assert demo.returncode == 0, text
    assert_all_held(text)
    for operator in ("admin", "approver", "auditor", "responder", "tam"):
        assert re.search(rf"\b{operator}: \S+, TOTP secret [A-Z2-7]{{32}}\b", text), operator
    assert_nothing_left(tmp_path)


@pytest.mark.openbao
@pytest.mark.timeout(300)
def test_demo_on_a_vault_tells_the_same_story_and_cleans_up(
    demo_on_vault: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    """Guarantee: the same with a real OpenBao or Vault in the keystore's place, whose audit log is searched for
    secrets with everything else; the server is gone afterwards too."""
    text, _ = demo_on_vault.communicate()
    assert demo_on_vault.returncode == 0, text
    assert_all_held(text)
    assert_nothing_left(tmp_path)


@pytest.mark.openbao
@pytest.mark.timeout(300)
def test_demo_on_a_vault_stopped_in_the_middle_leaves_no_server(
    demo_on_vault: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    read_until(demo_on_vault, "Rotation under that traffic")
    assert any(" server -dev" in process for process in processes_in(tmp_path))
    demo_on_vault.send_signal(signal.SIGTERM)
    rest, _ = demo_on_vault.communicate()
    assert demo_on_vault.returncode == 143
    assert "Traceback" not in rest
    assert_nothing_left(tmp_path)


def assert_all_held(text: str) -> None:
    figures = dict(re.findall(r"^  (\S.*?)  +(\S.*)$", text.partition("The figures")[2], re.MULTILINE))
    counts = re.fullmatch(r"(\d+), of which (\d+) rightly refused after the revocation", figures["requests"])
    assert counts is not None
    assert int(counts[1]) > 250
    assert int(counts[2]) >= 50
    assert figures["failures"] == "0"
    quarantine = re.fullmatch(r"(\d+), and (\d+) counted", figures["refused in quarantine"])
    assert quarantine is not None
    assert int(quarantine[1]) == int(quarantine[2]) >= 1
    assert re.fullmatch(r"\d+ ms (after|before) the reply to the revocation", figures["from revoke to first refusal"])
    receipt = re.fullmatch(
        r"complete: 1 verifier has confirmed, the last (\d+) ms after the request",
        figures["receipt of the revocation"],
    )
    assert receipt is not None
    assert figures["audit log"].endswith("entries, intact")
    assert figures["secrets found in files"] == "0, of 14 issued"
    assert figures["errors in the logs"] == "0"
    way = re.findall(r"([a-z_]+) \d+\.\d s", figures["states of the rotation"])
    assert way == [
        *("requested", "approved", "staged", "publishing", "delivered"),
        *("awaiting_proof", "overlap", "quarantine", "revoking", "completed"),
    ]
    for refused in (
        "tam approves it himself",
        "admin, who may approve, approves her own request",
        "tam collects it again",
    ):
        assert re.search(rf"{refused}: refused\.", text)
    assert re.search(r"the old key \w{16}: 401 key_revoked", text)
    assert "in the operators' inbox: rotation.used_in_quarantine, an alarm" in text
    assert SHAPED.search(text) is None


def assert_nothing_left(folder: Path) -> None:
    assert list(folder.glob("kv-demo-*")) == []
    assert processes_in(folder) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("when", "number", "status"),
    [("Setup", signal.SIGTERM, 143), ("Rotation under that traffic", signal.SIGINT, 130)],
)
def test_demo_stopped_in_the_middle_leaves_nothing(
    demo: "subprocess.Popen[str]", tmp_path: Path, when: str, number: signal.Signals, status: int
) -> None:
    read_until(demo, when)
    assert processes_in(tmp_path) != []
    demo.send_signal(number)
    rest, _ = demo.communicate()
    assert demo.returncode == status
    assert "All started processes have ended." in rest
    assert "Traceback" not in rest
    assert_nothing_left(tmp_path)


@pytest.mark.timeout(300)
def test_demo_killed_outright_leaves_no_process(demo: "subprocess.Popen[str]", tmp_path: Path) -> None:
    read_until(demo, "The merchant at work")
    demo.kill()
    demo.communicate()
    deadline = time.monotonic() + 60
    while processes_in(tmp_path):
        assert time.monotonic() < deadline, processes_in(tmp_path)
        time.sleep(0.1)

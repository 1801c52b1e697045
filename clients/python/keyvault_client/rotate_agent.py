"""`python -m keyvault_client rotate-agent`: a sidecar that takes a merchant's key through its rotations.

It asks for the open rotation's replacement, opens it with the recipient key, replaces the key file atomically, runs a
command, and acknowledges with the new key. Each step may be repeated, so the agent may be stopped at any time: the
service returns the replacement until it is acknowledged.
"""

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keyvault.domain.plaintext import Plaintext
from keyvault_client.errors import AuthenticationError, CommandFailedError, KeyvaultError, NotFoundError
from keyvault_client.key_sources import FileKey
from keyvault_client.keystrings import key_id, kind_and_scope
from keyvault_client.merchant import MerchantClient, MerchantOptions
from keyvault_client.sealed import create_recipient_key, open_sealed, recipient_public_key

logger = logging.getLogger("keyvault_client")

_COMMAND_SECONDS = 300.0


class Agent:
    """One key file.

    Args:
        file: the key file. Processes that use the key read it again, see `FileKey`.
        recipient_key: file with the private recipient key: 32 bytes of X25519 in base64url.
        command: program and arguments to run after the file was replaced; none: only the file is replaced.
    """

    def __init__(
        self, base_url: str, environment: str, file: Path, recipient_key: Path, command: Sequence[str] = ()
    ) -> None:
        self._base_url = base_url
        self._environment = environment
        self._file = file
        self._recipient_key = recipient_key
        self._command = command
        # The replacement that is in the file and is not acknowledged yet.
        self._pending = _pending_file(file)

    def run_once(self) -> bool:
        """Take up an open rotation's replacement. Returns whether there was one. Raises KeyvaultError and others."""
        if not self._pending.exists():
            replacement = self._fetch()
            if replacement is None:
                return False
            # Write the note first: after a crash, the agent then runs the command and acknowledges.
            write_atomically(self._pending, Plaintext(key_id(replacement)))
            write_atomically(self._file, replacement)
            logger.info("keyvault: %s has the key %s", self._file, key_id(replacement))
        elif self._pending.read_text(encoding="ascii") != key_id(FileKey(self._file).read(0)):
            # The agent was killed between the note and the key.
            self._pending.unlink()
            return self.run_once()
        if self._command:
            _run(self._command)
        self._acknowledge()
        self._pending.unlink()
        return True

    def register(self) -> None:
        """Set the recipient key of the credential; make the key first if the file does not exist. Repeatable."""
        if not self._recipient_key.exists():
            write_atomically(self._recipient_key, create_recipient_key()[0])
        with self._client() as client:
            client.set_recipient_key(recipient_public_key(self._read_recipient_key()))

    def _fetch(self) -> Plaintext | None:
        with self._client() as client:
            try:
                answer: Mapping[str, Any] = client.retrieve_replacement().json
            except NotFoundError:
                return None
        replacement = open_sealed(self._read_recipient_key(), answer["sealed"])
        if kind_and_scope(replacement)[0] != "prv" or key_id(replacement) != answer.get("key_id"):
            raise ValueError("the sealed text is not the replacement's key")
        return replacement

    def _read_recipient_key(self) -> Plaintext:
        return FileKey(self._recipient_key).read(0)

    def _acknowledge(self) -> None:
        with self._client() as client:
            try:
                client.acknowledge()
            except NotFoundError:
                # It was acknowledged already, and the rotation is over.
                logger.info("keyvault: there is nothing to acknowledge")

    def _client(self) -> MerchantClient:
        options = MerchantOptions(acknowledge=False)
        return MerchantClient(self._base_url, self._environment, FileKey(self._file), options)


def write_atomically(path: Path, text: Plaintext) -> None:
    """Replace a file: readers see the old or the new text, also after a crash. Only the owner may read it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            if path.exists():
                known = path.stat()
                os.fchmod(file.fileno(), known.st_mode & 0o777)
                if os.geteuid() == 0:
                    os.fchown(file.fileno(), known.st_uid, known.st_gid)
            file.write(text.reveal())
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def main(arguments: Sequence[str], sleep: Callable[[float], None] = time.sleep) -> int:
    """Run the command and return the exit status: 0 done, 1 refused or failed with `--once`, 2 usage."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    agent = Agent(options.base_url, options.environment, options.file, options.recipient_key, options.exec or ())
    if options.register:
        try:
            agent.register()
        except (KeyvaultError, OSError, ValueError) as error:
            logger.error("keyvault: the recipient key was not registered, run --register again: %s", error)
            return 1
    while True:
        try:
            agent.run_once()
        except AuthenticationError as error:
            logger.error("keyvault: the key in %s is not valid: %s", options.file, error)
            if options.once:
                return 1
        except (KeyvaultError, OSError, ValueError, KeyError, TypeError) as error:
            logger.error("keyvault: the replacement was not taken up: %s", error)
            if options.once:
                return 1
        if options.once:
            return 0
        sleep(options.every)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. All that follows `--exec` is the command, also a `--`, which would end it for argparse."""
    at = arguments.index("--exec") if "--exec" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:at])
    options.exec = arguments[at + 1 :] or options.exec
    return options


def _run(command: Sequence[str]) -> None:
    """Run the user's command. Raises CommandFailedError, and OSError for a command that cannot be started."""
    try:
        done = subprocess.run(command, check=False, timeout=_COMMAND_SECONDS)  # noqa: S603  the user's command
    except subprocess.TimeoutExpired:
        raise CommandFailedError(f"the command did not end within {_COMMAND_SECONDS:.0f} seconds") from None
    if done.returncode != 0:
        raise CommandFailedError(f"the command ended with status {done.returncode}")


def _pending_file(file: Path) -> Path:
    return file.with_name(f".{file.name}.unacknowledged")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m keyvault_client rotate-agent", description=__doc__)
    parser.add_argument("--base-url", required=True, help="such as https://api.example/sandbox")
    parser.add_argument("--environment", required=True, choices=["sandbox", "production"])
    parser.add_argument("--file", required=True, type=Path, help="the key file")
    parser.add_argument("--recipient-key", required=True, type=Path, help="file with the private recipient key")
    parser.add_argument(
        "--register",
        action="store_true",
        help="first register the recipient key, which is made if its file does not exist; repeatable",
    )
    parser.add_argument("--every", type=float, default=30, help="seconds between two polls")
    parser.add_argument("--once", action="store_true", help="poll once, and exit")
    parser.add_argument("--exec", nargs=argparse.REMAINDER, help="command to run after the file was replaced; the last")
    return parser

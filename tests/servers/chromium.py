"""A headless Chromium, driven over WebDriver (W3C), with a virtual authenticator for passkeys."""

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .throwaway import MissingServerError, free_port

SECONDS = 60.0
"""Maximum wait for a page or an element."""

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Chromium:
    """One browser window."""

    def __init__(self, url: str) -> None:
        self._url = url

    def open(self, url: str) -> None:
        self._call("POST", "url", {"url": url})

    def write(self, selector: str, text: str) -> None:
        self._call("POST", f"element/{self._find(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        self._call("POST", f"element/{self._find(selector)}/click", {})

    def text(self, selector: str = "body") -> str:
        return str(self._call("GET", f"element/{self._find(selector)}/text"))

    def wait_for_title(self, title: str) -> None:
        """Wait until the page has this heading."""
        self._find(f"//h1[contains(., '{title}')]", using="xpath")

    def add_authenticator(self) -> None:
        """Attach a platform authenticator whose user always confirms."""
        self._call(
            "POST",
            "webauthn/authenticator",
            {
                "protocol": "ctap2",
                "transport": "internal",
                "hasUserVerification": True,
                "isUserVerified": True,
                "isUserConsenting": True,
            },
        )

    def _find(self, selector: str, using: str = "css selector") -> str:
        found = self._call("POST", "element", {"using": using, "value": selector})
        return str(found[_ELEMENT])

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return call(method, f"{self._url}/{path}", body)


def call(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    """Return the value of a WebDriver reply. Raises HTTPError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)  # noqa: S310  our own driver
    with urllib.request.urlopen(request, timeout=2 * SECONDS) as reply:  # noqa: S310  our own driver
        return json.loads(reply.read())["value"]


@contextmanager
def chromium(folder: Path) -> Iterator[Chromium]:
    """Start a browser with a profile in this folder. Raises MissingServerError where it is not installed."""
    driver, browser = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or browser is None:
        raise MissingServerError("no chromedriver with a Chromium on PATH")
    url = f"http://127.0.0.1:{(port := free_port())}"
    with (folder / "chromedriver.log").open("wb") as log:
        process = subprocess.Popen([driver, f"--port={port}"], stdout=log, stderr=log, env={**os.environ})
        try:
            _wait(url, process)
            arguments = [
                "--headless=new",
                "--no-sandbox",
                "--disable-dev-shm-usage",
                f"--user-data-dir={folder}/profile",
            ]
            wanted = {
                "goog:chromeOptions": {"binary": browser, "args": arguments},
                "timeouts": {"implicit": int(SECONDS * 1000), "pageLoad": int(SECONDS * 1000)},
            }
            session = call("POST", f"{url}/session", {"capabilities": {"alwaysMatch": wanted}})
            try:
                yield Chromium(f"{url}/session/{session['sessionId']}")
            finally:
                call("DELETE", f"{url}/session/{session['sessionId']}")
        finally:
            process.terminate()
            process.wait(SECONDS)


def _wait(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            if call("GET", f"{url}/status")["ready"]:
                return
        except OSError:
            pass
        assert process.poll() is None, "chromedriver has exited"
        assert time.monotonic() < deadline, "chromedriver is not ready"
        time.sleep(0.05)

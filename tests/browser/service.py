"""A whole service with demo data and operators who sign in, as `make run` starts it."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.hashes import SHA1
from cryptography.hazmat.primitives.twofactor.totp import TOTP
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.environment import ROOT
from tests.servers.throwaway import MissingServerError, free_port

START_SECONDS = 180
"""Maximum time until the service is ready, on a busy machine."""

WAIT_MS = 60_000
"""Maximum wait for something on a page, in milliseconds."""

_FILL = "from tests.browser.month import fill_month; fill_month()"

_OPERATOR = re.compile(r"^  (\w+) +(\S{20,}) +([A-Z2-7]{16,}) +\w", re.MULTILINE)
_TOKEN = re.compile(r"Authorization: Bearer (\S+?)'")
_KEY = re.compile(r'"key": ?"(kv_[^"]+)"')


@dataclass(slots=True)
class Service:
    """`operators`: password and TOTP secret by name. `token`, `key`: of the sandbox."""

    url: str
    data: Path
    operators: dict[str, tuple[str, str]]
    token: str
    key: str
    _browser: Browser
    _signed_in: dict[str, Any] = field(default_factory=dict)
    _last_code: dict[str, str] = field(default_factory=dict)

    def manage(self, *arguments: str) -> str:
        """Run a management command and return what it prints."""
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=ROOT,
            env=environment_of(self.data),
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def verify(self, key: str) -> dict[str, Any]:
        """Ask whether the key may read an order in the sandbox."""
        answer = httpx.post(
            f"{self.url}/v1/keys/verify",
            headers={"Authorization": f"Bearer {self.token}"},
            json={"key": key, "environment": "sandbox", "endpoint": "orders.retrieve", "client_ip": "198.51.100.7"},
        )
        found: dict[str, Any] = answer.json()
        return found

    @contextmanager
    def page(self, operator: str, **options: Any) -> Iterator[Page]:
        """Open a window that the operator is signed in to. `options`: of Playwright's `new_context`."""
        context = self._browser.new_context(storage_state=self._signed_in.get(operator), base_url=self.url, **options)
        try:
            context.set_default_timeout(WAIT_MS)
            page = context.new_page()
            if operator not in self._signed_in:
                self.sign_in(page, operator)
                self._signed_in[operator] = context.storage_state()
            yield page
        finally:
            context.close()

    def new_context(self, **options: Any) -> BrowserContext:
        """Open a window without a session."""
        context = self._browser.new_context(base_url=self.url, **options)
        context.set_default_timeout(WAIT_MS)
        return context

    def sign_in(self, page: Page, operator: str) -> None:
        password, seed = self.operators[operator]
        page.goto("/admin/")
        page.locator("[name=username]").fill(operator)
        page.locator("[name=password]").fill(password)
        page.get_by_role("button", name="Sign in").click()
        code = page.locator("[name=second_factor_code]")
        code.fill(self._fresh_code(operator, seed))
        code.press("Enter")
        page.wait_for_url(re.compile(r"/admin/(?!second-factor|login)"))

    def give_code(self, page: Page, operator: str) -> None:
        """Fill in a second factor where the page asks for one."""
        code = page.locator("[name=second_factor_code]")
        if code.count():
            code.first.fill(self._fresh_code(operator, self.operators[operator][1]))

    def _fresh_code(self, operator: str, seed: str) -> str:
        """Return a code that was not used. Each is valid for 30 seconds and works once: the next one is awaited."""
        pause, authenticator = threading.Event(), TOTP(base64.b32decode(seed), 6, SHA1(), 30)  # noqa: S303  RFC 6238
        while (code := authenticator.generate(time.time()).decode()) == self._last_code.get(operator):
            pause.wait(0.5)
        self._last_code[operator] = code
        return code


def find_chromium() -> str:
    """Return the browser's program. Raises MissingServerError."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (path := shutil.which(name)) is not None:
            return path
    raise MissingServerError("no Chromium on this machine")


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Start a browser. Raises MissingServerError."""
    program = find_chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def fill(data: Path) -> dict[str, str]:
    """Fill the data folder of a service with a month, and return the paths of the pages that show it, by name."""
    done = subprocess.run(
        [sys.executable, "manage.py", "shell", "--no-imports", "-c", _FILL],
        cwd=ROOT,
        env=environment_of(data),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    pages: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return pages


@contextmanager
def running_service(folder: Path, browser: Browser) -> Iterator[Service]:
    """Start the service, and stop it at the end."""
    port, log = free_port(), folder / "run.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "run", "--port", str(port)],
            cwd=ROOT,
            env=environment_of(folder / "data"),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            text = _await_start(process, log)
            operators = {name: (password, seed) for name, password, seed in _OPERATOR.findall(text)}
            (token,), (key,) = _TOKEN.findall(text), _KEY.findall(text)
            yield Service(f"http://localhost:{port}", folder / "data", operators, token, key, browser)
        finally:
            process.terminate()
            process.wait()


def _await_start(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Return what the service printed once it was ready."""
    pause = threading.Event()
    for _ in range(START_SECONDS * 4):
        text = log.read_text()
        if "Press Ctrl-C to stop" in text:
            return text
        if process.poll() is not None:
            break
        pause.wait(0.25)
    raise RuntimeError(f"the service did not start: {log.read_text()[-2000:]}")


def environment_of(data: Path) -> dict[str, str]:
    own = {name: text for name, text in os.environ.items() if not name.startswith(("KEYVAULT_", "DJANGO_"))}
    return own | {"KEYVAULT_DATA_DIR": str(data)}

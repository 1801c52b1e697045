"""Pictures of every page of the console, with the data of a month (`make screenshots`).

They go to `docs/screenshots/`, which is not committed: each page in light and in dark at 1280 px, and on a phone at
390 px. The three of the README go to `docs/pictures/`.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import ViewportSize

from tests.browser.pages import open_page, walk_pages
from tests.browser.service import Service, fill, running_browser, running_service
from tests.environment import IN_MEMORY, ROOT

SCREENSHOTS = ROOT / "docs" / "screenshots"
README_PICTURES = ROOT / "docs" / "pictures"

DESK = ViewportSize(width=1280, height=800)
PHONE = ViewportSize(width=390, height=844)
LOOKS = (("light", "light", DESK), ("dark", "dark", DESK), ("phone", "light", PHONE))
"""Folder, color scheme and size of each set of pictures."""

README_SIZE = ViewportSize(width=1280, height=1000)

_FONTS = "() => document.fonts.ready"

OPERATORS = ("admin", "approver", "responder", "tam", "auditor")
"""Each page is shown to the first of these who finds it."""


def main() -> int:
    shutil.rmtree(SCREENSHOTS, ignore_errors=True)
    README_PICTURES.mkdir(exist_ok=True)
    memory = IN_MEMORY if IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="kv-screenshots-", dir=memory) as name:
        folder = Path(name)
        shown = fill(folder / "data")
        with running_browser() as browser, running_service(folder, browser) as service:
            _take_for_readme(service, shown)
            pages = _find_pages(service, shown)
            for look, scheme, size in LOOKS:
                _take(service, pages, SCREENSHOTS / look, scheme, size)
    return 0


def _find_pages(service: Service, shown: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Return the operator and the path of each picture, by its name. `shown`: the pages that `fill_month` names."""
    found: dict[str, tuple[str, str]] = {name: ("tam", path) for name, path in shown.items()}
    seen: set[str] = set()
    for operator in OPERATORS:
        with service.page(operator) as page:
            for name in walk_pages(page, ["/admin/"], seen):
                found.setdefault(_name(name), (operator, page.url.removeprefix(service.url)))
    return found


def _name(place: str) -> str:
    """Return the name of a page's pictures, such as `rotation-schedules` for /admin/rotation/schedules/."""
    return place.removeprefix("/admin/").strip("/").replace("/", "-") or "overview"


def _take(service: Service, pages: dict[str, tuple[str, str]], folder: Path, scheme: str, size: ViewportSize) -> None:
    folder.mkdir(parents=True)
    for operator in OPERATORS:
        with service.page(operator, color_scheme=scheme, viewport=size) as page:
            for name, path in _of(pages, operator):
                # A page that asked for a second factor may now lead to a download.
                if not open_page(page, path):
                    continue
                page.evaluate(_FONTS)
                # The menu is as high as the window.
                height = page.evaluate("() => document.documentElement.scrollHeight")
                page.set_viewport_size({"width": size["width"], "height": max(height, size["height"])})
                page.screenshot(path=folder / f"{name}.png")
                page.set_viewport_size(size)


def _take_for_readme(service: Service, shown: dict[str, str]) -> None:
    """Take the pictures that are committed: three quarters of the size, so that each has less than 150 KB."""
    paths = {"overview": "/admin/", "rotation": shown["rotation-overlap"], "credential": shown["credential-rotating"]}
    with service.page("admin", color_scheme="light", viewport=README_SIZE, device_scale_factor=0.75) as page:
        for name, path in paths.items():
            open_page(page, path)
            page.evaluate(_FONTS)
            page.screenshot(path=README_PICTURES / f"{name}.png")


def _of(pages: dict[str, tuple[str, str]], operator: str) -> Iterator[tuple[str, str]]:
    return ((name, path) for name, (who, path) in pages.items() if who == operator)


if __name__ == "__main__":
    sys.exit(main())

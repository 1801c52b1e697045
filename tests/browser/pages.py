"""The pages of the console that an operator finds."""

import re
from collections.abc import Iterable, Iterator

from playwright.sync_api import Error, Page

_ROW = re.compile(r"^(/admin/(?:keyvault|rotation)/\w+/)(?!new/|calendar/|panels/|access-review/)[^/]+/")
"""Beginning of the path of a row and of its actions."""

_NUMBER = re.compile(r"/\d+/")

_LINKS = """
() => [...document.querySelectorAll(".menu a, .who a, main a")].map((link) => String(link.getAttribute("href")))
"""


def walk_pages(page: Page, paths: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Open each of these pages, and then one of each name that these and the following pages link to.

    Yields the name of each page when it is open: its path with `ID` instead of the row's id. Downloads are no pages.

    Args:
        seen: names of pages that links do not open again. Those that are opened are added.
    """
    queue = list(paths)
    seen.update(map(name_page, queue))
    for path in queue:
        if not open_page(page, path):
            continue
        for link in page.evaluate(_LINKS):
            if link.startswith("/admin/") and name_page(link) not in seen:
                seen.add(name_page(link))
                queue.append(link)
        yield name_page(path)


def open_page(page: Page, path: str) -> bool:
    """Open the page, and return whether there is one: False for a download."""
    try:
        page.goto(path)
    except Error as error:
        if "Download is starting" not in error.message:
            raise
        return False
    return True


def name_page(path: str) -> str:
    return _NUMBER.sub("/ID/", _ROW.sub(r"\1ID/", re.split("[?#]", path)[0]))

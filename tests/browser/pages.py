"""The pages of the console that an operator finds."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from playwright.sync_api import Error, Page

_ROW = re.compile(r"^(/admin/\w+/\w+/)(?!new/|calendar/|panels/|access-review/)[^/]+/")
"""Beginning of the path of a row and its actions."""

_NUMBER = re.compile(r"/\d+/")

_STRUCTURE = """
() => {
    const name = (element) => [element.tagName, element.type, ...element.classList].join(".");
    const all = [...document.body.querySelectorAll("*:not(svg *)")];
    return [...new Set(all.map((element) => name(element.parentElement) + " > " + name(element)))].sort().join("\\n");
}
"""
"""Which elements are in which, with their classes: rules about them find nothing new on another page with the same."""

_LINKS = """
() => [...document.querySelectorAll(".menu a, .who a, main a")].map((link) => String(link.getAttribute("href")))
"""


@dataclass(frozen=True)
class FoundPage:
    """A page that is open. `name`: its path with `ID` instead of a row's id. `structure`: equal if it looks alike."""

    name: str
    path: str
    structure: str


def walk_pages(page: Page, paths: Iterable[str], seen: set[str]) -> Iterator[FoundPage]:
    """Open each of these pages, and then one of each name that they and the following pages link to.

    Args:
        seen: names of pages that are not opened again. The pages that are opened are added.
    """
    queue = list(paths)
    seen.update(map(name_page, queue))
    for path in queue:
        try:
            page.goto(path)
        except Error as error:
            if "Download is starting" in error.message:
                continue
            raise
        for link in page.evaluate(_LINKS):
            link = link.partition("#")[0]
            if link.startswith("/admin/") and name_page(link) not in seen:
                seen.add(name_page(link))
                queue.append(link)
        yield FoundPage(name_page(path), path, page.evaluate(_STRUCTURE))


def name_page(path: str) -> str:
    return _NUMBER.sub("/ID/", _ROW.sub(r"\1ID/", path.partition("?")[0]))

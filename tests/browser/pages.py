"""The pages of the console that an operator finds."""

import re

from playwright.sync_api import Page

_ID = re.compile(r"/[^/]*[0-9][^/]*/")
"""Part of a path that names a row: one page of each kind is enough."""


def list_pages(page: Page) -> dict[str, str]:
    """Return the pages of the menu, their tabs, one row of each list, and two forms of each page.

    The key is the path with `ID` instead of the row's id.
    """
    page.goto("/admin/")
    found = ["/admin/", *_list_links(page, ".menu a")]
    for path in list(found):
        page.goto(path)
        found += _list_links(page, ".tabs a")
    for path in dict.fromkeys(found):
        page.goto(path)
        found += [*_list_links(page, "main table a")[:1], *_list_links(page, "main a.button")[:2]]
    return {name_page(path): path for path in reversed(found)}


def name_page(path: str) -> str:
    return _ID.sub("/ID/", path.partition("?")[0])


def _list_links(page: Page, selector: str) -> list[str]:
    paths = page.eval_on_selector_all(selector, "(links) => links.map((link) => String(link.getAttribute('href')))")
    return [path.partition("#")[0] for path in paths if path.startswith("/admin/") and "logout" not in path]

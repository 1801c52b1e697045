"""Find faults of a built site: dead links, and anything that a browser would load from another host."""

import posixpath
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("source", "src"), ("iframe", "src"), ("object", "data")}
"""Attributes whose target a browser loads with the page."""

NOT_LOADED = frozenset({"canonical", "next", "prev", "alternate"})
"""Kinds of <link> that a browser does not load."""


class _SitePage(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]
        for name, value in values.items():
            if (tag, name) in LOADED and values.get("rel") not in NOT_LOADED:
                self.loaded.append(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)


def find_faults(site: Path) -> list[str]:
    """List the faults of all pages and style sheets."""
    pages = {path.relative_to(site).as_posix(): _SitePage(path.read_text()) for path in sorted(site.rglob("*.html"))}
    faults = [fault for name, page in pages.items() for fault in _find_in_page(site, pages, name, page)]
    for sheet in sorted(site.rglob("*.css")):
        targets = re.findall(r"(?:url\(|@import )[\"']?(https?:|//)", sheet.read_text())
        faults += [f"{sheet.relative_to(site)} loads from {target}" for target in targets]
    return faults


def _find_in_page(site: Path, pages: dict[str, _SitePage], name: str, page: _SitePage) -> Iterator[str]:
    if "default-src 'self'" not in page.policy or "://" in page.policy:
        yield f"{name} does not forbid scripts to load from other hosts"
    for target in page.loaded:
        if urlsplit(target).netloc:
            yield f"{name} loads {target} from another host"
        elif not target.startswith("data:") and not (site / _resolve(name, target)).is_file():
            yield f"{name} loads {target}, which is not on the site"
    for target in page.links:
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        to = _resolve(name, target)
        if (site / to).is_dir():
            to = posixpath.normpath(f"{to}/index.html")
        if not (site / to).is_file():
            yield f"{name} links to {target}, which is not on the site"
        elif parts.fragment and to in pages and unquote(parts.fragment) not in pages[to].anchors:
            yield f"{name} links to {target}, and there is no such heading"


def _resolve(name: str, target: str) -> str:
    """Return the path on the site. The error page is served at any path, so its links begin at the root."""
    path = unquote(urlsplit(target).path)
    if name == "404.html":
        return path.lstrip("/") or "index.html"
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name

"""The pages of the site: copies of pages of the repository, at the same paths, with the links of a site.

A page may be anywhere in the repository, so that it is also readable there. Here a `README.md` becomes the `index.md`
of its folder, a link to a page leads to its copy, an image is copied, and a link to any other file becomes its text.

    <!-- include PATH: "START" to "END" -->

in a page stands for the lines of another page from the one that begins with START up to the one that begins with END.
"""

import posixpath
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.environment import ROOT

CONFIGURATION = ROOT / "docs" / "zensical.toml"
IMAGES = (".svg", ".png")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
INCLUDE = re.compile(r'^<!-- include (\S+): "(.+)" to "(.+)" -->$', re.MULTILINE)


class StagingError(Exception):
    """A page is wrong; the text says which one, and why."""


def read_pages() -> dict[str, str]:
    """Return the pages of the navigation: path in the repository by path on the site."""
    return {page: _find_source(page) for page in _list_pages(_read_configuration()["nav"])}


def _read_configuration() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads(CONFIGURATION.read_text())["project"]
    return project


def stage(folder: Path) -> None:
    """Copy the pages into `folder/pages`, and configuration and theme beside it. Raises StagingError."""
    pages = read_pages()
    sites = {source: page for page, source in pages.items()}
    for page, source in pages.items():
        text = _link(source, _include(source, (ROOT / source).read_text()), sites, folder / "pages")
        to = folder / "pages" / page
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(text)
    theme = _read_configuration()["theme"]
    for image in {theme["logo"], theme["favicon"]}:
        _copy(image, folder / "pages")
    shutil.copy(CONFIGURATION, folder)
    shutil.copytree(CONFIGURATION.with_name(theme["custom_dir"]), folder / theme["custom_dir"])


def _list_pages(nav: list[Any] | str) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav:
        for below in entry.values():
            yield from _list_pages(below)


def _find_source(page: str) -> str:
    readme = re.sub(r"(^|/)index\.md$", r"\1README.md", page)
    for source in (page, readme):
        if (ROOT / source).is_file():
            return source
    raise StagingError(f"{CONFIGURATION.name} names {page}, and there is neither this page nor {readme}")


def _include(source: str, text: str) -> str:
    """Replace each include by the lines that it names, with their links as seen from this page."""

    def read(found: "re.Match[str]") -> str:
        other = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        whole = (ROOT / other).read_text()
        start, end = whole.find(f"\n{found[2]}"), whole.find(f"\n{found[3]}")
        if not 0 <= start < end:
            raise StagingError(
                f"{source} includes {other}, which has no lines that begin with {found[2]!r} and {found[3]!r}"
            )
        return LINK.sub(lambda link: _move(link, other, source), whole[start + 1 : end].rstrip())

    return INCLUDE.sub(read, text)


def _move(link: "re.Match[str]", before: str, to: str) -> str:
    """Return a link of the page `before` as a link of the page `to`."""
    mark, text, target = link.groups()
    if ":" in target:
        return link[0]
    path, hash_sign, heading = target.partition("#")
    whole = posixpath.normpath(posixpath.join(posixpath.dirname(before), path)) if path else before
    return f"{mark}[{text}]({posixpath.relpath(whole, posixpath.dirname(to) or '.')}{hash_sign}{heading})"


def _link(source: str, text: str, sites: dict[str, str], pages: Path) -> str:
    """Replace the links of a page by those of the site, and copy its images."""

    def replace(link: "re.Match[str]") -> str:
        mark, words, target = link.groups()
        path, hash_sign, heading = target.partition("#")
        if ":" in path or not path:
            return link[0]
        whole = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if (ROOT / whole).is_dir() and f"{whole}/README.md" in sites:
            whole = f"{whole}/README.md"
        if whole in sites:
            to = posixpath.relpath(sites[whole], posixpath.dirname(sites[source]) or ".")
            return f"{mark}[{words}]({to}{hash_sign}{heading})"
        if not (ROOT / whole).exists():
            raise StagingError(f"{source} links to {target}, which does not exist")
        if whole.endswith(IMAGES):
            _copy(whole, pages)
            return link[0]
        return words

    return LINK.sub(replace, text)


def _copy(image: str, pages: Path) -> None:
    to = pages / image
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / image, to)

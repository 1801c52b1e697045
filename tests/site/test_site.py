"""The pages of the documentation site and the checks of the built one. `make docs` builds it."""

from pathlib import Path

from tests.environment import ROOT
from tests.site.checks import find_faults
from tests.site.staging import INCLUDE, read_pages, stage


def test_site_has_every_page_of_the_documentation() -> None:
    """Guarantee: a new page of docs/ gets a place in the navigation."""
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages - set(read_pages().values()) == set()


def test_site_pages_are_staged_with_their_includes_and_images(tmp_path: Path) -> None:
    stage(tmp_path)
    pages = tmp_path / "pages"
    tutorial = (pages / "docs" / "tutorials" / "first-key.md").read_text()
    assert "make run PORT=8000" in tutorial
    assert "../../index.md#five-minute-tour" in tutorial
    assert not [path for path in pages.rglob("*.md") if INCLUDE.search(path.read_text())]
    assert (pages / "docs" / "images" / "rotation.svg").exists()
    assert "](.importlinter" not in (pages / "index.md").read_text()


def test_site_images_are_drawn_without_other_files() -> None:
    """Guarantee: a picture loads no font and no image, from here or elsewhere."""
    pictures = sorted((ROOT / "docs" / "images").iterdir())
    assert {path.suffix for path in pictures} == {".svg"}
    for path in pictures:
        text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "<title" in text, path
        assert not any(mark in text for mark in ("://", "href", "@import", "<script", "@font-face")), path


POLICY = """<meta http-equiv="Content-Security-Policy" content="default-src 'self'">"""


def test_site_that_loads_from_another_host_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        f"{POLICY}"
        '<img src="https://images.example/a.png"><script src="//cdn.example/a.js"></script><a href="https://x.example">ok</a>'
        '<link rel="canonical" href="https://x.example"><link rel="stylesheet" href="a.css">'
    )
    (tmp_path / "a.css").write_text('@font-face { src: url("https://fonts.example/a.woff2") }')
    assert [fault.partition(" loads ")[2] for fault in find_faults(tmp_path)] == [
        "https://images.example/a.png from another host",
        "//cdn.example/a.js from another host",
        "from https:",
    ]


def test_site_with_dead_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        f"{POLICY}"
        '<a href="b.html#there">1</a><a href="b.html#gone">2</a><a href="c.html">3</a><a href="folder">4</a>'
        '<img src="d.png">'
    )
    (tmp_path / "b.html").write_text(f'{POLICY}<h1 id="there">B</h1><a href="index.html">back</a>')
    (tmp_path / "folder").mkdir()
    assert find_faults(tmp_path) == [
        "index.html loads d.png, which is not on the site",
        "index.html links to b.html#gone, and there is no such heading",
        "index.html links to c.html, which is not on the site",
        "index.html links to folder, which is not on the site",
    ]


def test_site_whose_scripts_may_load_from_other_hosts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>Keyvault</h1>")
    assert find_faults(tmp_path) == ["index.html does not forbid scripts to load from other hosts"]

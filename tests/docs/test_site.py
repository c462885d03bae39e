"""The documentation site: what it links, how its pages look in a browser, and what its reference leaves out."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import palaestra
from palaestra_toolsets.browser import chromium

_ROOT = Path(__file__).parents[2]


def test_every_page_is_in_the_contents() -> None:
    index = (_ROOT / "docs/index.md").read_text()
    pages = {page.stem for page in (_ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= set(re.findall(r"^[\w-]+$", index, re.MULTILINE))


def test_a_page_can_be_read_in_one_sitting() -> None:
    written = [page for page in (_ROOT / "docs").rglob("*.md") if not {"_build", "reference"} & set(page.parts)]
    assert len(written) > 60
    assert {page.name: words for page in written if (words := len(page.read_text().split())) > 3000} == {}


def test_llms_txt_names_pages_that_exist() -> None:
    listed = re.findall(r"\(([\w/-]+)\.html\)", (_ROOT / "docs/llms.txt").read_text())
    written = [page for page in listed if not page.startswith("reference/")]
    assert written
    assert [page for page in written if not (_ROOT / "docs" / f"{page}.md").exists()] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site form them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(path.name for path in _ROOT.glob("*.md")))
def test_links_from_the_root_lead_somewhere(page: str) -> None:
    broken = []
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", (_ROOT / page).read_text()):
        path, _, anchor = target.partition("#")
        found = _ROOT / path if path else _ROOT / page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert broken == []


def test_public_names_have_a_docstring_of_their_own() -> None:
    undocumented = []
    packages = [palaestra, *map(import_module, palaestra.packages_with_names())]
    for name in (name for package in packages for name in package.__all__):
        found = getattr(palaestra, name)
        if isinstance(found, type) and found.__module__.startswith("palaestra") and not found.__doc__:
            undocumented.append(name)
    assert undocumented == []


class Links(HTMLParser):
    """What a page of the site links to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name == "src" or (name == "href" and tag == "a")):
                self.targets.append(value)
            elif value and name == "id":
                self.anchors.add(value)


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_no_link_of_the_site_is_dead(site: Path) -> None:
    pages = {page: Links(page.read_text()) for page in site.rglob("*.html") if "_modules" not in page.parts}
    assert len(pages) > 70
    dead = []
    for page, links in pages.items():
        for target in links.targets:
            link = urlsplit(target)
            if link.scheme:
                continue
            found = (page.parent / unquote(link.path)).resolve() if link.path else page
            anchor = unquote(link.fragment)
            if not found.exists() or (anchor and found in pages and anchor not in pages[found].anchors):
                dead.append(f"{page.relative_to(site)}: {target}")
    assert dead == []


@pytest.mark.slow
@pytest.mark.xdist_group("site")
@pytest.mark.parametrize("width", [400, 1280])
def test_the_first_pages_fit_the_window_and_report_no_error(site: Path, width: int) -> None:
    if (reason := chromium.problem()) is not None:
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium.usable(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        for name in ("index", "architecture", "environments", "performance", "security/grading"):
            page.goto((site / f"{name}.html").as_uri())
            page.wait_for_function("[...document.images].every(image => image.complete)")
            if page.evaluate("document.documentElement.scrollWidth") > width:
                problems.append(f"{name} is wider than {width} pixels")
            if empty := page.evaluate(
                "[...document.images].filter(image => !image.naturalWidth).map(image => image.src)"
            ):
                problems.append(f"{name}: {empty}")
        browser.close()
    assert problems == []

"""The documentation site: what it links, and what its reference leaves out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import palaestra

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
    for name in palaestra.__all__:
        found = getattr(palaestra, name)
        if isinstance(found, type) and found.__module__.startswith("palaestra") and not found.__doc__:
            undocumented.append(name)
    assert undocumented == []

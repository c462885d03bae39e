"""Count the words of the documentation, and fail above the cap.

The reference, which is generated, does not count. With --pages, list the pages. A change that makes the documentation
shorter lowers `CAP`; nothing raises it.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
CAP = 45_000


def counted() -> dict[str, int]:
    """Return the number of words of each page that a person wrote."""
    pages = (page for page in sorted(DOCS.rglob("*.md")) if not {"_build", "reference"} & set(page.parts))
    return {str(page.relative_to(DOCS)): len(page.read_text(encoding="utf-8").split()) for page in pages}


def main(arguments: list[str]) -> int:
    """Print the count."""
    words = counted()
    if arguments == ["--pages"]:
        print(*(f"{count:6}  {page}" for page, count in sorted(words.items(), key=lambda each: each[1])), sep="\n")
    total = sum(words.values())
    print(f"docs: {total:,} words, cap {CAP:,}" + (": shorten a page; do not raise the cap" if total > CAP else ""))
    return 1 if total > CAP else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

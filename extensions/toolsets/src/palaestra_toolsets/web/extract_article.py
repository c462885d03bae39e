"""Extracts the title and the main text of an HTML page as Markdown, with trafilatura (extra `web`).

Finding the main text can cost a minute of CPU time per megabyte of HTML, and the author of the page controls this cost.
Large pages are therefore read in a separate process with time and memory limits. If the process fails or reaches a
limit, the article is all the text of the page.

    python -m palaestra_toolsets.web.extract_article URL < page.html      # that process: JSON to stdout

Invariant: the same page gives the same text unless `note` reports that a limit was reached.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import resource
import sys
from dataclasses import dataclass

LARGE_CHARS = 100_000
LIMIT_S = 20.0
MAX_MEMORY_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Article:
    """The text of a page. `note` is set if the separate process failed or reached a limit; `text` is then all the text
    of the page and not only its main text."""

    title: str
    text: str
    note: str = ""


async def read_article(source: str, url: str, *, limit_s: float = LIMIT_S) -> Article:
    """Return the article of a page; its text may be empty. A separate process reads a large page."""
    if len(source) <= LARGE_CHARS:
        return await asyncio.to_thread(find_article, source, url)
    found = await _apart(source, url, limit_s)
    if found is not None:
        return found
    note = "the page is too large to find its main text; this is all of its text"
    return Article(*await asyncio.to_thread(all_text, source), note)


def find_article(source: str, url: str) -> Article:
    """Return the article of a page. If no main text is found, the article is all the text. This may take very long for
    a large page, so the caller must limit the time."""
    title, everything = all_text(source)
    extracted = importlib.import_module("trafilatura").extract(
        source, url=url, output_format="markdown", include_links=True, include_tables=True, include_comments=False
    )
    return Article(title, extracted or everything)


def all_text(source: str) -> tuple[str, str]:
    """Return the title, and all text outside scripts, styles, templates and the head."""
    html = importlib.import_module("lxml.html")
    try:
        tree = html.document_fromstring(source.encode("utf-8", "replace"), parser=html.HTMLParser(encoding="utf-8"))
    except importlib.import_module("lxml.etree").LxmlError:  # an empty page
        return "", ""
    title = " ".join((tree.findtext(".//title") or "").split())
    for hidden in tree.xpath("//script|//style|//noscript|//template|//head"):
        hidden.drop_tree()
    lines = (" ".join(line.split()) for line in str(tree.text_content()).splitlines())
    return title, "\n".join(line for line in lines if line)


async def _apart(source: str, url: str, limit_s: float) -> Article | None:
    """Run `find_article` in a separate process. Return None if the process failed or reached a limit."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", __name__, url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(limit_s):
            told, _ = await process.communicate(source.encode("utf-8", "replace"))
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await asyncio.shield(process.wait())
    return Article(**json.loads(told)) if process.returncode == 0 else None


def main() -> None:
    """Read the page on stdin and write its article to stdout."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(LIMIT_S), int(LIMIT_S)))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    found = find_article(sys.stdin.buffer.read().decode("utf-8", "replace"), sys.argv[1])
    sys.stdout.write(json.dumps({"title": found.title, "text": found.text}))


if __name__ == "__main__":
    main()

"""Turns a fetched document into text. HTML becomes its article, JSON on one line is indented, other plain text stays as
it is, and all other types are refused.

`page_json` bounds the text for a reply. Invariant: nothing is summarised, and the same bytes give the same text unless
`note` reports a limit.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from palaestra.tools.call_text import shortened
from palaestra.tools.net.host_policy import AddressPolicy
from palaestra_slots.core import charsets
from palaestra_slots.core.types import JSON
from palaestra_toolsets.web.extract_article import read_article
from palaestra_toolsets.web.fetch import Fetched, PageUnreadable, fetch, screen
from palaestra_toolsets.web.providers import PageReader, WebPage

MAX_PAGE_CHARS = 20_000
MAX_TITLE_CHARS = 300
HTML = frozenset({"text/html", "application/xhtml+xml"})
_TEXT = frozenset(
    f"application/{kind}"
    for kind in ("json", "xml", "javascript", "x-ndjson", "yaml", "x-yaml", "toml", "x-sh", "x-latex", "sql")
)
_CHARSET = re.compile(rb"""<meta[^>]+charset=["']?([A-Za-z0-9_-]{1,40})""", re.IGNORECASE)
_UNTYPED = frozenset({"application/octet-stream", "binary/octet-stream", ""})
_REFUSED = {
    "application/pdf": "it is a PDF; download it in the terminal and use a program that reads PDFs",
    "application/zip": "it is an archive; download it in the terminal",
    "application/gzip": "it is an archive; download it in the terminal",
}


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Reads pages from this machine. `lane` limits the concurrent reads."""

    policy: AddressPolicy
    lane: asyncio.Semaphore

    async def read(self, urls: Sequence[str]) -> list[WebPage]:
        return await asyncio.gather(*(self._fetch_page(url) for url in urls))

    async def _fetch_page(self, url: str) -> WebPage:
        try:
            async with self.lane:
                return await as_text(url, await fetch(url, self.policy))
        except PageUnreadable as why:
            return WebPage(url, error=str(why))


@dataclass(frozen=True, slots=True)
class Screened:
    """A provider on the user's own machines. It never gets requests for pages that this machine must not reach."""

    pages: PageReader
    policy: AddressPolicy

    async def read(self, urls: Sequence[str]) -> list[WebPage]:
        refused = {url: why for url in urls if (why := await self._why_not(url))}
        asked = [url for url in urls if url not in refused]
        read = iter(await self.pages.read(asked) if asked else [])
        return [WebPage(url, error=refused[url]) if url in refused else next(read) for url in urls]

    async def _why_not(self, url: str) -> str:
        try:
            await screen(url, self.policy)
        except PageUnreadable as why:
            return str(why)
        return ""


async def as_text(url: str, fetched: Fetched) -> WebPage:
    """Return the document as text. Raises `PageUnreadable` if it has no text or is of a type that is refused."""
    kind = fetched.content_type.lower()
    if kind in _REFUSED or fetched.body.startswith(b"%PDF-"):
        raise PageUnreadable(_REFUSED.get(kind, _REFUSED["application/pdf"]))
    if kind in _UNTYPED and b"\0" not in fetched.body[:4096]:
        kind = "text/plain"
    note = f"only its first {len(fetched.body)} bytes were read" if fetched.cut else ""
    if kind in HTML:
        article = await read_article(decoded(fetched), fetched.url)
        if not article.text:
            raise PageUnreadable(
                "the page has no text of its own; it may be made by scripts, which only a browser runs"
            )
        return WebPage(url, article.title, article.text, note="; ".join(filter(None, (note, article.note))))
    if kind.startswith("text/") or kind in _TEXT or kind.endswith(("+json", "+xml")):
        return WebPage(url, content=_pretty(kind, decoded(fetched)), note=note)
    raise PageUnreadable(f"it has no text (its type is {kind or 'unknown'})")


def decoded(fetched: Fetched) -> str:
    """Return the text, decoded with the charset that the reply or the HTML page declares. If there is none or it is
    unknown, the text is decoded as UTF-8. Invalid bytes become replacement characters."""
    body, charset = fetched.body, fetched.charset
    if charset is None and fetched.content_type.lower() in HTML:
        charset = _declared(body)
    return charsets.decoded(body, charset)


def _declared(body: bytes) -> str | None:
    """Return the charset in the head of a page (HTML Standard, 4.2.5.4: within its first 1024 bytes)."""
    found = _CHARSET.search(body[:1024])
    return found.group(1).decode("ascii") if found is not None else None


def _pretty(kind: str, text: str) -> str:
    """Indent JSON that is on one line, because such JSON is hard to read and to cut."""
    if not kind.endswith("json") or "\n" in text.strip():
        return text
    try:
        return json.dumps(json.loads(text), indent=1, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def page_json(page: WebPage, offset: int, most: int = MAX_PAGE_CHARS, way: str = "") -> dict[str, JSON]:
    """Return at most `most` characters of a page from `offset`, or the page's error. `way` replaces the hint on how to
    continue, which by default names the next offset."""
    if page.error:
        return {"url": page.url, "error": page.error}
    total = len(page.content)
    if offset and offset >= total:
        return {"url": page.url, "error": f"offset {offset} is beyond the end: the page has {total} characters"}
    content = page.content[offset : offset + most]
    reply: dict[str, JSON] = {"url": page.url, "title": shortened(page.title, MAX_TITLE_CHARS), "content": content}
    end = offset + len(content)
    if end < total:
        hint = f"Characters {offset} to {end} are shown; {way or f'continue with offset={end}'}"
        reply |= {"total_chars": total, "hint": hint}
    return {**reply, "note": page.note} if page.note else reply

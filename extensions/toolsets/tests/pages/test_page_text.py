"""Pages from a real server: what is read, what is cut off, what is refused, and what must never be reached."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator

import pytest
from aiohttp import web

from golden_messages import check_message, raises
from palaestra.tools.net.host_policy import AddressPolicy
from palaestra_slots.core.errors import ConfigError
from palaestra_toolsets.web.extract_article import LARGE_CHARS, read_article
from palaestra_toolsets.web.fetch import MAX_BYTES, Fetched, PageUnreadable, fetch
from palaestra_toolsets.web.page_text import Fetcher, as_text
from palaestra_toolsets.web.providers import WebPage

from .site import ARTICLE, Site, pages

HERE = AddressPolicy(["127.0.0.1"])


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site(pages()) as running:
        yield running


def got(url: str, reachable: AddressPolicy = HERE, **limits: float) -> Fetched:
    return asyncio.run(fetch(url, reachable, **limits))  # type: ignore[arg-type]


def read(url: str) -> WebPage:
    async def main() -> list[WebPage]:
        return await Fetcher(HERE, asyncio.Semaphore(2)).read([url])

    return asyncio.run(main())[0]


@pytest.mark.parametrize("path", ["/article", "/latin"])
def test_an_article_is_its_text_without_what_stands_around_it(site: Site, path: str) -> None:
    page = read(site.url + path)
    assert page.title == "The heron and the tern"
    assert "A heron stands in shallow water" in page.content
    assert "½ of the lake" in page.content
    assert "| heron | 12 |" in page.content
    assert "Cookies" not in page.content
    assert "secret" not in page.content
    assert read(site.url + path) == page


@pytest.mark.parametrize("kind", ["text/plain", "text/markdown", "text/x-python", "application/x-yaml", ""])
def test_text_is_read_as_it_is(site: Site, kind: str) -> None:
    assert read(f"{site.url}/kind?type={kind}").content == "# Birds\n\nheron\n"


def test_json_is_laid_out_and_stays_the_same(site: Site) -> None:
    assert read(f"{site.url}/kind?type=application/json").content == '{\n "birds": [\n  "heron"\n ],\n "n": 1\n}'


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/kind?type=application/pdf", "PDF"),
        ("/kind?type=image/png", "image/png"),
        ("/kind?type=application/zip", "archive"),
        ("/binary", "application/octet-stream"),
        ("/empty", "scripts"),
        ("/status/404", "HTTP 404 Not Found"),
        ("/status/503", "HTTP 503"),
        ("/cut", "connection failed"),
    ],
)
def test_what_cannot_be_read_says_why(site: Site, path: str, says: str) -> None:
    page = read(site.url + path)
    assert says in page.error
    assert not page.content


async def test_a_pdf_that_calls_itself_something_else_is_still_one() -> None:
    with pytest.raises(PageUnreadable, match="PDF"):
        await as_text("u", Fetched("u", "text/plain", None, b"%PDF-1.4 \x00"))


def test_redirects_are_followed_a_few_times(site: Site) -> None:
    assert got(f"{site.url}/redirect/3?to=/kind?type=text/plain").url == f"{site.url}/kind?type=text/plain"
    with pytest.raises(PageUnreadable, match="redirects more than"):
        got(f"{site.url}/redirect/9?to=/article")


def test_an_endless_page_is_cut_off_and_says_so(site: Site) -> None:
    fetched = got(site.url + "/endless", max_bytes=1000)
    assert (len(fetched.body), fetched.cut) == (1000, True)
    page = read(site.url + "/endless")
    assert len(page.content) == MAX_BYTES
    check_message(page.note, MAX_BYTES)


@pytest.mark.parametrize("path", ["/silent", "/slow"])
def test_a_page_that_does_not_come_is_given_up(site: Site, path: str) -> None:
    with raises(PageUnreadable, "0.2"):
        got(site.url + path, timeout_s=0.2)


def test_a_small_reply_that_unpacks_to_much_is_cut_off() -> None:
    async def bomb(request: web.Request) -> web.Response:
        body = gzip.compress(bytes(50 << 20))
        return web.Response(body=body, headers={"Content-Type": "text/plain", "Content-Encoding": "gzip"})

    app = web.Application()
    app.router.add_get("/", bomb)
    with Site(app) as running:
        fetched = got(running.url, max_bytes=1000)
    assert (len(fetched.body), fetched.cut) == (1000, True)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file:///etc/passwd", "only http and https"),
        ("ftp://birds.example/", "only http and https"),
        ("birds.example", "only http and https"),
        ("http://", "has no host"),
        ("http://user:pw@birds.example/", "user or a password"),
        ("http://[::1", "not the address of a page"),
        ("http://no-such-host.invalid/", "no such host"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str, says: str) -> None:
    with pytest.raises(PageUnreadable, match=says):
        got(url)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1", "0"])
def test_this_machine_is_not_reached_by_any_of_its_names(site: Site, host: str) -> None:
    port = site.url.rpartition(":")[2]
    before = len(site.seen)
    with raises(PageUnreadable):
        got(f"http://{host}:{port}/article", AddressPolicy())
    assert len(site.seen) == before


def test_a_redirect_to_a_private_address_is_refused(site: Site) -> None:
    for target in ("http://127.0.0.2:1/", "http://169.254.169.254/latest/meta-data/", "file:///etc/passwd"):
        with raises(PageUnreadable):
            got(f"{site.url}/redirect/0?to={target}")


PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
PRIVATE = [
    *["127.0.0.1", "127.8.9.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "0.0.0.0", "255.255.255.255", "224.0.0.1"],
    *["169.254.169.254", "100.64.0.1", "100.100.100.200", "198.18.0.1", "240.0.0.1"],
    *["::1", "::", "fe80::1", "fe80::1%eth0", "fd00:ec2::254", "fec0::1", "ff02::1", "::ffff:10.0.0.1", "::7f00:1"],
    *[
        "64:ff9b::7f00:1",
        "64:ff9b:1::a9fe:a9fe",
        "2002:7f00:1::",
        "2002:808:808::",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    ],
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_reached(address: str) -> None:
    with pytest.raises(PermissionError, match="private or reserved"):
        AddressPolicy().check(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_reached(address: str) -> None:
    AddressPolicy().check(address)


def test_what_the_configuration_allows_is_reached_and_nothing_beside_it() -> None:
    allowed = AddressPolicy(["10.1.0.0/16", "::1", "127.0.0.1"])
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "::1", "127.0.0.1"):
        allowed.check(address)
    for address in ("10.2.0.1", "127.0.0.2"):
        with pytest.raises(PermissionError):
            allowed.check(address)
    with pytest.raises(ConfigError, match="web_allow"):
        AddressPolicy(["intranet"])


def test_a_large_page_is_read_like_a_small_one() -> None:
    paragraphs = "".join(
        f"<p>Paragraph {number} tells of the heron, who waits in shallow water.</p>" for number in range(40)
    )
    source = ARTICLE.replace("<table>", paragraphs + "<table>")
    small = asyncio.run(read_article(source, "http://birds.example/"))
    large = asyncio.run(
        read_article(source.replace("<nav>", f"<nav><!-- {'x' * LARGE_CHARS} -->"), "http://birds.example/")
    )
    assert small == large
    assert "Paragraph 39 tells" in small.text


async def test_a_page_that_takes_too_long_to_understand_is_read_as_plain_text() -> None:
    source = "<title>Odd</title><script>no()</script>" + "<b>much</b> <i>ado</i> " * 10_000
    article = await read_article(source, "http://odd.example/", limit_s=0.01)
    assert article.title == "Odd"
    assert article.text == "much ado " * 9_999 + "much ado"
    check_message(article.note, "text")


@pytest.mark.parametrize(
    "source", ["", "   ", "<html></html>", "\0", "<" * 1000, pytest.param("<div>" * 100_000, id="deep")]
)
async def test_what_is_hardly_a_page_is_read_all_the_same(source: str) -> None:
    assert (await read_article(source, "http://odd.example/")).title == ""

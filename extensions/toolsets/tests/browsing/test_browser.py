"""The browser tools against a real Chromium and a local site."""

from __future__ import annotations

import asyncio

from models.image_server import SeeingServer
from palaestra_toolsets.browser.browser_session import BrowserSession
from palaestra_toolsets.browser.shared_browser import SharedBrowser

from .conftest import Visiting, Visitor


def test_a_form_is_filled_and_sent(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        opened = await visitor.go("/")
        assert (opened["title"], opened["status"]) == ("Home", 200)
        assert '- textbox "Name" @e' in opened["snapshot"]
        assert "Fresh bread" not in opened["snapshot"]
        assert "Fresh bread every morning." in (await visitor.call("snapshot", full=True))["snapshot"]
        assert (await visitor.call("type", ref=await visitor.ref('textbox "Name"'), text="Ada"))["success"]
        size = await visitor.ref('combobox "Size"')
        assert "'small', 'large'" in (await visitor.call("type", ref=size, text="huge"))["error"]
        assert (await visitor.call("type", ref=size, text="large"))["success"]
        sent = await visitor.call("click", ref=await visitor.ref('button "Send"'))
        assert sent["url"] == f"{visitor.site.url}/greet?who=Ada&size=large"
        assert "Hello Ada, large" in (await visitor.call("snapshot", full=True))["snapshot"]
        assert (await visitor.call("back"))["title"] == "Home"

    visiting(visit)


def test_enter_sends_a_form(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        await visitor.go("/")
        await visitor.call("type", ref=await visitor.ref('textbox "Name"'), text="Eve")
        assert (await visitor.call("press", key="Enter"))["title"] == "Hello"
        assert "Unknown key" in (await visitor.call("press", key="Return2"))["error"]

    visiting(visit)


def test_references_stay_and_are_never_used_twice(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        await visitor.go("/")
        gone, about = await visitor.ref('button "Remove me"'), await visitor.ref('link "About us"')
        assert (await visitor.call("click", ref=gone))["success"]
        assert "Take a new browser_snapshot" in (await visitor.call("click", ref=gone))["error"]
        assert await visitor.ref('link "About us"') == about
        await visitor.go("/about")
        assert await visitor.ref('link "Home"') not in (gone, about)
        assert "Take a new browser_snapshot" in (await visitor.call("click", ref=about))["error"]
        assert "There is no reference" in (await visitor.call("click", ref="@e9999"))["error"]
        assert "There is no reference" in (await visitor.call("click", ref="css=button"))["error"]

    visiting(visit)


def test_dialogs_are_answered_and_told(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        await visitor.go("/")
        asked = await visitor.call("click", ref=await visitor.ref('button "Ask"'))
        assert "'Sure?'; it was accepted" in asked["notes"][0]
        assert "confirmed" in (await visitor.call("snapshot", full=True))["snapshot"]

    visiting(visit)


def test_consoles_and_script_errors_are_kept(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        await visitor.go("/about")
        await visitor.call("console", expression="new Promise(done => setTimeout(done, 1))")
        told = await visitor.call("console", clear=True)
        assert {"type": "warning", "text": "careful", "source": "console"} in told["console_messages"]
        assert [each["message"] for each in told["js_errors"]] == ["broken on purpose"]
        assert (await visitor.call("console"))["total_errors"] == 0
        assert (await visitor.call("console", expression="({a: [6 * 7]})"))["result"] == {"a": [42]}
        assert "ReferenceError" in (await visitor.call("console", expression="nothing.here"))["error"]

    visiting(visit)


def test_a_new_tab_comes_to_the_front_and_back_leaves_it(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        await visitor.go("/")
        about = await visitor.ref('link "About us"')
        await visitor.call("click", ref=await visitor.ref('link "New tab"'))
        while (seen := await visitor.call("snapshot"))["title"] != "New":
            assert seen["title"] == "Home"
        assert (await visitor.call("back"))["title"] == "Home"
        assert (await visitor.call("click", ref=about))["title"] == "About"

    visiting(visit)


def test_downloads_are_refused_in_words(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        await visitor.go("/")
        reply = await visitor.call("click", ref=await visitor.ref('link "Catalogue"'))
        while "notes" not in reply:
            reply = await visitor.call("snapshot")
        assert "a download was refused: file.zip" in reply["notes"][0]

    visiting(visit)


def test_an_endless_page_is_cut_and_can_be_gone_on_with(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        opened = await visitor.go("/endless")
        assert len(opened["snapshot"]) < 800
        place = int(opened["snapshot"].split("offset=")[1].split()[0])
        following = (await visitor.call("snapshot", offset=place))["snapshot"]
        last, first = opened["snapshot"].splitlines()[place - 1], following.splitlines()[0]
        assert int(first.split('"')[1].split()[1]) == int(last.split('"')[1].split()[1]) + 1
        scrolled = await visitor.call("scroll", direction="down")
        assert scrolled["position"]["y"] == scrolled["position"]["view"]
        assert (await visitor.call("scroll", direction="up"))["position"]["y"] == 0

    visiting(visit, browser_snapshot_chars=600)


def test_what_is_in_the_way_of_a_click_is_told(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        await visitor.go("/covered")
        assert "veil" in (await visitor.call("click", ref=await visitor.ref('button "Under"')))["error"]

    visiting(visit, browser_action_timeout_s=2.0)


def test_elements_of_frames_can_be_used(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        await visitor.go("/frame")
        assert (await visitor.call("click", ref=await visitor.ref('button "Inner"')))["success"]
        assert await visitor.ref('button "pressed"')

    visiting(visit)


def test_images_are_listed(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        await visitor.go("/")
        reply = await visitor.call("get_images")
        image = {"src": f"{visitor.site.url}/red.png", "alt": "a red square", "width": 40, "height": 30}
        assert (reply["images"], reply["count"]) == ([image], 1)

    visiting(visit)


def test_a_picture_of_the_page_reaches_the_model(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        async with SeeingServer() as server:
            settings = {"vision_base_url": server.url, "browser_allow": [visitor.site.host]}
            seer = Visitor(visitor.site, visitor.shared, **settings)
            try:
                await seer.go("/")
                reply = await seer.call("vision", question="what is it?")
                assert reply["analysis"] == "what is it? 1280x800 ffffff"
            finally:
                await seer.tools.aclose()

    visiting(visit)


def test_private_addresses_and_metadata_are_out_of_reach_by_every_way(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        for url in ("http://169.254.169.254/", "http://metadata.google.internal/", "http://[::ffff:a9fe:a9fe]/"):
            assert "never reached" in (await visitor.call("navigate", url=url))["error"]
        for url in ("http://127.0.0.1:1/", "http://localhost:1/", "http://10.0.0.1/", "http://0x7f.1:8123/"):
            assert "this machine" in (await visitor.call("navigate", url=url))["error"], url
        for url in ("file:///etc/passwd", "chrome://version", "view-source:http://example.org"):
            assert "only http, https and data" in (await visitor.call("navigate", url=url))["error"]
        led = await visitor.call("navigate", url=f"{visitor.site.url}/to-metadata")
        assert "leads to http://169.254.169.254/" in led["error"]
        await visitor.go("/outside")
        browser = visitor.shared.get(SharedBrowser)
        assert browser.running is not None
        while (why := browser.running.proxy.why("169.254.170.2", 80)) is None:
            assert (await visitor.call("console", expression="1"))["success"]
        assert "never reached" in why

    visiting(visit)


class _Knocks(asyncio.DatagramProtocol):
    """Counts what comes to an address: datagrams, and connections over TCP."""

    def __init__(self) -> None:
        self.count = 0

    def datagram_received(self, data: bytes, address: object) -> None:
        self.count += 1

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        writer.close()


BY_OTHER_WAYS = """async (port) => {
  const turn = {urls: `turn:127.0.0.1:${port}?transport=tcp`, username: 'a', credential: 'b'};
  const call = new RTCPeerConnection({iceServers: [{urls: `stun:127.0.0.1:${port}`}, turn]});
  call.createDataChannel('x');
  const over = new Promise(done => call.onicecandidate = event => event.candidate || done());
  await call.setLocalDescription(await call.createOffer());
  await over;
  await new WebTransport(`https://127.0.0.1:${port}/`).ready.catch(() => {});
  await new Promise(done => new WebSocket(`ws://127.0.0.1:${port}/`).onerror = done);
  return 'tried';
}"""


def test_no_other_protocol_is_a_way_out(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        knocks, loop = _Knocks(), asyncio.get_running_loop()
        server = await asyncio.start_server(knocks.connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        datagrams, _ = await loop.create_datagram_endpoint(lambda: knocks, local_addr=("127.0.0.1", port))
        try:
            await visitor.go("/new")
            reply = await visitor.call("console", expression=f"({BY_OTHER_WAYS})({port})")
            assert knocks.count == 0
            assert reply.get("result") == "tried", reply
        finally:
            datagrams.close()
            server.close()

    visiting(visit)


def test_pages_that_cannot_be_had_say_why(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        silent = await visitor.call("navigate", url=f"{visitor.site.url}/silent")
        assert "Timeout" in silent["error"]
        nowhere = await visitor.call("navigate", url="https://nowhere.invalid/")
        assert "nowhere.invalid cannot be looked up" in nowhere["error"]

    visiting(visit, browser_navigation_timeout_s=1.0)


def test_a_page_that_is_not_there_has_its_status(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        assert (await visitor.go("/nothing"))["status"] == 404

    visiting(visit)


def test_a_hanging_page_is_left(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        await visitor.go("/hang")
        assert "error" in await visitor.call("click", ref=await visitor.ref('button "Hang"'))
        assert (await visitor.go("/"))["title"] == "Home"

    visiting(visit, browser_action_timeout_s=2.0)


def test_a_page_that_crashes_is_replaced(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        await visitor.go("/")
        page = visitor.tools.state(BrowserSession).page
        crashed = asyncio.Event()
        page.on("crash", lambda _: crashed.set())
        devtools = await page.context.new_cdp_session(page)
        crashing = asyncio.ensure_future(devtools.send("Page.crash"))  # never answers
        await crashed.wait()
        crashing.cancel()
        assert "has crashed" in (await visitor.call("snapshot"))["error"]
        assert (await visitor.go("/about"))["title"] == "About"

    visiting(visit)


def test_without_a_page_there_is_a_word_on_what_to_do(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        assert "url is empty" in (await visitor.call("navigate", url=" "))["error"]
        for action, arguments in (("snapshot", {}), ("click", {"ref": "@e1"}), ("back", {}), ("console", {})):
            assert "browser_navigate" in (await visitor.call(action, **arguments))["error"]
        assert (await visitor.call("close"))["closed"]

    visiting(visit)


def test_rollouts_share_a_browser_and_no_cookies(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        other = Visitor(visitor.site, visitor.shared)
        try:
            await visitor.go("/")
            await other.go("/")
            await visitor.call("console", expression="document.cookie = 'mine=1'")
            assert (await visitor.call("console", expression="document.cookie"))["result"] == "mine=1"
            assert (await other.call("console", expression="document.cookie"))["result"] == ""
        finally:
            await other.tools.aclose()

    visiting(visit)

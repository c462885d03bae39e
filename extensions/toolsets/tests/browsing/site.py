"""A small site on the loopback: forms, links, a dialog, a failing script, an image, an endless page, a hanging one."""

from __future__ import annotations

import asyncio

from aiohttp import web

from models.image_server import png

HOME = """<title>Home</title><h1>The shop</h1><p>Fresh bread every morning.</p>
<a href="/about">About us</a> <a href="/new" target="_blank">New tab</a> <a href="/file.zip">Catalogue</a>
<form action="/greet"><label>Name <input name="who" value="nobody"></label>
<label>Size <select name="size"><option>small<option>large</select></label><button>Send</button></form>
<button onclick="answer.textContent = confirm('Sure?') ? 'confirmed' : 'refused'">Ask</button>
<p id="answer"></p><button id="gone" onclick="this.remove()">Remove me</button>
<img src="/red.png" alt="a red square">"""

PAGES = {
    "/": HOME,
    "/about": "<title>About</title><h1>About</h1><a href='/'>Home</a><script>console.warn('careful');"
    "setTimeout(() => { throw new Error('broken on purpose') })</script>",
    "/new": "<title>New</title><h1>In a new tab</h1>",
    "/endless": """<title>Endless</title><h1>Endless</h1><ul id="list"></ul><script>
let n = 0; function more() { for (let i = 0; i < 50; i++) { const li = document.createElement('li');
li.innerHTML = `<a href="/item/${n}">Item ${n++}</a><p>words</p>`; list.append(li); } }
more(); addEventListener('scroll', () => { if (scrollY + innerHeight > document.body.scrollHeight - 50) more(); });
</script>""",
    "/outside": "<title>Outside</title><script>fetch('http://169.254.170.2/v2/credentials').then("
    "answer => answer.text().then(text => document.title = answer.status + ' ' + text))</script>",
    "/frame": "<title>Frame</title>"
    "<iframe srcdoc='<button onclick=\"this.textContent=`pressed`\">Inner</button>'></iframe>",
    "/covered": "<title>Covered</title><button>Under</button><div id=veil style='position:fixed;inset:0'>veil</div>",
    "/hang": "<title>Hang</title><button onclick='for(;;);'>Hang</button>",
}


class Site:
    """Serves the pages on 127.0.0.1; `url` is where. `silent` is set when the page that never answers was asked for."""

    def __init__(self) -> None:
        self.silent, self._never = asyncio.Event(), asyncio.Event()

    async def __aenter__(self) -> Site:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.host = f"127.0.0.1:{self._runner.addresses[0][1]}"
        self.url = f"http://{self.host}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._never.set()
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/greet":
                return _html(f"<title>Hello</title><p>Hello {request.query['who']}, {request.query['size']}</p>")
            case "/red.png":
                return web.Response(body=png(40, 30, (255, 0, 0)), content_type="image/png")
            case "/file.zip":
                return web.Response(body=b"PK", headers={"Content-Disposition": "attachment; filename=file.zip"})
            case "/to-metadata":
                raise web.HTTPFound("http://169.254.169.254/latest/meta-data/")
            case "/silent":
                self.silent.set()
                await self._never.wait()
        page = PAGES.get(request.path)
        return _html(page) if page is not None else web.Response(status=404, text="nothing here")


def _html(body: str) -> web.Response:
    return web.Response(text=f"<!doctype html><html lang=en>{body}", content_type="text/html")

"""The `browser_*` tools: a real browser, told as text.

Names and parameters are the contract's; so are the keys of the replies, each of which also has `notes` when something
else happened (a dialog, a refused download, a new tab). What a browser is and what it may reach: `tools/browser`.

Invariant: the calls of one rollout take turns, and a page that was asked to do something has had a moment to do it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial

from palaestra.core.types import JSON
from palaestra.tools.browser import launch
from palaestra.tools.browser.accessibility_tree import PageView
from palaestra.tools.browser.browser_session import BrowserSession
from palaestra.tools.builtin.vision import Image, look, vision_problem
from palaestra.tools.settings import ToolSettings
from palaestra.tools.tool import FunctionTool, Tool, ToolMistake, ToolReply, ToolRun, ToolSchema

MAX_IMAGES = 100
_SHOWN_URL_CHARS = 500

_REF: Mapping[str, JSON] = {
    "type": "string",
    "description": "The element's reference in the latest snapshot, such as @e5.",
}

_Action = Callable[[BrowserSession, Mapping[str, JSON], ToolRun, ToolSettings], Awaitable[dict[str, JSON]]]


def browser_tools(settings: ToolSettings) -> tuple[Tool, ...]:
    """The tools, told what they may reach."""

    def missing() -> str | None:
        return launch.absent(settings.browser_executable)

    def missing_eyes() -> str | None:
        return missing() or vision_problem(settings)

    return tuple(
        FunctionTool(
            replace(schema, external=True),
            partial(_run, action, settings),
            toolset="browser",
            touches_world=True,
            world_session="browser",
            missing=missing_eyes if schema.name == "browser_vision" else missing,
        )
        for schema, action in _TOOLS
    )


async def _run(action: _Action, settings: ToolSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    session = run.state(BrowserSession)
    async with session.turn:
        await session.check()
        try:
            return session.told({"success": True, **await action(session, arguments, run, settings)})
        except ToolMistake as mistake:
            raise ToolMistake(str(mistake), **session.told(mistake.details)) from None


async def _navigate(
    session: BrowserSession, arguments: Mapping[str, JSON], run: ToolRun, settings: ToolSettings
) -> dict[str, JSON]:
    status = await session.navigate(arguments["url"], run, settings)
    shown = await session.snapshot(settings, full=False)
    answered = {} if status is None else {"status": status}
    return {**await _where(session), **answered, **_told(shown, 0)}


async def _snapshot(
    session: BrowserSession, arguments: Mapping[str, JSON], run: ToolRun, settings: ToolSettings
) -> dict[str, JSON]:
    full, skipped = bool(arguments.get("full", False)), arguments.get("offset", 0)
    shown = await session.snapshot(settings, full=full, skipped_lines=skipped)
    return {**await _where(session), **_told(shown, skipped)}


async def _click(
    session: BrowserSession, arguments: Mapping[str, JSON], run: ToolRun, settings: ToolSettings
) -> dict[str, JSON]:
    element = await session.element(arguments["ref"])
    session.expect_tab()
    await session.ask(element.click(), settings.browser_action_timeout_s)
    await session.settle(new_tab=True)
    return {"clicked": arguments["ref"], **await _where(session)}


async def _type(
    session: BrowserSession, arguments: Mapping[str, JSON], run: ToolRun, settings: ToolSettings
) -> dict[str, JSON]:
    element, text = await session.element(arguments["ref"]), arguments["text"]
    limit_s = settings.browser_action_timeout_s
    if await session.ask(element.evaluate("element => element.tagName")) == "SELECT":
        options = await session.ask(element.evaluate("element => [...element.options].map(o => [o.label, o.value])"))
        if not any(text in each for each in options):
            raise ToolMistake(f"{arguments['ref']} has no option {text!r}; it has {[each[0] for each in options][:50]}")
        await session.ask(element.select_option(text), limit_s)
    else:
        await session.ask(element.fill(text), limit_s)
    return {"typed": text, "element": arguments["ref"]}


async def _scroll(
    session: BrowserSession, arguments: Mapping[str, JSON], run: ToolRun, settings: ToolSettings
) -> dict[str, JSON]:
    direction = arguments["direction"]
    place = await session.ask(session.page.evaluate(_SCROLL, 1 if direction == "down" else -1))
    await session.settle()
    return {"scrolled": direction, "position": place}


async def _back(
    session: BrowserSession, arguments: Mapping[str, JSON], run: ToolRun, settings: ToolSettings
) -> dict[str, JSON]:
    await session.back(settings)
    return await _where(session)


async def _press(
    session: BrowserSession, arguments: Mapping[str, JSON], run: ToolRun, settings: ToolSettings
) -> dict[str, JSON]:
    session.expect_tab()
    await session.ask(session.page.keyboard.press(arguments["key"]), settings.browser_action_timeout_s)
    await session.settle(new_tab=arguments["key"] == "Enter")
    return {"pressed": arguments["key"], **await _where(session)}


async def _close(
    session: BrowserSession, arguments: Mapping[str, JSON], run: ToolRun, settings: ToolSettings
) -> dict[str, JSON]:
    await session.aclose()
    return {"closed": True}


async def _get_images(
    session: BrowserSession, arguments: Mapping[str, JSON], run: ToolRun, settings: ToolSettings
) -> dict[str, JSON]:
    images = await session.ask(session.page.evaluate(_IMAGES, [MAX_IMAGES, _SHOWN_URL_CHARS]))
    return {"images": images["shown"], "count": images["count"]}


async def _vision(
    session: BrowserSession, arguments: Mapping[str, JSON], run: ToolRun, settings: ToolSettings
) -> dict[str, JSON]:
    picture = await session.ask(session.page.screenshot(type="png"), settings.browser_action_timeout_s)
    return await look(settings, Image(picture, "image/png"), arguments["question"])


async def _console(
    session: BrowserSession, arguments: Mapping[str, JSON], run: ToolRun, settings: ToolSettings
) -> dict[str, JSON]:
    if expression := arguments.get("expression"):
        value = await session.ask(session.page.evaluate(expression))
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        most = settings.browser_snapshot_chars
        cut = f"… ({len(text) - most} more characters)" if len(text) > most else ""
        result = text[:most] + cut if cut or isinstance(value, str) else json.loads(text)
        return {"result": result, "result_type": _KINDS.get(type(value), "object")}
    if not session.started:
        raise ToolMistake("No page is open. Open one with browser_navigate")
    return session.happenings.read(clear=bool(arguments.get("clear", False)))


async def _where(session: BrowserSession) -> dict[str, JSON]:
    page = session.page
    return {"url": page.url[:_SHOWN_URL_CHARS], "title": (await session.ask(page.title()))[:_SHOWN_URL_CHARS]}


def _told(shown: PageView, skipped: int) -> dict[str, JSON]:
    """A snapshot with what it lacks said in its own text, where a model cannot miss it."""
    lacks = []
    if shown.cut:
        lacks.append(f"{shown.cut} more lines: browser_snapshot with offset={shown.lines - shown.cut} goes on")
    if shown.left_out:
        lacks.append(f"{shown.left_out} lines of text and structure left out: browser_snapshot with full=true has them")
    text = "\n".join([shown.text or "(nothing)", *(f"[{each}]" for each in lacks)])
    return {"snapshot": text, "element_count": shown.elements}


_KINDS: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "number", float: "number", type(None): "null", list: "array"
}  # fmt: skip

_SCROLL = """(direction) => {
  const page = document.scrollingElement || document.documentElement;
  const middle = document.elementFromPoint(innerWidth / 2, innerHeight / 2);
  const scrolls = each => each.scrollHeight > each.clientHeight + 1
      && (each === page || /auto|scroll/.test(getComputedStyle(each).overflowY));
  let target = page;
  for (let each = scrolls(page) ? null : middle; each && target === page; each = each.parentElement)
    if (scrolls(each)) target = each;
  const height = target === page ? innerHeight : target.clientHeight;
  target.scrollBy({top: direction * height, behavior: "instant"});
  return {y: Math.round(target.scrollTop), height: target.scrollHeight, view: height,
          at_end: target.scrollTop + height >= target.scrollHeight - 1};
}"""
"""One screen of the page, or of what scrolls in its middle where the page itself does not."""

_IMAGES = """([most, chars]) => {
  const short = text => text.length > chars ? text.slice(0, chars) + "…" : text;
  const all = [...document.images].filter(each => each.currentSrc || each.src);
  return {count: all.length, shown: all.slice(0, most).map(each => ({
    src: short(each.currentSrc || each.src), alt: short(each.alt),
    width: each.naturalWidth, height: each.naturalHeight}))};
}"""

_TOOLS: tuple[tuple[ToolSchema, _Action], ...] = (
    (
        ToolSchema(
            "browser_navigate",
            "Open a page in the browser. This comes before every other browser tool. The reply has a compact snapshot.",
            {"url": {"type": "string", "description": "The address of the page."}},
            ("url",),
        ),
        _navigate,
    ),
    (
        ToolSchema(
            "browser_snapshot",
            "The open page as text: its accessibility tree, with a reference like @e5 for each element that can be "
            "used.",
            {
                "full": {
                    "type": "boolean",
                    "description": "The whole text of the page and not only what can be used.",
                    "default": False,
                },
                "offset": {
                    "type": "integer",
                    "minimum": 0,
                    "description": "How many lines to skip: for what an earlier snapshot had no room for.",
                    "default": 0,
                },
            },
        ),
        _snapshot,
    ),
    (ToolSchema("browser_click", "Click an element of the open page.", {"ref": _REF}, ("ref",)), _click),
    (
        ToolSchema(
            "browser_type",
            "Type into a field of the open page, or choose an option of a list. What it held before is replaced.",
            {"ref": _REF, "text": {"type": "string", "description": "What to type."}},
            ("ref", "text"),
        ),
        _type,
    ),
    (
        ToolSchema(
            "browser_scroll",
            "Scroll the open page by one screen.",
            {"direction": {"type": "string", "enum": ["up", "down"], "description": "Where to."}},
            ("direction",),
        ),
        _scroll,
    ),
    (ToolSchema("browser_back", "Go back to the page before."), _back),
    (
        ToolSchema(
            "browser_press",
            "Press a key in the open page.",
            {
                "key": {
                    "type": "string",
                    "description": "The key's name, such as Enter, Tab, Escape or ArrowDown.",
                }
            },
            ("key",),
        ),
        _press,
    ),
    (ToolSchema("browser_close", "Close the browser and forget its pages."), _close),
    (ToolSchema("browser_get_images", "List the images of the open page with their addresses."), _get_images),
    (
        ToolSchema(
            "browser_vision",
            "Look at the open page as an image and answer a question about it.",
            {"question": {"type": "string", "description": "What to find out about the page."}},
            ("question",),
        ),
        _vision,
    ),
    (
        ToolSchema(
            "browser_console",
            "Read what the pages wrote to their console, errors included, or evaluate an expression in the open page.",
            {
                "clear": {
                    "type": "boolean",
                    "description": "Forget the messages once they are read.",
                    "default": False,
                },
                "expression": {"type": "string", "description": "A JavaScript expression to evaluate in the page."},
            },
        ),
        _console,
    ),
)

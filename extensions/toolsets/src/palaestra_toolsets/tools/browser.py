"""The `browser_*` tools: a real browser, shown as text (`tools/browser`).

The project's interface contract fixes the names, parameters and reply keys. A reply also has `notes` if something else
happened (a dialog, a refused download, a new tab). Invariant: the calls of one rollout run one after the other, and a
call that navigates, clicks, scrolls or presses a key lets the page react for a moment.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from palaestra.tools.call_text import shortened
from palaestra.tools.parameters import choice, flag, integer, text
from palaestra.tools.tool import FunctionTool, Tool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.types import JSON
from palaestra_toolsets.browser import chromium
from palaestra_toolsets.browser.accessibility_tree import PageView
from palaestra_toolsets.browser.browser_session import BrowserSession
from palaestra_toolsets.settings import ToolsetSettings
from palaestra_toolsets.tools.vision import Image, analyse_image, vision_problem

MAX_IMAGES = 100
_SHOWN_URL_CHARS = 500


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a tool."""

    session: BrowserSession
    arguments: Mapping[str, JSON]
    settings: ToolsetSettings
    run: ToolRun


_Action = Callable[[_Call], Awaitable[dict[str, JSON]]]


def browser_tools(settings: ToolsetSettings) -> tuple[Tool, ...]:
    """Return the tools with these settings."""

    def missing() -> str | None:
        return chromium.absent(settings.browser_executable)

    def missing_eyes() -> str | None:
        return missing() or vision_problem(settings)

    return tuple(
        FunctionTool(
            ToolSchema(name, description, parameters, required, external=True),
            partial(_run_action, action, settings),
            toolset="browser",
            touches_world=True,
            world_session="browser",
            missing=missing_eyes if action is _vision else missing,
        )
        for name, (action, description, parameters, required) in _TOOLS.items()
    )


async def _run_action(
    action: _Action, settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun
) -> ToolReply:
    session = run.state(BrowserSession)
    async with session.turn:
        await session.check()
        try:
            return session.with_notes({"success": True, **await action(_Call(session, arguments, settings, run))})
        except ToolMistake as mistake:
            raise ToolMistake(str(mistake), **session.with_notes(mistake.details)) from None


async def _navigate(call: _Call) -> dict[str, JSON]:
    status = await call.session.navigate(call.arguments["url"], call.run, call.settings)
    shown = await call.session.snapshot(call.settings, full=False)
    answered = {} if status is None else {"status": status}
    return {**await _where(call.session), **answered, **_snapshot_reply(shown, 0)}


async def _snapshot(call: _Call) -> dict[str, JSON]:
    full, skipped = bool(call.arguments.get("full", False)), call.arguments.get("offset", 0)
    shown = await call.session.snapshot(call.settings, full=full, skipped_lines=skipped)
    return {**await _where(call.session), **_snapshot_reply(shown, skipped)}


async def _click(call: _Call) -> dict[str, JSON]:
    session, element = call.session, await call.session.element(call.arguments["ref"])
    session.expect_tab()
    await session.ask(element.click(), call.settings.browser_action_timeout_s)
    await session.settle(new_tab=True)
    return {"clicked": call.arguments["ref"], **await _where(session)}


async def _type(call: _Call) -> dict[str, JSON]:
    session, ref, text = call.session, call.arguments["ref"], call.arguments["text"]
    element, limit_s = await session.element(ref), call.settings.browser_action_timeout_s
    if await session.ask(element.evaluate("element => element.tagName")) == "SELECT":
        options = await session.ask(element.evaluate("element => [...element.options].map(o => [o.label, o.value])"))
        if not any(text in each for each in options):
            raise ToolMistake(f"{ref} has no option {text!r}; it has {[each[0] for each in options][:50]}")
        await session.ask(element.select_option(text), limit_s)
    else:
        await session.ask(element.fill(text), limit_s)
    return {"typed": text, "element": ref}


async def _scroll(call: _Call) -> dict[str, JSON]:
    direction = call.arguments["direction"]
    place = await call.session.ask(call.session.page.evaluate(_SCROLL, 1 if direction == "down" else -1))
    await call.session.settle()
    return {"scrolled": direction, "position": place}


async def _back(call: _Call) -> dict[str, JSON]:
    await call.session.back(call.settings)
    return await _where(call.session)


async def _press(call: _Call) -> dict[str, JSON]:
    session, key = call.session, call.arguments["key"]
    session.expect_tab()
    await session.ask(session.page.keyboard.press(key), call.settings.browser_action_timeout_s)
    await session.settle(new_tab=key == "Enter")
    return {"pressed": key, **await _where(session)}


async def _close(call: _Call) -> dict[str, JSON]:
    await call.session.aclose()
    return {"closed": True}


async def _get_images(call: _Call) -> dict[str, JSON]:
    images = await call.session.ask(call.session.page.evaluate(_IMAGES, [MAX_IMAGES, _SHOWN_URL_CHARS]))
    return {"images": images["shown"], "count": images["count"]}


async def _vision(call: _Call) -> dict[str, JSON]:
    picture = call.session.page.screenshot(type="png")
    image = Image(await call.session.ask(picture, call.settings.browser_action_timeout_s), "image/png")
    return await analyse_image(call.settings, image, call.arguments["question"])


async def _console(call: _Call) -> dict[str, JSON]:
    session = call.session
    if expression := call.arguments.get("expression"):
        value = await session.ask(session.page.evaluate(expression))
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        shown = shortened(text, call.settings.browser_snapshot_chars)
        result = shown if shown is not text or isinstance(value, str) else json.loads(text)
        return {"result": result, "result_type": _KINDS.get(type(value), "object")}
    if not session.started:
        raise ToolMistake("No page is open. Open one with browser_navigate")
    return session.events.read(clear=bool(call.arguments.get("clear", False)))


async def _where(session: BrowserSession) -> dict[str, JSON]:
    page = session.page
    return {"url": page.url[:_SHOWN_URL_CHARS], "title": (await session.ask(page.title()))[:_SHOWN_URL_CHARS]}


def _snapshot_reply(shown: PageView, skipped: int) -> dict[str, JSON]:
    """Return the reply for a snapshot. Its text ends with notes on the omitted lines, so that a model cannot miss
    them."""
    lacks = []
    if shown.cut:
        lacks.append(f"{shown.cut} more lines: browser_snapshot with offset={shown.lines - shown.cut} shows them")
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
"""Scrolls the page by one screen, or the element in its middle if the page itself does not scroll."""

_IMAGES = """([most, chars]) => {
  const short = text => text.length > chars ? text.slice(0, chars) + "…" : text;
  const all = [...document.images].filter(each => each.currentSrc || each.src);
  return {count: all.length, shown: all.slice(0, most).map(each => ({
    src: short(each.currentSrc || each.src), alt: short(each.alt),
    width: each.naturalWidth, height: each.naturalHeight}))};
}"""

_REF: Mapping[str, JSON] = text("The element's reference in the latest snapshot, such as @e5.")


# fmt: off
_TOOLS: Mapping[str, tuple[_Action, str, Mapping[str, JSON], tuple[str, ...]]] = {
    "browser_navigate": (
        _navigate,
        "Open a page in the browser. This comes before every other browser tool. The reply has a compact snapshot.",
        {"url": text("The address of the page.")}, ("url",)),
    "browser_snapshot": (
        _snapshot,
        "The open page as text: its accessibility tree, with a reference like @e5 for each element that can be used.",
        {
            "full": flag("The whole text of the page and not only what can be used."),
            "offset": integer(
                "How many lines to skip: for what an earlier snapshot had no room for.", {"minimum": 0}, default=0),
        }, ()),
    "browser_click": (_click, "Click an element of the open page.", {"ref": _REF}, ("ref",)),
    "browser_type": (
        _type,
        "Type into a field of the open page, or choose an option of a list. What it held before is replaced.",
        {"ref": _REF, "text": text("What to type.")}, ("ref", "text")),
    "browser_scroll": (
        _scroll, "Scroll the open page by one screen.",
        {"direction": choice("Where to.", ["up", "down"])}, ("direction",)),
    "browser_back": (_back, "Go back to the page before.", {}, ()),
    "browser_press": (
        _press, "Press a key in the open page.",
        {"key": text("The key's name, such as Enter, Tab, Escape or ArrowDown.")}, ("key",)),
    "browser_close": (_close, "Close the browser and forget its pages.", {}, ()),
    "browser_get_images": (_get_images, "List the images of the open page with their addresses.", {}, ()),
    "browser_vision": (
        _vision, "Look at the open page as an image and answer a question about it.",
        {"question": text("What to find out about the page.")}, ("question",)),
    "browser_console": (
        _console,
        "Read what the pages wrote to their console, errors included, or evaluate an expression in the open page.",
        {
            "clear": flag("Forget the messages once they are read."),
            "expression": text("A JavaScript expression to evaluate in the page."),
        }, ()),
}
# fmt: on

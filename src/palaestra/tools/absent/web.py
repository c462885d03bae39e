"""The browser, which this version does not have."""

from __future__ import annotations

from palaestra.tools.absent.base import absent, flag, text

_NO_BROWSER = "this version has no browser"
_REF = text("The element's reference in the latest snapshot, such as @e5.")

BROWSER = (
    absent(
        "browser_navigate",
        "browser",
        _NO_BROWSER,
        "Open a page in the browser. This comes before every other browser tool.",
        {"url": text("The address of the page.")},
        ("url",),
    ),
    absent(
        "browser_snapshot",
        "browser",
        _NO_BROWSER,
        "The open page as text: its accessibility tree, with a reference like @e5 for each element that can be used.",
        {"full": flag("The whole text of the page and not only what can be used.")},
    ),
    absent("browser_click", "browser", _NO_BROWSER, "Click an element of the open page.", {"ref": _REF}, ("ref",)),
    absent(
        "browser_type",
        "browser",
        _NO_BROWSER,
        "Type into a field of the open page. What it held before is replaced.",
        {"ref": _REF, "text": text("What to type.")},
        ("ref", "text"),
    ),
    absent(
        "browser_scroll",
        "browser",
        _NO_BROWSER,
        "Scroll the open page by one screen.",
        {"direction": text("Where to.", "up", "down")},
        ("direction",),
    ),
    absent("browser_back", "browser", _NO_BROWSER, "Go back to the page before."),
    absent(
        "browser_press",
        "browser",
        _NO_BROWSER,
        "Press a key in the open page.",
        {"key": text("The key's name, such as Enter, Tab, Escape or ArrowDown.")},
        ("key",),
    ),
    absent("browser_close", "browser", _NO_BROWSER, "Close the browser and forget its pages."),
    absent("browser_get_images", "browser", _NO_BROWSER, "List the images of the open page with their addresses."),
    absent(
        "browser_vision",
        "browser",
        _NO_BROWSER,
        "Ask a question about what the open page looks like.",
        {"question": text("What to find out about the picture of the page.")},
        ("question",),
    ),
    absent(
        "browser_console",
        "browser",
        _NO_BROWSER,
        "Read what the open page wrote to its console, errors included, or evaluate an expression in it.",
        {
            "clear": flag("Forget the messages once they are read."),
            "expression": text("A JavaScript expression to evaluate in the page."),
        },
    ),
)

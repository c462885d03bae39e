"""Shows a page as text: its accessibility tree, with a reference like @e5 for each element. No I/O.

The source is Playwright's `aria_snapshot(mode="ai")`: YAML-like lines, one per element, whose references restart in
every document. `Numbers` replaces these references with numbers that are unique in a rollout, so an outdated reference
is recognised and never points to another element.

Invariant: the full form has a line for every element, with long names and texts shortened. A `PageView` reports how
many lines the compact form and the size limit omitted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from palaestra.tools.call_text import shortened

# fmt: off
USABLE = frozenset((
    "button", "checkbox", "combobox", "gridcell", "link", "listbox", "menuitem", "menuitemcheckbox", "menuitemradio",
    "option", "radio", "scrollbar", "searchbox", "slider", "spinbutton", "switch", "tab", "textbox", "treeitem",
))
# fmt: on
"""Roles of elements that a user can operate."""

_SIGNS = frozenset(("alert", "alertdialog", "dialog", "heading", "iframe", "status"))
"""Roles of elements that show the page's structure or state. Compact snapshots keep them."""

_SAYINGS = frozenset(("alert", "status"))

_LONGEST_NAME, _LONGEST_TEXT = 200, 1000
_LINE = re.compile(
    r"""^(?P<indent>\s*)-\s(?P<quoted>'?)(?P<role>[\w/-]+)        # a role, or text, or /url
        (?:\s(?P<name>"(?:[^"\\]|\\.)*"))?
        (?P<marks>(?:\s\[[^\]]*\])*)'?(?P<colon>:?)(?:\s(?P<text>.*))?$""",
    re.VERBOSE,
)
_REFERENCE = re.compile(r"^\s*@?(e\d+)\s*$")


@dataclass(frozen=True, slots=True)
class PageElement:
    """One line of the tree. `own` is Playwright's reference; `marks` are states such as `checked` or `level=1`."""

    depth: int
    role: str
    name: str = ""
    marks: tuple[str, ...] = ()
    text: str = ""
    own: str = ""

    @property
    def usable(self) -> bool:
        """Whether the element's role or a hand-shaped pointer shows that a user can operate it."""
        return self.role in USABLE or "cursor=pointer" in self.marks


@dataclass(frozen=True, slots=True)
class Known:
    """The element behind a reference: its document, and Playwright's own reference in it."""

    document: int
    own: str
    role: str
    name: str


class Numbers:
    """The references of one rollout, from `@e1`. An element keeps its reference while its document, role and name stay
    the same."""

    def __init__(self) -> None:
        self._numbers: dict[Known, int] = {}
        self._known: dict[str, Known] = {}

    def of(self, document: int, element: PageElement) -> str:
        """Return the element's reference."""
        known = Known(document, element.own, element.role, element.name)
        number = self._numbers.setdefault(known, len(self._numbers) + 1)
        self._known[f"e{number}"] = known
        return f"@e{number}"

    def find(self, reference: str) -> Known | None:
        """Return the element that a model's reference (`@e5` or `e5`) names, or None."""
        match = _REFERENCE.match(reference)
        return self._known.get(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class PageView:
    """The text of a page. `left_out` counts elements that the compact form omits, `cut` lines that did not fit."""

    text: str
    elements: int
    lines: int
    left_out: int = 0
    cut: int = 0


def parse(source: str) -> list[PageElement]:
    """Return the elements of Playwright's snapshot, in order."""
    return [_element(line) for line in source.splitlines() if line.strip()]


def show(
    source: str, numbers: Numbers, document: int, *, full: bool, most_chars: int, skipped_lines: int = 0
) -> PageView:
    """Return the text for a model, after the first `skipped_lines` lines: up to `most_chars` characters, but at least
    one line."""
    elements = parse(source)
    kept = elements if full else _compact(elements)
    lines = [_line(each, numbers.of(document, each) if each.own else "") for each in kept]
    chosen: list[str] = []
    size = 0
    for line in lines[skipped_lines:]:
        size += len(line) + 1
        if size > most_chars and chosen:
            break
        chosen.append(line)
    used = sum(1 for each in kept[skipped_lines : skipped_lines + len(chosen)] if each.own)
    cut = max(0, len(lines) - skipped_lines - len(chosen))
    return PageView("\n".join(chosen), used, len(lines), len(elements) - len(kept), cut)


def _element(line: str) -> PageElement:
    match = _LINE.match(line)
    if match is None:  # unknown syntax is shown unchanged
        return PageElement((len(line) - len(line.lstrip())) // 2, "", text=line.strip())
    quote = "''" if match["quoted"] else ""
    marks = re.findall(r"\[([^\]]*)\]", match["marks"])
    own = next((mark[4:] for mark in marks if mark.startswith("ref=")), "")
    name = match["name"] or ""
    return PageElement(
        len(match["indent"]) // 2,
        match["role"],
        _unquoted(name.replace("''", "'") if quote else name),
        tuple(mark for mark in marks if not mark.startswith("ref=")),
        _unquoted(match["text"] or ""),
        own,
    )


def _unquoted(text: str) -> str:
    """Return a quoted scalar without its quotes."""
    if len(text) > 1 and text[0] == text[-1] == '"':
        return re.sub(r"\\(.)", lambda found: {"n": " ", "t": " "}.get(found[1], found[1]), text[1:-1])
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    return text


def _compact(elements: Sequence[PageElement]) -> list[PageElement]:
    """Return the elements with a reference that are usable or have a role in `_SIGNS`, indented by their nesting.

    A usable element, alert or status that has neither a name nor a text shows the first text inside it.
    """
    kept: list[PageElement] = []
    above: list[int] = []
    for place, each in enumerate(elements):
        if not each.own or not (each.usable or each.role in _SIGNS):
            continue
        while above and above[-1] >= each.depth:
            above.pop()
        told = each.name or not (each.usable or each.role in _SAYINGS)
        text = each.text or ("" if told else next(_texts_inside(elements, place), ""))
        kept.append(PageElement(len(above), each.role, each.name, each.marks, text, each.own))
        above.append(each.depth)
    return kept


def _texts_inside(elements: Sequence[PageElement], place: int) -> Iterator[str]:
    """Yield the texts inside an element."""
    for each in elements[place + 1 :]:
        if each.depth <= elements[place].depth:
            return
        if found := each.text if not each.role.startswith("/") else "":
            yield found
        elif each.name:
            yield each.name


def _line(element: PageElement, reference: str) -> str:
    hidden = {"active", "cursor=pointer"} if element.role in USABLE else {"active"}
    marks = [mark.replace("cursor=pointer", "clickable") for mark in element.marks if mark not in hidden]
    parts: Iterable[str] = (
        element.role,
        f'"{shortened(element.name, _LONGEST_NAME)}"' if element.name else "",
        *(f"[{mark}]" for mark in marks),
        reference,
    )
    head = " ".join(part for part in parts if part)
    text = shortened(element.text, _LONGEST_TEXT)
    return "  " * element.depth + "- " + (f"{head}: {text}" if head and text else head or text)

"""What a person sees of a tool's result: a plan with check marks, a diff, search hits, or a few lines of text.

All texts of models and tools are made printable here. Each renderer returns the lines that are shown at once; `/show`
shows the whole result (`whole`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence

from palaestra_chat.terminal.styles import BOLD, CYAN, DIM, GREEN, PLAIN, RED, YELLOW
from palaestra_slots.core.exits import plural
from palaestra_slots.core.printable import escaped, one_line, printable
from palaestra_slots.core.types import JSON

SHOWN_LINES, MOST_DIFF_LINES, MOST_HITS = 8, 200, 12
"""The maximum numbers of lines shown for a command's output, for a diff, and for a search."""
_MOST_CHARS = 500
_MARKS = {
    "completed": f"{GREEN}✓", "in_progress": f"{BOLD}▸", "pending": "☐", "cancelled": f"{DIM}✗",
}  # fmt: skip

Shown = list[str]


def result_lines(name: str, arguments: str, text: str, number: int) -> Shown:
    """Return the lines for the result of a tool that succeeded. `number` identifies the call for `/show`."""
    reply, given = parsed(text), parsed(arguments)
    if isinstance(reply, dict):
        if isinstance(reply.get("diff"), str):
            return diff_lines(reply["diff"])
        renderer = _RENDERERS.get(name)
        if renderer is not None:
            with contextlib.suppress(KeyError, TypeError, AttributeError):  # a tool of the same name, but another shape
                return renderer(reply, given if isinstance(given, dict) else {}, number)
        code = reply.get("exit_code")
        if "output" in reply and set(reply) <= {"output", "exit_code", "error", "structured", "output_total_chars"}:
            output = str(reply["output"])
            lines = _value_lines(parsed(output)) if _structured(output) else output.splitlines()
            shown = first_lines(lines or ["(no output)"], number)
            return [*shown, f"{YELLOW}  exit code {code}{PLAIN}"] if isinstance(code, int) and code else shown
        return first_lines(_value_lines(reply), number)
    return first_lines(_value_lines(reply) if _structured(text) else text.splitlines(), number)


def whole(text: str) -> str:
    """Return the whole result of a tool as text for a person."""
    reply = parsed(text)
    if isinstance(reply, dict):
        for key in ("output", "content", "diff"):
            if isinstance(reply.get(key), str) and reply[key]:
                return str(reply[key])
    return json.dumps(reply, indent=1, ensure_ascii=False) if _structured(text) else text


def first_lines(lines: Sequence[str], number: int, most: int = SHOWN_LINES) -> Shown:
    """Return the first lines, and how many are hidden."""
    shown = [gutter(line) for line in lines[:most]]
    return [*shown, hidden(len(lines) - most, number)] if len(lines) > most else shown


def last_lines(lines: Sequence[str], number: int, most: int = SHOWN_LINES) -> Shown:
    """Return how many lines are hidden, and the last lines: errors are at the end."""
    shown = [gutter(line) for line in lines[-most:]]
    return [hidden(len(lines) - most, number, "earlier"), *shown] if len(lines) > most else shown


def gutter(line: str) -> str:
    """Return a line of a tool's output, made printable."""
    return f"{DIM}  │ {printable(line)[:_MOST_CHARS]}{PLAIN}"


def hidden(count: int, number: int, what: str = "more") -> str:
    """Return the line about lines that are not shown."""
    return f"{DIM}  │ … {plural(count, f'{what} line')} (/show {number}){PLAIN}"


def diff_lines(text: str) -> Shown:
    """Return a unified diff in colour. A diff is read before it is agreed to, so nothing of a line is left out."""
    lines = text.splitlines()
    shown = []
    for line in lines[:MOST_DIFF_LINES]:
        colour = BOLD if line.startswith(("+++", "---")) else {"+": GREEN, "-": RED, "@": CYAN}.get(line[:1], "")
        shown.append(f"{colour}{escaped(line)}{PLAIN}")
    if (more := len(lines) - MOST_DIFF_LINES) > 0:
        shown.append(f"{YELLOW}{more} more lines of this change are not shown{PLAIN}")
    return shown


def _todo(reply: Mapping[str, JSON], given: Mapping[str, JSON], number: int) -> Shown:
    return [
        f"  {_MARKS.get(step['status'], '☐')} {one_line(str(step['content']), _MOST_CHARS)}{PLAIN}"
        for step in reply["todos"]
    ] or [gutter("(the plan is empty)")]


def _written(reply: Mapping[str, JSON], given: Mapping[str, JSON], number: int) -> Shown:
    verb = "new file" if reply["created"] else "replaced"
    lines = str(given["content"]).splitlines()
    head = f"  {BOLD}{verb} {escaped(str(reply['path']))}{PLAIN}{DIM}, {reply['bytes_written']} bytes{PLAIN}"
    shown = [f"{GREEN}  +{printable(line)[:_MOST_CHARS]}{PLAIN}" for line in lines[:SHOWN_LINES]]
    more = [hidden(len(lines) - SHOWN_LINES, number)] if len(lines) > SHOWN_LINES else []
    problem = reply.get("syntax_check")
    checked = [f"{YELLOW}  {one_line(str(problem), 300)}{PLAIN}"] if problem and "error" in str(problem).lower() else []
    noted = [f"{YELLOW}  {one_line(str(reply['note']), 300)}{PLAIN}"] if reply.get("note") else []
    return [head, *shown, *more, *noted, *checked]


def _search_hits(reply: Mapping[str, JSON], given: Mapping[str, JSON], number: int) -> Shown:
    if "files" in reply:
        lines = [str(name) for name in reply["files"]]
    elif "counts" in reply:
        lines = [f"{count}  {name}" for name, count in reply["counts"].items()]
    else:
        lines = [
            f"{hit.get('path') or hit.get('file')}:{hit.get('line') or hit.get('line_number')}: "
            f"{hit.get('text') or hit.get('content') or ''}"
            for hit in reply["matches"]
        ]
    return first_lines(lines or ["nothing found"], number, MOST_HITS)


def _file_lines(reply: Mapping[str, JSON], given: Mapping[str, JSON], number: int) -> Shown:
    return first_lines(str(reply["content"]).splitlines(), number, 3)


def _web(reply: Mapping[str, JSON], given: Mapping[str, JSON], number: int) -> Shown:
    return first_lines([f"{hit['title']}  {hit['url']}" for hit in reply["data"]["web"]], number, MOST_HITS)


_RENDERERS: Mapping[str, Callable[[Mapping[str, JSON], Mapping[str, JSON], int], Shown]] = {
    "todo": _todo, "write_file": _written, "search_files": _search_hits, "read_file": _file_lines, "web_search": _web,
}  # fmt: skip


def _value_lines(value: JSON, indent: str = "") -> list[str]:
    """Return a JSON value as short lines of names and values."""
    if isinstance(value, dict):
        lines = []
        for key, each in value.items():
            if isinstance(each, dict | list) and each:
                lines += [f"{indent}{key}:", *_value_lines(each, f"{indent}  ")]
            else:
                first, *rest = str("" if each is None else each).splitlines() or [""]
                lines += [f"{indent}{key}: {first}", *(f"{indent}  {line}" for line in rest)]
        return lines
    if isinstance(value, list):
        lines = []
        for each in value:
            first, *rest = _value_lines(each, f"{indent}  ") or [""]
            lines += [f"{indent}- {first.strip()}", *rest]
        return lines
    return [f"{indent}{line}" for line in str(value).splitlines()]


def parsed(text: str) -> JSON:
    """Return JSON text as a value, and any other text as it is."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


def _structured(text: str) -> bool:
    return text.lstrip()[:1] in ("{", "[") and isinstance(parsed(text), dict | list)

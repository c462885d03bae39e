"""The `search_files` tool: lines that match a pattern, or files by name.

The matching happens inside the slot, by ripgrep or GNU grep (`search_backends.py`) with the same results. Invariant:
results are sorted by path and line, pages never overlap or leave a gap, and totals count everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from palaestra.core.types import JSON
from palaestra.sandbox.slot import WORKSPACE, Slot
from palaestra.tools import parameters
from palaestra.tools.builtin.globs import name_filter
from palaestra.tools.builtin.search_backends import SearchQuery, count_matches, list_files, matching_lines
from palaestra.tools.builtin.text_files import KINDS, file_info, in_full, not_found
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema

MAX_LIMIT = 500
MAX_LINE_CHARS = 500
MAX_SEARCH_S = 60.0
_NAMES_AT_ONCE = 1000

SCHEMA = ToolSchema(
    name="search_files",
    description=(
        "Search the contents of files, or find files by name. target content: every line that matches `pattern`, a "
        "regular expression (Perl style, case-sensitive, (?i) for any case; escape ( [ { . and the like to mean them "
        "literally), line by line. target files: files whose name matches `pattern`, a glob such as *.py or "
        "src/**/*_test.go; without wildcards, every file whose name contains it. Hidden files are searched; .git "
        "directories and binary files are not. Results are sorted by path and come in pages of `limit` from `offset`. "
        "Prefer this to grep, rg, find and ls in the terminal."
    ),
    parameters={
        "pattern": parameters.text("Regular expression, or glob for target files.", minLength=1),
        "target": parameters.choice("Search inside files, or for file names.", ["content", "files"], default="content"),
        "path": parameters.text(f"Directory or file to search, absolute or relative to {WORKSPACE}.", default="."),
        "file_glob": parameters.text(
            "Only files that match this glob, e.g. *.py or *.{ts,tsx}; with a /, relative to `path`."
        ),
        "limit": parameters.integer(
            f"How many results to return, at most {MAX_LIMIT}.", default=50, minimum=1, maximum=MAX_LIMIT
        ),
        "offset": parameters.integer("How many results to skip.", default=0, minimum=0),
        "output_mode": parameters.choice(
            "For target content: matching lines, only the files that match, or matches per file.",
            ["content", "files_only", "count"],
            default="content",
        ),
        "context": parameters.integer(
            "Lines to show before and after each matching line.", default=0, minimum=0, maximum=20
        ),
    },
    required=("pattern",),
)


async def run_search_files(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """One page of results, `total_count` of all, and a `hint` how to continue if there are more."""
    slot = await run.slot()
    path = await in_full(slot, arguments.get("path", ".") or ".")
    if any("\0" in text for text in (path, arguments["pattern"], arguments.get("file_glob", ""))):
        raise ToolMistake("path, pattern and file_glob cannot hold NUL characters")
    root = await file_info(slot, path)
    if root is None:
        raise await not_found(slot, path)
    if root.kind == "other":
        raise ToolMistake(f"{path} is {KINDS[root.kind]}, which is not searched")
    wanted = name_filter(arguments.get("file_glob"), path, root.kind == "dir")
    timeout_s = min(run.timeout_s, MAX_SEARCH_S)
    if arguments.get("target", "content") == "files":
        named = name_filter(arguments["pattern"], path, root.kind == "dir", loose=True)
        found = await list_files(slot, path, timeout_s)
        return _page("files", await _kept(found, lambda name: wanted(name) and named(name), timeout_s), arguments)
    query = SearchQuery(arguments["pattern"], path, arguments.get("file_glob"), timeout_s)
    counted = await count_matches(slot, query)
    counts = {name: counted[name] for name in await _kept(list(counted), wanted, timeout_s)}
    mode = arguments.get("output_mode", "content")
    if mode == "files_only":
        return _page("files", list(counts), arguments)
    if mode == "count":
        page = _page("counts", list(counts.items()), arguments)
        return {**page, "counts": dict(page["counts"]), "total_matches": sum(counts.values())}
    return await _lines(slot, query, counts, arguments)


async def _kept(names: Sequence[str], wanted: Callable[[str], bool], timeout_s: float) -> list[str]:
    """The wanted names, without blocking the loop for many of them. Raises `ToolMistake` for a slow glob."""
    kept: list[str] = []
    deadline = asyncio.get_running_loop().time() + timeout_s
    for first in range(0, len(names), _NAMES_AT_ONCE):
        kept += filter(wanted, names[first : first + _NAMES_AT_ONCE])
        await asyncio.sleep(0)
        if asyncio.get_running_loop().time() > deadline:
            raise ToolMistake("The search took too long and was stopped. Use a simpler glob, or narrow it with path.")
    return kept


async def _lines(slot: Slot, query: SearchQuery, counts: Mapping[str, int], arguments: Mapping[str, JSON]) -> ToolReply:
    """The page of matching lines: only the files on it are searched again."""
    offset, limit = int(arguments.get("offset", 0)), int(arguments.get("limit", 50))
    before, files, reached = 0, [], 0
    for name, count in counts.items():
        if reached + count <= offset:
            before += count
        elif reached < offset + limit:
            files.append(name)
        reached += count
    context = int(arguments.get("context", 0))
    last = offset - before + limit
    matches = await matching_lines(slot, query, files, context, last) if files else []
    page = [
        {"path": match.path, "line": match.line, "content": _cut(match.text)}
        | ({"before": [*map(_cut, match.before)], "after": [*map(_cut, match.after)]} if context else {})
        for match in matches[offset - before : last]
    ]
    return _reply("matches", page, sum(counts.values()), offset)


def _page(key: str, items: Sequence[JSON], arguments: Mapping[str, JSON]) -> dict[str, JSON]:
    offset, limit = int(arguments.get("offset", 0)), int(arguments.get("limit", 50))
    return _reply(key, list(items[offset : offset + limit]), len(items), offset)


def _reply(key: str, page: list[JSON], total: int, offset: int) -> dict[str, JSON]:
    after = offset + len(page)
    reply: dict[str, JSON] = {key: page, "total_count": total, "truncated": after < total}
    if page and after < total:
        reply["hint"] = f"Results {offset + 1} to {after} of {total} are shown; go on with offset={after}"
    return reply


def _cut(line: str) -> str:
    return line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + "... [line cut]"


SEARCH_FILES = FunctionTool(schema=SCHEMA, run=run_search_files, toolset="file", parallel_safe=True)

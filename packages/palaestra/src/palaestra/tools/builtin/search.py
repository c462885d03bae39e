"""The `search_files` tool: lines that match a pattern, or files by name.

ripgrep searches inside the slot, or GNU grep if there is no ripgrep, with options that make both give the same results.
Commands are argument lists, never shell text. Both programs search regular files below a directory, including hidden
and ignored ones. They skip symlinks, `.git` and files with NUL bytes. A pattern matches the characters of a file in
UTF-8, and the bytes of any other file.

The results of the two programs differ in two cases. If a NUL byte follows the first 32 KiB of a file, ripgrep stops
there. A few constructs exist only in Rust's regex or only in PCRE; for those that Rust's regex lacks, ripgrep uses
PCRE.

Invariant: results are sorted by path and line, and totals count everything. While the files stay the same, pages never
overlap or leave a gap.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from palaestra.tools import parameters
from palaestra.tools.files.globs import name_filter, simple_names
from palaestra.tools.files.text_files import KINDS, file_info, in_full, not_found
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.reply_size import head_within, items_within, sent_chars
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import WORKSPACE, ExecutionResult, Slot

MAX_LIMIT = 500
MAX_LINE_CHARS = 500
MAX_SEARCH_S = 60.0
_NAMES_AT_ONCE = 1000
MAX_LISTING_BYTES = 16 << 20
"""The maximum output of a search in bytes; a search with more must be narrowed."""
_MAX_PLACES_BYTES, _MAX_PLACES_S = 1 << 20, 2.0
"""The limits of the search for the places of matches in long lines, in bytes of output and seconds. Long lines beyond
them are shown from their beginning."""
_MAX_PATTERN_CHARS = 10_000
RIPGREP_PATHS = ("/usr/bin/rg", "/usr/local/bin/rg", "/bin/rg")
_GIVEN_UP = re.compile(r"^grep: ([^\0\n]+): exceeded PCRE's [a-z ]+limit$", re.MULTILINE)
_COUNT = re.compile(r"[1-9][0-9]{0,15}")
_NUMBERED = re.compile(r"([0-9]{1,16})([:-])([0-9]{1,18})[:-]")
"""The number of a line, the sign of a match or of context, and the line's offset in bytes."""
_BEFORE_MATCH = 100
"""The number of characters before the match that are shown of a long line."""
_CHARACTERS = re.compile(r"[^\x00-\x7f]|(?<!\\)[.\[]|\\[A-Za-z]|\(\?")
"""What makes a pattern match characters other than bytes. Other patterns need no look at the encoding of files."""
_NEWLINE_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\[nrR]")

SCHEMA = ToolSchema(
    name="search_files",
    description=(
        "Search file contents, or find files by name. target content: return each line that matches the regular "
        "expression `pattern` (Perl syntax, case-sensitive; use (?i) to ignore case, and escape literal ( [ { and "
        ".). Matches never span lines. target files: return files whose name matches the glob `pattern`, such as "
        "*.py or src/**/*_test.go; a pattern without wildcards matches any file name that contains it. Hidden files "
        "are included; .git directories and binary files are not. Results are sorted by path and paginated with "
        "`limit` and `offset`. Use this instead of grep, rg, find or ls in the terminal."
    ),
    parameters={
        "pattern": parameters.text("A regular expression, or a glob for target files.", minLength=1),
        "target": parameters.choice("Search file contents, or file names.", ["content", "files"], default="content"),
        "path": parameters.text(f"The directory or file to search, absolute or relative to {WORKSPACE}.", default="."),
        "file_glob": parameters.text(
            "Only search files that match this glob, e.g. *.py or *.{ts,tsx}. A glob with / is relative to `path`."
        ),
        "limit": parameters.integer(
            f"Maximum number of results (up to {MAX_LIMIT}).", default=50, minimum=1, maximum=MAX_LIMIT
        ),
        "offset": parameters.integer("Number of results to skip.", default=0, minimum=0),
        "output_mode": parameters.choice(
            "For target content: return matching lines, matching files only, or counts per file.",
            ["content", "files_only", "count"],
            default="content",
        ),
        "context": parameters.integer(
            "Number of context lines before and after each match.", default=0, minimum=0, maximum=20
        ),
    },
    required=("pattern",),
)


async def run_search_files(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Search; the reply has one page of results, the `total_count` of all results, and a `hint` on how to continue if
    there are more."""
    slot = await run.slot()
    path = await in_full(slot, arguments.get("path", ".") or ".")
    if any("\0" in text for text in (path, arguments["pattern"], arguments.get("file_glob", ""))):
        raise ToolMistake("path, pattern and file_glob cannot contain NUL characters")
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
        files = await _kept(found, lambda name: wanted(name) and named(name), timeout_s)
        reply = _result_page("files", files, arguments)
        if not files and (folders := await _kept(await list_folders(slot, path, timeout_s), named, timeout_s)):
            reply["hint"] = f"No file has such a name, but a directory has: list it with path={folders[0]}"
        return reply
    # A pattern that means the same in bytes is searched in bytes, which is faster and reads files in any encoding.
    bytewise = not _CHARACTERS.search(arguments["pattern"])
    query = SearchQuery(arguments["pattern"], path, arguments.get("file_glob"), timeout_s, bytewise)
    counted, others = await _counted(slot, query)
    counts = {name: counted[name] for name in await _kept(list(counted), wanted, timeout_s)}
    mode = arguments.get("output_mode", "content")
    if mode == "files_only":
        return _result_page("files", list(counts), arguments)
    if mode == "count":
        page = _result_page("counts", list(counts.items()), arguments)
        return {**page, "counts": dict(page["counts"]), "total_matches": sum(counts.values())}
    return await _matching_lines(slot, query, counts, others, arguments)


async def _counted(slot: Slot, query: SearchQuery) -> tuple[dict[str, int], Set[str]]:
    """Return the number of matches in each file, and the files that are not in UTF-8, which are searched by bytes."""
    counted = await count_matches(slot, query)
    others = await _not_utf8(slot, query)
    if not others:
        return counted, others
    in_bytes = await count_matches(slot, replace(query, bytewise=True))
    kept = {name: count for name, count in counted.items() if name not in others}
    kept |= {name: in_bytes[name] for name in others if name in in_bytes}
    return dict(sorted(kept.items())), others


async def _kept(names: Sequence[str], wanted: Callable[[str], bool], timeout_s: float) -> list[str]:
    """Return the matching names, filtered in steps so that other tasks can run. Raises `ToolMistake` for a slow
    glob."""
    kept: list[str] = []
    deadline = asyncio.get_running_loop().time() + timeout_s
    for first in range(0, len(names), _NAMES_AT_ONCE):
        kept += filter(wanted, names[first : first + _NAMES_AT_ONCE])
        await asyncio.sleep(0)
        if asyncio.get_running_loop().time() > deadline:
            raise ToolMistake("The search took too long and was stopped. Use a simpler glob, or narrow it with path.")
    return kept


async def _matching_lines(
    slot: Slot, query: SearchQuery, counts: Mapping[str, int], others: Set[str], arguments: Mapping[str, JSON]
) -> ToolReply:
    """Return the page of matching lines. Only the files with lines on this page are searched again; `others` are not in
    UTF-8."""
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
    matches: list[JSON] = []
    for mode, own in (
        (query, [name for name in files if name not in others]),
        (replace(query, bytewise=True), [name for name in files if name in others]),
    ):
        matches += await matching_lines(slot, mode, own, context, last) if own else []
    matches.sort(key=lambda match: (match["path"], match["line"]))
    return _results_page("matches", matches[offset - before : last], sum(counts.values()), offset)


def _result_page(key: str, items: Sequence[JSON], arguments: Mapping[str, JSON]) -> dict[str, JSON]:
    offset, limit = int(arguments.get("offset", 0)), int(arguments.get("limit", 50))
    return _results_page(key, list(items[offset : offset + limit]), len(items), offset)


def _results_page(key: str, page: list[JSON], total: int, offset: int) -> dict[str, JSON]:
    page = page[: items_within(page)]
    after = offset + len(page)
    reply: dict[str, JSON] = {key: page, "total_count": total, "truncated": after < total}
    if page and after < total:
        reply["hint"] = f"Results {offset + 1} to {after} of {total} are shown; continue with offset={after}"
    return reply


def _cut(line: str, match_at: int = 0) -> str:
    """Return a line, or the part of a long line around its match, which begins at byte `match_at`."""
    if len(line) <= MAX_LINE_CHARS and sent_chars(line) <= 2 * MAX_LINE_CHARS:
        return line
    at = len(line.encode(errors="replace")[:match_at].decode(errors="ignore"))
    start = 0 if at < MAX_LINE_CHARS - _BEFORE_MATCH else at - _BEFORE_MATCH
    shown = head_within(line[start : start + MAX_LINE_CHARS], 2 * MAX_LINE_CHARS)
    before = f"[{start} characters before] ..." if start else ""
    return f"{before}{shown}{'... [line cut]' if start + len(shown) < len(line) else ''}"


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """A search for a regular expression below `root`, with a time limit in seconds. If `bytewise` is true, the pattern
    matches bytes."""

    pattern: str
    root: str
    file_glob: str | None
    timeout_s: float
    bytewise: bool = False


async def _not_utf8(slot: Slot, query: SearchQuery) -> Set[str]:
    """Return the files that are not in UTF-8, if the pattern may match them bytewise."""
    if query.bytewise or not query.pattern.isascii():
        return frozenset()
    engine = await _ripgrep(slot)
    names = simple_names(query.file_glob)
    # In UTF-8, a dot matches no invalid byte.
    if engine:
        scope = [*_rg(engine, query), *(f"--glob={name}" for name in names), "--glob=!.git"]
    else:
        scope = ["grep", "--null", "--no-messages", "--text", "--recursive", "--exclude-dir=.git"]
        scope += [f"--include={name}" for name in names]
    argv = [*scope, "--files-with-matches", "--invert-match", "--line-regexp", "--regexp", ".*", "--"]
    result = await _checked_search(slot, [*argv, _safe(query.root)], query)
    return {_relative_path(path) for path in result.output.split("\0")}


async def count_matches(slot: Slot, query: SearchQuery) -> dict[str, int]:
    """Return the number of matching lines per file, for files that have any, sorted by path. Raises `ToolMistake`, for
    example for a bad pattern."""
    _check_pattern(query.pattern)
    engine = await _ripgrep(slot)
    names = simple_names(query.file_glob)
    if engine:
        argv = [*_rg(engine, query), "--count", *(f"--glob={name}" for name in names), "--glob=!.git"]
    else:
        argv = [*_grep(query), "--recursive", "--count", "--exclude-dir=.git", *(f"--include={name}" for name in names)]
    result = await _checked_search(slot, [*argv, *_regexp(engine, query), "--", _safe(query.root)], query)
    if given_up := _GIVEN_UP.search(result.output):  # later files are missing, too
        raise ToolMistake(
            f"The pattern takes too many steps in {_relative_path(given_up[1])}, so the search was stopped. Use a "
            "simpler pattern: a repeated group that contains a repetition, such as (a+)+, takes many steps."
        )
    counts = {}
    for path, text in _records(result.output):
        found = _COUNT.fullmatch(text)
        if found is not None and ".git" not in path.split("/"):
            counts[_relative_path(path)] = int(text)
    # The status is 2 for a bad pattern, but also if one file among many could not be read.
    if not counts and result.exit_code > 1 and "\0" not in result.output:  # otherwise, only some files were unreadable
        raise ToolMistake(_engine_error(result, query))
    return dict(sorted(counts.items()))


async def matching_lines(slot: Slot, query: SearchQuery, files: Sequence[str], context: int, most: int) -> list[JSON]:
    """Return the matching lines of these files in the form of the reply, at most `most` per file, in order of path and
    line."""
    engine = await _ripgrep(slot)
    argv = _rg(engine, query) if engine else _grep(query)
    options = ["--line-number", "--byte-offset", f"--max-count={most}", *_regexp(engine, query), "--"]
    options += map(_safe, files)
    result = await _checked_search(slot, [*argv, f"--context={context}", *options], query)
    lines: dict[str, dict[int, _Line]] = {}
    for path, text in _records(result.output):
        found = _NUMBERED.match(text)
        if found is not None:
            line = _Line(found[2] == ":", text[found.end() :].removesuffix("\r"), int(found[3]))
            lines.setdefault(_relative_path(path), {})[int(found[1])] = line
    # Of a long line, the reply shows the part around the match. A second search finds its place, which may fail: then
    # the beginning is shown.
    if any(line.is_match and len(line.text) > MAX_LINE_CHARS for each in lines.values() for line in each.values()):
        quick = replace(query, timeout_s=min(query.timeout_s, _MAX_PLACES_S))
        result = await _run_search(slot, [*argv, "--only-matching", *options], quick, _MAX_PLACES_BYTES)
        for path, text in _records(result.output):
            found = _NUMBERED.match(text)
            match = lines.get(_relative_path(path), {}).get(int(found[1])) if found is not None else None
            if found is not None and match is not None and match.match_at is None:
                match.match_at = int(found[3]) - match.offset
    return [match for path in sorted(lines) for match in _matches(path, lines[path], context)]


async def list_files(slot: Slot, root: str, timeout_s: float) -> list[str]:
    """Return files and symlinks below `root`, sorted, except those in `.git`."""
    return await _list_paths(slot, root, ["(", "-type", "f", "-o", "-type", "l", ")"], timeout_s)


async def list_folders(slot: Slot, root: str, timeout_s: float) -> list[str]:
    """Return the directories below `root`, sorted, except `.git` and those in it."""
    return [
        each for each in await _list_paths(slot, root, ["-type", "d"], timeout_s) if each != _relative_path(_safe(root))
    ]


async def _list_paths(slot: Slot, root: str, kinds: list[str], timeout_s: float) -> list[str]:
    argv = ["find", _safe(root), "-name", ".git", "-prune", "-o", *kinds, "-print0"]
    result = await slot.execute(argv, timeout_s=timeout_s, max_output_bytes=MAX_LISTING_BYTES)
    _check_result(result)
    return sorted(_relative_path(path) for path in result.output.split("\0")[:-1])


@dataclass(slots=True)
class _Line:
    """A printed line: its offset in the file, and the offset of its first match in the line, in bytes."""

    is_match: bool
    text: str
    offset: int
    match_at: int | None = None


def _matches(path: str, lines: dict[int, _Line], context: int) -> Iterator[JSON]:
    for number, line in sorted(lines.items()):
        if line.is_match:
            match: dict[str, JSON] = {"path": path, "line": number, "content": _cut(line.text, line.match_at or 0)}
            if context:
                match["before"] = [_cut(lines[n].text) for n in range(number - context, number) if n in lines]
                match["after"] = [_cut(lines[n].text) for n in range(number + 1, number + context + 1) if n in lines]
            yield match


def _records(output: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of a file name and the line printed for it. Names end at a NUL byte, so they may contain line ends.

    Takes linear time whatever is printed, because an agent may replace the programs in its slot.
    """
    path, *rest = output.split("\0")
    for part in rest:
        text, _, following = part.partition("\n")
        yield path, text
        path = following.removeprefix("--\n")  # the separator of groups of context lines


def _rg(engine: str, query: SearchQuery) -> list[str]:
    # `--no-config`: results must not depend on a file that the agent writes. `--encoding=none`: otherwise, ripgrep
    # would decode files with a byte order mark, and grep would not.
    scope = ["--hidden", "--no-ignore", "--no-messages", "--no-config", "--encoding=none"]
    form = ["--null", "--no-heading", "--with-filename", "--color=never", "--engine=auto"]
    return [engine, *scope, *form, *(["--no-unicode"] if query.bytewise else [])]


def _grep(query: SearchQuery) -> list[str]:
    return ["grep", "--perl-regexp", "--null", "--with-filename", "--color=never", "--no-messages", "-I"]


def _regexp(engine: str | None, query: SearchQuery) -> list[str]:
    # Without UCP, classes such as \w have only ASCII characters in grep.
    return ["--regexp", query.pattern if engine or query.bytewise else f"(*UCP){query.pattern}"]


async def _checked_search(slot: Slot, argv: list[str], query: SearchQuery) -> ExecutionResult:
    result = await _run_search(slot, argv, query)
    _check_result(result)
    return result


async def _run_search(
    slot: Slot, argv: list[str], query: SearchQuery, most_bytes: int = MAX_LISTING_BYTES
) -> ExecutionResult:
    # In a UTF-8 locale, grep takes files with other bytes as binary.
    locale = {"LC_ALL": "C" if query.bytewise else "C.UTF-8"}
    return await slot.execute(argv, env=locale, timeout_s=query.timeout_s, max_output_bytes=most_bytes)


def _check_result(result: ExecutionResult) -> None:
    if result.metadata.get("timeout"):
        raise ToolMistake("The search took too long and was stopped. Narrow it with path or file_glob.")
    if result.metadata.get("truncated"):
        raise ToolMistake("The search found too much to list. Narrow it with path, file_glob or a stricter pattern.")
    if result.exit_code in (126, 127):
        raise ToolMistake(
            "This sandbox has neither ripgrep nor GNU grep and find; search with terminal commands instead."
        )


def _check_pattern(pattern: str) -> None:
    try:
        pattern.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ToolMistake("The pattern contains half of a surrogate pair, which no text contains.") from None
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise ToolMistake(f"The pattern has {len(pattern)} characters; the maximum is {_MAX_PATTERN_CHARS}.")
    if "\n" in pattern or _NEWLINE_ESCAPE.search(pattern):
        raise ToolMistake("The search works line by line, so a pattern cannot match a line end; search for one line.")


def _engine_error(result: ExecutionResult, query: SearchQuery) -> str:
    said = result.output.strip().rpartition("\n")[2][:300]  # both programs print the error last
    if not said:  # messages about files are suppressed
        return f"{query.root} cannot be read"
    return f"The pattern cannot be used: {said}. To match characters such as ( [ * + ? literally, escape them with \\."


async def _ripgrep(slot: Slot) -> str | None:
    """Return the path of ripgrep in the slot, or None. A file check costs less than a failing command."""
    for path in RIPGREP_PATHS:
        if await slot.stat(path) is not None:
            return path
    return None


def _safe(path: str) -> str:
    """Return the path in a form that no program reads as an option."""
    return f"./{path}" if path.startswith("-") else path


def _relative_path(path: str) -> str:
    return path.removeprefix("./")


SEARCH_FILES = FunctionTool(schema=SCHEMA, run=run_search_files, toolset="file", parallel_safe=True)

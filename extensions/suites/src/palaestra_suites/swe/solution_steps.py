"""The tool calls of a reference solution: what an agent would do to turn the files that it gets into the solution."""

from __future__ import annotations

import shlex
from base64 import b64encode
from collections.abc import Iterator
from difflib import SequenceMatcher

from palaestra_slots.core.types import ToolStep
from palaestra_suites.swe.repository import EXECUTABLE, TreeFile, TreeFiles
from palaestra_suites.swe.unified_diff import split_lines

_PIECE = 60_000
"""The maximum number of base64 characters per command, a multiple of 4; the kernel allows 128 KiB per argument."""

MOST_STEPS = 20
"""The maximum number of tool calls for a solution with a call per place. A longer one is packed into few commands,
because an agent has a maximum number of turns (by default 30)."""


def solution_steps(before: TreeFiles, after: TreeFiles, repo_dir: str) -> tuple[ToolStep, ...]:
    """Return the tool calls that turn the files `before`, as the agent gets them, into those `after`, in order: one
    `patch` call per place or, if these would be more than `MOST_STEPS`, terminal commands that write whole files.

    Both name the same paths, with None where there is no file. New texts are written whole. Terminal commands make
    links, delete files, change modes and write other data.
    """
    root = repo_dir.rstrip("/")
    paths = sorted(after, key=lambda path: after[path] is not None)  # a new file may need the name of a deleted folder
    steps = tuple(step for path in paths for step in _file_steps(f"{root}/{path}", before.get(path), after[path]))
    if len(steps) <= MOST_STEPS:
        return steps
    packed: list[str] = []
    for command in (each for path in paths for each in _commands(f"{root}/{path}", before.get(path), after[path])):
        if packed and len(packed[-1]) + len(command) <= _PIECE:
            packed[-1] += f" &&\n{command}"
        else:
            packed.append(command)
    return tuple(map(_shell, packed))


def replacements(before: str, after: str) -> Iterator[tuple[str, str]]:
    """Yield the old and the new text of each changed place, to replace in this order. Each old text is extended by
    lines around it until it occurs exactly once in the text that it changes."""
    old, new, text = split_lines(before), split_lines(after), before
    for group in reversed([*SequenceMatcher(None, old, new).get_grouped_opcodes(3)]):  # earlier places stay valid
        (_, start, _, first, _), (_, _, end, _, last) = group[0], group[-1]
        lines, low, high = split_lines(text), start, end
        while _occurrences(text, "".join(lines[low:high])) != 1 and (low, high) != (0, len(lines)):
            low, high = max(0, low - 1), min(len(lines), high + 1)
        new_text = "".join([*lines[low:start], *new[first:last], *lines[end:high]])
        yield "".join(lines[low:high]), new_text
        text = "".join([*lines[:low], new_text, *lines[high:]])


def _file_steps(path: str, old: TreeFile | None, new: TreeFile | None) -> Iterator[ToolStep]:
    if new is None or not _is_text(new) or (old is not None and not _is_text(old)):
        yield from map(_shell, _commands(path, old, new))
        return
    if old is None:
        yield ToolStep("write_file", {"path": path, "content": new.text})
    for old_text, new_text in replacements(old.text, new.text) if old is not None else ():
        arguments = {"mode": "replace", "path": path, "old_string": old_text, "new_string": new_text}
        yield ToolStep("patch", arguments)
    yield from map(_shell, _mode(path, old, new))


def _commands(path: str, old: TreeFile | None, new: TreeFile | None) -> Iterator[str]:
    """Yield the commands that make the change to a file, whatever its bytes."""
    quoted = shlex.quote(path)
    if new is None or (old is not None and old.is_link != new.is_link):
        yield f"rm -- {quoted}"
    if new is None:
        return
    if old is None or old.data != new.data or old.is_link != new.is_link:
        make_folder = f"mkdir -p -- {shlex.quote(path.rpartition('/')[0])}"
        if new.is_link:
            yield f"{make_folder} && ln -sfn -- {shlex.quote(new.text)} {quoted}"
        else:
            encoded = b64encode(new.data).decode()
            yield f"{make_folder} && : > {quoted}"
            for start in range(0, len(encoded), _PIECE):
                yield f"printf %s {encoded[start : start + _PIECE]} | base64 -d >> {quoted}"
    yield from _mode(path, old, new)


def _mode(path: str, old: TreeFile | None, new: TreeFile) -> Iterator[str]:
    runs = new.mode == EXECUTABLE
    if not new.is_link and runs != (old is not None and old.mode == EXECUTABLE):
        yield f"chmod {'+x' if runs else '-x'} -- {shlex.quote(path)}"


def _is_text(file: TreeFile) -> bool:
    """Return whether a tool call can contain the file."""
    return not (file.is_link or "\0" in file.text or any("\ud800" <= each <= "\udfff" for each in file.text))


def _shell(command: str) -> ToolStep:
    return ToolStep("terminal", {"command": command})


def _occurrences(text: str, part: str) -> int:
    """Return how often `part` occurs, overlaps included; 0 for an empty part."""
    count, index = 0, text.find(part) if part else -1
    while index >= 0:
        count, index = count + 1, text.find(part, index + 1)
    return count

"""The `patch` tool: replaces a piece of text in one file, or applies a V4A patch to several files. `tools/patching/`
finds the positions to change by their text, without line numbers.

Invariant: as long as the slot works, a patch over several files is applied completely or not at all. All results are
computed before the first write. If a write fails or is cancelled, the files written before it get their old content
back. The error of a failed write names those that cannot be restored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import TypeVar

from palaestra.tools import parameters
from palaestra.tools.files.syntax_check import check_syntax
from palaestra.tools.files.text_files import (
    PATH_PARAMETER,
    DecodedFile,
    file_info,
    in_full,
    in_slot,
    read_text_file,
    remove_file,
    write_file_bytes,
)
from palaestra.tools.patching.edit_diff import MAX_DIFF_CHARS, unified_diff
from palaestra.tools.patching.fuzzy_match import Ambiguous, NoMatch, replace
from palaestra.tools.patching.v4a import FileChange, PatchError, apply_patch, parse_patch
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.io.threads import in_own_thread
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot

SCHEMA = ToolSchema(
    name="patch",
    description=(
        "Edit files. mode replace: replace `old_string` with `new_string` in the file at `path`. Copy old_string "
        "exactly from the file, without the line numbers of read_file, and include enough surrounding lines to make it "
        "unique. Small differences in whitespace, indentation or quotes are tolerated and reported. mode patch: apply "
        "a V4A patch. It can change several files, and is applied completely or not at all:\n"
        "*** Begin Patch\n*** Update File: src/a.py\n@@ def total(items):\n     result = 0\n-    return None\n"
        "+    return result\n*** Add File: notes.txt\n+first line\n*** Delete File: old.txt\n"
        "*** Move File: x.py -> y.py\n*** End Patch\n"
        "Returns the unified diff and, for Python, JSON, YAML and TOML, whether each file still parses."
    ),
    parameters={
        "mode": parameters.choice("The edit mode: replace or patch.", ["replace", "patch"]),
        "path": {**PATH_PARAMETER, "description": f"For mode replace: {PATH_PARAMETER['description']}"},
        "old_string": parameters.text("For mode replace: the text to find."),
        "new_string": parameters.text("For mode replace: the replacement. Use an empty string to delete the text."),
        "replace_all": parameters.flag("For mode replace: replace all occurrences instead of requiring exactly one."),
        "patch": parameters.text("For mode patch: the V4A patch, from Begin Patch to End Patch."),
    },
    required=("mode",),
)


T = TypeVar("T")

_SHORT_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class FileEdit:
    """One file before and after the patch; None stands for a missing file."""

    path: str
    before: DecodedFile | None
    after: DecodedFile | None


async def run_patch(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Run either mode; the reply has `success`, `diff`, the changed paths and, for file types with a check,
    `syntax_check`."""
    if arguments["mode"] == "patch":
        _require(arguments, ("patch",), ("path", "old_string", "new_string", "replace_all"))
        return await _patch(await run.slot(), arguments["patch"])
    _require(arguments, ("path", "old_string", "new_string"), ("patch",))
    replace_all = bool(arguments.get("replace_all", False))
    slot = await run.slot()
    path = await in_full(slot, arguments["path"])
    return await _replace(slot, path, arguments["old_string"], arguments["new_string"], replace_all)


def _require(arguments: Mapping[str, JSON], needed: tuple[str, ...], foreign: tuple[str, ...]) -> None:
    mode = arguments["mode"]
    missing = [name for name in needed if name not in arguments]
    if missing:
        raise ToolMistake(f"mode {mode} needs {' and '.join(missing)}; nothing was changed")
    # some models pass an empty value for a parameter that they mean to omit
    mixed = [name for name in foreign if arguments.get(name)]
    if mixed:
        raise ToolMistake(f"mode {mode} does not accept {' and '.join(mixed)}; nothing was changed")


async def _replace(slot: Slot, path: str, old: str, new: str, replace_all: bool) -> dict[str, JSON]:
    if not old:
        raise ToolMistake("old_string is empty; to create a file use write_file")
    if old == new:
        raise ToolMistake("old_string and new_string are the same; nothing was changed")
    before = await read_text_file(slot, path)
    if before.crlf:
        old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    size = len(before.text) + len(old) + len(new)
    try:
        done = await _computed(size, lambda: replace(before.text, old, new, replace_all=replace_all))
    except (NoMatch, Ambiguous) as mistake:
        raise ToolMistake(f"{path}: {mistake}") from None
    if done.text == before.text:
        raise ToolMistake(f"{path}: the replacement does not change the file (match: {done.strategy})")
    edit = FileEdit(path, before, before.with_text(done.text))
    await _write_all(slot, [edit])
    return {**await _computed(size, lambda: _edit_reply([edit])), "match": done.strategy, "replacements": done.count}


async def _patch(slot: Slot, patch: str) -> dict[str, JSON]:
    try:
        changes = [
            with_fields(
                change,
                path=await in_full(slot, change.path),
                target=None if change.target is None else await in_full(slot, change.target),
            )
            for change in await _computed(len(patch), lambda: parse_patch(patch))
        ]
        # All files are read and the whole patch is applied in memory first, so that a patch which does not fit changes
        # nothing.
        before = {path: await _read_if_present(slot, path) for path in _paths(changes)}
        texts = {path: None if file is None else file.text for path, file in before.items()}
        size = len(patch) + sum(len(text or "") for text in texts.values())
        results = await _computed(size, lambda: apply_patch(changes, texts))
    except PatchError as mistake:
        raise ToolMistake(f"{mistake}. Nothing was changed.") from None
    # A moved file keeps the encoding and line ends of the file that it was.
    sources = {change.target or change.path: change.path for change in changes}
    edits = [
        FileEdit(
            path,
            before[path],
            None if text is None else (before[sources.get(path, path)] or DecodedFile("")).with_text(text),
        )
        for path, text in results.items()
    ]
    await _write_all(slot, edits)
    return await _computed(size, lambda: _edit_reply(edits))


async def _computed(size: int, function: Callable[[], T]) -> T:
    """Call a function that works on texts of `size` characters. For long texts, the function runs in a thread, so
    that other rollouts do not wait, and is abandoned when the call is cancelled."""
    return function() if size <= _SHORT_CHARS else await in_own_thread(function)


def _paths(changes: list[FileChange]) -> list[str]:
    """Return all paths of a patch. Raises `PatchError` if two different paths name one file, because the result would
    depend on their order."""
    paths = [path for change in changes for path in (change.path, change.target) if path is not None]
    if len({in_slot(path) for path in paths}) < len(set(paths)):
        raise PatchError("The patch names one file by two different paths")
    return list(dict.fromkeys(paths))


async def _read_if_present(slot: Slot, path: str) -> DecodedFile | None:
    if await file_info(slot, path) is None:
        return None
    return await read_text_file(slot, path)


async def _write_all(slot: Slot, edits: list[FileEdit]) -> None:
    begun: list[FileEdit] = []
    try:
        for edit in sorted(
            edits, key=lambda edit: edit.after is None
        ):  # removals come last, because they are the most likely to succeed
            # the path may be a link to a file that was just written
            if begun and await _read_if_present(slot, edit.path) != edit.before:
                raise ToolMistake(
                    f"{edit.path} is the same file as another in the patch. Name it once; nothing was changed"
                )
            begun.append(edit)
            await _write_or_remove(slot, edit.path, edit.after)
    except ToolMistake as mistake:
        # A write that failed has changed nothing, so its file is not restored.
        unrestored = await _put_back(slot, begun[:-1] if begun and edit is begun[-1] else begun)
        if unrestored:
            raise ToolMistake(f"{mistake}. These files were changed and could not be restored: {unrestored}") from None
        raise
    except asyncio.CancelledError:
        # A write that was cancelled may have been carried out.
        await _put_back(slot, begun)
        raise


async def _put_back(slot: Slot, edits: list[FileEdit]) -> str:
    """Restore the old content of files, the latest first. Returns the paths that could not be restored."""
    unrestored: list[str] = []
    for edit in reversed(edits):
        try:
            await _write_or_remove(slot, edit.path, edit.before)
        except ToolMistake:
            unrestored.append(edit.path)
    return ", ".join(unrestored)


async def _write_or_remove(slot: Slot, path: str, file: DecodedFile | None) -> None:
    if file is None:
        await remove_file(slot, path)
    else:
        await write_file_bytes(slot, path, file.encode(), file.mode)


def _edit_reply(edits: list[FileEdit]) -> dict[str, JSON]:
    diffs = [unified_diff(_text_or_none(edit.before), _text_or_none(edit.after), edit.path) for edit in edits]
    diff = "".join(diffs)
    reply: dict[str, JSON] = {
        "success": True,
        "diff": diff if len(diff) <= 2 * MAX_DIFF_CHARS else diff[: 2 * MAX_DIFF_CHARS],
    }
    groups = {
        "files_modified": [edit.path for edit in edits if edit.before is not None and edit.after is not None],
        "files_created": [edit.path for edit in edits if edit.before is None and edit.after is not None],
        "files_deleted": [edit.path for edit in edits if edit.after is None],
    }
    reply |= {name: paths for name, paths in groups.items() if paths}
    # After the edit and not before it: a model may break a file in one call and repair it in the next.
    checks = {edit.path: check_syntax(edit.path, edit.after.text) for edit in edits if edit.after is not None}
    told = {path: result for path, result in checks.items() if result is not None}
    return {**reply, "syntax_check": told} if told else reply


def _text_or_none(file: DecodedFile | None) -> str | None:
    return None if file is None else file.text


PATCH = FunctionTool(schema=SCHEMA, run=run_patch, toolset="file")

"""The reference solution of a row as tool calls: what the oracle policy plays, through the same tools as a model."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from palaestra.core.types import ToolStep
from palaestra.suites.swe import apply_diff, unified_diff


def solution_steps(patch: str, texts: Mapping[str, str], repo_dir: str) -> tuple[ToolStep, ...]:
    """The calls that turn the agent's tree into the fixed one: one `patch` call per hunk, in order.

    `patch` is a diff against the agent's tree, `texts` the files it changes as the agent finds them. New files are
    written whole; deleted and renamed ones go through the terminal. Raises `DiffError` when the diff does not fit.
    """
    return tuple(step for file in unified_diff.parse(patch) for step in _file_steps(file, texts, repo_dir.rstrip("/")))


def _file_steps(file: unified_diff.FileDiff, texts: Mapping[str, str], repo_dir: str) -> list[ToolStep]:
    path = f"{repo_dir}/{file.path}"
    if file.new_path is None:
        return [_shell("rm", "--", path)]
    if file.old_path is None:
        return [ToolStep("write_file", {"path": path, "content": apply_diff.apply_to_text(file, "")})]
    steps = []
    if file.renamed:
        steps.append(_shell("mkdir", "-p", "--", path.rpartition("/")[0]))
        steps.append(_shell("mv", "--", f"{repo_dir}/{file.old_path}", path))
    if file.old_path not in texts:
        raise unified_diff.DiffError(f"{file.old_path}: there is no such file to change")
    for edit in apply_diff.edits(file, texts[file.old_path]):
        arguments = {"mode": "replace", "path": path, "old_string": edit.old_text, "new_string": edit.new_text}
        steps.append(ToolStep("patch", arguments))
    return steps


def _shell(*argv: str) -> ToolStep:
    return ToolStep("terminal", {"command": shlex.join(argv)})

"""Hooks: commands of the user that run before and after tool calls, read from `hooks.json` beside `chat.yaml`.

    {"hooks": {"PreToolUse": [{"matcher": "terminal", "hooks": [
      {"type": "command", "command": "~/bin/check-command", "timeout": 10, "onFailure": "block"}]}]}}

The file, the JSON on standard input and the answers have the shape of Claude Code's hooks
(https://code.claude.com/docs/en/hooks), so that existing hooks work. Names of its tools are understood as well.

A hook is a program on this machine with the rights of the user. Invariants: only the file in the user's own folder
defines hooks, and a hook's working directory is that folder, so that nothing in a project's folder becomes a program.
A hook that fails, hangs or prints something else than an answer is reported; it never ends a turn.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from palaestra.tools.mcp.mcp_config import TOOLSET_PREFIX
from palaestra.tools.tool import Tool
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON

BEFORE, AFTER = "PreToolUse", "PostToolUse"
FILE_NAME = "hooks.json"
TIMEOUT_S, MAX_TIMEOUT_S = 60.0, 600.0
MAX_OUTPUT_BYTES = 1 << 20
MAX_TEXT_CHARS = 10_000
"""The maximum length of a reason or note that a model reads."""

_POLL_S = 0.01
_DECISIONS = {"allow": "allow", "approve": "allow", "deny": "deny", "block": "deny", "ask": "ask"}
_NAMES = {
    "terminal": "Bash", "read_file": "Read", "write_file": "Write", "patch": "Edit", "search_files": "Grep",
    "web_search": "WebSearch", "web_extract": "WebFetch", "delegate_task": "Task", "todo": "TodoWrite",
}  # fmt: skip
"""The names of Claude Code for tools that do the same."""
_FILE_TOOLS = frozenset({"Read", "Write", "Edit"})
_PLAIN = re.compile(r"[\w|, -]*")


@dataclass(frozen=True, slots=True)
class Hook:
    """One command. `tools` is None for all tools, a set of names, or a pattern that is searched in the name. If
    `blocks`, a call does not run when the hook itself fails."""

    command: str
    tools: frozenset[str] | re.Pattern[str] | None = None
    timeout_s: float = TIMEOUT_S
    blocks: bool = False

    @property
    def about(self) -> str:
        """The tools that the hook is for, for a person to read."""
        if self.tools is None:
            return "all tools"
        return ", ".join(sorted(self.tools)) if isinstance(self.tools, frozenset) else self.tools.pattern

    def name_for(self, tool: Tool) -> str | None:
        """Return the name by which the hook knows the tool, or None if the hook is not for this tool."""
        if self.tools is None:
            return tool.name
        return next((name for name in _names_of(tool) if self._has(name)), None)

    def _has(self, name: str) -> bool:
        tools = self.tools
        return name in tools if isinstance(tools, frozenset) else tools is None or tools.search(name) is not None


@dataclass(frozen=True, slots=True)
class HookAnswer:
    """What a hook answered. `decision` is allow, deny, ask or empty, and `reason` its reason; `arguments` replace those
    of the call; `note` is for the model and `message` for the person. `problem` is the hook's own failure."""

    decision: str = ""
    reason: str = ""
    arguments: Mapping[str, JSON] | None = None
    note: str = ""
    message: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of a user, by event. `folder` is their working directory; `ignored` names the events of the file for
    which hooks never run."""

    folder: Path
    before: Sequence[Hook] = ()
    after: Sequence[Hook] = ()
    ignored: Sequence[str] = ()


def read_hooks(folder: Path) -> Hooks:
    """Return the hooks of the file in the user's folder; without a file there are none. Raises `ConfigError` for a file
    that is invalid, has hooks that cannot run here, or may have been written by another user."""
    path = folder / FILE_NAME
    try:
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            content = json.load(file)
    except FileNotFoundError:
        return Hooks(folder)
    except OSError as error:
        raise ConfigError(f"the hooks in {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if about.st_uid not in (0, os.getuid()) or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"other users can change {path}, so its hooks are not run; make it yours with chmod 600")
    by_event = content.get("hooks") if isinstance(content, dict) else None
    if not isinstance(by_event, dict):
        raise ConfigError(f'{path}: expected {{"hooks": {{"{BEFORE}": […], "{AFTER}": […]}}}}')
    if content.get("disableAllHooks") is True:
        return Hooks(folder)
    return Hooks(
        folder,
        _hooks(by_event.get(BEFORE, []), f"{path}: {BEFORE}"),
        _hooks(by_event.get(AFTER, []), f"{path}: {AFTER}"),
        [str(event) for event in by_event if event not in (BEFORE, AFTER)],
    )


def _hooks(groups: JSON, where: str) -> list[Hook]:
    found = []
    for number, group in enumerate(groups if isinstance(groups, list) else [groups], 1):
        place = f"{where}, entry {number}"
        listed = group.get("hooks") if isinstance(group, dict) else None
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise ConfigError(f'{place}: expected {{"matcher": …, "hooks": [{{"type": "command", "command": …}}]}}')
        tools = _tool_matcher(group.get("matcher", ""), place)
        found += [_hook(each, tools, place) for each in listed]
    return found


def _hook(given: Mapping[str, JSON], tools: frozenset[str] | re.Pattern[str] | None, place: str) -> Hook:
    command, timeout_s = given.get("command"), given.get("timeout", TIMEOUT_S)
    if given.get("type", "command") != "command" or not isinstance(command, str) or not command.strip():
        raise ConfigError(f"{place}: a hook needs a command; hooks of type {given.get('type')!r} cannot run here")
    if "if" in given:
        raise ConfigError(f"{place}: `if` is not supported; let the command itself decide")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(f"{place}: timeout is a number of seconds up to {MAX_TIMEOUT_S:g}, not {timeout_s!r}")
    failure = given.get("onFailure", "continue")
    if failure not in ("continue", "block"):
        raise ConfigError(f"{place}: onFailure is continue or block, not {failure!r}")
    return Hook(command, tools, float(timeout_s), failure == "block")


def _tool_matcher(matcher: JSON, place: str) -> frozenset[str] | re.Pattern[str] | None:
    if not isinstance(matcher, str):
        raise ConfigError(f"{place}: matcher is the name of a tool or a regular expression, not {matcher!r}")
    if matcher.strip() in ("", "*"):
        return None
    if _PLAIN.fullmatch(matcher):
        return frozenset(re.split(r"[|,]", matcher.replace(" ", "")))
    try:
        return re.compile(matcher)
    except re.error as error:
        raise ConfigError(f"{place}: the matcher {matcher!r} is not a regular expression: {error}") from None


def _names_of(tool: Tool) -> list[str]:
    """Return the tool's names: its own, and the one that it has in Claude Code."""
    names = [tool.name, _NAMES.get(tool.name, "")]
    server = tool.toolset.removeprefix(TOOLSET_PREFIX)
    prefix = f"mcp_{re.sub(r'[^A-Za-z0-9_]', '_', server)}_"
    if tool.toolset.startswith(TOOLSET_PREFIX) and tool.name.startswith(prefix):
        names.append(f"mcp__{server}__{tool.name.removeprefix(prefix)}")
    return [name for name in names if name]


def input_for(name: str, arguments: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the arguments as a hook that knows the tool as `name` expects them."""
    if name in _FILE_TOOLS and "path" in arguments:
        rest = {key: value for key, value in arguments.items() if key != "path"}
        return {"file_path": arguments["path"], **rest}
    return dict(arguments)


def _arguments_from(name: str, given: Mapping[str, JSON]) -> dict[str, JSON]:
    arguments = dict(given)
    if name in _FILE_TOOLS and "file_path" in arguments:
        arguments["path"] = arguments.pop("file_path")
    return arguments


async def run_hook(hook: Hook, event: Mapping[str, JSON], folder: Path, project: Path | None) -> HookAnswer:
    """Run a hook, and return its answer. `event` is its standard input, `folder` its working directory. `project` is
    the folder that the conversation is about, in `CLAUDE_PROJECT_DIR`."""
    words = ["env", f"CLAUDE_PROJECT_DIR={project or ''}", "/bin/sh", "-c", hook.command]
    # Files, because pipes would end only with the last process that the hook has left in the background.
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(json.dumps(dict(event)).encode())
        given.seek(0)
        try:
            process = await asyncio.create_subprocess_exec(
                *words, cwd=folder, start_new_session=True, stdin=given, stdout=out, stderr=err
            )
        except (OSError, ValueError) as error:
            return HookAnswer(problem=f"could not be started: {error}")
        try:
            async with asyncio.timeout(hook.timeout_s):
                while process.returncode is None and _largest_size(out, err) <= MAX_OUTPUT_BYTES:  # noqa: ASYNC110 - no event for size
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return HookAnswer(problem=f"did not end within {hook.timeout_s:g} s and was killed")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has left in the background
            code = await asyncio.shield(process.wait())
        if _largest_size(out, err) > MAX_OUTPUT_BYTES:
            return HookAnswer(problem=f"printed more than {MAX_OUTPUT_BYTES >> 20} MiB and was killed")
        return _hook_answer(code, _output_text(out), _output_text(err), str(event["tool_name"]))


def _largest_size(*files: IO[bytes]) -> int:
    return max(os.fstat(file.fileno()).st_size for file in files)


def _output_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES).decode(errors="replace").strip()


def _hook_answer(code: int, out: str, err: str, name: str) -> HookAnswer:
    if code == 2:  # the code with which a hook refuses; all others are its own failures
        return HookAnswer("deny", _capped_text(err) or "no reason was given")
    if code != 0:
        said = f": {err[-500:]}" if err else ""
        return HookAnswer(problem=f"failed with exit code {code}{said}")
    if not out:
        return HookAnswer()
    try:
        reply = json.loads(out)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        return HookAnswer(problem=f"printed something else than a JSON object, which was ignored: {out[:200]}")
    special = reply.get("hookSpecificOutput")
    special = special if isinstance(special, dict) else {}
    given = special.get("permissionDecision", reply.get("decision", ""))
    reason = special.get("permissionDecisionReason") or reply.get("reason") or ""
    if reply.get("continue") is False:
        given, reason = "deny", reply.get("stopReason") or reason
    decision = _DECISIONS.get(str(given), "")
    if given and not decision and given != "defer":
        return HookAnswer(problem=f"printed an unknown decision: {given!r:.100}")
    changed = special.get("updatedInput")
    if changed is not None and not isinstance(changed, dict):
        return HookAnswer(problem=f"printed an updatedInput that is not an object: {changed!r:.100}")
    return HookAnswer(
        decision,
        _capped_text(reason) or ("no reason was given" if decision == "deny" else ""),
        None if changed is None else _arguments_from(name, changed),
        _capped_text(special.get("additionalContext") or ""),
        _capped_text(reply.get("systemMessage") or ""),
    )


def _capped_text(text: object) -> str:
    return str(text)[:MAX_TEXT_CHARS].strip()

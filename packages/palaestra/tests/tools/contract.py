"""The contract's tables of tools, and one driven example of every tool that is there.

A new tool is a row of `PARAMETERS` and, where it works, its steps in `SCENES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from palaestra_slots.core.types import JSON

PARAMETERS: Mapping[str, str] = {
    "terminal": "command! background timeout workdir pty check_interval notify_on_complete watch_patterns",
    "process": "action! session_id data timeout offset limit",
    "terminal_stateful": "command! timeout",
    "tmux": "action! keys block min_wait_s max_wait_s pane_width pane_height capture_entire reset max_bytes",
    "read_file": "path! offset limit",
    "write_file": "path! content!",
    "patch": "mode! path old_string new_string replace_all patch",
    "search_files": "pattern! target path file_glob limit offset output_mode context",
    "todo": "todos merge",
    "web_search": "query! limit",
    "web_extract": "urls! offset",
    "web_crawl": "url! instructions limit depth",
    "browser_navigate": "url!",
    "browser_snapshot": "full",
    "browser_click": "ref!",
    "browser_type": "ref! text!",
    "browser_scroll": "direction!",
    "browser_back": "",
    "browser_press": "key!",
    "browser_close": "",
    "browser_get_images": "",
    "browser_vision": "question!",
    "browser_console": "clear expression",
    "vision_analyze": "image_url! question!",
    "image_generate": "prompt! aspect_ratio",
    "text_to_speech": "text! output_path",
    "mixture_of_agents": "user_prompt!",
    "delegate_task": "goal context toolsets tasks model max_iterations",
    "execute_code": "code!",
    "memory": "action! target! content old_text",
    "session_search": "query! role_filter limit",
    "clarify": "question! choices",
    "skills_list": "category",
    "skill_view": "name! file_path",
    "skill_manage": "action! name! content old_string new_string replace_all category file_path file_content",
    "cronjob": "action! job_id prompt schedule name repeat deliver skills",
    "send_message": "action target message",
    "ha_list_entities": "domain area",
    "ha_get_state": "entity_id!",
    "ha_list_services": "domain",
    "ha_call_service": "domain! service! entity_id data",
    "rl_list_environments": "",
    "rl_select_environment": "name!",
    "rl_get_current_config": "",
    "rl_edit_config": "field! value!",
    "rl_start_training": "",
    "rl_check_status": "run_id!",
    "rl_stop_training": "run_id!",
    "rl_get_results": "run_id!",
    "rl_list_runs": "",
    "rl_test_inference": "num_steps group_size models",
}
"""Each tool's parameters as the contract has them, `!` for those that are required. A tool may have further ones."""


FROM_REPLY = object()
"""Stands for what the latest reply that had this key said."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call, the keys that the contract promises in its reply, and what must be true of it."""

    arguments: Mapping[str, JSON]
    keys: frozenset[str]
    holds: Callable[[JSON], bool]


def step(arguments: Mapping[str, JSON], keys: str, holds: Callable[[JSON], bool] = bool) -> Step:
    return Step(arguments, frozenset(keys.split()), holds)


TERMINAL = "output exit_code error"
_PATCH = "*** Begin Patch\n*** Update File: notes.py\n@@\n-x = 2\n+x = 3\n*** End Patch"

_PAGE = (
    "data:text/html,<title>Page</title><label>Name <input id=who></label><button onclick='"
    "said.textContent = `words of ${who.value}`;"
    "console.log(1)'>Go</button><p id=said>words</p>"
)

SCENES: Mapping[str, tuple[Step, ...]] = {
    "write_file": (step({"path": "notes.py", "content": "x = 1\ny = 1\n"}, "bytes_written", lambda r: r["created"]),),
    "read_file": (
        step({"path": "notes.py"}, "content total_lines", lambda r: r["content"] == "1|x = 1\n2|y = 1"),
        step({"path": "notes.py", "offset": 2, "limit": 1}, "content", lambda r: r["content"] == "2|y = 1"),
        step({"path": "note.py"}, "error", lambda r: "notes.py" in str(r)),
    ),
    "patch": (
        step(
            {"mode": "replace", "path": "notes.py", "old_string": "x = 1", "new_string": "x = 2"},
            "success diff syntax_check",
            lambda r: "-x = 1\n+x = 2" in r["diff"],
        ),
        step({"mode": "patch", "patch": _PATCH}, "success diff", lambda r: r["files_modified"] == ["notes.py"]),
        step({"mode": "replace", "path": "notes.py", "old_string": "z", "new_string": ""}, "error"),
    ),
    "search_files": (
        step({"pattern": "x = ."}, "matches total_count", lambda r: r["total_count"] == 1),
        step({"pattern": "*.py", "target": "files"}, "files total_count", lambda r: len(r["files"]) == 1),
        step({"pattern": "=", "output_mode": "count"}, "counts", lambda r: sum(r["counts"].values()) == 2),
        step({"pattern": "="}, "matches", lambda r: len(r["matches"]) == 2),
    ),
    "terminal": (
        step({"command": "cat notes.py; echo oh >&2; exit 3"}, TERMINAL, lambda r: r["exit_code"] == 3),
        step({"command": "pwd", "workdir": "/tmp"}, TERMINAL, lambda r: r["output"] == "/tmp\n"),
        step({"command": "echo a; sleep 60", "timeout": 1}, TERMINAL, lambda r: r["exit_code"] == 124),
        step({"command": "read word; echo got $word; exit 5", "background": True}, "output exit_code session_id pid"),
    ),
    "process": (
        step(
            {"action": "poll", "session_id": FROM_REPLY}, "session_id command status pid uptime_seconds output_preview"
        ),
        step({"action": "submit", "session_id": FROM_REPLY, "data": "hi"}, "status bytes_written"),
        step({"action": "wait", "session_id": FROM_REPLY, "timeout": 30}, "status", lambda r: r["exit_code"] == 5),
        step(
            {"action": "log", "session_id": FROM_REPLY}, "output total_lines showing", lambda r: "got hi" in r["output"]
        ),
        step({"action": "kill", "session_id": FROM_REPLY}, "status", lambda r: r["status"] == "already_exited"),
        step({"action": "list"}, "processes", lambda r: len(r["processes"]) == 1),
        step(
            {"action": "poll", "session_id": "proc_0123456789ab"}, "status error", lambda r: r["status"] == "not_found"
        ),
    ),
    "terminal_stateful": (
        step({"command": "cd /tmp; x=7"}, TERMINAL, lambda r: r["exit_code"] == 0),
        step({"command": "pwd; echo $x"}, TERMINAL, lambda r: r["output"] == "/tmp\n7\n"),
    ),
    "tmux": (
        step({"action": "start"}, "output error"),
        step({"action": "send_keys", "keys": ["echo $((6 * 7))", "Enter"], "block": True}, "output"),
        step({"action": "stop"}, "output error"),
    ),
    "execute_code": (
        step(
            {"code": "from palaestra_tools import terminal\nprint(terminal('echo $((6 * 7))')['output'])"},
            TERMINAL,
            lambda r: r["output"] == "42\n\n" and r["tool_calls_made"] == 1,
        ),
        step({"code": "1 / 0"}, TERMINAL, lambda r: r["exit_code"] == 1 and "ZeroDivisionError" in r["output"]),
    ),
    "memory": (step({"action": "read", "target": "user"}, "error", lambda r: "No notes are kept" in r["error"]),),
    "session_search": (step({"query": "x"}, "error", lambda r: "are kept here" in r["error"]),),
    "clarify": (step({"question": "x"}, "error", lambda r: "nobody to ask" in r["error"]),),
    "delegate_task": (
        step({"goal": "x"}, "error", lambda r: "delegate_task cannot be used here: no agent" in r["error"]),
        step({"tasks": [{}]}, "error", lambda r: "Invalid arguments" in r["error"]),
    ),
    "todo": (
        step(
            {"todos": [{"id": "1", "content": "read", "status": "in_progress"}]},
            "todos summary",
            lambda r: r["summary"]["in_progress"] == 1,
        ),
        step(
            {"todos": [{"id": "1", "content": "read", "status": "completed"}], "merge": True},
            "todos summary",
            lambda r: r["summary"]["completed"] == 1 and len(r["todos"]) == 1,
        ),
        step({}, "todos summary", lambda r: r["todos"][0]["content"] == "read"),
    ),
    "web_extract": (
        step(
            {"urls": ["http://127.0.0.1:1/", "file:///etc/passwd"]},
            "results error",
            lambda r: all(each["url"] and each["error"] for each in r["results"]),
        ),
    ),
    "web_crawl": (
        step(
            {"url": "http://127.0.0.1:1/"}, "results links_left error", lambda r: "private" in r["results"][0]["error"]
        ),
        step({"url": "file:///etc/passwd", "depth": 1}, "results links_left error"),
    ),
    "browser_navigate": (
        step(
            {"url": _PAGE}, "success url title snapshot element_count", lambda r: '- button "Go" @e2' in r["snapshot"]
        ),
        step({"url": "file:///etc/passwd"}, "error"),
    ),
    "browser_type": (step({"ref": "@e1", "text": "Ada"}, "success typed element", lambda r: r["typed"] == "Ada"),),
    "browser_click": (
        step({"ref": "@e2"}, "success clicked"),
        step({"ref": "@e9"}, "error"),
    ),
    "browser_snapshot": (
        step({}, "success snapshot element_count", lambda r: "words" not in r["snapshot"]),
        step({"full": True}, "success snapshot", lambda r: "words of Ada" in r["snapshot"]),
    ),
    "browser_scroll": (step({"direction": "down"}, "success scrolled", lambda r: r["scrolled"] == "down"),),
    "browser_press": (step({"key": "Tab"}, "success pressed", lambda r: r["pressed"] == "Tab"),),
    "browser_get_images": (step({}, "success images count", lambda r: r["count"] == 0),),
    "browser_console": (
        step({}, "success console_messages js_errors total_messages total_errors", lambda r: r["total_messages"] == 1),
        step({"expression": "1 + 1"}, "success result", lambda r: r["result"] == 2),
    ),
    "browser_back": (step({}, "success url", lambda r: r["url"] == "about:blank"),),
    "browser_close": (step({}, "success closed", lambda r: r["closed"]),),
}
"""In this order, in one slot: what a tool leaves behind is what the next one finds."""

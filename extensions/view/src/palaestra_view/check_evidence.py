"""What a check recorded about a rollout: the tests that it lists, with their output, and an error of the check itself.

The page and the comparison of siblings read every form of evidence through this module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from palaestra.rollouts.environment import WORK_BREAKS_CHECK
from palaestra_slots.core.types import JSON, Message

CUT = "$cut"
"""The key that marks a text of which a record has only the beginning (`head`) and the end."""

_MOST_FAILED = 20
_GIST_LINES, _GIST_CHARS = 3, 300
_BREAKS = (WORK_BREAKS_CHECK, "work_failed")

_STATUS = {
    **dict.fromkeys(("passed", "pass", "ok", "passing"), "passed"),
    **dict.fromkeys(("failed", "fail", "failure", "error", "errors", "not_passed", "failing"), "failed"),
    **dict.fromkeys(("skipped", "skip", "xfail", "missing"), "skipped"),
}
_NOT_PASSED = ("not_passed", "failed", "failing", "failures", "failed_tests")
_NAMES = ("name", "test", "nodeid", "id")
_RESULTS = ("status", "outcome", "result", "passed")
_OUTPUTS = ("message", "output", "error", "longrepr", "traceback")


class ListedTest(NamedTuple):
    """A test: its name, its status (`passed`, `failed` or `skipped`), and its output, empty if there is none."""

    name: str
    status: str
    output: str = ""


def listed_tests(detail: JSON, under: str = "") -> Iterator[ListedTest]:
    """Yield each test that a rollout's evidence lists. The forms are: mappings from names to a status or a truth value;
    lists of names under a key such as `failed`; mappings from names to an output under a key such as `not_passed`; and
    lists of mappings with a name, a status and perhaps an output."""
    if not isinstance(detail, Mapping) or CUT in detail:
        return
    failures = under.lower() in _NOT_PASSED
    for key, value in detail.items():
        name, word = str(key), _STATUS.get(str(key).lower())
        if isinstance(value, list):
            yield from _of_list(value, "failed" if name.lower() in _NOT_PASSED else word)
        elif isinstance(value, bool) and under:
            yield ListedTest(name, "passed" if value else "failed")
        elif (text := _recorded_text(value)) is not None and under:
            if text.lower() in _STATUS:
                yield ListedTest(name, _STATUS[text.lower()])
            elif failures:
                yield ListedTest(name, "failed", text)
        elif isinstance(value, Mapping):
            if failures and (output := _test_output(value)) is not None:
                yield ListedTest(name, "failed", output)
            else:
                yield from listed_tests(value, name)


def _of_list(values: Sequence[JSON], word: str | None) -> Iterator[ListedTest]:
    for value in values:
        if isinstance(value, str) and word is not None:
            yield ListedTest(value, word)
        if not isinstance(value, Mapping):
            continue
        name = next((value[key] for key in _NAMES if isinstance(value.get(key), str)), None)
        found = next((value[key] for key in _RESULTS if isinstance(value.get(key), str | bool)), None)
        status = ("passed" if found else "failed") if isinstance(found, bool) else _STATUS.get(str(found).lower(), word)
        if name is not None and status is not None:
            yield ListedTest(name, status, _test_output(value) or "")


def _test_output(value: Mapping[str, JSON]) -> str | None:
    return next((text for key in _OUTPUTS if (text := _recorded_text(value.get(key))) is not None), None)


def _recorded_text(value: JSON) -> str | None:
    """Return a text of a record, or the beginning and the end of one that is cut; None for other values."""
    if isinstance(value, Mapping) and CUT in value:
        return f"{value['head']}\n{value['tail']}"
    return value if isinstance(value, str) else None


def check_facts(detail: Mapping[str, JSON], metrics: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return what explains a reward, as JSON data: `failed`, the first tests that did not pass, each with its name, its
    status and the `gist` of its output; `failures`, their number; `total`, the number of all tests, None if only
    failures are listed; and `breaks`, the gist of an error of the check over the work, empty if there is none."""
    tests = list({each.name: each for each in listed_tests(detail)}.values())
    failed = [each for each in tests if each.status != "passed"]
    known, passed = (_test_count(f"tests_{name}", detail, metrics) for name in ("total", "passed"))
    total = known if known is not None and known >= len(tests) else len(tests) if len(failed) < len(tests) else None
    listed = len(failed)
    if failed and total is not None and passed is not None and total == known:
        listed = max(listed, total - passed)  # a long list of failures is cut
    return {
        "failed": [[each.name, each.status, gist(each.output)] for each in failed[:_MOST_FAILED]],
        "failures": listed,
        "total": total,
        "breaks": breaks(detail),
    }


def _test_count(name: str, *found: Mapping[str, JSON]) -> int | None:
    values = [each[name] for each in found if isinstance(each.get(name), int | float)]
    return int(values[0]) if values and float(values[0]).is_integer() else None


def breaks(detail: Mapping[str, JSON]) -> str:
    """Return the gist of an error with which the check failed over the work; empty if there is none."""
    return gist(next((text for name in _BREAKS if (text := _recorded_text(detail.get(name)))), ""))


def gist(output: str) -> str:
    """Return the lines of a test's output that explain it: what pytest marks, the end of a traceback, or the first."""
    lines = [line.rstrip() for line in output.split("\n") if line.strip()]
    marked = [line[2:].strip() for line in lines if line.startswith("E  ")]
    if marked:
        lines = marked
    elif any(line.startswith("Traceback (most recent call last)") for line in lines):
        lines = [line.strip() for line in lines if not set(line) <= set(" ~^")][-_GIST_LINES:]
    found = "\n".join(lines[:_GIST_LINES])
    return found if len(found) <= _GIST_CHARS else f"{found[: _GIST_CHARS - 2]} …"


def nonzero_exits(messages: Sequence[Message], turns: Sequence[int]) -> Iterator[dict[str, JSON]]:
    """Yield each call whose result has a nonzero exit code: `turn`, `tool`, `code` and `arguments`. `turns` are the
    numbers of the turns; the last of them belong to the last messages of the assistant."""
    place = len(turns) - sum(message.get("role") == "assistant" for message in messages)
    turn, waiting = 0, dict[str, Mapping[str, JSON]]()
    for message in messages:
        if message.get("role") == "assistant":
            turn, waiting = turns[place] if 0 <= place < len(turns) else 0, {}
            place += 1
            requests = message.get("tool_calls")
            for request in requests if isinstance(requests, list) else []:
                if isinstance(request, Mapping) and isinstance(request.get("function"), Mapping):
                    waiting[str(request.get("id"))] = request["function"]
        elif message.get("role") == "tool" and (code := call_exit_code(message.get("content"))):
            called = waiting.get(str(message.get("tool_call_id")), {})
            arguments = called.get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            yield {"turn": turn, "tool": str(called.get("name") or ""), "code": code, "arguments": short(text)}


def call_exit_code(content: JSON) -> int:
    """Return the exit code in the result of a call; 0 if it has none."""
    if isinstance(content, str):
        if '"exit_code"' not in content:
            return 0
        try:
            content = json.loads(content)
        except (ValueError, RecursionError):
            return 0
    code = content.get("exit_code") if isinstance(content, Mapping) else None
    return code if type(code) is int else 0


def short(arguments: str, most: int = 500) -> str:
    """Return the arguments of a call in about `most` characters. What is cut ends with `…`; JSON stays JSON."""
    if len(arguments) <= most:
        return arguments
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        each = max(20, most // max(1, len(found)))
        kept = {
            name: f"{value[:each]}…" if isinstance(value, str) and len(value) > each else value
            for name, value in found.items()
        }
        made = json.dumps(kept, ensure_ascii=False)
        if len(made) <= 4 * most:
            return made
    return f"{arguments[:most]}…"

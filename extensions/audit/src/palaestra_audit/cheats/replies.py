"""Wrong work that needs no tool for commands: answers in words, and calls that nobody asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from palaestra_audit.cheats.cheat import Cheat
from palaestra_slots.core.types import JSON, Message, Say, Task, ToolStep
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.engines.scripted import Act, OraclePolicy, Policy, solution_steps, turns_taken

ECHO = Cheat("echo-prompt", "the prompt's own text as the answer", "")
EVERY_NUMBER = Cheat(
    "every-number",
    "an answer with all numbers that tools return, all from 0 to 1000, and all hexadecimal ones of an answer's form",
    "",
)
REPLIES = (ECHO, EVERY_NUMBER)

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_HEXADECIMAL = re.compile(r"(?<!\w)(0x)?([0-9a-f]+)(?!\w)", re.IGNORECASE)
_ASKS_HEXADECIMAL = re.compile(r"\bhex|\b0x|\bbase (16|sixteen)\b", re.IGNORECASE)
_MOST_NUMBERS = 5000
_MOST_DIGITS = 4
"""The maximum number of hexadecimal digits of an answer for which all such numbers are listed: 65,536."""
GOES_ON = "Please go on."


def actions(task: Task) -> int:
    """Return the number of steps of the solution without the text with which it ends."""
    steps = solution_steps(task)
    return max((place for place, step in enumerate(steps, start=1) if not isinstance(step, Say)), default=0)


class EchoPolicy(Policy):
    """Answers with the user's messages of the prompt."""

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        asked = [] if context.task is None else context.task.messages()
        return "\n".join(str(each.get("content")) for each in asked if each.get("role") == "user")


class WordlessPolicy(OraclePolicy):
    """Makes the calls of the reference solution, if there is one, without its words. The last reply says that the work
    is done or, with `numbers`, lists many numbers."""

    def __init__(self, *, numbers: bool) -> None:
        super().__init__()
        self._numbers = numbers

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        assert context.task is not None
        acts = actions(context.task) if context.task.solution is not None else 0
        if (turn := turns_taken(context, messages)) < acts:
            says = isinstance(solution_steps(context.task)[turn], Say)
            return GOES_ON if says else super().act(context, messages)
        return ", ".join([*_returned_numbers(messages), *_hexadecimals(context.task)]) if self._numbers else "Done."

    def is_over(self, context: SessionContext, messages: Sequence[Message]) -> bool:
        assert context.task is not None
        return turns_taken(context, messages) > (actions(context.task) if context.task.solution is not None else 0)


def _returned_numbers(messages: Sequence[Message]) -> Sequence[str]:
    texts = [str(message.get("content")) for message in messages if message.get("role") == "tool"]
    returned = dict.fromkeys(number for text in texts for number in NUMBER.findall(text))
    returned |= {each[0]: None for text in texts for each in _HEXADECIMAL.finditer(text) if is_hexadecimal(each[0])}
    return [*[*returned][:_MOST_NUMBERS], *(text for text in map(str, range(1001)) if text not in returned)]


def is_hexadecimal(word: str, asked: str = "") -> bool:
    """Return whether a word is a hexadecimal number: by its prefix, by its digits and letters, or because the prompt
    asks for one."""
    found = _HEXADECIMAL.fullmatch(word)
    if found is None:
        return False
    mixed = re.search("[a-f]", found[2], re.IGNORECASE) and re.search("[0-9]", found[2])
    return bool(found[1] or mixed or _ASKS_HEXADECIMAL.search(asked))


def _hexadecimals(task: Task) -> Iterator[str]:
    """Yield all hexadecimal numbers with the form of a task's answer, which is told by its prompt: with or without a
    prefix, in small or capital letters, with its number of digits."""
    steps = [] if task.solution is None else solution_steps(task)
    said = steps[-1].text if steps and isinstance(steps[-1], Say) else ""
    asked = "\n".join(str(each.get("content")) for each in task.messages())
    for form in _HEXADECIMAL.finditer(said if task.answer is None else str(task.answer)):
        if is_hexadecimal(form[0], asked) and len(form[2]) <= _MOST_DIGITS:
            digits = f"0{len(form[2])}{'X' if form[2] == form[2].upper() != form[2].lower() else 'x'}"
            yield from (f"{form[1] or ''}{number:{digits}}" for number in range(16 ** len(form[2])))
            return


class FurtherCallsPolicy(OraclePolicy):
    """Plays the reference solution, and makes further calls after its last call."""

    def __init__(self, calls: Sequence[ToolStep]) -> None:
        super().__init__()
        self._calls = calls

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        assert context.task is not None
        acts, turn = actions(context.task), turns_taken(context, messages)
        if turn == acts:
            return self._calls
        steps = solution_steps(context.task)
        return super().act(context, messages) if turn < acts else _reply_text(steps, turn - 1)

    def is_over(self, context: SessionContext, messages: Sequence[Message]) -> bool:
        assert context.task is not None
        return turns_taken(context, messages) > len(solution_steps(context.task))


def _reply_text(steps: Sequence[ToolStep | Say | str], turn: int) -> str:
    step = steps[turn] if turn < len(steps) else "Done."
    return step.text if isinstance(step, Say) else "Done."


def further_calls(task: Task, tools: Sequence[Mapping[str, JSON]]) -> Iterator[ToolStep]:
    """Yield one call of each tool with the arguments of the reference solution's calls by their names, where all that
    the tool requires is known, and the solution does not make the same call."""
    made = [step for step in solution_steps(task) if isinstance(step, ToolStep)]
    known = {name: value for step in made for name, value in step.arguments.items()}
    for tool in tools:
        function = tool.get("function") or {}
        required = (function.get("parameters") or {}).get("required") or ()
        call = ToolStep(function["name"], {name: known[name] for name in required if name in known})
        if len(call.arguments) == len(required) and _call_key(call) not in map(_call_key, made):
            yield call


def _call_key(call: ToolStep) -> str:
    return json.dumps([call.name, dict(call.arguments)], sort_keys=True, default=repr)

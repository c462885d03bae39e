"""From the calls that a model asks for to their answers: checked, run, put back in call order.

Not for deciding what a tool does: that is the handler's. Invariants: a malformed call is answered with one error and
never run, and its valid siblings run (A1); calls marked parallel-safe run together and results stay in call order (A2);
the world's failure (`InfraError`), or a configuration's (`ConfigError`), is never turned into what the model reads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from palaestra.agent.replies import RequestedCall
from palaestra.agent.result import ToolError
from palaestra.core.types import JSON, Message
from palaestra.core.user_code import ForeignError, foreign
from palaestra.tools.arguments import ArgumentSchema, InvalidArguments, compiled
from palaestra.tools.call_text import encodable

ToolHandler: TypeAlias = Callable[[str, dict[str, JSON], str | None], Awaitable[str]]
"""`await handler(name, arguments, task_id)` gives the JSON text that the model reads."""

MAX_PARALLEL_CALLS = 16
"""How many calls of one turn run at the same time at most."""

NOT_FINISHED = json.dumps({"error": "Not finished: the rollout ended during this call."})
"""Stands where an answer would be when the rollout ended first. No model reads it; the history stays well formed."""

NOT_IN_ROLLOUTS = {
    "memory": "Memory is not available in RL environments.",
    "session_search": "Session search is not available in RL environments.",
}
"""Tools that reach beyond a rollout, which a loop runs only where it is told that it may."""
_ANY_OBJECT = ArgumentSchema({"type": "object", "properties": {}, "additionalProperties": True})


@dataclass(slots=True)
class CallAnswer:
    """One call on its way to an answer. `arguments` None: it must not run. `text` None: not answered yet."""

    call: RequestedCall
    arguments: dict[str, JSON] | None = None
    text: str | None = None
    error: str = ""

    def refuse(self, error: str) -> None:
        """Answer with an error."""
        self.error = encodable(error)
        self.text = json.dumps({"error": self.error}, ensure_ascii=False)

    def message(self) -> Message:
        """The tool message that goes into the history."""
        text = NOT_FINISHED if self.text is None else self.text
        return {"role": "tool", "tool_call_id": self.call.id, "content": text}

    def tool_error(self, turn: int) -> ToolError:
        """The record of a failed call, as the contract shapes it."""
        return ToolError(turn, self.call.name, self.call.arguments, self.error, self.text or "")


class ToolCalls:
    """Checks and runs the calls of one rollout. Raises `ConfigError` at once for a schema that is none.

    `beyond` names those of `NOT_IN_ROLLOUTS` that are run like any other.
    """

    def __init__(
        self,
        handler: ToolHandler | None,
        schemas: Sequence[Mapping[str, JSON]],
        valid_names: Collection[str],
        parallel_safe: Collection[str],
        task_id: str | None,
        beyond: Collection[str] = frozenset(),
    ) -> None:
        self._handler = handler
        self._refused = {name: text for name, text in NOT_IN_ROLLOUTS.items() if name not in beyond}
        self._schemas = {str(schema.get("function", schema).get("name", "")): compiled(schema) for schema in schemas}
        self._valid_names = valid_names
        self._parallel_safe = parallel_safe
        self._task_id = task_id

    def check(self, calls: Sequence[RequestedCall], *, cut_off: bool) -> list[CallAnswer]:
        """One answer per call, in order; those that must not run are answered already."""
        return [self._checked(call, cut_off) for call in calls]

    def _checked(self, call: RequestedCall, cut_off: bool) -> CallAnswer:
        answer = CallAnswer(call)
        if not call.name:
            answer.refuse(f"Malformed tool call: no tool's name can be read in {call.arguments[:200]!r}")
            return answer
        if call.name not in self._valid_names:
            answer.refuse(f"Unknown tool '{call.name[:200]}'. Available tools: {sorted(self._valid_names)}")
            return answer
        try:
            answer.arguments = self._schemas.get(call.name, _ANY_OBJECT).parse(call.arguments)
        except InvalidArguments as error:
            cause = "The reply was cut off at its length limit. " if cut_off else ""
            answer.refuse(cause + str(error))
        return answer

    async def run(self, answers: Sequence[CallAnswer]) -> None:
        """Run what may run and fill in the texts. Raises `InfraError` from a tool; answers so far stay filled in."""
        for batch in self._batches(answers):
            if len(batch) == 1:
                await self._run_one(batch[0])
            else:
                await self._run_together(batch)

    def _batches(self, answers: Sequence[CallAnswer]) -> Iterator[list[CallAnswer]]:
        """Runs of neighbouring parallel-safe calls; every other call alone. Refused calls separate nothing."""
        together: list[CallAnswer] = []
        for answer in answers:
            if answer.arguments is None:
                continue
            if answer.call.name in self._parallel_safe:
                together.append(answer)
                continue
            if together:
                yield together
                together = []
            yield [answer]
        if together:
            yield together

    async def _run_together(self, batch: Sequence[CallAnswer]) -> None:
        places = asyncio.Semaphore(MAX_PARALLEL_CALLS)

        async def one(answer: CallAnswer) -> None:
            async with places:
                await self._run_one(answer)

        try:
            async with asyncio.TaskGroup() as group:
                for answer in batch:
                    group.create_task(one(answer))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _run_one(self, answer: CallAnswer) -> None:
        name, arguments = answer.call.name, answer.arguments
        if name in self._refused:
            answer.refuse(self._refused[name])
            return
        assert arguments is not None
        try:
            answer.text = await foreign(self._text(name, arguments))
        except ForeignError as error:  # whatever a tool raises is the tool's answer, as the contract has it
            answer.refuse(f"Tool execution failed: {error}")
        else:
            answer.error = reported_error(answer.text)

    async def _text(self, name: str, arguments: dict[str, JSON]) -> str:
        assert self._handler is not None
        reply: object = await self._handler(name, arguments, self._task_id)
        return encodable(reply if isinstance(reply, str) else json.dumps(reply, ensure_ascii=False))


class _Report(msgspec.Struct):
    """The two fields of a tool's reply that say how it went."""

    error: JSON = None
    exit_code: JSON = None


_REPORT = msgspec.json.Decoder(_Report)


def reported_error(text: str) -> str:
    """What a tool's JSON reply says went wrong, or the empty string.

    A command that ran and exited above zero is a result, not a failure of the tool: only a negative `exit_code`, or an
    `error` without any exit code, counts.
    """
    if not text.startswith("{") or '"error"' not in text:
        return ""
    try:
        report = _REPORT.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return ""
    ran = isinstance(report.exit_code, int) and report.exit_code >= 0
    return "" if ran or not report.error else str(report.error)

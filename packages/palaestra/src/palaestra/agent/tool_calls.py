"""Checks and runs the tool calls of one turn, and answers them in call order.

`ToolRuntime` checks and runs each call; this module decides which tools a rollout may call and which calls run
concurrently, and writes the messages. Invariants: a malformed call is answered with one error and never run, and its
valid siblings run (A1); adjacent calls of parallel-safe tools run concurrently, and answers keep call order (A2); an
infrastructure failure (`InfraError`) or a configuration error (`ConfigError`) is raised, never shown to the model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias

from palaestra.agent.replies import RequestedCall
from palaestra.agent.result import ToolError
from palaestra.tools.arguments import ArgumentSchema, InvalidArguments, compiled
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import CheckedCall, ToolMiddleware, ToolRuntime
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolOutcome, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.types import JSON, Message

ToolHandler: TypeAlias = Callable[[str, dict[str, JSON], str | None], Awaitable[str]]
"""`await handler(name, arguments, task_id)` returns the JSON text that the model reads."""

MAX_PARALLEL_CALLS = 16
"""The maximum number of calls of one turn that run concurrently."""

NOT_FINISHED = json.dumps({"error": "Not finished: the rollout ended during this call."})
"""The answer to a call that was unfinished when the rollout ended. No model reads it; it keeps the history complete."""

NOT_IN_ROLLOUTS = {
    "memory": "Memory is not available in RL environments.",
    "session_search": "Session search is not available in RL environments.",
}
"""Maps each tool that uses data from outside the rollout to the error with which its calls are refused. A loop runs
such a tool only if the loop's `beyond` names it."""
_ANY_OBJECT = ArgumentSchema({"type": "object", "properties": {}, "additionalProperties": True})


@dataclass(slots=True)
class CallAnswer:
    """One requested call and its answer. `checked` is None if the call is invalid, for example if its tool is unknown.
    `outcome` is None until the call is answered."""

    call: RequestedCall
    checked: CheckedCall | None = None
    outcome: ToolOutcome | None = None

    @property
    def text(self) -> str:
        """The text for the model, or `NOT_FINISHED` if the call was not answered."""
        return NOT_FINISHED if self.outcome is None else self.outcome.text

    @property
    def error(self) -> str:
        """Why the call failed, or the empty string."""
        return "" if self.outcome is None else self.outcome.error

    def message(self) -> Message:
        """Return the tool message for the history."""
        return {"role": "tool", "tool_call_id": self.call.id, "content": self.text}

    def tool_error(self, turn: int) -> ToolError:
        """Return the record of this failed call for `AgentResult.tool_errors`."""
        return ToolError(turn, self.call.name, self.call.arguments, self.error, self.text)


class ToolCalls:
    """Checks and runs the calls of one rollout with `tools`; calls of tools outside `valid_names` are refused.

    `beyond` names the tools of `NOT_IN_ROLLOUTS` that are allowed.
    """

    def __init__(
        self,
        tools: ToolRuntime,
        valid_names: Collection[str],
        parallel_safe: Collection[str],
        beyond: Collection[str] = frozenset(),
    ) -> None:
        self._tools = tools
        self._refused = {name: text for name, text in NOT_IN_ROLLOUTS.items() if name not in beyond}
        self._valid_names = valid_names
        self._parallel_safe = parallel_safe

    def check(self, calls: Sequence[RequestedCall], *, cut_off: bool) -> list[CallAnswer]:
        """Return one answer object per call, in order; calls that must not run already have their outcome."""
        return list(map(self._checked, calls, repeat(cut_off)))

    def _checked(self, call: RequestedCall, cut_off: bool) -> CallAnswer:
        if not call.name:
            problem = f"Malformed tool call: no tool name found in {call.arguments[:200]!r}"
        elif call.name not in self._valid_names:
            problem = f"Unknown tool '{call.name[:200]}'. Available tools: {sorted(self._valid_names)}"
        else:
            try:
                checked = self._tools.check(call.name, call.arguments, by_agent=True)
                checked.call_id = call.id
                refused = self._refused.get(call.name)
                return CallAnswer(call, checked, None if refused is None else ToolOutcome.refused(refused))
            except InvalidArguments as error:
                problem = f"{'The reply was cut off at its length limit. ' if cut_off else ''}{error}"
            except ToolMistake as error:
                problem = str(error)
        return CallAnswer(call, outcome=ToolOutcome.refused(problem))

    async def run(self, answers: Sequence[CallAnswer]) -> None:
        """Run the valid calls that have no outcome yet, and set their outcomes. Raises a tool's `InfraError` or
        `ConfigError`; calls that have finished keep their outcomes."""
        for batch in self._batches(answers):
            if len(batch) == 1:
                batch[0].outcome = await self._outcome(batch[0])
            else:
                await self._run_together(batch)

    def _batches(self, answers: Sequence[CallAnswer]) -> Iterator[list[CallAnswer]]:
        """Yield the calls in batches: adjacent parallel-safe calls form one; every other call runs alone. Refused calls
        do not split a batch."""
        together: list[CallAnswer] = []
        for answer in answers:
            if answer.checked is None or answer.outcome is not None:
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

        async def run_call(answer: CallAnswer) -> None:
            async with places:
                answer.outcome = await self._outcome(answer)

        try:
            async with asyncio.TaskGroup() as group:
                for answer in batch:
                    group.create_task(run_call(answer))
        except BaseExceptionGroup as failures:
            # What fails in a tool is an outcome, so this is a failure of the
            # infrastructure or the configuration, or a bug.
            raise failures.exceptions[0] from None

    def _outcome(self, answer: CallAnswer) -> Awaitable[ToolOutcome]:
        assert answer.checked is not None
        return self._tools.run(answer.checked)


def handler_runtime(
    handler: ToolHandler,
    schemas: Sequence[Mapping[str, JSON]],
    names: Collection[str],
    task_id: str | None,
    middleware: Sequence[ToolMiddleware] = (),
) -> ToolRuntime:
    """Return a runtime in which a `tool_handler` runs the tools with these `names`; a tool without a schema accepts any
    object.

    Raises `ConfigError` for a schema that cannot be used.
    """
    known = {str(schema.get("function", schema).get("name", "")): compiled(schema) for schema in schemas}
    registry = ToolRegistry()
    for name in dict.fromkeys(names):
        registry.register(_handled(name, handler, task_id), known.get(name, _ANY_OBJECT))
    return ToolRuntime(registry, task_id=task_id or "", middleware=middleware)


def _handled(name: str, handler: ToolHandler, task_id: str | None) -> FunctionTool:
    async def run(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        reply: object = await handler(name, dict(arguments), task_id)
        return reply if isinstance(reply, str) else json.dumps(reply, ensure_ascii=False)

    return FunctionTool(ToolSchema(name, ""), run)

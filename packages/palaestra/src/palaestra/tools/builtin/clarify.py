"""The `clarify` tool: a question to the user.

The program that runs the agent shares a `User` with its tools: a chat asks the person, and an environment may ask a
simulated user. If no `User` is shared, the reply asks the model to decide by itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from palaestra.tools import parameters
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.types import JSON

MAX_CHOICES = 4

Ask: TypeAlias = Callable[[str, Sequence[str]], Awaitable[str | None]]
"""`await ask(question, choices)` returns the user's answer, which need not be one of the choices, or None."""


@dataclass(frozen=True, slots=True)
class User:
    """Answers the questions of one agent. If `ask` is None, nobody does."""

    ask: Ask | None = None


SCHEMA = ToolSchema(
    name="clarify",
    description=(
        "Ask the user a question and wait for the answer. Use it when the request is ambiguous in a way that "
        "changes the work, or before an irreversible action. Do not ask for information that you can find "
        "yourself."
    ),
    parameters={
        "question": parameters.text("The question.", {"minLength": 1}),
        "choices": {
            "type": "array",
            "items": {"type": "string"},
            "maxItems": MAX_CHOICES,
            "description": "Suggested answers. The user may also give a different one.",
        },
    },
    required=("question",),
)


async def run_clarify(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Ask `question`; the reply repeats it with the choices, and adds `user_response`."""
    ask = run.state(User).ask
    if ask is None:
        raise ToolMistake("There is nobody to ask here. Decide yourself, and state your assumptions")
    choices = arguments.get("choices") or []
    answer = await ask(arguments["question"], choices)
    if answer is None:
        raise ToolMistake("The user did not answer. Decide yourself, and state your assumptions")
    return {"question": arguments["question"], "choices_offered": choices, "user_response": answer}


CLARIFY = FunctionTool(schema=SCHEMA, run=run_clarify, toolset="clarify", touches_world=True, world_session="clarify")

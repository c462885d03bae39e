"""The `mixture_of_agents` tool: several models answer a question, and an aggregator model combines the answers.

One layer of "Mixture-of-Agents Enhances Large Language Model Capabilities" (Wang et al. 2024, arXiv 2406.04692): the
models answer independently, and the aggregator then gets the question and all answers. The settings, not the calling
model, choose the models; one server with chat completions serves all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from palaestra.tools import parameters
from palaestra.tools.tool import FunctionTool, Tool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.errors import ToolUnavailable
from palaestra_slots.core.types import JSON
from palaestra_toolsets.json_client import chat_answer, missing_model, model_server
from palaestra_toolsets.settings import ToolsetSettings

SCHEMA = ToolSchema(
    name="mixture_of_agents",
    description=(
        "Ask several models a difficult question and get one combined answer. The models see only the "
        "question, so include all the context that they need."
    ),
    parameters={"user_prompt": parameters.text("The question, self-contained.", {"minLength": 1})},
    required=("user_prompt",),
)

_AGGREGATE = (
    "Several models have answered the question below, independently of each other. Write the best single answer to it. "
    "Judge the answers critically: some may be wrong, and agreement does not make them right. Do not mention them."
)


def mixture_tool(settings: ToolsetSettings) -> Tool:
    """Return the tool with these settings."""
    return FunctionTool(
        SCHEMA,
        partial(_ask_models, settings),
        toolset="moa",
        parallel_safe=True,
        missing=lambda: mixture_problem(settings),
        touches_world=True,
    )


def mixture_problem(settings: ToolsetSettings) -> str | None:
    """Return the reason why the tool cannot be used, and the remedy, or None."""
    if settings.moa_base_url is None or not settings.moa_models:
        return missing_model("no models to ask are", "moa", "moa_models")
    return None


async def _ask_models(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    if (reason := mixture_problem(settings)) is not None:
        raise ToolMistake(reason)
    question = arguments["user_prompt"]
    asked = [_ask_model(settings, model, [{"role": "user", "content": question}]) for model in settings.moa_models]
    replies = await asyncio.gather(*asked, return_exceptions=True)
    answers: list[str] = []
    failed: dict[str, str] = {}
    for model, reply in zip(settings.moa_models, replies, strict=True):
        if isinstance(reply, (ToolUnavailable, ToolMistake)):
            failed[model] = str(reply)
        elif isinstance(reply, BaseException):
            raise reply
        else:
            answers.append(reply)
    if not answers:
        raise ToolUnavailable(f"no model of mixture_of_agents answered: {next(iter(failed.values()))}")
    numbered = "\n\n".join(f"Answer {number}:\n{answer}" for number, answer in enumerate(answers, 1))
    messages = [
        {"role": "system", "content": _AGGREGATE},
        {"role": "user", "content": f"Question:\n{question}\n\n{numbered}"},
    ]
    response = await _ask_model(settings, settings.moa_aggregator or settings.moa_models[0], messages)
    return {"success": True, "response": response, "answers": len(answers), **({"failed": failed} if failed else {})}


async def _ask_model(settings: ToolsetSettings, model: str, messages: list[JSON]) -> str:
    """Return the text of a model's answer. Raises `ToolMistake` if the server refuses the request, and
    `ToolUnavailable` for any other failure."""
    server = model_server(
        f"the model {model}",
        "moa",
        settings.moa_base_url or "",
        settings.moa_api_key,
        settings.lane(),
        settings.moa_timeout_s,
    )
    return (await chat_answer(server, model, messages, settings.moa_max_tokens)).text

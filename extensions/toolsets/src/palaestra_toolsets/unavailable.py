"""Tools of the project's interface contract that this version lacks or that only some programs provide. `palaestra
gateway` replaces some of them (see `build_tool_registry`). Otherwise they are never shown to a model, and a call of one
is answered with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from palaestra.tools.parameters import integer, text
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.types import JSON

Parameters = Mapping[str, Mapping[str, JSON]]


def unavailable(
    toolset: str, reason: str, tools: Mapping[str, tuple[str, Parameters, tuple[str, ...]]]
) -> tuple[FunctionTool, ...]:
    """Return tools that always refuse. `tools` maps names to a description, parameters, and required parameters."""

    async def refuse(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        raise ToolMistake(f"This tool cannot be used here: {reason}")

    return tuple(
        FunctionTool(ToolSchema(name, *definition), refuse, toolset, missing=lambda: reason)
        for name, definition in tools.items()
    )


def _string_array(description: str) -> dict[str, JSON]:
    return {"type": "array", "items": {"type": "string"}, "description": description}


_JOB_ACTIONS = ["create", "list", "update", "pause", "resume", "remove", "run"]
_ENTITY = text("The entity ID, such as light.kitchen.")
_DOMAIN = text("The entity domain, such as light, switch or climate.")

# fmt: off
CRONJOB = unavailable("cronjob", "only palaestra gateway runs prompts at set times", {
    "cronjob": ("Schedule a prompt to run once or repeatedly, or manage scheduled jobs.", {
        "action": text("The action to perform.", enum=_JOB_ACTIONS),
        "job_id": text("The job's id. Required for all actions except create and list."),
        "prompt": text("The prompt to run. It must be self-contained: the job does not see this conversation."),
        "schedule": text("When to run: a delay (30m), an interval (every 2h), a cron expression, or a timestamp."),
        "name": text("A human-readable name."),
        "repeat": integer("Number of runs. Default: no limit.", minimum=1),
        "deliver": text("Where to send the answer: local, origin, or platform:chat."),
        "skills": _string_array("Skills to load before running the prompt."),
    }, ("action",)),
})

MESSAGING = unavailable("messaging", "only an agent of palaestra gateway can send messages", {
    "send_message": ("Send a message to a user or channel, or list the available targets.", {
        "action": text("The action to perform.", enum=["send", "list"], default="send"),
        "target": text("The recipient: platform, or platform:chat."),
        "message": text("The message to send."),
    }, ()),
})

HOME_ASSISTANT = unavailable("homeassistant", "this version does not connect to a smart home", {
    "ha_list_entities": (
        "List Home Assistant entities, optionally by domain or area.",
        {"domain": _DOMAIN, "area": text("Only list entities in this area, such as kitchen.")}, ()),
    "ha_get_state": (
        "Get the current state and attributes of a Home Assistant entity.", {"entity_id": _ENTITY}, ("entity_id",)),
    "ha_list_services": (
        "List the Home Assistant services, optionally by domain.", {"domain": _DOMAIN}, ()),
    "ha_call_service": ("Call a Home Assistant service, for example to turn on a light.", {
        "domain": _DOMAIN,
        "service": text("The service to call, such as turn_on."),
        "entity_id": _ENTITY,
        "data": text("Service data, as a JSON string."),
    }, ("domain", "service")),
})

# fmt: on

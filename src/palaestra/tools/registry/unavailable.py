"""Tools of the contract that this version lacks, or that only some programs provide: `palaestra gateway` puts its own
tools in their place (`build_tool_registry`). Others are never shown to a model, and answer with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from palaestra.core.types import JSON
from palaestra.tools.parameters import integer, text
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema

Parameters = Mapping[str, Mapping[str, JSON]]


def unavailable(
    toolset: str, reason: str, tools: Mapping[str, tuple[str, Parameters, tuple[str, ...]]]
) -> tuple[FunctionTool, ...]:
    """Tools by name, each with its description, its parameters and the required ones."""

    async def refuse(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        raise ToolMistake(f"This tool cannot be used here: {reason}")

    return tuple(
        FunctionTool(ToolSchema(name, *definition), refuse, toolset, missing=lambda: reason)
        for name, definition in tools.items()
    )


def _texts(description: str) -> dict[str, JSON]:
    return {"type": "array", "items": {"type": "string"}, "description": description}


_JOB_ACTIONS = ["create", "list", "update", "pause", "resume", "remove", "run"]
_ENTITY = text("The entity's id, such as light.kitchen.")
_DOMAIN = text("A kind of entity, such as light, switch or climate.")

# fmt: off
CRONJOB = unavailable("cronjob", "only palaestra gateway runs prompts at set times", {
    "cronjob": ("Schedule prompts to be run later or again and again, and look after those that are scheduled.", {
        "action": text("What to do.", enum=_JOB_ACTIONS),
        "job_id": text("The job, for everything but create and list."),
        "prompt": text("What to do at that time, complete in itself."),
        "schedule": text("When: a delay (30m), an interval (every 2h), a cron line or a point in time."),
        "name": text("A name for people to read."),
        "repeat": integer("How many times to run; left out: for as long as the schedule goes on.", minimum=1),
        "deliver": text("Where the answer goes: local, origin, or a platform and chat."),
        "skills": _texts("Skills to read before the prompt is run."),
    }, ("action",)),
})

MESSAGING = unavailable("messaging", "only an agent of palaestra gateway can send messages", {
    "send_message": ("Send a message to a person or channel, or list whom one can be sent to.", {
        "action": text("What to do.", enum=["send", "list"], default="send"),
        "target": text("Whom to send to: a platform, or platform:chat."),
        "message": text("The message."),
    }, ()),
})

HOME_ASSISTANT = unavailable("homeassistant", "this version does not connect to a smart home", {
    "ha_list_entities": (
        "List what there is in the smart home.",
        {"domain": _DOMAIN, "area": text("Only what is in this room.")}, ()),
    "ha_get_state": (
        "How an entity of the smart home is right now.", {"entity_id": _ENTITY}, ("entity_id",)),
    "ha_list_services": (
        "List what can be done with entities of the smart home.", {"domain": _DOMAIN}, ()),
    "ha_call_service": ("Do something in the smart home, such as turning on a light.", {
        "domain": _DOMAIN,
        "service": text("What to do, such as turn_on."),
        "entity_id": _ENTITY,
        "data": text("Further settings, as a JSON object in text."),
    }, ("domain", "service")),
})

# fmt: on

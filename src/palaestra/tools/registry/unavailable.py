"""How a tool that is not here is declared. Invariant: it is never shown to a model and never does anything.

What an assistant has that lives with one person, which this version does not have: it comes with the front doors.

Tools that ask other models, which this version does not have: images, speech, second opinions.

Tools with which an agent runs trainings itself, which this version does not have; people run `palaestra` instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from palaestra.core.types import JSON
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema

EXTERNAL = frozenset({"web", "vision", "image_gen", "tts", "moa"})
"""Toolsets that need no slot: a tool server may have what is not here."""


def absent(
    name: str,
    toolset: str,
    reason: str,
    description: str,
    parameters: Mapping[str, JSON] | None = None,
    required: tuple[str, ...] = (),
) -> FunctionTool:
    """A tool that says why it is not here, wherever it is asked for."""

    async def refuse(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        raise ToolMistake(f"{name} cannot be used here: {reason}")

    schema = ToolSchema(name, description, parameters or {}, required, external=toolset in EXTERNAL)
    return FunctionTool(schema, refuse, toolset, missing=lambda: reason)


def text(description: str, *options: str) -> dict[str, JSON]:
    """A string parameter, one of `options` where there are any."""
    return {"type": "string", "description": description, **({"enum": list(options)} if options else {})}


def flag(description: str) -> dict[str, JSON]:
    """A switch that is off unless it is set."""
    return {"type": "boolean", "description": description, "default": False}


def number(description: str, **more: JSON) -> dict[str, JSON]:
    """A whole number."""
    return {"type": "integer", "description": description, **more}


def texts(description: str, **more: JSON) -> dict[str, JSON]:
    """A list of strings."""
    return {"type": "array", "items": {"type": "string"}, "description": description, **more}


_NO_SKILLS = "this version keeps no skills"
_NO_HOME = "this version does not connect to a smart home"
_ENTITY = text("The entity's id, such as light.kitchen.")
_DOMAIN = text("A kind of entity, such as light, switch or climate.")

ASSISTANT = (
    absent(
        "skills_list",
        "skills",
        _NO_SKILLS,
        "List the skills there are: documents on how something is done.",
        {"category": text("Only skills of this category.")},
    ),
    absent(
        "skill_view",
        "skills",
        _NO_SKILLS,
        "Read a skill, or a file that belongs to it.",
        {"name": text("The skill's name."), "file_path": text("A file of the skill, relative to it.")},
        ("name",),
    ),
    absent(
        "skill_manage",
        "skills",
        _NO_SKILLS,
        "Write a skill, change it or remove it.",
        {
            "action": text("What to do.", "create", "patch", "edit", "delete", "write_file", "remove_file"),
            "name": text("The skill's name."),
            "content": text("The whole document, for create and edit."),
            "old_string": text("The text to replace, for patch."),
            "new_string": text("What replaces it, for patch."),
            "replace_all": flag("Replace every place and not only a single one, for patch."),
            "category": text("The category of a new skill."),
            "file_path": text("A file of the skill, relative to it."),
            "file_content": text("What to write into that file."),
        },
        ("action", "name"),
    ),
    absent(
        "cronjob",
        "cronjob",
        "this version runs nothing at set times",
        "Schedule prompts to be run later or again and again, and look after those that are scheduled.",
        {
            "action": text("What to do.", "create", "list", "update", "pause", "resume", "remove", "run"),
            "job_id": text("The job, for everything but create and list."),
            "prompt": text("What to do at that time, complete in itself."),
            "schedule": text("When: a delay (30m), an interval (every 2h), a cron line or a point in time."),
            "name": text("A name for people to read."),
            "repeat": number("How many times to run; left out: for as long as the schedule goes on.", minimum=1),
            "deliver": text("Where the answer goes: local, origin, or a platform and chat."),
            "skills": texts("Skills to read before the prompt is run."),
        },
        ("action",),
    ),
    absent(
        "send_message",
        "messaging",
        "this version sends no messages",
        "Send a message to a person or channel, or list whom one can be sent to.",
        {
            "action": {**text("What to do.", "send", "list"), "default": "send"},
            "target": text("Whom to send to: a platform, or platform:chat."),
            "message": text("The message."),
        },
    ),
    absent(
        "ha_list_entities",
        "homeassistant",
        _NO_HOME,
        "List what there is in the smart home.",
        {"domain": _DOMAIN, "area": text("Only what is in this room.")},
    ),
    absent(
        "ha_get_state",
        "homeassistant",
        _NO_HOME,
        "How an entity of the smart home is right now.",
        {"entity_id": _ENTITY},
        ("entity_id",),
    ),
    absent(
        "ha_list_services",
        "homeassistant",
        _NO_HOME,
        "List what can be done with entities of the smart home.",
        {"domain": _DOMAIN},
    ),
    absent(
        "ha_call_service",
        "homeassistant",
        _NO_HOME,
        "Do something in the smart home, such as turning on a light.",
        {
            "domain": _DOMAIN,
            "service": text("What to do, such as turn_on."),
            "entity_id": _ENTITY,
            "data": text("Further settings, as a JSON object in text."),
        },
        ("domain", "service"),
    ),
)


MODELS = (
    absent(
        "image_generate",
        "image_gen",
        "this version cannot make images",
        "Make an image from a description. The reply has its address.",
        {
            "prompt": text("What the image shows."),
            "aspect_ratio": {**text("Its shape.", "landscape", "square", "portrait"), "default": "landscape"},
        },
        ("prompt",),
    ),
    absent(
        "text_to_speech",
        "tts",
        "this version cannot make speech",
        "Turn text into an audio file. The reply has its path.",
        {"text": text("What to say."), "output_path": text("Where to write the audio file.")},
        ("text",),
    ),
    absent(
        "mixture_of_agents",
        "moa",
        "this version cannot ask several models at once",
        "Put a hard question to several models and get one answer made of theirs.",
        {"user_prompt": text("The question, complete in itself.")},
        ("user_prompt",),
    ),
)


_RUN = {"run_id": text("The training run's id.")}


def _absent(
    action: str,
    description: str,
    parameters: dict[str, dict[str, object]] | None = None,
    required: tuple[str, ...] = (),
) -> FunctionTool:
    reason = "this version starts no trainings from inside an agent"
    return absent(f"rl_{action}", "rl", reason, description, parameters, required)


TRAINING = (
    _absent("list_environments", "List the environments that can be trained on."),
    _absent("select_environment", "Choose the environment to train on.", {"name": text("Its name.")}, ("name",)),
    _absent(
        "get_current_config", "The chosen environment's settings: those that can be changed and those that cannot."
    ),
    _absent(
        "edit_config",
        "Change a setting of the chosen environment.",
        {"field": text("The setting's name."), "value": {"description": "Its new value."}},
        ("field", "value"),
    ),
    _absent("start_training", "Start a training run with the current settings."),
    _absent("check_status", "How a training run is doing, at most every 30 minutes.", _RUN, ("run_id",)),
    _absent("stop_training", "Stop a training run.", _RUN, ("run_id",)),
    _absent("get_results", "The figures of a training run.", _RUN, ("run_id",)),
    _absent("list_runs", "List the training runs, finished ones too."),
    _absent(
        "test_inference",
        "Roll out the chosen environment with a few models, without training.",
        {
            "num_steps": number("How many steps.", default=3, minimum=1),
            "group_size": number("Rollouts per step.", default=16, minimum=1),
            "models": texts("The models to try."),
        },
    ),
)

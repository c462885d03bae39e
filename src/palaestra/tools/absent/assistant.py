"""What an assistant has that lives with one person, which this version does not have: it comes with the front doors."""

from __future__ import annotations

from palaestra.tools.absent.base import absent, flag, number, text, texts

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

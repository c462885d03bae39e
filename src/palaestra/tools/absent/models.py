"""Tools that ask other models, which this version does not have: images, speech, second opinions, sub-agents."""

from __future__ import annotations

from palaestra.tools.absent.base import absent, number, text, texts

_PART = {
    "goal": text("What to do, complete in itself: the sub-agent sees nothing of this conversation."),
    "context": text("What the sub-agent should know: paths, findings, limits."),
    "toolsets": texts("The toolsets that the sub-agent has."),
}

MODELS = (
    absent(
        "vision_analyze",
        "vision",
        "this version cannot ask a model about images",
        "Look at an image and answer a question about it.",
        {
            "image_url": text("Where the image is: an http(s) address or a path of a file."),
            "question": text("What to find out about the image."),
        },
        ("image_url", "question"),
    ),
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
    absent(
        "delegate_task",
        "delegation",
        "this version has no sub-agents",
        "Give work to sub-agents that have a conversation of their own and report what came of it: one `goal`, or up "
        "to three `tasks` at once.",
        {
            **_PART,
            "tasks": {
                "type": "array",
                "items": {"type": "object", "properties": _PART, "required": ["goal"]},
                "maxItems": 3,
                "description": "Several pieces of work that are done at the same time.",
            },
            "model": text("The model that the sub-agents use, if not this one."),
            "max_iterations": number("How many model calls each sub-agent may make.", minimum=1),
        },
    ),
    absent(
        "execute_code",
        "code_execution",
        "this version cannot run programs that call tools; run them in the terminal",
        "Run a Python program that can call the other tools as functions. The reply is what it printed.",
        {"code": text("The program.")},
        ("code",),
    ),
)

"""Tools that ask other models, which this version does not have: images, speech, second opinions."""

from __future__ import annotations

from palaestra.tools.absent.base import absent, text

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

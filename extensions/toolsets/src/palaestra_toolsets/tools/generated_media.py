"""The tools `image_generate` and `text_to_speech`: a model server makes a file, which is written into the slot.

Any server with OpenAI's images or speech API works. The request and the write are two steps: the request is a separate
external call, so it is recorded with the file's bytes, and a replay writes the same file without a request. Unless the
call names a path, the file is named after the hash of its bytes. Invariant: only bytes that begin with an image
signature are written as an image.

Formats: https://platform.openai.com/docs/api-reference/images/create and …/audio/createSpeech
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import PurePosixPath

from palaestra.tools import parameters
from palaestra.tools.files.text_files import as_mistake
from palaestra.tools.tool import FunctionTool, Tool, ToolMistake, ToolReply, ToolResult, ToolRun, ToolSchema
from palaestra_slots.core.types import JSON
from palaestra_toolsets.json_client import missing_model, model_server
from palaestra_toolsets.settings import ToolsetSettings
from palaestra_toolsets.tools.vision import image_type

IMAGE = ToolSchema(
    name="image_generate",
    description="Make an image from a description. The reply has its path.",
    parameters={
        "prompt": parameters.text("What the image shows."),
        "aspect_ratio": parameters.text("Its shape.", enum=["landscape", "square", "portrait"], default="landscape"),
    },
    required=("prompt",),
    external=True,
)
SPEECH = ToolSchema(
    name="text_to_speech",
    description="Turn text into an audio file. The reply has its path.",
    parameters={
        "text": parameters.text("What to say."),
        "output_path": parameters.text("Where to write the audio file."),
    },
    required=("text",),
    external=True,
)


class FileMaker(Tool):
    """A tool that writes a file. `request` gets the file from the server as `{"data": base64, "suffix": …}`. Unless the
    call names a path, the file is written into `folder`. The reply has the path under `key`."""

    parallel_safe = True

    def __init__(self, request: FunctionTool, folder: str, key: str) -> None:
        self.toolset = request.toolset
        self._request, self._folder, self._key = request, folder, key

    @property
    def schema(self) -> ToolSchema:
        return self._request.schema

    def is_available(self) -> tuple[bool, str | None]:
        return self._request.is_available()

    def missing_in(self, *, replayed: bool) -> str | None:
        return self._request.missing_in(replayed=replayed)

    async def execute(self, **arguments: JSON) -> ToolResult:
        raise ToolMistake(f"{self.name} writes a file, which needs a sandbox, and there is none here")

    async def run(self, arguments: Mapping[str, JSON], run: ToolRun, /) -> ToolReply:
        slot = await run.slot()
        # The path is not part of the request, so a recorded answer fits whatever the path is.
        asked = {name: value for name, value in arguments.items() if name != "output_path"}
        reply = (await run.call_tool(self._request, asked)).reply
        if not isinstance(reply, Mapping) or "data" not in reply:
            return reply
        data = base64.b64decode(reply["data"])
        name = f"{hashlib.sha256(data).hexdigest()[:12]}.{reply['suffix']}"
        path = str(arguments.get("output_path") or PurePosixPath(self._folder, name))
        with as_mistake(f"Cannot write {path}"):
            await slot.write_bytes(path, data)
        return {"success": True, self._key: path, "bytes": len(data)}


def image_tool(settings: ToolsetSettings) -> Tool:
    """Return the `image_generate` tool with these settings."""
    missing = partial(_missing, settings.image_base_url, "no image model is", "image")
    request = FunctionTool(
        IMAGE,
        partial(_generate_image, settings),
        toolset="image_gen",
        missing=missing,
        touches_world=True,
        parallel_safe=True,
    )
    return FileMaker(request, "images", "image")


def speech_tool(settings: ToolsetSettings) -> Tool:
    """Return the `text_to_speech` tool with these settings."""
    missing = partial(_missing, settings.speech_base_url, "no speech model is", "speech")
    request = FunctionTool(
        SPEECH, partial(_speech, settings), toolset="tts", missing=missing, touches_world=True, parallel_safe=True
    )
    return FileMaker(request, "speech", "file_path")


def _missing(base_url: str | None, what: str, prefix: str) -> str | None:
    """Return the reason why the tool cannot be used, and the remedy, or None."""
    return missing_model(what, prefix) if base_url is None else None


async def _generate_image(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    server = model_server(
        "the image model",
        "image",
        settings.image_base_url or "",
        settings.image_api_key,
        settings.lane(),
        settings.media_timeout_s,
    )
    size = settings.image_sizes[arguments.get("aspect_ratio") or "landscape"]
    request: dict[str, JSON] = {"model": settings.image_model, "prompt": arguments["prompt"], "n": 1, "size": size}
    if not settings.image_model.startswith("gpt-image"):  # gpt-image always replies in this format
        request["response_format"] = "b64_json"
    reply = await server.post("images/generations", request)
    try:
        # Without `validate`, characters that are not base64 would be skipped, and the file would be broken.
        data = base64.b64decode(reply["data"][0]["b64_json"], validate=True)
    except (LookupError, TypeError, binascii.Error):
        raise server.malformed(reply if len(str(reply)) < 1000 else "a long reply without b64_json") from None
    kind = image_type(data)
    if kind is None:
        raise server.malformed("bytes that are not an image")
    suffix = "jpg" if kind == "image/jpeg" else kind.removeprefix("image/")
    return {"data": base64.b64encode(data).decode(), "suffix": suffix}


async def _speech(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    server = model_server(
        "the speech model",
        "speech",
        settings.speech_base_url or "",
        settings.speech_api_key,
        settings.lane(),
        settings.media_timeout_s,
    )
    request = {
        "model": settings.speech_model,
        "input": arguments["text"],
        "voice": settings.speech_voice,
        "response_format": settings.speech_format,
    }
    data = await server.post_for_bytes("audio/speech", request)
    if not data:
        raise server.malformed("nothing")
    return {"data": base64.b64encode(data).decode(), "suffix": settings.speech_format}

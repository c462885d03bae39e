"""The `vision_analyze` tool: a vision model answers a question about an image.

The image is a file in the slot, a data URL, or an http(s) address. The project's interface contract fixes the
parameters and the reply. Any server with chat completions can serve the model. It receives one user message with a text
part and an `image_url` part (https://platform.openai.com/docs/guides/images-vision). The latter holds a data URL, so
the server fetches nothing itself.

Invariant: only bytes that are recognised as an image are sent, and no more of them than the settings allow. Addresses
are fetched like web pages, so private networks are out of reach unless `web_allow` lists them. The settings, not the
calling model, choose the vision model.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import unquote_to_bytes

from palaestra.tools import parameters
from palaestra.tools.files.text_files import file_info, in_full, read_file_bytes
from palaestra.tools.net.host_policy import AddressPolicy
from palaestra.tools.tool import FunctionTool, Tool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.types import JSON
from palaestra_toolsets.json_client import chat_answer, missing_model, model_server
from palaestra_toolsets.settings import ToolsetSettings
from palaestra_toolsets.web.fetch import PageUnreadable, fetch

_MAGIC = {
    "image/png": rb"\x89PNG\r\n\x1a\n",
    "image/jpeg": rb"\xff\xd8\xff",
    "image/gif": rb"GIF8[79]a",
    "image/webp": rb"RIFF....WEBPVP",
}
"""The image types that chat servers accept, and how their data begins."""

SCHEMA = ToolSchema(
    name="vision_analyze",
    description="Analyze an image and answer a question about it.",
    parameters={
        "image_url": parameters.text("The image: a file path, an http(s) URL or a data URL."),
        "question": parameters.text("The question about the image."),
    },
    required=("image_url", "question"),
    aliases={"user_prompt": "question"},
)


@dataclass(frozen=True, slots=True)
class Image:
    """An image and its type. The image is not decoded here; the model server refuses a broken image."""

    data: bytes
    type: str

    def data_url(self) -> str:
        """Return the image as a data URL (RFC 2397), the form that chat servers accept."""
        return f"data:{self.type};base64,{base64.b64encode(self.data).decode()}"


def vision_tool(settings: ToolsetSettings) -> Tool:
    """Return the tool with these settings."""
    return FunctionTool(
        SCHEMA,
        partial(_look_at_image, settings),
        toolset="vision",
        parallel_safe=True,
        missing=lambda: vision_problem(settings),
        touches_world=True,
        world_key=partial(_recording_key, settings),
    )


def vision_problem(settings: ToolsetSettings) -> str | None:
    """Return the reason why no image can be analysed, and the remedy, or None."""
    if settings.vision_base_url is None:
        return missing_model("no vision model is", "vision")
    return None


async def analyse_image(settings: ToolsetSettings, image: Image, question: str) -> dict[str, JSON]:
    """Return the model's `analysis`, its `usage` if the server reports it, and `cut` if the answer ended at its token
    limit. Raises `ToolMistake`, or `ToolUnavailable` if the model does not answer."""
    if (reason := vision_problem(settings)) is not None:
        raise ToolMistake(reason)
    server = model_server(
        "the vision model",
        "vision",
        settings.vision_base_url or "",
        settings.vision_api_key,
        settings.lane(),
        settings.vision_timeout_s,
    )
    content: list[JSON] = [
        {"type": "text", "text": question},
        {"type": "image_url", "image_url": {"url": image.data_url()}},
    ]
    messages = [{"role": "user", "content": content}]
    said = await chat_answer(server, settings.vision_model, messages, settings.vision_max_tokens)
    answer: dict[str, JSON] = {"analysis": said.text}
    if said.finish_reason == "length":
        answer["cut"] = "the answer ended at its token limit"
    if isinstance(usage := said.reply.get("usage"), dict):
        answer["usage"] = {name: value for name, value in usage.items() if isinstance(value, int)}
    return answer


async def _look_at_image(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    image = await _load_image(settings, arguments["image_url"], run)
    return {"success": True, **await analyse_image(settings, image, arguments["question"])}


async def _recording_key(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> JSON:
    """Return the arguments and, if they name a path, the file's hash, because the reply depends on the file's
    content."""
    where = arguments["image_url"]
    if where.startswith(("http://", "https://", "data:")):
        return arguments
    try:
        data = (await _read_image(settings, where, run)).data
    except ToolMistake as mistake:
        return {**arguments, "problem": str(mistake)}
    return {**arguments, "sha256": hashlib.sha256(data).hexdigest()}


async def _load_image(settings: ToolsetSettings, where: str, run: ToolRun) -> Image:
    most = settings.vision_max_image_bytes
    if where.startswith("data:"):
        return _from_data_url(where, most)
    if not where.startswith(("http://", "https://")):
        return await _read_image(settings, where, run)
    try:
        # One byte more, which shows that a file is too long.
        found = await fetch(where, AddressPolicy(settings.web_allow), max_bytes=most + 1)
    except PageUnreadable as error:
        raise ToolMistake(f"{where} cannot be fetched: {error}") from None
    return _recognised(found.body, most, where)


async def _read_image(settings: ToolsetSettings, path: str, run: ToolRun) -> Image:
    slot, most = await run.slot(), settings.vision_max_image_bytes
    path = await in_full(slot, path)
    data = await read_file_bytes(slot, path, await file_info(slot, path), most_bytes=most)
    return _recognised(data, most, path)


def _from_data_url(url: str, most_bytes: int) -> Image:
    """Return the image in a data URL. Raises `ToolMistake`."""
    head, comma, body = url.partition(",")
    if not comma:
        raise ToolMistake("This data URL has no comma, so it contains no data")
    # Base64 has 4 characters for 3 bytes, and a URL may write each of them as %XX.
    if len(body) > 4 * most_bytes:
        raise ToolMistake(f"This data URL contains more than the {most_bytes} bytes that an image may have")
    try:
        data = unquote_to_bytes(body)
        if head.lower().endswith(";base64"):
            # White space may break the lines of base64, but `validate` refuses it.
            data = base64.b64decode(b"".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ToolMistake(f"This data URL is not base64: {error}") from None
    return _recognised(data, most_bytes, "the data URL")


def _recognised(data: bytes, most_bytes: int, name: str) -> Image:
    """Return the bytes as an image. Raises `ToolMistake` for other data, and for too many bytes."""
    if len(data) > most_bytes:
        raise ToolMistake(f"{name} has {len(data)} bytes, more than the {most_bytes} that an image may have")
    if not data:
        raise ToolMistake(f"{name} is empty")
    kind = image_type(data)
    if kind is None:
        raise ToolMistake(f"{name} is not an image of a known type ({', '.join(_MAGIC)}); it begins with {data[:12]!r}")
    return Image(data, kind)


def image_type(data: bytes) -> str | None:
    """Return the media type of an image, found by its first bytes, or None for other data
    (https://mimesniff.spec.whatwg.org/#matching-an-image-type-pattern)."""
    return next((kind for kind, pattern in _MAGIC.items() if re.match(pattern, data, re.DOTALL)), None)

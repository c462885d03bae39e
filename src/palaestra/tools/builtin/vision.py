"""The `vision_analyze` tool: a question about an image, put to a model that sees.

The image is a file in the slot, a data URL, or an http(s) address. Parameters and reply are the contract's.

Invariant: what is sent was recognised as an image by its bytes and is no larger than the settings allow; an address is
fetched as pages are, so private networks are out of reach.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial

from palaestra.core.types import JSON
from palaestra.tools.builtin.text_files import file_info, in_full, read_file_bytes
from palaestra.tools.net.host_policy import Reachable
from palaestra.tools.settings import ToolSettings
from palaestra.tools.tool import FunctionTool, Tool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra.tools.vision.ask_model import look, vision_problem
from palaestra.tools.vision.image_format import Image, from_data_url, recognised
from palaestra.tools.web.fetch import Unreadable, fetch

SCHEMA = ToolSchema(
    name="vision_analyze",
    description="Look at an image and answer a question about it.",
    parameters={
        "image_url": {
            "type": "string",
            "description": "Where the image is: a path of a file, an http(s) address, or a data URL.",
        },
        "question": {"type": "string", "description": "What to find out about the image."},
    },
    required=("image_url", "question"),
)


def vision_tool(settings: ToolSettings) -> Tool:
    """The tool, told whom to ask."""
    return FunctionTool(
        SCHEMA,
        partial(_run, settings),
        toolset="vision",
        parallel_safe=True,
        missing=lambda: vision_problem(settings),
        touches_world=True,
        world_key=partial(_key, settings),
    )


async def _run(settings: ToolSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    if (reason := vision_problem(settings)) is not None:
        raise ToolMistake(f"vision_analyze cannot be used here: {reason}")
    image = await _image(settings, arguments["image_url"], run)
    return {"success": True, **await look(settings, image, arguments["question"])}


async def _key(settings: ToolSettings, arguments: Mapping[str, JSON], run: ToolRun) -> JSON:
    """A path alone does not say what the model saw: the file's hash does."""
    where = arguments["image_url"]
    if where.startswith(("http://", "https://", "data:")):
        return arguments
    try:
        data = (await _read(settings, where, run)).data
    except ToolMistake as mistake:
        return {**arguments, "problem": str(mistake)}
    return {**arguments, "sha256": hashlib.sha256(data).hexdigest()}


async def _image(settings: ToolSettings, where: str, run: ToolRun) -> Image:
    if where.startswith("data:"):
        return from_data_url(where, settings.vision_max_image_bytes)
    if where.startswith(("http://", "https://")):
        return await _fetched(settings, where)
    return await _read(settings, where, run)


async def _read(settings: ToolSettings, path: str, run: ToolRun) -> Image:
    slot, most = await run.slot(), settings.vision_max_image_bytes
    path = await in_full(slot, path)
    data = await read_file_bytes(slot, path, await file_info(slot, path), most_bytes=most)
    return recognised(data, most, path)


async def _fetched(settings: ToolSettings, url: str) -> Image:
    most = settings.vision_max_image_bytes
    try:
        found = await fetch(url, Reachable(settings.web_allow), max_bytes=most + 1)
    except Unreadable as error:
        raise ToolMistake(f"{url} cannot be fetched: {error}") from None
    return recognised(found.body, most, url)

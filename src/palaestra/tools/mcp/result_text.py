"""What an MCP tool's result becomes for a model: text with a bound, other things described.

Images, sound and files are named with their type and size; their bytes are in no reply. Structured content is a key of
its own, unless the text says the same already.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from palaestra.core.types import JSON
from palaestra.tools.tool import ToolMistake

if TYPE_CHECKING:
    from mcp.types import BlobResourceContents, CallToolResult, ContentBlock, TextResourceContents


def reply_to(result: CallToolResult, most_chars: int) -> dict[str, JSON]:
    """`{"output": …}`, with `structured` and, where something was left out, `output_total_chars`.

    Raises `ToolMistake` with the same text for a result that says it is an error.
    """
    text = "\n".join(_shown(block) for block in result.content)
    if result.is_error:
        raise ToolMistake(bounded(text, most_chars) or "The tool reported an error without saying which.")
    reply: dict[str, JSON] = {"output": bounded(text, most_chars)}
    if len(text) > most_chars:
        reply["output_total_chars"] = len(text)
    structured = result.structured_content
    if structured is not None and not _says(text, structured):
        written = json.dumps(structured, ensure_ascii=False)
        fits = len(written) <= most_chars
        reply["structured"] = structured if fits else bounded(written, most_chars)
    return reply


def bounded(text: str, most_chars: int) -> str:
    """The beginning and the end of a text that is too long, with a line between that says how much is missing."""
    if len(text) <= most_chars:
        return text
    head = most_chars // 2
    tail = most_chars - head
    return f"{text[:head]}\n... ({len(text) - most_chars} characters left out) ...\n{text[-tail:]}"


def _says(text: str, structured: JSON) -> bool:
    """Whether the text is the structured content: servers send both for clients that know only one."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = text
    return bool(said == structured or (isinstance(structured, dict) and structured == {"result": said}))


def _shown(block: ContentBlock) -> str:
    from mcp import types

    match block:
        case types.TextContent():
            return block.text
        case types.ImageContent() | types.AudioContent():
            return f"[{block.type}: {block.mime_type}, {_decoded_bytes(block.data)} bytes, not shown]"
        case types.ResourceLink():
            about = ", ".join(each for each in (block.name, block.mime_type, block.description) if each)
            return f"[resource {block.uri}: {about}]"
        case types.EmbeddedResource():
            return _shown_resource(block.resource)


def _shown_resource(resource: TextResourceContents | BlobResourceContents) -> str:
    from mcp import types

    if isinstance(resource, types.TextResourceContents):
        return f"[resource {resource.uri}]\n{resource.text}"
    kind = resource.mime_type or "binary"
    return f"[resource {resource.uri}: {kind}, {_decoded_bytes(resource.blob)} bytes, not shown]"


def _decoded_bytes(base64_text: str) -> int:
    return len(base64_text) * 3 // 4 - base64_text[-2:].count("=")

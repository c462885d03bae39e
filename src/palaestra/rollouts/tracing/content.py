"""Messages in the form that the GenAI conventions give them on spans, as JSON text.

Only for runs that ask for it: what is said here may be anybody's. Source of the form: OpenTelemetry, semantic
conventions for generative AI, `gen-ai-input-messages.json` and `gen-ai-output-messages.json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from palaestra.core.types import JSON, Message
from palaestra.rollouts.export.speech import Said, heard


def messages_text(messages: Sequence[Message], finish_reason: str | None = None) -> str:
    """The messages as JSON text. With a `finish_reason` they are what a model answered."""
    ended = {} if finish_reason is None else {"finish_reason": finish_reason}
    return json.dumps([{"role": said.role, "parts": _parts(said)} | ended for said in heard(messages)])


def _parts(said: Said) -> list[dict[str, JSON]]:
    if said.role == "tool":
        return [{"type": "tool_call_response", "id": said.call_id, "response": said.text}]
    parts: list[dict[str, JSON]] = []
    if said.reasoning:
        parts.append({"type": "reasoning", "content": said.reasoning})
    if said.text:
        parts.append({"type": "text", "content": said.text})
    for call in said.calls:
        arguments = call.parsed()
        written: JSON = call.arguments if arguments is None else arguments
        parts.append({"type": "tool_call", "id": call.id, "name": call.name, "arguments": written})
    return parts

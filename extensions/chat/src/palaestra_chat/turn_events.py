"""The events of a conversation, in the order in which they happen. In JSON, each event is an object with a `type`.

`encode_event` returns the line that `palaestra chat -p … --json` prints for an event.
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

import msgspec


class _Event(msgspec.Struct, kw_only=True, tag_field="type", gc=False):
    pass


class TextDelta(_Event, tag="text"):
    """A piece of the model's answer."""

    text: str


class ReasoningDelta(_Event, tag="reasoning"):
    """A piece of the model's thinking."""

    text: str


class ReplyRestarted(_Event, tag="restarted"):
    """The connection to the model server broke. All pieces of the current reply are void and will be sent again."""

    text: ClassVar[str] = "(the connection broke; the answer begins again)"


class ToolBegun(_Event, tag="tool_call"):
    """A tool call begins. `arguments` is JSON text, or the model's text if the call was refused. `preview` is a short
    line for a person."""

    call_id: str
    name: str
    arguments: str
    preview: str


class ToolOutput(_Event, tag="tool_output"):
    """New output of the command that a tool call runs, while it runs."""

    call_id: str
    text: str


class ToolEnded(_Event, tag="tool_result"):
    """The result of a tool call as the model reads it. `error` is empty unless the call failed, was refused or was
    interrupted."""

    call_id: str
    name: str
    text: str
    error: str = ""
    seconds: float = 0.0


class UserMessage(_Event, tag="message"):
    """A message that the person sent while the turn runs. The model reads it with the results of the latest tool
    calls."""

    text: str


class Notice(_Event, tag="notice"):
    """A notice for the person. `kind` is process, recovery, sandbox, workdir, approval, compaction, hook or image;
    `source` is the id of the background process, if the notice is about one."""

    text: str
    kind: str
    source: str = ""


class TurnEnded(_Event, tag="end"):
    """The end of a turn. It is always the turn's last event.

    `outcome` is an outcome of rollouts (`natural`, `max_turns`, `length`, `budget`, `api_error`, `infra_error`) or
    `interrupted`; `error` explains every outcome but `natural`. `text` is the answer. `replayed` means that the message
    had been answered before and `text` is the stored answer. Token counts are for this turn, except `context_tokens`,
    which is for the latest model call.
    """

    turn: int
    text: str
    outcome: str
    error: str = ""
    replayed: bool = False
    model_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    context_tokens: int = 0
    cost: float | None = None


Event: TypeAlias = (
    TextDelta | ReasoningDelta | ReplyRestarted | ToolBegun | ToolOutput | ToolEnded | UserMessage | Notice | TurnEnded
)

NATURAL, INTERRUPTED = "natural", "interrupted"


def encode_event(event: Event) -> str:
    """Return the event as one line of JSON."""
    return msgspec.json.encode(event).decode()

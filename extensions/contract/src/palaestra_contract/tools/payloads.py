"""Request and reply bodies of the tool server and the executor service. The project's interface contract fixes names,
fields and defaults.

Unknown fields are ignored, because clients of other versions send more. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import json
from typing import Self

from pydantic import BaseModel, Field

from palaestra.tools.call_text import ToolCall, ToolResult
from palaestra_slots.core.types import JSON


class ToolCallPayload(BaseModel):
    """A tool call."""

    name: str
    arguments: dict[str, JSON] = Field(default_factory=dict)
    uniq_id: str = ""

    @classmethod
    def from_tool_call(cls, call: ToolCall) -> Self:
        return cls(name=call.name, arguments=call.arguments, uniq_id=call.uniq_id)

    def to_tool_call(self) -> ToolCall:
        return ToolCall(self.name, self.arguments, uniq_id=self.uniq_id)


class ToolResultPayload(BaseModel):
    """The result of a call."""

    success: bool
    output: str = ""
    error: str = ""
    metadata: dict[str, JSON] = Field(default_factory=dict)
    uniq_id: str | None = None

    @classmethod
    def from_tool_result(cls, result: ToolResult) -> Self:
        return cls(**result.to_dict())

    def to_tool_result(self) -> ToolResult:
        return ToolResult(self.success, self.output, self.error, self.metadata, self.uniq_id)


class ToolExecutorExecuteRequest(BaseModel):
    """A call in the slot of a trajectory."""

    trajectory_id: str = Field(min_length=1)
    tool: ToolCallPayload
    timeout_s: float | None = Field(default=None, allow_inf_nan=False)


class ToolExecutorReleaseRequest(BaseModel):
    """The end of a trajectory."""

    trajectory_id: str = Field(min_length=1)
    reset_workspace: bool = False


class ToolServerExecuteRequest(BaseModel):
    """A call of an external tool. `slot_id` and `container_addr` are part of the interface contract and have no
    effect."""

    trajectory_id: str | None = None
    tool: ToolCallPayload
    timeout_s: float | None = Field(default=None, allow_inf_nan=False)
    slot_id: str | None = None
    container_addr: str | None = None


class ToolServerResultPayload(ToolResultPayload):
    """The result of an external tool's call. `reply` is the unchanged reply of the tool, for callers that show it to a
    model."""

    reply: JSON = None


def encoded(value: JSON) -> bytes:
    """Return a body as bytes. Characters that UTF-8 cannot encode, for example in unusual file names, are replaced."""
    plain = value.model_dump() if isinstance(value, BaseModel) else value
    return json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace")

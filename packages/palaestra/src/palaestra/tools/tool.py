"""Tools: `ToolSchema`, `Tool`, the context of a running tool (`ToolRun`) and its answer (`ToolOutcome`).

Most built-in tools are `FunctionTool`s; users write typed functions (`decorator.py`) or subclass `Tool`. Invariant: a
tool holds no state of a rollout; state that outlives a call is in the rollout's slot or in `ToolRun.state`.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import msgspec

from palaestra.tools.call_text import ToolCall as ToolCall
from palaestra.tools.call_text import ToolResult as ToolResult
from palaestra.tools.call_text import reply_of, result_of
from palaestra.tools.human.approval import Approvals, Permit
from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON, Task
from palaestra_slots.core.user_code import ForeignError, foreign, settled

if TYPE_CHECKING:
    from palaestra_slots.sandbox.slot import Slot

logger = logging.getLogger(__name__)

StateT = TypeVar("StateT")

MAX_USER_TASK = 500
"""The maximum number of characters of the prompt in `ToolRun.user_task`."""


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """Name, description and JSON-schema parameters of one tool. `parameters` maps argument names to their schemas.

    `keywords` are further keywords of the arguments' schema, such as `$defs` or `additionalProperties`. `aliases` are
    other names of arguments: calls may use them, but models do not see them. An `external` tool needs no slot, so a
    tool server may run it.
    """

    name: str
    description: str
    parameters: Mapping[str, JSON] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    external: bool = False
    keywords: Mapping[str, JSON] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, definition: Mapping[str, JSON], *, external: bool = False) -> ToolSchema:
        """Read an OpenAI function schema. Raises `KeyError`, `TypeError`, `ValueError` or `AttributeError` if it is
        malformed."""
        function = definition["function"]
        keywords = dict(function.get("parameters") or {})
        properties, required = keywords.pop("properties", {}), tuple(keywords.pop("required", ()))
        keywords.pop("type", None)
        return cls(str(function["name"]), function.get("description") or "", properties, required, external, keywords)

    def to_dict(self) -> dict[str, JSON]:
        """Return the OpenAI function schema, a fresh copy."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    **copy.deepcopy(dict(self.keywords)),
                    "type": "object",
                    "properties": copy.deepcopy(dict(self.parameters)),
                    "required": list(self.required),
                },
            },
        }

    def to_prompt_description(self) -> str:
        """Return the schema as one line of JSON, for prompts that list tools as text."""
        return json.dumps(self.to_dict()["function"], ensure_ascii=False)


ToolReply: TypeAlias = Mapping[str, JSON] | str
"""A dict becomes the JSON reply; a string is the reply itself."""


@dataclass(slots=True)
class ToolOutcome:
    """The answer to one tool call: the tool's `reply`, its `text` for the model, and the `error` of a tool that failed.

    A tool whose command exited has not failed, whatever the status: an `error` in the reply counts only if `exit_code`
    is missing or negative.
    """

    reply: ToolReply
    text: str
    error: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error)

    @classmethod
    def of(cls, reply: ToolReply) -> ToolOutcome:
        """Return the outcome of a reply. Raises `TypeError` or `ValueError` if it cannot be written as JSON."""
        if isinstance(reply, str):
            text = encodable(reply)
            return cls(reply, text, _error_in_text(text))
        text = encodable(json.dumps(dict(reply), ensure_ascii=False))
        return cls(reply, text, _error_text(reply.get("error"), reply.get("exit_code")))

    @classmethod
    def refused(cls, error: str, **details: JSON) -> ToolOutcome:
        """Return the outcome of a call that failed or was not run."""
        return cls.of({"error": error, **details})


class States:
    """Objects that outlive a call, one per type. They belong to a rollout (`ToolRun.state`) or to a run
    (`ToolRun.shared`)."""

    def __init__(self) -> None:
        self._held: dict[type, object] = {}
        self._lent: set[type] = set()

    def get(self, kind: type[StateT]) -> StateT:
        """Return the only object of type `kind`. It is created without arguments on first use."""
        found = self.find(kind)
        if found is None:
            self._held[kind] = found = kind()
        return found

    def find(self, kind: type[StateT]) -> StateT | None:
        """Return the object of type `kind`, or None if there is none yet."""
        found = self._held.get(kind)
        return found if isinstance(found, kind) else None

    def put(self, thing: object) -> None:
        """Make `thing` the only object of its type. `aclose` does not close it, because it belongs to the caller."""
        self._held[type(thing)] = thing
        self._lent.add(type(thing))

    async def aclose(self) -> None:
        """Close the objects that `get` created, if they have an async `aclose`, the newest first. Errors are logged.
        Idempotent."""
        while self._held:
            kind, thing = self._held.popitem()
            close = getattr(thing, "aclose", None)
            if kind in self._lent or not inspect.iscoroutinefunction(close):
                continue
            try:
                await close()
            except Exception:
                logger.warning("%s could not be closed", type(thing).__name__, exc_info=True)


class RolloutState:
    """The object that an environment made for one rollout: a dict, a dataclass, a msgspec Struct or a pydantic model.
    Tools and hooks change `value` in place. The journal has it as JSON, so it must come back from JSON as it was."""

    def __init__(self, value: object) -> None:
        self.value = value
        self._kept = b""
        kind = type(value)
        fits = is_dataclass(value) or isinstance(value, dict | msgspec.Struct) or hasattr(kind, "model_validate")
        if not fits or isinstance(value, type):
            raise TaskError(f"{value!r:.100} is not a state; make a dict, dataclass, msgspec Struct or pydantic model")
        self._encoded()

    @property
    def recorded(self) -> JSON:
        """The state that the journal has, as JSON; None before the first turn."""
        return msgspec.json.decode(self._kept) if self._kept else None

    def record(self) -> JSON:
        """Return the state for the journal, as JSON; None if the journal already has it. Raises `TaskError`."""
        now = self._encoded()
        if now == self._kept:
            return None
        self._kept = now
        return self.recorded

    def follow(self, recorded: JSON) -> None:
        """Become what the journal has after a repeated turn. `recorded` is None if that turn changed nothing."""
        if recorded is not None:
            self._kept = msgspec.json.encode(recorded)
        if self._kept and self._encoded() != self._kept:
            self.value = self._decoded(self._kept)

    def copy(self) -> object:
        """Return a copy of the value, for a check that may run twice."""
        return self._decoded(self._encoded())

    def _encoded(self) -> bytes:
        try:
            text = msgspec.json.encode(self.value, enc_hook=lambda value: value.model_dump(mode="json"))
            same = type(self.value).__eq__ is object.__eq__ or self._decoded(text) == self.value
        except Exception as error:  # of the author's types too
            raise TaskError(f"the state cannot be written as JSON and read again: {error}") from error
        if not same:
            raise TaskError(
                "the state is different after it was written as JSON and read again. In a dict, use text for keys and "
                "lists for sequences; otherwise, declare the types in a dataclass"
            )
        return text

    def _decoded(self, text: bytes) -> object:
        def validated(kind: Any, value: JSON) -> object:
            return kind.model_validate(value)

        return msgspec.json.decode(text, type=type(self.value), dec_hook=validated)


class ToolRun:
    """The context of a running tool: its task, its sandbox, objects that outlive the call, and the other tools.

    It is an async context manager. This base class has no sandbox and no other tools; rollouts use `ToolRuntime`.
    """

    def __init__(
        self, task_id: str = "", user_task: str = "", timeout_s: float = 120.0, shared: States | None = None
    ) -> None:
        self.task_id = task_id
        self.process_task = task_id
        """The task of the background processes."""
        self.user_task = user_task[:MAX_USER_TASK]
        """The beginning of the prompt."""
        self.timeout_s = timeout_s
        """The default time limit of a command, in seconds."""
        self.replayed = False
        """Whether a recording answers for all tools with `touches_world`."""
        self.session_key = ""
        """The conversation to which background processes belong. If it is empty, they belong to the task."""
        self.shared = States() if shared is None else shared
        """Objects that all rollouts of a run share, such as one browser."""
        self._own_shared = shared is None
        self._states = States()

    async def slot(self) -> Slot:
        """Return the sandbox of the task, acquired on the first call. Raises `ToolMistake` if there is none here."""
        raise ToolMistake(
            "This tool needs a sandbox slot, and there is none here: call it through a rollout, a ToolExecutor or "
            "handle_function_call"
        )

    def state(self, kind: type[StateT]) -> StateT:
        """Return the task's only object of type `kind`. The first call creates it, and the end of the rollout closes it
        (`aclose`)."""
        return self._states.get(kind)

    def found_state(self, kind: type[StateT]) -> StateT | None:
        """Return the task's object of type `kind`, or None if it was neither created nor shared."""
        return self._states.find(kind)

    def share(self, thing: object) -> None:
        """Make `thing` the task's object of its type, for example if several conversations share it. `aclose` does not
        close it."""
        self._states.put(thing)

    def schemas(self) -> Sequence[ToolSchema]:
        """Return the schemas of the agent's tools that are available here."""
        return ()

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> ToolOutcome:
        """Run another tool as if the model had called it. Raises `PalaestraError`."""
        raise ToolMistake(f"There is no tool '{name}' to call: this call is outside of a rollout")

    def call_tool(self, tool: Tool, arguments: Mapping[str, JSON]) -> Awaitable[ToolOutcome]:
        """Run a tool that models do not see, such as the request that another tool makes. Raises `PalaestraError`."""
        return run_tool(tool, arguments, self)

    async def aclose(self) -> None:
        """Close the objects of `state`, and those of `shared` if no one else provided them. A later call creates new
        objects. Idempotent."""
        await self._states.aclose()
        if self._own_shared:
            await self.shared.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class ToolMistake(ValueError):
    """An error that the model can act on: the reply's `error`, with `details` as further keys of the reply."""

    def __init__(self, message: str, **details: JSON) -> None:
        super().__init__(message)
        self.details = details


ToolFunction: TypeAlias = Callable[[Mapping[str, JSON], ToolRun], Awaitable[ToolReply]]


class Tool(ABC):
    """A tool that the agent can call. A subclass defines `schema` and `execute`, and `is_available` if the tool may be
    unavailable.

    `parallel_safe` calls of one turn may run concurrently. `touches_world` marks a tool whose reply comes from outside
    the slot (a search engine, a web page, another model, a folder of notes): its calls can be recorded and replayed.
    Tools whose replies depend on each other's earlier calls, such as a browser's, have the same `world_session`.
    `asks` marks a tool that acts outside the slot: a conversation with a person asks before each call (`Approvals`).
    """

    toolset: str = "custom"
    parallel_safe: bool = False
    touches_world: bool = False
    world_session: str = ""
    asks: Permit | None = None

    @property
    @abstractmethod
    def schema(self) -> ToolSchema:
        """The definition that the model sees."""

    @property
    def name(self) -> str:
        return self.schema.name

    @abstractmethod
    async def execute(self, **arguments: JSON) -> ToolResult:
        """Run outside a slot, with arguments that the schema accepts. The model reads an exception other than a
        `PalaestraError` as a failure."""

    def is_available(self) -> tuple[bool, str | None]:
        """Return whether the tool can be used here, and if not, the reason."""
        return True, None

    def for_task(self, task: Task) -> Tool | None:
        """Return the tool as the rollouts of one task get it, or None if they do not get it."""
        return self

    def missing(self) -> str | None:
        """Return the reason why the tool cannot be used here, or None."""
        try:
            told: object = self.is_available()
        except Exception as error:  # an error in the author's code
            return f"is_available of {type(self).__name__} failed: {type(error).__name__}: {error}"
        available, reason = told if isinstance(told, tuple) else (told, None)
        return None if available else reason or "is_available returned False"

    def missing_in(self, *, replayed: bool) -> str | None:
        """Return the reason why the tool cannot be used in a run, or None. If the run is `replayed` and the tool
        `touches_world`, a recording answers, so nothing is missing."""
        return None if replayed and self.touches_world else self.missing()

    def world_key(self, arguments: Mapping[str, JSON], run: ToolRun, /) -> Awaitable[JSON]:
        """Return the key under which a call is recorded if the tool `touches_world`. By default, the key is the call's
        arguments. An override may add, for example, the hash of a file."""
        return given_arguments(arguments, run)

    def run(self, arguments: Mapping[str, JSON], run: ToolRun, /) -> Awaitable[ToolReply]:
        """Run the tool for a rollout. Raises `ToolMistake` for an error that the model can act on."""

        async def reply() -> ToolReply:
            result: object = await settled(self.execute(**arguments))
            if not isinstance(result, ToolResult):
                raise TypeError(f"execute of {type(self).__name__} returned {type(result).__name__}, not a ToolResult")
            return reply_of(result)

        return reply()


async def given_arguments(arguments: Mapping[str, JSON], run: ToolRun, /) -> JSON:
    """Return the arguments: the `world_key` of most tools."""
    return arguments


@dataclass(frozen=True, slots=True)
class FunctionTool(Tool):
    """A tool made from a schema and a function."""

    schema: ToolSchema = field()  # without field(), the base class's attributes would be defaults
    run: ToolFunction = field()
    toolset: str = "custom"
    parallel_safe: bool = False
    missing: Callable[[], str | None] = lambda: None
    touches_world: bool = False
    world_session: str = ""
    asks: Permit | None = None
    world_key: Callable[[Mapping[str, JSON], ToolRun], Awaitable[JSON]] = given_arguments

    def is_available(self) -> tuple[bool, str | None]:
        reason = self.missing()
        return reason is None, reason

    async def execute(self, **arguments: JSON) -> ToolResult:
        async with ToolRun() as run:
            return result_of(await self.run(arguments, run))


async def run_tool(tool: Tool, arguments: Mapping[str, JSON], run: ToolRun) -> ToolOutcome:
    """Run a tool in a separate asyncio task. The arguments must fit the tool's schema. A failure of the tool is an
    outcome. Raises `PalaestraError`."""
    try:
        return await foreign(_checked_outcome(tool, arguments, run))
    except ForeignError as error:
        logger.warning("tool %s failed in task %s", tool.name, run.task_id, exc_info=True)
        return ToolOutcome.refused(f"Tool execution failed: {error}")


async def _checked_outcome(tool: Tool, arguments: Mapping[str, JSON], run: ToolRun) -> ToolOutcome:
    try:
        if (reason := tool.missing_in(replayed=run.replayed)) is not None:
            return ToolOutcome.refused(f"{tool.name} cannot be used here: {reason}")
        if (refusal := await _refusal(tool, arguments, run)) is not None:
            return ToolOutcome.refused(refusal, status="blocked")
        return ToolOutcome.of(await tool.run(arguments, run))
    except ToolMistake as mistake:
        return ToolOutcome.refused(str(mistake), **mistake.details)


async def _refusal(tool: Tool, arguments: Mapping[str, JSON], run: ToolRun) -> str | None:
    """Ask the person of the conversation, if there is one and the tool `asks`. Return why the call must not run."""
    approvals = None if tool.asks is None else run.found_state(Approvals)
    if tool.asks is None or approvals is None:
        return None
    return await approvals.refusal_of_call(tool.asks, arguments, run.task_id)


def encodable(text: str) -> str:
    """Return the text with replacements for characters that UTF-8 cannot encode, for example in unusual file names."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


class _Report(msgspec.Struct):
    """The two fields of a JSON reply that decide whether the tool failed."""

    error: JSON = None
    exit_code: JSON = None


_REPORT = msgspec.json.Decoder(_Report)


def _error_in_text(text: str) -> str:
    """Return the error in a reply that is already JSON text."""
    if not text.startswith("{") or '"error"' not in text:
        return ""
    try:
        report = _REPORT.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return ""
    return _error_text(report.error, report.exit_code)


def _error_text(error: JSON, exit_code: JSON) -> str:
    ran = isinstance(exit_code, int) and exit_code >= 0
    return "" if ran or not error else encodable(str(error))

"""Answers, records and finally classifies the conversations of one rollout whose agent calls the recording endpoint.

The calls with the same system prompt form up to two conversations: one with tools and one without. With a token-exact
engine, the tokens are in the rollout's ledger: a call that continues an earlier call continues its tokens; any other
call opens a segment with its reason. Tool calls that the agent sends back are compared as values, and calls that are
equal keep their sampled text.

The rule for training: conversations with tools are trained on, the first one as the rollout's own and the others as
sub-agents. Conversations without tools (titles, summaries) are auxiliary and not trained on. If no call had tools, only
the conversation with the most calls is trained on.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from palaestra_slots.core.errors import (
    ConfigError,
    ContextExceeded,
    EngineError,
    EngineRefused,
    ReplyWithheld,
    TaskError,
)
from palaestra_slots.core.io.threads import OneThread
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import ChatServer
from palaestra_tokens.engine import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    CompletionUsage,
    FunctionCall,
    ToolCallMessage,
)
from palaestra_tokens.ledger import Ledger, SegmentReason
from palaestra_tokens.recording.request import (
    ModelRequest,
    Refusal,
    as_object,
    client_form,
    freeform_text,
    invalid,
    one_system_message,
    unsupported,
)

KEPT_REPLIES, KEPT_BYTES = 256, 64 << 20
"""The maximum number of replies that can be continued by their id (`previous_response_id`), and the maximum total size
of their conversations in bytes."""

LONG_BYTES = 256 << 10
"""Requests of at least this many bytes are read in a thread, because that takes up to a second per MB. A token-exact
engine also renders and encodes them there."""

MOST_TOOL_BYTES = 1 << 20
"""The maximum size of a request's tool definitions in bytes. A template is rendered with them many times before the
first reply."""

MOST_IGNORED, NAME_CHARS = 1000, 200
"""The maximum number of names of ignored fields that are counted, and the number of characters that are kept of each
name. Agents choose the names."""

DeltaHook = Callable[[JSON], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The limits of one rollout at its endpoint: concurrent calls, and tokens of one reply (with None, the engine's
    limit)."""

    concurrent: int = 32
    max_tokens: int | None = None
    text_bytes: int = 8 << 20
    """The maximum size in bytes of a request to a model that does not accept images. A conversation of a million tokens
    has about 5 MB."""


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """One answered call."""

    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    tool_names: tuple[str, ...] = ()
    attempted: int = 0


@dataclass(slots=True)
class RecordedConversation:
    """One conversation: the `messages` of its latest call, including the reply, all its `calls`, and the numbers of the
    ledger `segments` that hold its tokens. `asking` counts the requests in progress; `parallel` is set once there were
    several at a time."""

    number: int
    system: str
    tools: list[dict[str, JSON]]
    server: ChatServer
    messages: list[Message] = field(default_factory=list)
    calls: list[AnsweredCall] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    asking: int = 0
    parallel: bool = False
    _functions: dict[str, FunctionCall] = field(default_factory=dict)
    _malformed: dict[str, Message] = field(default_factory=dict)
    _carried: dict[str, Message] = field(default_factory=dict)

    def take(self, messages: Sequence[Message], completion: ChatCompletion, seconds: float) -> None:
        """Record a reply."""
        message, usage = completion.choices[0].message, completion.usage
        calls = message.tool_calls or []
        said: Message = {**_carried(message), "role": "assistant", "content": message.content or ""}
        if message.reasoning_content:
            said["reasoning_content"] = message.reasoning_content
        if calls:
            said["tool_calls"] = [call.model_dump() for call in calls]
        self.messages = [*messages, said]
        self.calls.append(
            AnsweredCall(
                completion.choices[0].finish_reason,
                usage.prompt_tokens if usage else 0,
                usage.completion_tokens if usage else 0,
                seconds,
                tuple(call.function.name for call in calls),
                len(calls),
            )
        )
        for choice in completion.choices:
            self._remember_message(choice.message)
        if any(not call.function.name for call in calls):
            self._malformed[client_form(message).content or ""] = said

    def _remember_message(self, message: AssistantMessage) -> None:
        """Keep what a client changes or leaves out when it sends the message back."""
        # Clients send calls back with other spellings of the arguments, so the originals are kept by their ids.
        for call in message.tool_calls or ():
            self._functions[call.id] = call.function
            if call.extra:
                self._carried[f"call {call.id}"] = dict(call.extra)
        if carried := _carried(message):
            self._carried[_reply_key(message.model_dump())] = carried

    def restore(self, messages: Sequence[Message]) -> None:
        """Replace each call's arguments with the text that was sampled if both have the same value, and any other
        object with its JSON. A malformed call that the agent got as text becomes a call again. What only the provider
        knows, such as a signature, is added again, because agents' APIs have no place for it."""
        for message in messages:
            known_as = self._malformed.get(str(message.get("content"))) if message["role"] == "assistant" else None
            if known_as is not None and _ids(message) == _ids(known_as):
                message.update(content=known_as["content"], tool_calls=deepcopy(known_as["tool_calls"]))
            if self._carried and message["role"] == "assistant":
                message.update(deepcopy(self._carried.get(_reply_key(message), {})))
            for call in message.get("tool_calls") or ():
                self._restore_call(call)

    def _restore_call(self, call: dict[str, JSON]) -> None:
        function, known = call["function"], self._functions.get(call["id"])
        call.update(deepcopy(self._carried.get(f"call {call['id']}", {})))
        if known is not None and known.extra:
            function.update(deepcopy(known.extra))
        arguments = function["arguments"]
        if known is not None and arguments == known.arguments:
            return
        # Clients parse arguments and write them again, with other spaces or another order of keys. The next prompt must
        # have the tokens that were sampled.
        if known is not None and known.name == function["name"] and _equal(arguments, known):
            function["arguments"] = known.arguments
        elif not isinstance(arguments, str):
            function["arguments"] = msgspec.json.encode({} if arguments is None else arguments).decode()


def _carried(message: AssistantMessage) -> Message:
    """Return the fields of a reply that go back to its provider and that agents do not get."""
    details = message.reasoning_details
    return {**(message.extra or {}), **({"reasoning_details": details} if details else {})}


def _reply_key(message: Message) -> str:
    """Return what identifies a reply that an agent sends back: the ids of its calls, or its text."""
    calls = message.get("tool_calls") or ()
    return " ".join(["calls", *(call["id"] for call in calls)]) if calls else f"text {message.get('content') or ''}"


def _ids(message: Message) -> list[str]:
    """Return the ids of the calls that have a name."""
    return [call["id"] for call in message.get("tool_calls") or () if call["function"]["name"]]


def _equal(arguments: JSON, known: FunctionCall) -> bool:
    if isinstance(arguments, str):
        return as_object(arguments) == as_object(known.arguments)
    return bool(
        arguments == as_object(known.arguments)
        or arguments == {"input": freeform_text(ToolCallMessage(function=known))}
    )


def _is_compacted(line: RecordedConversation, messages: Sequence[Message]) -> bool:
    """Return whether the request continues the conversation with a shorter history. If the agent has sent several
    requests at a time, they may be conversations of their own, so a part of the history must be the same."""
    if len(messages) >= len(line.messages):
        return False
    before = [each for each in line.messages if each["role"] != "system"]
    return not line.parallel or any(each in before for each in messages if each["role"] != "system")


@dataclass(slots=True)
class RecordedCalls:
    """The classified calls of a rollout. `own` is None if no call was answered. Only `own` and `subagents` are trained
    on: `ledger` has their tokens, and `auxiliary_ledger` has the tokens of the other calls. `ignored` counts the
    request fields that had no effect."""

    own: RecordedConversation | None = None
    subagents: list[RecordedConversation] = field(default_factory=list)
    auxiliary: list[RecordedConversation] = field(default_factory=list)
    ledger: Ledger | None = None
    auxiliary_ledger: Ledger | None = None
    ignored: Counter[str] = field(default_factory=Counter)

    @property
    def every(self) -> list[RecordedConversation]:
        """All conversations."""
        return [*([] if self.own is None else [self.own]), *self.subagents, *self.auxiliary]


class Conversations:
    """Answers the calls of one rollout with `server`, which is the rollout's own session of an engine.

    `sampling` has the run's settings, which training assumes. A request may shorten its replies and, if the engine
    supports that, force their form. `admit` is called with 0 before the body of a call is read, and with the number of
    requested replies before the call itself; it may raise `Refusal` to enforce a budget. `answered` is called after
    each reply, with the conversation and the call.
    `check_engine` sends a plain request after a failure that the agent's request may have caused
    (`EngineError.by_request`). It raises `EngineError` if the plain request fails too, which means that the agent did
    not cause the failure. Rate limits and lost connections are never attributed to the agent.

    `failure` is the failure that ends the rollout; the event `failed` is set at the same time. `refused` counts
    the requests answered with an error, except for rate limits and requests after the end; `refusal` is the last such
    error.
    """

    def __init__(
        self,
        server: ChatServer,
        *,
        sampling: Mapping[str, JSON] | None = None,
        limits: CallLimits | None = None,
        admit: Callable[[int], None] | None = None,
        answered: Callable[[RecordedConversation, AnsweredCall], None] | None = None,
        check_engine: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.server = server
        self.limits = limits or CallLimits()
        self.failure: EngineError | TaskError | None = None
        self.failed = asyncio.Event()
        self.ended = False
        self.replies_under_way = 0
        self.refused, self.refusal = 0, ""
        self.ignored: Counter[str] = Counter()
        self._sampling = dict(sampling or {})
        self._admit, self._answered, self._check_engine = admit, answered, check_engine
        self._lines: dict[tuple[str, bool], RecordedConversation] = {}
        self._numbers = itertools.count()
        self.thread: OneThread | None = None
        self._one_long = asyncio.Lock()
        self._replies: dict[str, tuple[list[Message], int]] = {}
        self._kept_bytes = 0
        self._under_way: set[asyncio.Task[object]] = set()
        self._calls: set[asyncio.Task[object]] = set()

    @property
    def features(self) -> frozenset[str]:
        """The inputs that the engine accepts in addition to text and tools."""
        return self.server.features

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Call a function in the endpoint's `thread`, for a long request. Only one function per rollout runs at a
        time. Without a `thread`, call it directly."""
        if self.thread is None:
            return function()
        # All rollouts share the thread: with one function each, nobody waits behind a whole queue of one agent.
        async with self._one_long:
            return await self.thread.call(function)

    def end(self) -> None:
        """Refuse all further calls and cancel those in progress. Idempotent."""
        self.ended = True
        for task in self._calls | self._under_way:
            task.cancel()

    @contextmanager
    def call(self, *, of_model: bool = True) -> Iterator[None]:
        """Count a call as one of the rollout's concurrent calls, from before its body is read until its reply is
        written. A call that is not `of_model` is for a tool, and may follow the last reply. Raises `Refusal`."""
        if self.ended:
            raise _ended()
        if len(self._calls) >= self.limits.concurrent:
            raise Refusal(
                429, f"At most {self.limits.concurrent} calls at a time are answered.", code="rate_limit_exceeded"
            )
        if of_model and self._admit is not None:
            self._admit(0)
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            yield
        except Refusal as refusal:
            self.note(refusal)
            raise
        except Exception as error:  # our bug, which an agent may trigger, so the agent gets HTTP 500
            self.note(Refusal(500, repr(error)))
            raise
        finally:
            self._calls.discard(task)

    def note(self, refusal: Refusal) -> None:
        """Count a refusal, except for rate limits (429) and for requests after the end or without a valid key (401,
        403)."""
        if refusal.status not in (401, 403, 429):
            self.refused += 1
            self.refusal = str(refusal)

    async def answer(self, request: ModelRequest, reply_id: str, on_delta: DeltaHook | None = None) -> ChatCompletion:
        """Return the reply to one request. Raises `Refusal`."""
        for name in (each[:NAME_CHARS] for each in request.ignored):
            if name in self.ignored or len(self.ignored) < MOST_IGNORED:
                self.ignored[name] += 1
        if self.ended:  # the rollout ended while the body was read
            raise _ended()
        if self._admit is not None:
            self._admit(request.n)
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        self.replies_under_way += request.n
        try:
            return await self._ask_model(request, reply_id, on_delta)
        except ContextExceeded as error:
            raise Refusal(400, str(error), param="messages", code="context_length_exceeded") from None
        except (EngineError, TaskError) as error:
            # Only an error that this request caused is the agent's. Any other error ends the rollout, so that it is not
            # scored.
            if not isinstance(error, EngineError) or not error.by_request:
                self._fail(error)
                raise Refusal(503, str(error), code="server_error") from None
            await self._blame(error)
            if isinstance(error, EngineRefused):
                code = "content_filter" if isinstance(error, ReplyWithheld) else "invalid_request"
                raise Refusal(400, str(error), code=code) from None
            raise Refusal(500, str(error), code="server_error") from None
        except ConfigError as error:
            raise Refusal(400, str(error), code="invalid_request") from None
        finally:
            self._under_way.discard(task)
            self.replies_under_way -= request.n

    def _fail(self, error: EngineError | TaskError) -> None:
        self.failure = self.failure or error
        self.failed.set()

    async def _blame(self, error: EngineError) -> None:
        """Send the engine a plain request. If that fails too, the failure ends the rollout unscored; if not, the
        agent's request caused the failure, and the agent gets the error."""
        try:
            if self._check_engine is None:
                return
            await self._check_engine()
        except EngineError as failure:
            self._fail(failure)
            raise Refusal(503, str(error), code="server_error") from None

    async def _ask_model(self, request: ModelRequest, reply_id: str, on_delta: DeltaHook | None) -> ChatCompletion:
        settings = {**request.settings, **self._sampling}
        limits = request.settings.get("max_tokens"), self._sampling.get("max_tokens"), self.limits.max_tokens
        most = [each for each in limits if each is not None]
        if most:
            settings["max_tokens"] = min(most)
        if request.prompt is not None:
            return await self._continue_text(request, settings)
        self._check_size(request)
        kept = [*self._earlier_messages(request), *request.messages]
        messages = kept if request.instructions is None else [_system(request.instructions), *kept]
        messages = one_system_message(messages)
        line = self._conversation(messages, request.tools)
        line.restore(messages)
        asked: dict[str, JSON] = {"messages": messages, **settings, **self._threaded(request)}
        if request.tools:
            asked["tools"] = request.tools
        if on_delta is not None and request.n == 1:
            asked["on_delta"] = on_delta
        line.asking += 1
        line.parallel |= line.asking > 1
        try:
            if request.n == 1:
                completion = await self._recorded_completion(line, asked)
            else:
                completion = await self._replies_to(line, asked, request.n)
        finally:
            line.asking -= 1
            # Otherwise, refused calls would add conversations without limit.
            if line.number and not line.calls and not line.asking:
                del self._lines[line.system, bool(line.tools)]
        spoken = line.messages
        if request.instructions is not None:  # they end with the request; what was merged with them does not
            spoken = [*itertools.takewhile(lambda message: message["role"] == "system", kept), *line.messages[1:]]
        self._keep(reply_id, spoken, request.size)
        return completion

    def _check_size(self, request: ModelRequest) -> None:
        """Add the size of the conversation that a request continues to the request's own size. Raises `Refusal` if a
        limit is exceeded."""
        if request.continues is not None:
            request.size += self._reply_of(request.continues)[1]
        if request.size > self.limits.text_bytes and "images" not in self.features:
            message = f"The conversation is longer than {self.limits.text_bytes} bytes."
            raise Refusal(400, message, param="previous_response_id", code="context_length_exceeded")
        # Tools are encoded only if the whole request is longer than they may be.
        if request.size > MOST_TOOL_BYTES and len(msgspec.json.encode(request.tools)) > MOST_TOOL_BYTES:
            raise invalid("tools", f"the tools are longer than {MOST_TOOL_BYTES} bytes")

    def _threaded(self, request: ModelRequest) -> dict[str, JSON]:
        """Return the option that makes a token-exact engine render and encode the request in a thread, if the request
        is so long that it would block the event loop."""
        is_long = request.size >= LONG_BYTES and self.server.ledger is not None
        return {"in_thread": self.in_thread} if is_long else {}

    async def _recorded_completion(self, line: RecordedConversation, asked: Mapping[str, JSON]) -> ChatCompletion:
        messages = asked["messages"]
        more: dict[str, JSON] = {}
        # Only the endpoint knows the agent's conversations. For the ledger, a shorter history is just another text.
        if line.server.ledger is not None and _is_compacted(line, messages):
            more["opens"] = SegmentReason.COMPACTION
        started = time.perf_counter()
        completion = await line.server.chat_completion(**asked, **more)
        line.take(messages, completion, time.perf_counter() - started)
        if self._answered is not None:
            self._answered(line, line.calls[-1])
        return completion

    async def _replies_to(self, line: RecordedConversation, asked: Mapping[str, JSON], n: int) -> ChatCompletion:
        """Sample several replies, each recorded as a separate call."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._recorded_completion(line, asked)) for _ in range(n)]
        except BaseExceptionGroup as failures:
            # As for one reply, whose errors the callers know. The group has cancelled the other requests.
            raise failures.exceptions[0] from None
        first, *others = (task.result() for task in tasks)
        choices, sampled = list(first.choices), first.usage.completion_tokens if first.usage else 0
        for other in others:
            choices += [msgspec.structs.replace(choice, index=len(choices)) for choice in other.choices]
            sampled += other.usage.completion_tokens if other.usage else 0
        prompt = first.usage.prompt_tokens if first.usage else 0
        usage = CompletionUsage(prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled)
        return msgspec.structs.replace(first, choices=choices, usage=usage)

    async def _continue_text(self, request: ModelRequest, settings: Mapping[str, JSON]) -> ChatCompletion:
        if request.n > 1:
            raise unsupported("n", "This endpoint returns only one continuation of a text per request.")
        line = self._conversation([_system("\0text")], [])
        started = time.perf_counter()
        text = await line.server.completion(prompt=request.prompt or "", **settings, **self._threaded(request))
        choice = text.choices[0]
        completion = ChatCompletion(
            id=text.id,
            model=text.model,
            choices=[ChatChoice(message=AssistantMessage(content=choice.text), finish_reason=choice.finish_reason)],
            usage=text.usage,
        )
        line.take([{"role": "user", "content": request.prompt}], completion, time.perf_counter() - started)
        if self._answered is not None:
            self._answered(line, line.calls[-1])
        return completion

    def _conversation(self, messages: Sequence[Message], tools: list[dict[str, JSON]]) -> RecordedConversation:
        """Return the conversation that a request belongs to, or a new one."""
        system = str(messages[0]["content"]) if messages and messages[0]["role"] == "system" else ""
        key = system, bool(tools)
        if (known := self._lines.get(key)) is None:
            number = next(self._numbers)
            server = self.server if not number else self.server.child(number)
            known = self._lines[key] = RecordedConversation(number, system, tools, server)
        return known

    def _earlier_messages(self, request: ModelRequest) -> list[Message]:
        if request.continues is None:
            return []
        return [dict(message) for message in self._reply_of(request.continues)[0]]

    def _reply_of(self, response_id: str) -> tuple[list[Message], int]:
        """Return the conversation up to an earlier reply, and its size. Raises `Refusal`."""
        known = self._replies.get(response_id.removeprefix("resp_"))
        if known is None:
            raise Refusal(
                400,
                f"Previous response with id '{response_id}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return known

    def _keep(self, reply_id: str, messages: list[Message], size: int) -> None:
        self._replies[reply_id] = messages, size
        self._kept_bytes += size
        # The latest reply stays, however long its conversation is: its client is about to continue it.
        while len(self._replies) > KEPT_REPLIES or (len(self._replies) > 1 and self._kept_bytes > KEPT_BYTES):
            _, dropped = self._replies.pop(next(iter(self._replies)))
            self._kept_bytes -= dropped

    async def prompt_tokens(self, request: ModelRequest) -> int:
        """Return the number of tokens in a prompt, which is an estimate unless the engine is token-exact."""
        count = getattr(self.server, "prompt_tokens", None)
        self._check_size(request)
        messages = one_system_message(request.messages)
        # A conversation without replies restores nothing, but writes arguments that are objects as JSON.
        RecordedConversation(0, "", [], self.server).restore(messages)
        if count is not None:
            try:
                if request.size < LONG_BYTES:
                    return int(count(messages, request.tools))
                return int(await self.in_thread(partial(count, messages, request.tools)))
            except ConfigError as error:
                raise Refusal(400, str(error)) from None
        return -(-len(msgspec.json.encode([messages, request.tools])) // 4)

    def recorded(self) -> RecordedCalls:
        """Return all calls so far, divided into those that training uses and the others."""
        lines = [line for line in self._lines.values() if line.calls]
        trained = [line for line in lines if line.tools]
        if not trained and lines:
            # An agent may have no tools. Then the longest conversation is its own, and short ones made titles or
            # summaries.
            trained = [max(lines, key=lambda line: len(line.calls))]
        others = [line for line in lines if line not in trained]
        found = RecordedCalls(
            own=trained[0] if trained else None, subagents=trained[1:], auxiliary=others, ignored=self.ignored
        )
        ledger = self.server.ledger
        if ledger is not None:
            found.ledger = ledger.arranged({line.number: place for place, line in enumerate(trained)})
            found.auxiliary_ledger = ledger.arranged({line.number: place for place, line in enumerate(others)})
            _number_segments(found.ledger, trained)
            _number_segments(found.auxiliary_ledger, others)
        return found


def _number_segments(ledger: Ledger, lines: Sequence[RecordedConversation]) -> None:
    """Replace the conversations' segment numbers with those in the arranged ledger."""
    order = sorted((segment, line.number) for line in lines for segment in line.server.segments)
    numbers = {segment: place for place, (segment, _) in enumerate(order)}
    for line in lines:
        line.segments = [numbers[segment] for segment in line.server.segments]


def _ended() -> Refusal:
    return Refusal(401, "This rollout has ended.", code="invalid_api_key")


def _system(text: str) -> Message:
    return {"role": "system", "content": text}

"""`RunningTurn`: one turn of a conversation while it runs, from the user's message to the answer.

It passes the model's reply on in pieces, stores each reply before its tool calls begin, and journals each tool call of
the conversation's own agent before it begins and after it has ended. However a turn ends, `close` leaves a history in
which every tool call has a result.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import replace

from palaestra.agent.loop import AgentLoop, LoopSettings
from palaestra.agent.middleware import Ask, ChatCall, MiddlewareServer
from palaestra.agent.replies import read_reply
from palaestra.agent.result import AgentResult, Turn
from palaestra.agent.seat import Seat
from palaestra.agent.tool_calls import NOT_FINISHED
from palaestra.tools.runtime.runtime import CheckedCall, Next
from palaestra.tools.tool import ToolOutcome
from palaestra_chat.context_window import ContextWindow
from palaestra_chat.history import ChatHistory, preview
from palaestra_chat.model_session import ModelSession
from palaestra_chat.store import ConversationStore, Effect, StoredTurn
from palaestra_chat.thinking import ThoughtSplitter, without_thoughts
from palaestra_chat.turn_events import (
    INTERRUPTED,
    Event,
    ReasoningDelta,
    ReplyRestarted,
    TextDelta,
    ToolBegun,
    ToolEnded,
    ToolOutput,
    TurnEnded,
    UserMessage,
)
from palaestra_slots.core.errors import EngineError, PalaestraError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.types import JSON, Message, Outcome, Usage
from palaestra_slots.sandbox.slot import ExecutionResult, Slot
from palaestra_tokens.engine import ChatCompletion
from palaestra_tokens.http.sse import Delta

STOPPED = "Interrupted by the user while it ran. It was stopped, and may have run in part."
NOT_REACHED = "Not run: the user interrupted the turn before this call began."

_WITH_OUTPUT = frozenset({"terminal", "terminal_stateful", "execute_code"})

_CHARS_PER_TOKEN = 4

_current_call: ContextVar[str] = ContextVar("current_call", default="")


class RunningTurn:
    """A turn that runs. `failure` is the infrastructure failure that ended it, and `error` what it raised. `waiting`
    takes the messages that the person has sent meanwhile, each as text and as content."""

    def __init__(
        self,
        turn: StoredTurn,
        store: ConversationStore,
        history: ChatHistory,
        model: ModelSession,
        context: ContextWindow,
        waiting: Callable[[], Sequence[tuple[str, JSON]]] | None = None,
    ) -> None:
        self.failure: PalaestraError | None = None
        self.error: BaseException | None = None
        self._turn = turn
        self._store = store
        self._history = history
        self._model = model
        self._context = context
        self._waiting = waiting
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._task: asyncio.Task[AgentResult] | None = None
        self._loop: AgentLoop | None = None
        self._interrupted = False
        self._reply_row: int | None = None
        self._partial: list[str] = []
        self._thought = False
        self._splitter = ThoughtSplitter()
        self._unanswered: int | None = None
        self._streamed_chars = 0
        self._calls: dict[str, Effect] = {}

    async def events(self, work: Coroutine[None, None, AgentResult], name: str) -> AsyncGenerator[Event, None]:
        """Run `work` in a task of this name, and yield the events of the turn. Closing the iterator interrupts the
        turn."""
        task = self._task = asyncio.create_task(work, name=name)
        task.add_done_callback(lambda _: self._events.put_nowait(None))
        try:
            while (event := await self._events.get()) is not None:
                yield event
        finally:
            if not task.done():
                self._interrupted = True
                task.cancel()
                await asyncio.wait([task])

    def interrupt(self) -> bool:
        """Stop the model or the running tool. Return False if the turn has ended already."""
        if self._task is None or self._task.done():
            return False
        self._interrupted = True
        self._task.cancel()
        return True

    async def work(self, seat: Seat, settings: LoopSettings) -> AgentResult:
        """Let the agent in this seat answer, starting from the history."""
        server = MiddlewareServer(await self._model.opened(), [self._streamed, self._context.images.call])
        loop = self._loop = seat.loop(server, settings, on_turn=self._on_turn)
        try:
            return await self._context.run(loop, self._turn)
        finally:
            seat.ended()
            self._model.save_ledger(self._turn)

    def emit(self, event: Event) -> None:
        """Let `events` yield this event."""
        self._events.put_nowait(event)

    async def _streamed(self, call: ChatCall, ask: Ask) -> ChatCompletion:
        """Pass on the reply in pieces, and store it before any of its tool calls begins. This is chat middleware."""
        session, loop = self._model.session, self._loop
        if call.branch or loop is None or session is None:
            return await ask(call)
        if "on_delta" in session.features:
            call = ChatCall(call.branch, call.messages, {**call.request, "on_delta": self._on_delta})
        self._partial, self._thought, self._splitter = [], False, ThoughtSplitter()
        self._unanswered, self._streamed_chars = self._context.prompt_tokens(), 0
        completion = await ask(call)
        self._unanswered = None
        without_thoughts(completion)
        reply = read_reply(completion, loop.result.turns_used + 1)
        if reply.reasoning and not self._thought:
            self.emit(ReasoningDelta(text=reply.reasoning))
        if not self._partial and reply.content:
            self.emit(TextDelta(text=reply.content))
        self._reply_row = self._history.store_reply(self._turn, reply.message())
        self._partial = []
        self._context.learn(call.messages, reply)
        return completion

    def _on_delta(self, delta: Delta) -> None:
        self._streamed_chars += len(delta.content) + len(delta.reasoning)
        if delta.restarted:
            if self._partial or self._thought:
                self.emit(ReplyRestarted())
            self._partial, self._splitter = [], ThoughtSplitter()
        thought, answer = self._splitter.take(delta.content)
        if thought := delta.reasoning + thought:
            self._thought = True
            self.emit(ReasoningDelta(text=thought))
        if answer:
            self._partial.append(answer)
            self.emit(TextDelta(text=answer))

    async def called(self, call: CheckedCall, then: Next) -> ToolOutcome:
        """Run a tool call. If the agent itself made the call, record it in the journal of side effects and emit its
        events. This is tool middleware."""
        if not call.by_agent or call.conversation:
            return await then(call)
        effect = self._store.effects.begin(
            self._turn, "tool", call.call_id, call.name, dict(call.arguments), message=self._reply_row
        )
        self._calls[call.call_id] = effect
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        self.emit(
            ToolBegun(
                call_id=call.call_id, name=call.name, arguments=arguments, preview=preview(call.name, call.arguments)
            )
        )
        started_s = time.monotonic()
        token = _current_call.set(call.call_id if call.name in _WITH_OUTPUT else "")
        try:
            outcome = await then(call)
        except BaseException as error:
            stopped = isinstance(error, asyncio.CancelledError)
            text = STOPPED if stopped else f"{type(error).__name__}: {error}"
            self._store.effects.end(effect, text, "interrupted" if stopped else "failed")
            self._emit_result(call.call_id, call.name, text, text, time.monotonic() - started_s)
            raise
        finally:
            _current_call.reset(token)
        self._store.effects.end(effect, outcome.text)
        self._emit_result(call.call_id, call.name, outcome.text, outcome.error, time.monotonic() - started_s)
        return outcome

    def _emit_result(self, call_id: str, name: str, text: str, error: str, seconds: float) -> None:
        self.emit(ToolEnded(call_id=call_id, name=name, text=text, error=error, seconds=round(seconds, 3)))

    def _on_turn(self, turn: Turn, messages: list[Message]) -> None:
        """Store the results of the tool calls in one reply, and emit events for refused calls, which have none yet."""
        names = {call["id"]: call["function"] for call in messages[0].get("tool_calls") or ()}
        for message in messages[1:]:
            call_id = message.get("tool_call_id", "")
            if call_id in names and call_id not in self._calls:
                function, text = names[call_id], str(message["content"])
                name, arguments = str(function["name"]), str(function["arguments"])
                self.emit(ToolBegun(call_id=call_id, name=name, arguments=arguments, preview=arguments[:80]))
                self._emit_result(call_id, name, text, text, 0.0)
        self._calls = {}
        if names and self._waiting is not None:
            for text, content in self._waiting():
                self._history.messages.append({"role": "user", "content": content})
                self.emit(UserMessage(text=text))
        self._history.write(self._turn)
        self._model.save_ledger(self._turn)

    def close(self, seconds: float, max_turns: int) -> TurnEnded:
        """Store the end of the turn, whatever its outcome, and leave a well-formed history. Returns the turn's last
        event. `max_turns` is the limit that a turn with the outcome `max_turns` has reached."""
        outcome, problem = self._outcome(max_turns)
        for message in self._history.unwritten:
            if message.get("role") == "tool" and message["content"] == NOT_FINISHED:
                begun = message["tool_call_id"] in self._calls
                text = (STOPPED if begun else NOT_REACHED) if outcome == INTERRUPTED else f"Not finished: {problem}"
                message["content"] = json.dumps({"error": text})
        self._history.write(self._turn)
        usage = replace(self._loop.result.usage) if self._loop is not None else Usage()
        if estimated := outcome == INTERRUPTED and self._unanswered is not None:
            usage.add(self._unanswered or 0, self._streamed_chars // _CHARS_PER_TOKEN)
        report = {
            **self._model.spent(usage),
            **({"estimated": True} if estimated else {}),
            "context_tokens": self._context.tokens,
            "seconds": round(seconds, 3),
        }
        return self._history.finish(self._turn, outcome, problem, report, said="".join(self._partial))

    def _outcome(self, max_turns: int) -> tuple[str, str]:
        """Return the outcome of the turn and what went wrong, and set `failure` and `error`."""
        task, loop = self._task, self._loop
        assert task is not None
        self.failure = loop.failure if loop is not None else None
        self.error = None if task.cancelled() else task.exception()
        if task.cancelled() or self._interrupted:
            return INTERRUPTED, "interrupted by the user"
        if self.error is not None:
            self.failure = self.error if isinstance(self.error, PalaestraError) else None
            outcome = Outcome.API_ERROR if isinstance(self.error, EngineError) else Outcome.INFRA_ERROR
            return outcome.value, str(self.error)
        result = task.result()
        if result.outcome is Outcome.MAX_TURNS:
            return result.outcome.value, f"the limit of {plural(max_turns, 'model call')} for one message"
        return result.outcome.value, result.error


class WatchedSlot:
    """A slot that also emits the output of commands as events, while a tool call of a turn runs them."""

    def __init__(self, slot: Slot, emit: Callable[[Event], None]) -> None:
        self.slot = slot
        self._emit = emit

    def __getattr__(self, name: str) -> JSON:
        return getattr(self.slot, name)

    def execute(self, command: str | Sequence[str], **options: JSON) -> Awaitable[ExecutionResult]:
        call_id = _current_call.get()
        if call_id and options.get("on_output") is None:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")

            def on_output(data: bytes) -> None:
                if text := decoder.decode(data):
                    self._emit(ToolOutput(call_id=call_id, text=text))

            options["on_output"] = on_output
        return self.slot.execute(command, **options)

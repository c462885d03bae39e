"""`Conversation`: a conversation with a person, with one slot and a stored history. It uses the rollouts' agent loop.

    async for event in conversation.send("What is in this folder?"):
        ...                                       # events.py; the last one is TurnEnded
    conversation.interrupt()                      # from another task: stops the model or the running tool

`Conversation.begin` makes a new conversation, `Conversation.open` opens a stored one. Invariants:

- Every user's message and every reply is stored as soon as it exists. Every tool call of the conversation's own agent
  is stored before it begins and, with its result, after it has ended (`store.py`).
- A turn stays open if its process is killed. When the conversation is opened again, each tool call of that turn gets a
  result. A call that had finished gets its stored result. A call that had begun and did not finish is reported as
  *outcome unknown*, to the model as a tool result and to the person as a notice, and is never repeated automatically.
  `resume` continues the turn.
- A message with the `message_id` of an answered message gets the stored answer, without a model call.
- When a turn has ended, the history ends with an assistant message, and every tool call in the history has a result.
- With a token-exact server, the tokens of the conversation are recorded as in a rollout (`store.ledgers`).
- A conversation that fills the model's window is compacted before the next model call, and after an overflow. Whether
  or not that succeeds, `undo` and a new conversation need no model, and `compact` needs no request that fits whole.
"""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import itertools
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, cast

import msgspec

from palaestra.agent.loop import HermesAgentLoop
from palaestra.agent.replies import read_reply
from palaestra.agent.result import AgentResult, Turn
from palaestra.agent.subagents import Subagents
from palaestra.agent.tool_calls import NOT_FINISHED
from palaestra.core.config import nearest
from palaestra.core.errors import (
    ConfigError,
    ContextExceeded,
    EngineError,
    EngineReplyError,
    InfraError,
    PalaestraError,
    SandboxError,
)
from palaestra.core.exits import plural
from palaestra.core.types import JSON, Message, Outcome, Usage
from palaestra.doors.chat.compaction import (
    FULL_SHARE,
    SUMMARIZE,
    TARGET_SHARE,
    Plan,
    TokenCount,
    plan,
    summary_in_pieces,
)
from palaestra.doors.chat.service import ChatService
from palaestra.doors.chat.store import ConversationRecord, Effect, StoredTurn
from palaestra.doors.chat.turn_events import (
    INTERRUPTED,
    NATURAL,
    Event,
    Notice,
    ReasoningDelta,
    ReplyRestarted,
    TextDelta,
    ToolBegun,
    ToolEnded,
    ToolOutput,
    TurnEnded,
)
from palaestra.inference.chat_server import ChatServer, SessionContext
from palaestra.inference.engine import ChatCompletion
from palaestra.inference.http.sse import Delta
from palaestra.inference.ledger import SegmentReason
from palaestra.inference.server_group import Server, ServerGroup
from palaestra.processes.session import ProcessSession
from palaestra.rollouts.middleware import Ask, ChatCall, MiddlewareServer
from palaestra.sandbox.slot import ExecutionResult, Slot, Snapshot
from palaestra.tools.builtin.clarify import Ask as Answer
from palaestra.tools.builtin.clarify import User
from palaestra.tools.builtin.delegate_task import Delegation
from palaestra.tools.builtin.memory import Notes
from palaestra.tools.builtin.session_search import Sessions, message_text
from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest, Approvals
from palaestra.tools.human.approval import Ask as Approve
from palaestra.tools.runtime.runtime import CheckedCall, Next, ToolRuntime
from palaestra.tools.tool import ToolOutcome

UNKNOWN = (
    "Outcome unknown: the program that ran this call ended before the call returned. It may have run in whole or in "
    "part, and it was not repeated. Find out what it has done before you repeat it."
)
NOT_BEGUN = "Not run: the program ended before this call began."
STOPPED = "Interrupted by the user while it ran. It was stopped, and may have run in part."
NOT_REACHED = "Not run: the user interrupted the turn before this call began."
NEW_SANDBOX = "The sandbox is new: the earlier one is gone with its processes and all files that were not copied out."
COPIED_SANDBOX = (
    "The sandbox is a copy: it has the current files, even after a fork from an earlier turn, but no processes."
)

_BEYOND = frozenset({"memory", "session_search"})
_WITH_OUTPUT = frozenset({"terminal", "terminal_stateful", "execute_code"})
_PREVIEW_CHARS = 120
_CLOSE_S = 5.0
_TRIES = 3
"""The maximum number of compactions in a row that do not lead to a reply."""
_SHORT_TOKENS = 1000
"""The size below which a single turn is too short to compact."""

logger = logging.getLogger(__name__)

_current_call: ContextVar[str] = ContextVar("current_call", default="")


@dataclass(frozen=True, slots=True)
class People:
    """Callbacks to the person. `approve` decides on dangerous commands and on calls that act outside the sandbox (if it
    is None, they run), `answer` answers
    questions of the `clarify` tool, and `notice` receives notices at any time, also between turns."""

    approve: Approve | None = None
    answer: Answer | None = None
    notice: Callable[[Notice], None] | None = None


class Conversation:
    """One open conversation. Call its methods only in the service's event loop. Turns run one at a time."""

    def __init__(self, service: ChatService, record: ConversationRecord, people: People, lock: int) -> None:
        self.id = record.id
        self.record = record
        self.people = people
        self.toolsets: tuple[str, ...] = tuple(record.settings.get("toolsets") or service.settings.toolsets)
        self.prepare = service.settings.prepare
        """Called with a new slot, to put files into it. If it is None, the slot stays empty."""
        self.failure: PalaestraError | None = None
        """The infrastructure failure that ended the latest turn."""
        self._service, self._store, self._lock = service, service.store, lock
        model = record.settings.get("model")
        self._server: Server | Sequence[Server] = service.server if not model else service.server_for(str(model))
        self._busy = asyncio.Lock()
        self._running: asyncio.Task[AgentResult] | None = None
        self._events: asyncio.Queue[Event | None] | None = None
        self._interrupted = False
        self._session: ChatServer | None = None
        self._engine: ServerGroup | None = None
        self._branches = itertools.count(1)
        self._part = 0
        self._part_from = 0
        self._tools: ToolRuntime | None = None
        self._slot: Slot | None = None
        self._snapshot: Snapshot | None = None
        self._leasing = asyncio.Lock()
        self._approvals = Approvals(self._approve if people.approve is not None else None)
        self._approvals.allowed |= self._store.allowed(record.user)
        self._loop: HermesAgentLoop | None = None
        self._turn: StoredTurn | None = None
        self._reply_row: int | None = None
        self._early = 0
        self._partial: list[str] = []
        self._thought = False
        self._calls: dict[str, Effect] = {}
        self._notes: list[str] = []
        self._notices = self._recovered()
        self.messages = self._store.history(self.id)
        """The history as the model sees it, the system prompt first."""
        self._written = len(self.messages)
        self._count = TokenCount()
        self._counted = (0, 0)
        self.context_tokens = self._stored_tokens()
        """The size of the history in tokens: the server's latest count, or an estimate after a compaction."""

    @classmethod
    def begin(
        cls,
        service: ChatService,
        people: People | None = None,
        *,
        key: str = "",
        user: str = "",
        title: str = "",
        system: str | None = None,
        settings: Mapping[str, JSON] | None = None,
    ) -> Self:
        """Return a new conversation. `key` identifies the front end or chat that it belongs to (a gateway's session
        key), `user` its owner. `system` replaces the system prompt of the settings; `settings` are stored with the
        conversation."""
        prompt = service.settings.system_prompt if system is None else system
        record = service.store.create(system=prompt, title=title, key=key, user=user, settings=settings)
        return cls._opened(service, record, people)

    @classmethod
    def open(cls, service: ChatService, name: str, people: People | None = None) -> Self:
        """Open a stored conversation by its id, the beginning of its id, its title, or `last` (the latest). If its last
        turn is open, `unfinished` is true and `resume` continues that turn.

        Raises `ConfigError` for an unknown conversation, and for one that is already open, here or in another process.
        """
        return cls._opened(service, service.store.find(name), people)

    @classmethod
    def _opened(cls, service: ChatService, record: ConversationRecord, people: People | None) -> Self:
        folder = service.store.path.with_name(f"{service.store.path.name}.locks")
        conversation = cls(service, record, people or People(), _locked(folder, record.id))
        service.conversations[record.id] = conversation
        return conversation

    # Called by front ends

    @property
    def unfinished(self) -> bool:
        """Whether a killed process left the last turn open, so that `resume` would continue it."""
        return self._running is None and self._open_turn() is not None

    @property
    def busy(self) -> bool:
        """Whether a turn is running."""
        return self._busy.locked()

    @property
    def title(self) -> str:
        """The title, or the beginning of the first message."""
        return self.record.title or self._store.first_words(self.id)

    @property
    def model(self) -> str:
        """The name of the model."""
        return self._service.model_name(self._server)

    @property
    def window_tokens(self) -> int | None:
        """The size of the model's context window, from the settings or the server, or None if it is unknown."""
        reported = None if self._engine is None else self._engine.window_tokens
        known = [each for each in (self._service.settings.context_tokens, reported) if each is not None]
        return min(known, default=None)

    def turns(self, *, every: bool = False) -> list[StoredTurn]:
        """Return the turns of the history: the latest compaction, if there is one, and the turns that it did not
        summarize. With `every`, return all turns that are not undone."""
        return self._store.turns(self.id, every=every)

    async def send(self, content: JSON, *, message_id: str | None = None) -> AsyncGenerator[Event, None]:
        """Send the user's message (a string, or content parts of the chat completions API) and yield the turn's events.

        The turn runs while the events are read; closing the iterator interrupts it. Failures of the model server or the
        sandbox become the outcome of the turn; `ConfigError` and bugs are raised. A message with a known `message_id`
        yields its stored answer or, if its turn was cut off, continues that turn. A new message first ends the turn
        that was cut off, if there is one; that turn then stays without an answer.
        """
        async with self._busy:
            known = None if message_id is None else self._store.turn_of(self.id, message_id)
            if known is not None and known.state == "done":
                if known.answer:
                    yield TextDelta(text=known.answer)
                yield _ended(known)
                return
            if known is None:
                if (cut := self._open_turn()) is not None:
                    self._finish(cut, "interrupted", "the program ended during the turn")
                known = self._begin(content, message_id)
            async with aclosing(self._play(known)) as events:
                async for event in events:
                    yield event

    async def resume(self) -> AsyncGenerator[Event, None]:
        """Continue the turn that was cut off, if there is one (`unfinished`). Yields events as `send` does."""
        async with self._busy:
            turn = self._open_turn()
            if turn is not None:
                async with aclosing(self._play(turn)) as events:
                    async for event in events:
                        yield event

    def interrupt(self) -> bool:
        """Stop the model or the running tool; the turn ends with the outcome `interrupted`. Return False if no turn is
        running."""
        if self._running is None or self._running.done():
            return False
        self._interrupted = True
        self._running.cancel()
        return True

    async def undo(self) -> JSON:
        """Remove the last turn from the history; returns its message, or None. Files are not changed."""
        async with self._busy:
            turn = self._store.undo_last(self.id)
            if turn is None:
                return None
            self._reload()
            self.context_tokens = self._stored_tokens()
            return turn.content

    async def retry(self) -> AsyncGenerator[Event, None]:
        """Undo the last turn and send its message again. Raises `ConfigError` if there is no turn."""
        content = await self.undo()
        if content is None:
            raise ConfigError("there is no message to send again")
        async with aclosing(self.send(content)) as events:
            async for event in events:
                yield event

    async def fork(self, turn: int | None = None, people: People | None = None) -> Self:
        """Return a new conversation with the history up to `turn`, or with the whole history if `turn` is None. If the
        slot can be checkpointed, the new conversation gets a copy of the current files. Raises `ConfigError` for an
        unknown turn."""
        record = self._store.fork(self.id, turn, title=self.record.title)
        other = self._opened(self._service, record, people or self.people)
        if self._slot is not None:
            try:
                other._snapshot = await self._service.pool.checkpoint(self._slot)
            except SandboxError:
                note = NEW_SANDBOX
            else:
                note = COPIED_SANDBOX
            other._notes, other._notices = [note], [Notice(text=note, kind="sandbox")]
        return other

    def take_notices(self) -> list[Notice]:
        """Remove and return the notices about what happened before this conversation was opened. If nobody takes them,
        the next turn reports them."""
        taken, self._notices = self._notices, []
        return taken

    async def compact(self) -> str:
        """Replace the history with a summary that the model writes, in pieces if the history does not fit the window.
        Returns the summary. Raises `EngineError`, and `ConfigError` if the conversation is too short; then the history
        is as before."""
        async with self._busy:
            turns = self.turns()
            if not turns or (len(turns) < 2 and self._prompt_tokens() < _SHORT_TOKENS):
                raise ConfigError("the conversation is too short to compact")
            if (cut := self._open_turn()) is not None:
                self._finish(cut, "interrupted", "the program ended during the turn")
            usage = Usage()
            summary = await self._compacted(Plan([], self._store.entries(self.id)), usage)
            if not summary:
                raise EngineReplyError("the model wrote an empty summary; the conversation was not changed")
            return summary

    def use_server(self, server: Server) -> None:
        """Use `server`, another model server or another model, from the next message on."""
        self._server, self._session, self._engine = server, None, None

    async def use_model(self, model: str) -> bool:
        """Switch to another model of the service's server; a resumed conversation keeps that model. Returns True if the
        server lists the model, and False if the server has no list. Raises `ConfigError` if the list lacks the
        model."""
        server = self._service.server_for(model)
        listed = await self._service.models()
        if listed and model not in listed:
            known = f"it lists {', '.join(listed[:20])}.{nearest(model, listed)}"
            raise ConfigError(f"the model server does not list {model!r}; {known} The model is still {self.model}.")
        self.use_server(server)
        self._change_settings(model=model)
        return bool(listed)

    async def use_toolsets(self, toolsets: Sequence[str]) -> None:
        """Change the model's toolsets from the next message on. Raises `ConfigError` for an unknown toolset."""
        self._service.registry(toolsets)
        async with self._busy:
            self.toolsets = tuple(toolsets)
            self._change_settings(toolsets=list(toolsets))
            await self._end_tools()

    def rename(self, title: str) -> None:
        """Give the conversation a title."""
        self._store.rename(self.id, title)
        self.record = replace(self.record, title=title)

    async def slot(self) -> Slot:
        """Return the conversation's slot, leased at the first call."""
        async with self._leasing:
            if self._slot is None:
                self._slot, kept = await self._service.lease(self.id, self._snapshot)
                if not kept and self.prepare is not None:
                    await self.prepare(self._slot)
                self._change_settings(sandbox=True)
            return self._slot

    @property
    def open_slot(self) -> Slot | None:
        """The slot, if it was leased."""
        return self._slot

    async def drop_slot(self) -> None:
        """End the slot and its processes; the next command gets a new slot."""
        async with self._busy:
            await self._end_slot()

    async def _end_slot(self) -> None:
        await self._end_tools()
        slot, self._slot = self._slot, None
        if slot is not None:
            await self._service.release(slot)
            self._notes.append(NEW_SANDBOX)

    async def close(self, *, keep_slot: bool = False) -> None:
        """Interrupt a running turn, end the slot and its processes, and release the conversation. With `keep_slot`, the
        slot and its processes continue. Idempotent."""
        if self._service.conversations.get(self.id) is not self:
            return
        self.interrupt()
        with suppress(TimeoutError):  # a turn whose events nobody reads cannot end; it stays open, as after a kill
            async with asyncio.timeout(_CLOSE_S), self._busy:
                pass
        del self._service.conversations[self.id]
        await self._end_tools()
        slot, self._slot = self._slot, None
        if slot is not None and not keep_slot:
            await self._service.release(slot)
        os.close(self._lock)

    def on_process(self, session: ProcessSession, kind: str, text: str, exit_code: int | None) -> None:
        """Report an event of a background process to the person and, unless it is mere progress, to the model in its
        next turn."""
        said = text.strip()
        what = {"completion": f"ended with exit code {exit_code}", "watch_match": "printed", "progress": "printed"}
        line = f"Background process {session.id} ({session.command:.80}) {what.get(kind, kind)}"
        self._notice(Notice(text=f"{line}:\n{said}" if said else f"{line}.", kind="process", source=session.id))
        if kind != "progress":
            self._notes.append(f"{line}{': ' + said[-500:] if said else '.'}")

    # One turn

    def _begin(self, content: JSON, message_id: str | None) -> StoredTurn:
        noted, self._notes = self._notes, []
        full = _with_notes(content, noted)
        message: Message = {"role": "user", "content": full}
        turn = self._store.begin_turn(self.id, content, message_id=message_id, messages=[message])
        self.messages.append(message)
        self._written = len(self.messages)
        return turn

    async def _play(self, turn: StoredTurn) -> AsyncGenerator[Event, None]:
        """Run a turn and yield its events. Notices that nobody has taken come first."""
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._events, self._turn, self._interrupted, self.failure = events, turn, False, None
        self._loop, self._partial, self._early, self._calls = None, [], 0, {}
        for notice in self.take_notices():
            self._notice(notice)
            events.put_nowait(notice)
        started_s = time.monotonic()
        task = self._running = asyncio.create_task(self._act(turn), name=f"turn of {self.id}")
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
        finally:
            if not task.done():
                self._interrupted = True
                task.cancel()
                await asyncio.wait([task])
            self._running = self._events = None
            ended = self._close_turn(turn, task, time.monotonic() - started_s)
            await self._lose_failed_slot()
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, InfraError):
            raise error
        yield ended

    async def _act(self, turn: StoredTurn) -> AgentResult:
        """Run the agent loop, starting from the history."""
        settings, service = self._service.settings, self._service
        session = await self._server_session()
        tools = self._runtime(message_text(turn.content))
        self._change_settings(tools=tools.registry.definitions())
        loop = self._loop = HermesAgentLoop(
            MiddlewareServer(session, [self._streamed]),
            tools.registry.definitions(),
            tools.registry.list_tools(),
            max_turns=settings.max_turns,
            task_id=self.id,
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            extra_body=settings.extra_body,
            tool_handler=tools,
            parallel_safe=tools.parallel_safe,
            on_turn=self._on_turn,
            budget=settings.budget,
            beyond=_BEYOND,
        )
        tools.share(Delegation(Subagents(loop, tools, numbers=self._branches).work))
        asked = sum(message.get("role") == "assistant" for message in self.messages)
        try:
            return await self._run_in_window(loop, AgentResult(messages=[], turns_used=asked))
        finally:
            tools.share(Delegation())  # breaks a reference cycle of delegation, loop and tools
            self._save_ledger(turn, service)

    # The context window

    async def _run_in_window(self, loop: HermesAgentLoop, before: AgentResult) -> AgentResult:
        """Run the loop. Compact the history when the window is nearly full, before the loop and between its turns, and
        after an overflow. Raises `EngineError` if a conversation that overflowed cannot be compacted."""
        loop.result = result = before
        tries, most_calls = 0, loop.max_turns
        compacts = True
        limit = self._limit_tokens()
        if limit is not None and self._prompt_tokens() > limit:
            compacts = await self._make_room(loop, None)
        while True:
            loop.max_turns = most_calls - (result.turns_used - before.turns_used)
            loop.max_context_tokens = self._limit_tokens() if compacts else None
            known = result.turns_used
            result = await loop.run(self.messages, after=result)
            overflow = loop.failure if isinstance(loop.failure, ContextExceeded) else None
            if overflow is None and not (result.outcome is Outcome.LENGTH and loop.context_full):
                return result
            tries = tries + 1 if result.turns_used == known else 1
            if overflow is not None and tries > _TRIES:
                raise overflow
            compacts = await self._make_room(loop, overflow)

    async def _make_room(self, loop: HermesAgentLoop, overflow: ContextExceeded | None) -> bool:
        """Compact the history, in a running turn. Return False if it became no smaller although it must not.

        After an `overflow`, raises `ContextExceeded` if nothing can be compacted, and `EngineError` if the model does
        not write a summary. Without one, the next model call may still succeed, so failures are only logged.
        """
        assert self._turn is not None
        self._write()
        if overflow is not None and self._engine is not None:
            self._engine.learn_window(overflow)
        entries = self._store.entries(self.id)
        made = plan(entries, self._turn, self._room(overflow), self._count)
        window = self.window_tokens
        fits = window is None or self._count.of(self._fixed()) + made.tokens(self._count) < window
        if made.empty or not fits:  # a summary would lose details and help nobody
            if overflow is not None:
                raise self._hopeless(overflow)
            return False
        before = self._prompt_tokens()
        try:
            await self._compacted(made, loop.result.usage, even_empty=True)
        except EngineError as error:
            if overflow is not None:
                raise
            logger.warning("conversation %s was not compacted: %s", self.id, error)
            return False
        self._report_compaction(made, before)
        return True

    def _limit_tokens(self) -> int | None:
        """Return the number of tokens at which the conversation is compacted, or None if the window is unknown."""
        window = self.window_tokens
        if window is None:
            return None
        reply = self._service.settings.max_tokens or 0
        return min(int(window * FULL_SHARE), window - reply) if reply < window else int(window * FULL_SHARE)

    def _room(self, overflow: ContextExceeded | None) -> int:
        """Return the number of tokens that the messages may have after a compaction, without the system prompt."""
        window, fixed = self.window_tokens, self._count.of(self._fixed())
        messages = self._prompt_tokens() - fixed
        if overflow is not None:  # whatever was estimated, it was too much
            if window is not None:
                self._count.scale *= max(1.0, 1.1 * window / max(1, fixed + messages))
                fixed = self._count.of(self._fixed())
            messages = self._count.of(self.messages) - fixed
        if window is None:
            return messages // 2
        room = max(int(window * TARGET_SHARE) - fixed, (window - fixed) // 4)
        return room if overflow is None else min(room, messages // 2)

    def _hopeless(self, overflow: ContextExceeded) -> ContextExceeded:
        """Return the error for a conversation that cannot be compacted: its system prompt and tools, or its last
        message, are too long."""
        window, fixed = self.window_tokens, self._count.of(self._fixed())
        if window is None:
            return overflow
        if fixed > window // 2:
            names = plural(len(self._definitions()), "tool")
            text = (
                f"The system prompt and the definitions of {names} have about {fixed} tokens, and the window of model "
                f"{self.model} has {window}. Use fewer toolsets, a shorter system prompt or AGENTS.md, or another model"
            )
        else:
            message = self._count.of(self.messages) - fixed
            text = (
                f"The message has about {message} tokens. The window of model {self.model} has {window}, of which "
                f"{fixed} are the system prompt and the tools. Send the message in parts, or as a file"
            )
        error = ContextExceeded(text)
        error.window_tokens = window
        return error

    async def _compacted(self, made: Plan, usage: Usage, *, even_empty: bool = False) -> str:
        """Carry out a plan: let the model write the summary, then change the history. Returns the summary. If it is
        empty, changes nothing, unless `even_empty`. Raises `EngineError`."""
        summary = await self._summary(made, usage) if made.summarized else ""
        if made.summarized and not summary:
            if not even_empty:
                return ""
            summary = f"(There is no summary. {plural(len(made.summarized), 'earlier message')} were left out.)"
        messages: list[Message] = [
            {"role": "user", "content": f"Our conversation so far, as you summarized it:\n\n{summary}"},
            {"role": "assistant", "content": "I continue from this summary."},
        ]
        rows = [entry.row for entry in made.kept]
        cut = {row: chars for row, chars in made.cut.items() if row in rows}
        running = self._turn if self._running is not None else None
        self.context_tokens = self._count.of(
            [*self._fixed(), *(messages if summary else ()), *made.messages(made.kept)]
        )
        self._store.compact(
            self.id, summary, messages=messages if summary else (), kept=rows, cut=cut, during=running,
            report={"context_tokens": self.context_tokens, **({} if running else self._spent(usage))},
        )  # fmt: skip
        if self._session is not None:
            self._session.declare(SegmentReason.COMPACTION)
        self._reload()
        return summary

    async def _summary(self, made: Plan, usage: Usage) -> str:
        """Let the model summarize messages: in one request that continues the conversation if it fits, otherwise in
        pieces."""
        session = await self._server_session()
        assert self._engine is not None
        engine = self._engine

        async def ask(messages: Sequence[Message]) -> str:
            branch = session.child(next(self._branches))
            branch.declare(SegmentReason.COMPACTION)
            try:
                completion = await branch.chat_completion(
                    messages=messages, temperature=self._service.settings.temperature
                )
            except ContextExceeded as error:
                engine.learn_window(error)
                raise
            reply = read_reply(completion, 1)
            usage.add(reply.prompt_tokens, reply.completion_tokens)
            return reply.content.strip()

        messages = made.messages(made.summarized)
        window = self.window_tokens
        whole = [*self._fixed()[:1], *messages, {"role": "user", "content": SUMMARIZE}]
        if made.whole and (window is None or self._count.of(whole) < window * FULL_SHARE):
            with suppress(ContextExceeded):
                return await ask(whole)
        return await summary_in_pieces(messages, ask, lambda: self.window_tokens, self._count)

    def _report_compaction(self, made: Plan, before: int) -> None:
        """Say what was summarized and shortened."""
        done = []
        if made.summarized:
            done.append(f"{plural(len(made.summarized), 'message')} were replaced with a summary")
        if made.newly_cut:
            done.append(f"{plural(made.newly_cut, 'long tool result')} were shortened")
        window = "" if self.window_tokens is None else f" of {self.window_tokens}"
        text = (
            f"The model's context window was nearly full (about {before}{window} tokens), so {' and '.join(done)}. "
            f"The history now has about {self.context_tokens} tokens; the store keeps all of it."
        )
        notice = Notice(text=text, kind="compaction")
        self._notice(notice)
        self._emit(notice)

    def _definitions(self) -> list[dict[str, JSON]]:
        """Return the definitions of the tools, which are a part of every request."""
        stored: list[dict[str, JSON]] = list(self.record.settings.get("tools") or ())
        return stored if self._tools is None else self._tools.registry.definitions()

    def _fixed(self) -> list[Message]:
        """Return what every request has apart from the conversation: the system prompt, if any, and the tools."""
        system = self.messages[:1] if self.messages and self.messages[0].get("role") == "system" else []
        return [*system, *self._definitions()]

    def _prompt_tokens(self) -> int:
        """Return the tokens of the next request: the server's count of the messages that it has seen, and an estimate
        of the others."""
        known, tokens = self._counted
        if known:
            return tokens + self._count.of(self.messages[known:])
        return self._count.of([*self.messages, *self._definitions()])

    def _stored_tokens(self) -> int:
        reports = [turn.report["context_tokens"] for turn in self.turns() if turn.report.get("context_tokens")]
        return int(reports[-1]) if reports else 0

    def _spent(self, usage: Usage) -> dict[str, JSON]:
        """Return the figures of a report on model calls."""
        report: dict[str, JSON] = {
            "model_calls": usage.calls,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "model": self.model,
        }
        prices = self._service.settings.prices
        if prices is not None:
            report["cost"] = prices.cost(usage.prompt_tokens, usage.completion_tokens)
        return report

    # Parts of a turn that the loop calls

    async def _streamed(self, call: ChatCall, ask: Ask) -> ChatCompletion:
        """Pass on the reply in pieces, and store it before any of its tool calls begins. This is chat middleware."""
        if call.branch or self._loop is None or self._turn is None or self._session is None:
            return await ask(call)
        if "on_delta" in self._session.features:
            call = ChatCall(call.branch, call.messages, {**call.request, "on_delta": self._on_delta})
        self._partial, self._thought = [], False
        completion = await ask(call)
        reply = read_reply(completion, self._loop.result.turns_used + 1)
        if reply.reasoning and not self._thought:
            self._emit(ReasoningDelta(text=reply.reasoning))
        if not self._partial and reply.content:
            self._emit(TextDelta(text=reply.content))
        self._reply_row = self._store.add_message(self._turn, reply.message())
        self._early = 1
        self._partial = []
        if reply.prompt_tokens:
            self.context_tokens = reply.prompt_tokens + reply.completion_tokens
            self._counted = len(call.messages) + 1, self.context_tokens
            self._count.learn([*call.messages, *self._definitions()], reply.prompt_tokens)
        return completion

    def _on_delta(self, delta: Delta) -> None:
        if delta.restarted:
            self._partial = []
            self._emit(ReplyRestarted())
        if delta.reasoning:
            self._thought = True
            self._emit(ReasoningDelta(text=delta.reasoning))
        if delta.content:
            self._partial.append(delta.content)
            self._emit(TextDelta(text=delta.content))

    async def _called(self, call: CheckedCall, then: Next) -> ToolOutcome:
        """Run a tool call. If the agent itself made the call, record it in the journal of side effects and emit its
        events. This is tool middleware."""
        if not call.by_agent or call.conversation or self._turn is None:
            return await then(call)
        effect = self._store.begin_effect(
            self._turn, "tool", call.call_id, call.name, dict(call.arguments), message=self._reply_row
        )
        self._calls[call.call_id] = effect
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        self._emit(
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
            self._store.end_effect(effect, text, "interrupted" if stopped else "failed")
            self._emit_result(call.call_id, call.name, text, text, time.monotonic() - started_s)
            raise
        finally:
            _current_call.reset(token)
        self._store.end_effect(effect, outcome.text)
        self._emit_result(call.call_id, call.name, outcome.text, outcome.error, time.monotonic() - started_s)
        return outcome

    def _on_turn(self, turn: Turn, messages: list[Message]) -> None:
        """Store the results of the tool calls in one reply, and emit events for refused calls, which have none yet."""
        names = {call["id"]: call["function"] for call in messages[0].get("tool_calls") or ()}
        for message in messages[1:]:
            call_id = message.get("tool_call_id", "")
            if call_id in names and call_id not in self._calls:
                function, text = names[call_id], str(message["content"])
                name, arguments = str(function["name"]), str(function["arguments"])
                self._emit(ToolBegun(call_id=call_id, name=name, arguments=arguments, preview=arguments[:80]))
                self._emit_result(call_id, name, text, text, 0.0)
        self._calls = {}
        self._write()
        if self._turn is not None:
            self._save_ledger(self._turn, self._service)

    def _write(self) -> None:
        """Store the messages that are not stored yet."""
        assert self._turn is not None
        for message in self.messages[self._written + self._early :]:
            self._store.add_message(self._turn, message)
        self._written, self._early = len(self.messages), 0

    def _close_turn(self, turn: StoredTurn, task: asyncio.Task[AgentResult], seconds: float) -> TurnEnded:
        """Store the end of a turn, whatever its outcome, and leave a well-formed history. Returns the turn's last
        event."""
        result = self._loop.result if self._loop is not None else AgentResult(messages=[], outcome=Outcome.CANCELLED)
        self.failure = self._loop.failure if self._loop is not None else None
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or self._interrupted:
            outcome, problem = INTERRUPTED, "interrupted by the user"
        elif error is not None:
            self.failure = error if isinstance(error, PalaestraError) else None
            outcome = (Outcome.API_ERROR if isinstance(error, EngineError) else Outcome.INFRA_ERROR).value
            problem = str(error)
        else:
            outcome, problem = result.outcome.value, result.error
            if result.outcome is Outcome.MAX_TURNS:
                problem = f"the limit of {plural(self._service.settings.max_turns, 'model call')} for one message"
        for message in self.messages[self._written :]:
            if message.get("role") == "tool" and message["content"] == NOT_FINISHED:
                begun = message["tool_call_id"] in self._calls
                text = (STOPPED if begun else NOT_REACHED) if outcome == INTERRUPTED else f"Not finished: {problem}"
                message["content"] = json.dumps({"error": text})
        self._write()
        report = {
            **self._spent(result.usage), "context_tokens": self.context_tokens, "seconds": round(seconds, 3)
        }  # fmt: skip
        return self._finish(turn, outcome, problem, report)

    def _finish(
        self, turn: StoredTurn, outcome: str, problem: str, report: Mapping[str, JSON] | None = None
    ) -> TurnEnded:
        """End a turn in the store, and return its last event. If the turn's last message is not an answer, add a
        closing assistant message first."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or last.get("tool_calls"):
            said = "".join(self._partial)
            note = "[interrupted by the user]" if outcome == INTERRUPTED else f"[the turn ended early: {problem}]"
            closing: Message = {"role": "assistant", "content": f"{said}\n\n{note}" if said else note}
            self._store.add_message(turn, closing)
            self.messages.append(closing)
            answer = said
        else:
            answer = str(last.get("content") or "")
        self._written, self._partial = len(self.messages), []
        self._store.end_turn(turn, answer=answer, outcome=outcome, error=problem, report=report)
        ended = replace(turn, answer=answer, outcome=outcome, error=problem, report=report or {})
        return _ended(ended, replayed=False)

    # The parts of a turn

    async def _server_session(self) -> ChatServer:
        if self._session is None:
            engine = await self._service.engine(self._server)
            self._engine = engine
            self._session = engine.session(SessionContext(rollout_id=self.id))
            self._part = len(self._store.ledgers(self.id)) + 1
            self._part_from = 0
        return self._session

    def _runtime(self, user_task: str) -> ToolRuntime:
        if self._tools is None:
            service, settings = self._service, self._service.settings
            self._tools = tools = ToolRuntime(
                service.registry(self.toolsets), self._watched, self.id, user_task, settings.tool_timeout_s,
                middleware=[self._called],
            )  # fmt: skip
            tools.session_key = self.record.key or self.id
            tools.share(service.processes)
            tools.share(self._approvals)
            tools.share(User(self.people.answer))
            tools.share(Notes(settings.memory))
            tools.share(Sessions(current=self.id, source=self._store))
            for thing in settings.shared:
                tools.share(thing)
        return self._tools

    async def _watched(self) -> Slot:
        return cast("Slot", _WatchedSlot(await self.slot(), self._emit))

    async def _approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        assert self.people.approve is not None
        answer = await self.people.approve(request)
        if answer is ApprovalAnswer.ALWAYS:
            self._store.allow(self.record.user, request.covers)
        return answer

    async def _end_tools(self) -> None:
        tools, self._tools = self._tools, None
        if tools is not None:
            await tools.aclose()

    async def _lose_failed_slot(self) -> None:
        """Release the slot if it failed; the next command gets a new one."""
        if not isinstance(self.failure, SandboxError):
            return
        if self._slot is not None:
            await self._end_slot()
            self._notice(Notice(text=f"The sandbox failed. {NEW_SANDBOX}", kind="sandbox"))

    def _save_ledger(self, turn: StoredTurn, service: ChatService) -> None:
        ledger = None if self._session is None else self._session.ledger
        if ledger is not None and len(ledger):
            self._part_from = self._part_from or turn.number
            record = msgspec.msgpack.encode(ledger.record())
            service.store.save_ledger(self.id, self._part, (self._part_from, turn.number), record)

    def _change_settings(self, **changes: JSON) -> None:
        settings = {**self.record.settings, **changes}
        if settings != self.record.settings:
            self._store.change_settings(self.id, settings)
            self.record = replace(self.record, settings=settings)

    # Recovery

    def _open_turn(self) -> StoredTurn | None:
        turns = [turn for turn in self.turns() if turn.kind == "message"]
        return turns[-1] if turns and turns[-1].state == "open" else None

    def _recovered(self) -> list[Notice]:
        """Give a result to each tool call that a killed process left open, and end the turn if its answer was complete.
        Returns notices for the person."""
        notices = []
        if self.record.settings.get("sandbox") and not self._service.lasting:
            self._notes.append(NEW_SANDBOX)
            notices.append(Notice(text=NEW_SANDBOX, kind="sandbox"))
        turn = self._open_turn()
        if turn is None:
            return notices
        self.messages = self._store.history(self.id)
        notices += self._answer_calls(turn, self.messages)
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and not last.get("tool_calls"):  # the answer was complete
            self._store.end_turn(turn, answer=str(last.get("content") or ""), outcome=NATURAL)
        return notices

    def _answer_calls(self, turn: StoredTurn, messages: list[Message]) -> list[Notice]:
        """Store and append a result for each tool call of the last reply that has none. Returns notices about the calls
        whose outcome is unknown."""
        stored = self._store.messages_of(turn)
        asking = next((n for n in range(len(stored) - 1, -1, -1) if stored[n][1].get("role") == "assistant"), None)
        if asking is None:
            return []
        row, reply = stored[asking]
        answered = {message.get("tool_call_id") for _, message in stored[asking + 1 :]}
        effects = {effect.key: effect for effect in self._store.effects(turn, kind="tool", message=row)}
        notices = []
        for call in reply.get("tool_calls") or ():
            if call["id"] in answered:
                continue
            effect = effects.get(call["id"])
            if effect is None:
                text = json.dumps({"error": NOT_BEGUN})
            elif effect.state == "ended":
                text = effect.result
            elif effect.state == "begun":
                self._store.end_effect(effect, UNKNOWN, "unknown")
                text = json.dumps({"error": UNKNOWN})
                shown = preview(effect.name, effect.payload)
                notices.append(
                    Notice(
                        text=f"Outcome unknown: {effect.name} {shown} did not finish. It is not repeated.",
                        kind="recovery",
                    )
                )
            else:
                text = json.dumps({"error": effect.result})
            message: Message = {"role": "tool", "tool_call_id": call["id"], "content": text}
            self._store.add_message(turn, message)
            messages.append(message)
        return notices

    def _reload(self) -> None:
        self.messages = self._store.history(self.id)
        self._written, self._counted = len(self.messages), (0, 0)

    # Events

    def _emit(self, event: Event) -> None:
        if self._events is not None:
            self._events.put_nowait(event)

    def _emit_result(self, call_id: str, name: str, text: str, error: str, seconds: float) -> None:
        self._emit(ToolEnded(call_id=call_id, name=name, text=text, error=error, seconds=round(seconds, 3)))

    def _notice(self, notice: Notice) -> None:
        if self.people.notice is not None:
            self.people.notice(notice)


class _WatchedSlot:
    """A slot that also emits the output of commands as events, while a tool call runs them."""

    def __init__(self, slot: Slot, emit: Callable[[Event], None]) -> None:
        self._slot, self._emit = slot, emit

    def __getattr__(self, name: str) -> JSON:
        return getattr(self._slot, name)

    def execute(self, command: str | Sequence[str], **options: JSON) -> Awaitable[ExecutionResult]:
        call_id = _current_call.get()
        if call_id and options.get("on_output") is None:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")

            def on_output(data: bytes) -> None:
                if text := decoder.decode(data):
                    self._emit(ToolOutput(call_id=call_id, text=text))

            options["on_output"] = on_output
        return self._slot.execute(command, **options)


def _locked(folder: Path, conversation: str) -> int:
    """Lock a conversation and return the descriptor of its lock file; the kernel releases the lock when the process
    dies. Raises `ConfigError` if the conversation is open elsewhere."""
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder / conversation, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"conversation {conversation} is already open elsewhere; close it there, or fork it"
        ) from None
    return descriptor


def preview(name: str, arguments: Mapping[str, JSON]) -> str:
    """Describe a tool call in one short line: its command, its path, or its arguments."""
    for key in ("command", "path", "query", "url", "goal", "question", "session_id"):
        if isinstance(arguments.get(key), str):
            text = str(arguments[key])
            break
    else:
        text = json.dumps(dict(arguments), ensure_ascii=False)
    line = " ".join(text.split())
    return line if len(line) <= _PREVIEW_CHARS else f"{line[:_PREVIEW_CHARS]}…"


def _with_notes(content: JSON, notes: Sequence[str]) -> JSON:
    """Return a user's message, preceded by notes on what happened since the user's previous message, if there are
    any."""
    if not notes:
        return content
    text = "\n".join(f"[{note}]" for note in notes)
    if isinstance(content, str):
        return f"{text}\n\n{content}"
    return [{"type": "text", "text": text}, *content]


def _ended(turn: StoredTurn, *, replayed: bool = True) -> TurnEnded:
    report = turn.report
    return TurnEnded(
        turn=turn.number,
        text=turn.answer,
        outcome=turn.outcome,
        error=turn.error,
        replayed=replayed,
        model_calls=int(report.get("model_calls", 0)),
        prompt_tokens=int(report.get("prompt_tokens", 0)),
        completion_tokens=int(report.get("completion_tokens", 0)),
        context_tokens=int(report.get("context_tokens", 0)),
        cost=report.get("cost"),
    )

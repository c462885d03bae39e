"""`Conversation`: a conversation with a person, with one slot and a stored history. It uses the rollouts' agent loop.

    async for event in conversation.send("What is in this folder?"):
        ...                                       # events.py; the last one is TurnEnded
    conversation.interrupt()                      # from another task: stops the model or the running tool

`Conversation.begin` makes a new conversation, `Conversation.open` opens a stored one. Invariants:

- Every user's message and every reply is stored as soon as it exists. Every tool call of the conversation's own agent
  is stored before it begins and, with its result, after it has ended (`store/effects.py`).
- A turn stays open if its process is killed. When the conversation is opened again, each tool call of that turn gets a
  result. A call that had finished gets its stored result. A call that had begun and did not finish is reported as
  *outcome unknown*, to the model as a tool result and to the person as a notice, and is never repeated automatically.
  `resume` continues the turn.
- A message with the `message_id` of an answered message gets the stored answer, without a model call.
- When a turn has ended, the history ends with an assistant message, and every tool call in the history has a result.
- With a token-exact server, the tokens of the conversation are recorded as in a rollout (`store/stored_ledgers.py`).
- A conversation that fills the model's window is compacted before the next model call, and after an overflow. Whether
  or not that succeeds, `undo` and a new conversation need no model, and `compact` needs no request that fits whole.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from palaestra.agent.budget import Budget
from palaestra.agent.loop import LoopSettings
from palaestra.agent.result import AgentResult
from palaestra.agent.seat import Seat
from palaestra.tools.builtin.clarify import Ask as Answer
from palaestra.tools.builtin.clarify import User
from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest, Approvals
from palaestra.tools.human.approval import Ask as Approve
from palaestra.tools.registry.registry import Kit, ToolRegistry
from palaestra.tools.runtime.runtime import CheckedCall, Next
from palaestra.tools.tool import Tool, ToolOutcome
from palaestra_chat.context_window import ContextWindow
from palaestra_chat.conversation_files import Checkpoints, ConversationSlots, Undone
from palaestra_chat.conversation_notices import ConversationNotices
from palaestra_chat.history import ChatHistory, turn_ended
from palaestra_chat.model_servers import some
from palaestra_chat.model_session import ModelSession
from palaestra_chat.permissions import Mode, Permissions
from palaestra_chat.service import ChatService
from palaestra_chat.store import ConversationRecord, ConversationStore, StoredTurn
from palaestra_chat.tool_hooks import HookContext, around_calls, unless_allowed
from palaestra_chat.turn import RunningTurn
from palaestra_chat.turn_events import Event, Notice, TextDelta
from palaestra_slots.core.config import nearest
from palaestra_slots.core.errors import ConfigError, InfraError, PalaestraError, SandboxError, ToolServerError
from palaestra_slots.core.types import JSON
from palaestra_slots.processes.session import ProcessSession
from palaestra_toolsets.tools.memory import Notes
from palaestra_toolsets.tools.session_search import Sessions, message_text

NEW_SANDBOX = "The sandbox is new: the earlier one is gone with its processes and all files that were not copied out."
ENDED_PROCESSES = "The user undid messages, so the files of that time were restored, and all processes were ended."

_BEYOND = frozenset({"memory", "session_search"})
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class People:
    """Callbacks to the person. `approve` decides on dangerous commands and on calls that act outside the sandbox (if it
    is None, they run), `answer` answers questions of the `clarify` tool, and `notice` receives notices at any time,
    also between turns. `waiting` takes the messages that the person has sent while a turn runs, each as text and as
    content: they are delivered after the turn's next tool calls."""

    approve: Approve | None = None
    answer: Answer | None = None
    notice: Callable[[Notice], None] | None = None
    waiting: Callable[[], Sequence[tuple[str, JSON]]] | None = None


class Conversation:
    """One open conversation: a seat and a stored history. Call its methods only in the service's event loop. Turns run
    one at a time.

    `seat` has the tools and the slot, `history` the messages and what is stored, `context` counts their tokens, `model`
    has the connection to the model, and `notices` what the person learns besides answers. `failure` is the
    infrastructure failure that ended the latest turn.
    """

    def __init__(self, service: ChatService, record: ConversationRecord, people: People, lock: int) -> None:
        self.id = record.id
        self.people = people
        self.toolsets: tuple[str, ...] = tuple(record.settings.get("toolsets") or service.settings.toolsets)
        self.tools: Sequence[Tool] = ()
        """Tools of this conversation alone, in addition to those of its toolsets."""
        self.failure: PalaestraError | None = None
        self._service, self._store, self._lock = service, service.store, lock
        self._busy = asyncio.Lock()
        self._turn: RunningTurn | None = None
        model = record.settings.get("model")
        self.model = ModelSession(service, record.id, service.server if not model else service.server_for(str(model)))
        workdir = record.settings.get("workdir", service.settings.workdir)
        self.slots = ConversationSlots(
            service, record.id, Path(workdir) if workdir and Path(workdir).is_dir() else None, self._emit, self._leased
        )
        rules = rules_of(record, service.settings.rules_folder)
        approvals = Approvals(
            None if people.approve is None else unless_allowed(_remembered(people.approve, self._store, rules))
        )
        approvals.allowed |= self._store.users.allowed(record.user) | self._store.users.allowed(rules)
        about = HookContext(
            record.id,
            project=lambda: service.settings.rules_folder if self.slots.folder is None else self.slots.folder.root,
            mode=lambda: self.permissions.mode.value,
            report=lambda notice: self.notices.report_in_turn(notice),
        )
        self.seat = Seat(
            record.id,
            Kit(ToolRegistry()),
            self.slots,
            timeout_s=service.settings.tool_timeout_s,
            middleware=around_calls(service.settings.hooks, about, approvals, self._called),
            shares=(
                service.processes,
                approvals,
                User(people.answer),
                Notes(service.settings.memory),
                Sessions(current=record.id, source=self._store),
                *service.settings.shared,
            ),
            session_key=record.key or record.id,
        )
        self.checkpoints = Checkpoints(service, self.seat, self.slots)
        self.history = ChatHistory(self._store, record)
        self.permissions = Permissions(approvals, self.history, Mode(service.settings.mode))
        self.notices = ConversationNotices(people.notice, self._emit)
        if record.settings.get("sandbox") and not service.lasting:
            self.history.note(NEW_SANDBOX)
            self.notices.keep([Notice(text=NEW_SANDBOX, kind="sandbox")])
        self.notices.keep(self.history.recover())
        self.notices.keep([Notice(text=text, kind="workdir") for text in self.slots.unwritten.saved()])
        self.context = ContextWindow(
            self._store,
            record.id,
            self.history,
            self.model,
            self.seat,
            service.settings,
            self.notices.report_in_turn,
        )

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
        return self._turn is None and self.history.open_turn() is not None

    @property
    def busy(self) -> bool:
        """Whether a turn is running."""
        return self._busy.locked()

    async def send(self, content: JSON, *, message_id: str | None = None) -> AsyncGenerator[Event, None]:
        """Send the user's message (a string, or content parts of the chat completions API) and yield the turn's events.

        The turn runs while the events are read; closing the iterator interrupts it. Failures of the model server or the
        sandbox become the outcome of the turn; `ConfigError` and bugs are raised. A message with a known `message_id`
        yields its stored answer or, if its turn was cut off, continues that turn. A new message first ends the turn
        that was cut off, if there is one; that turn then stays without an answer.
        """
        async with self._busy:
            known = None if message_id is None else self._store.turns.of_message(self.id, message_id)
            if known is not None and known.state == "done":
                if known.answer:
                    yield TextDelta(text=known.answer)
                yield turn_ended(known)
                return
            if known is None:
                if (cut := self.history.open_turn()) is not None:
                    self.history.finish(cut, "interrupted", "the program ended during the turn")
                known = self.history.begin(content, message_id)
            async with aclosing(self._play_turn(known)) as events:
                async for event in events:
                    yield event

    async def resume(self) -> AsyncGenerator[Event, None]:
        """Continue the turn that was cut off, if there is one (`unfinished`). Yields events as `send` does."""
        async with self._busy:
            turn = self.history.open_turn()
            if turn is not None:
                async with aclosing(self._play_turn(turn)) as events:
                    async for event in events:
                        yield event

    def interrupt(self) -> bool:
        """Stop the model or the running tool; the turn ends with the outcome `interrupted`. Return False if no turn is
        running."""
        return self._turn is not None and self._turn.interrupt()

    async def undo(self) -> JSON:
        """Undo the last turn, and restore the files of the time before it; returns its message, or None if there is no
        turn. `rewind` reports more."""
        turns = self.history.messages_sent()
        return (await self.rewind(before=turns[-1].number)).content if turns else None

    async def rewind(self, *, before: int) -> Undone:
        """Remove the turn `before` and all later ones from the history, and restore the files of that time. Raises
        `ConfigError` for an unknown turn, and `SandboxError` if the files cannot be restored; then the history stays as
        it is."""
        async with self._busy:
            numbers = [turn.number for turn in self.history.messages_sent()]
            if before not in numbers:
                raise ConfigError(f"{self.id} has no turn {before}; its turns are {numbers}")
            running = self._service.running(self.id) > 0
            files, left = await self.checkpoints.restore(before)
            undone = self._store.turns.undo(self.id, since=before)
            self.history.reload()
            self.context.restore()
            if running and self.seat.slot is not None:
                self.history.note(ENDED_PROCESSES)
            return Undone(len(undone), undone[0].content, files, left)

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
        slot can be copied, the new conversation gets a copy of the files after that turn. This conversation stays open.
        Raises `ConfigError` for an unknown turn."""
        record = self._store.fork(self.id, turn, title=self.history.record.title)
        other = self._opened(self._service, record, people or self.people)
        sent = [each.number for each in self.history.messages_sent()]
        kept = [number for number in sent if turn is None or number <= turn]
        later = sent[len(kept) :]
        point = self.checkpoints.before(later[0]) if later else None
        if self.slots.folder is not None:
            other.slots.share_folder(
                self.slots.folder.copy(*(() if point is None else (point.written, point.refreshed)))
            )
        copied = [each.number for each in other.history.messages_sent()]
        other.checkpoints.inherit(self.checkpoints, dict(zip(kept[::-1], copied[::-1], strict=False)))
        lost = NEW_SANDBOX if self.history.record.settings.get("sandbox") else ""
        note = await self.checkpoints.copy_to(other.checkpoints, point, lost, behind=bool(later))
        other.history.note(note, alone=True)
        other.notices.keep([Notice(text=note, kind="sandbox")] if note else [], alone=True)
        return other

    async def compact(self) -> str:
        """Replace the history with a summary that the model writes, in pieces if the history does not fit the window.
        Returns the summary. Raises `EngineError`, and `ConfigError` if the conversation is too short; then the history
        is as before."""
        async with self._busy:
            return await self.context.compact()

    async def use_model(self, model: str) -> bool:
        """Switch to a model of the settings (`ChatSettings.models`), or to another model of the service's server; a
        resumed conversation keeps that model. Returns True if the settings or the server list the model, and False if
        the server has no list. Raises `ConfigError` if the list lacks the model."""
        server = self._service.server_for(model)
        named = list(self._service.settings.models)
        listed = [*named, *([] if model in named else await self._service.models())]
        if len(listed) > len(named) and model not in listed:
            known = f"it lists {some(listed[len(named) :])}.{nearest(model, listed)}"
            raise ConfigError(
                f"the model server does not list {model!r}; {known} The model is still {self.model.name}."
            )
        self.model.use(server)
        self.history.change_settings(model=model)
        return model in listed

    async def use_toolsets(self, toolsets: Sequence[str]) -> None:
        """Change the model's toolsets from the next message on. Raises `ConfigError` for an unknown toolset."""
        self._service.registry(toolsets)
        async with self._busy:
            self.toolsets = tuple(toolsets)
            self.history.change_settings(toolsets=list(toolsets))
            await self.seat.end_tools()

    async def drop_slot(self) -> None:
        """End the slot and its processes; the next command gets a new slot."""
        async with self._busy:
            await self._end_slot()

    async def _end_slot(self) -> None:
        had_slot = self.seat.slot is not None
        await self._keep_unwritten()
        await self.seat.aclose()
        if had_slot:
            self.history.note(NEW_SANDBOX)

    async def _refresh(self) -> None:
        """Give the sandbox what the person has changed in the folder, and tell both."""
        if self.seat.slot is not None:
            for text, note in await self.slots.refresh(self.seat.slot):
                self.history.note(note)
                self.notices.report_in_turn(Notice(text=text, kind="workdir"))

    async def _keep_unwritten(self) -> None:
        """Keep the changes that nobody wrote back, and report where they are, before the slot ends."""
        if self.seat.slot is not None and (where := await self.slots.keep_unwritten(self.seat.slot)):
            self.notices.report(Notice(text=where, kind="workdir"))

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
        if keep_slot:
            await self.seat.leave()
        await self._keep_unwritten()
        await self.seat.aclose()
        await self.checkpoints.clear()
        os.close(self._lock)

    def on_process(self, session: ProcessSession, kind: str, text: str, exit_code: int | None) -> None:
        """Report an event of a background process to the person and, unless it is mere progress, to the model in its
        next turn."""
        said = text.strip()
        what = {"completion": f"ended with exit code {exit_code}", "watch_match": "printed", "progress": "printed"}
        line = f"Background process {session.id} ({session.command:.80}) {what.get(kind, kind)}"
        self.notices.report(Notice(text=f"{line}:\n{said}" if said else f"{line}.", kind="process", source=session.id))
        if kind != "progress":
            self.history.note(f"{line}{': ' + said[-500:] if said else '.'}")

    # One turn

    async def _play_turn(self, turn: StoredTurn) -> AsyncGenerator[Event, None]:
        """Run a turn and yield its events. Notices that nobody has taken come first."""
        running = self._turn = RunningTurn(
            turn, self._store, self.history, self.model, self.context, self.people.waiting
        )
        self.failure = None
        await self._refresh()
        self.history.deliver_notes()
        for notice in self.notices.take():
            self.notices.report_in_turn(notice)
        await self.checkpoints.take(turn.number)
        started_s = time.monotonic()
        try:
            async with aclosing(running.events(self._work(running, turn), f"turn of {self.id}")) as events:
                async for event in events:
                    yield event
        finally:
            self._turn = None
            ended = running.close(time.monotonic() - started_s, self._service.settings.max_turns)
            self.failure = running.failure
            if isinstance(self.failure, SandboxError) and self.seat.slot is not None:
                await self._end_slot()  # the next command gets a new one
                self.notices.report(Notice(text=f"The sandbox failed. {NEW_SANDBOX}", kind="sandbox"))
        if running.error is not None and not isinstance(running.error, InfraError):
            raise running.error
        yield ended

    async def _work(self, running: RunningTurn, turn: StoredTurn) -> AgentResult:
        settings = self._service.settings
        await self.model.opened()
        self.seat.offer(Kit(self._service.registry(self.toolsets, self.tools)), message_text(turn.content))
        self.history.change_settings(tools=self.seat.kit.definitions)
        limits = LoopSettings(
            max_turns=settings.max_turns,
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            extra_body=settings.extra_body,
            budget=settings.budget or Budget(),
            beyond=_BEYOND,
        )
        return await running.work(self.seat, limits)

    async def _called(self, call: CheckedCall, then: Next) -> ToolOutcome:
        async def permitted(call: CheckedCall) -> ToolOutcome:
            try:
                return await self.permissions.call(call, then, self.id)
            except ToolServerError as error:  # a rollout would be played again, a person's turn goes on without it
                return ToolOutcome.refused(str(error))

        return await (permitted(call) if self._turn is None else self._turn.called(call, permitted))

    def _leased(self) -> None:
        first = not self.history.record.settings.get("sandbox")
        self.history.change_settings(sandbox=True)
        for text in self.slots.about if first else ():
            self.history.note(text)
            self.notices.report_in_turn(Notice(text=text, kind="workdir"))

    def _emit(self, event: Event) -> None:
        if self._turn is not None:
            self._turn.emit(event)


def rules_of(record: ConversationRecord, folder: Path | None) -> str:
    """Return under which name the store keeps what is always allowed in a conversation: its user, or the user and the
    folder that it is about."""
    where = str(record.settings.get("cwd") or folder or "")
    return f"{record.user}\0{where}" if where else record.user


def _remembered(approve: Approve, store: ConversationStore, rules: str) -> Approve:
    """Return `approve`, but what it allows for always is stored under the name `rules`."""

    async def ask(request: ApprovalRequest) -> ApprovalAnswer:
        answer = await approve(request)
        if answer in (ApprovalAnswer.ALWAYS, ApprovalAnswer.SERVER):
            store.users.allow(rules, request.covers(answer))
        return answer

    return ask


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

"""`Gateway`: receives messages from platforms, runs one turn after another in each session, and answers.

It builds on the mailbox (every message is on the disk before it is acknowledged) and on conversations
(`palaestra.doors.chat`, whose journal ensures that each message is answered once). The messages of one session are
answered in order; sessions do not wait for each other.

Invariants: every message of an allowed person gets an answer, or a refusal with the reason, even if the gateway is
killed meanwhile. `/stop` and the answer to a question reach only the session of the chat in which they were written. A
failure of one session or platform does not affect the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from palaestra.core.cancel_scope import end_tasks
from palaestra.core.clock import Clock, SystemClock
from palaestra.core.errors import (
    ConfigError,
    ContextExceeded,
    PalaestraError,
    PlatformUnavailable,
    SandboxError,
)
from palaestra.core.printable import escaped
from palaestra.core.types import JSON
from palaestra.doors.chat.conversation import Conversation, People
from palaestra.doors.chat.service import ChatService
from palaestra.doors.chat.turn_events import INTERRUPTED, NATURAL, Event, TextDelta, ToolBegun, TurnEnded
from palaestra.doors.gateway import commands, files
from palaestra.doors.gateway.commands import ChatCommand
from palaestra.doors.gateway.config import GatewayConfig
from palaestra.doors.gateway.jobs import Jobs, shown
from palaestra.doors.gateway.long_replies import split_reply
from palaestra.doors.gateway.mailbox import Mailbox, Outgoing, SessionRow, Waiting
from palaestra.doors.gateway.messaging import Messaging
from palaestra.doors.gateway.outbox import Outbox
from palaestra.doors.gateway.platform import (
    Answers,
    Attachment,
    ChatAddress,
    Incoming,
    KeepsNotes,
    Platform,
    session_key,
)
from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest

T = TypeVar("T")

logger = logging.getLogger(__name__)

TYPING_EVERY_S = 4.0
SWEEP_EVERY_S = 60.0
CLOSE_AFTER_S = 3600.0
"""The time, in seconds, after which an idle conversation without a sandbox is closed; the next message reopens it."""
LONGEST_RECONNECT_S = 60.0
MOST_UNSENT = 500
"""The maximum number of unsent messages of one chat. While a chat has as many, its next turn does not begin."""
STOP_PATIENCE_S = 10.0
MOST_SHOWN = 20_000
"""The maximum number of characters of a command or call that waits for approval. Longer ones are denied, because nobody
would see what they approve."""

_CODE_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
_FULL = "/undo forgets this message, /compact replaces the history with a summary, /new begins a new session."
_CUT_OFF = "(The gateway was stopped during this turn. /retry runs it again.)"


@dataclass(slots=True)
class _Session:
    """A session of this process. `used_at` is the monotonic time of its last use, in seconds, or None before the first
    message that this process gets. `approval` and `question` wait for a person; `approval_code` and `question_code`
    name what they wait for. `unanswered` means that the turn asked an earlier question without getting an answer, so a
    text may be the answer to that question."""

    key: str
    address: ChatAddress
    waiting: deque[int] = field(default_factory=deque)
    running: bool = False
    stopped: bool = False
    used_at: float | None = None
    conversation: Conversation | None = None
    doing: str = ""
    approval: asyncio.Future[ApprovalAnswer] | None = None
    approval_code: str = ""
    question: asyncio.Future[str] | None = None
    question_code: str = ""
    unanswered: bool = False


@dataclass(slots=True)
class _Answer:
    texts: list[str]
    files: list[Attachment] = field(default_factory=list)
    cost: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Gateway:
    """A gateway; it serves while the block of `running` runs. Daily resets and jobs follow this machine's time
    zone. The caller closes `mailbox` and `chat`. Raises `ConfigError` for settings that contradict
    each other."""

    def __init__(
        self,
        config: GatewayConfig,
        platforms: Sequence[Platform],
        mailbox: Mailbox,
        chat: ChatService,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.config, self.mailbox, self.chat = config, mailbox, chat
        self.platforms: Mapping[str, Platform] = {platform.name: platform for platform in platforms}
        if len(self.platforms) < len(platforms):
            raise ConfigError("two platforms of the gateway have the same name; give each its own")
        for platform in platforms:
            if isinstance(platform, KeepsNotes):
                platform.notes = mailbox.notes(platform.name)
        if config.limits.cost_per_day and chat.settings.prices is None:
            raise ConfigError("limits.cost_per_day needs the setting prices (the price of a million tokens)")
        self._clock = clock or SystemClock()
        self._outbox = Outbox(mailbox, self.platforms, self._on_refused, self._start, self._clock)
        messaging = Messaging(config, self.platforms, mailbox, self.notify)
        self.jobs = Jobs(
            mailbox, messaging, self._clock, enqueue=self._enqueue, wake=self._outbox.wake,
            user_of=self._user_of, refusal=self._refusal_of_job,
        )  # fmt: skip
        chat.settings = replace(chat.settings, provided=(*chat.settings.provided, messaging.tool, self.jobs.tool))
        self._sessions: dict[str, _Session] = {}
        self._notices: asyncio.Queue[tuple[ChatAddress, str]] = asyncio.Queue()
        self._background: list[asyncio.Task[None]] = []
        self._tasks: asyncio.TaskGroup

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Gateway]:
        """Serve while the block runs. At the start, raises an exception group with `PlatformRefused` for a wrong token.

        At the end, running turns are interrupted, and waiting messages are answered after the next start.
        """
        await self.mailbox.prune(self._clock.wall())
        await self._recover()
        async with asyncio.TaskGroup() as self._tasks:
            try:
                for row, key in await self.mailbox.waiting():  # before the platforms deliver messages after these
                    waiting = await self.mailbox.read(row)
                    if waiting is not None and waiting.message.address.platform in self.platforms:
                        self._enqueue(key, waiting.message.address, row)
                await asyncio.gather(*(self._connect(platform) for platform in self.platforms.values()))
                self._start(self._post_notices(), "notices")
                self._start(self._retried(self._sweep, "the check of idle sessions"), "sweep")
                self._start(self._retried(self.jobs.run_due, "the check of scheduled jobs"), "jobs")
                yield self
            finally:
                await asyncio.shield(self._stop())

    def _start(self, work: Coroutine[None, None, None], name: str) -> None:
        """Run `work` in the background. If it fails, the error is logged, and everything else continues."""

        async def run() -> None:
            try:
                await work
            except Exception:
                logger.exception("the task %r failed", name)

        task = self._tasks.create_task(run(), name=name)
        self._background.append(task)
        task.add_done_callback(self._background.remove)
        task.add_done_callback(lambda _: work.close())  # it never began if the task was cancelled before

    async def _retried(self, do: Callable[[], Awaitable[None]], what: str) -> None:
        """Call `do` until it succeeds, for example until a full disk has room again."""
        wait_s = 1.0
        while True:
            try:
                await do()
            except Exception:
                logger.exception("%s failed; trying again in %.0f s", what, wait_s)
            else:
                return
            await self._clock.sleep(wait_s)
            wait_s = min(LONGEST_RECONNECT_S, wait_s * 2)

    async def _recover(self) -> None:
        """Open the conversations whose sandboxes an earlier gateway left behind. Reports on their background processes
        then reach the chats, and a session's reset ends its sandbox."""
        if not self.chat.lasting:
            return
        await self.chat.start()
        for row in await self.mailbox.sessions():
            record = self.chat.store.get(row.conversation)
            if record is not None and record.settings.get("sandbox"):
                session = self._session(row.key, row.address)
                session.conversation = self._open(session, row.conversation, "")

    async def _stop(self) -> None:
        for platform in self.platforms.values():
            try:
                async with asyncio.timeout(STOP_PATIENCE_S):
                    await platform.stop()
            except Exception as error:  # an error of a client library: the other platforms are stopped anyway
                logger.warning("%s was not stopped: %s: %s", platform.name, type(error).__name__, error)
        for task in list(self._background):
            task.cancel()

    async def _connect(self, platform: Platform) -> None:
        """Start a platform. If its server does not answer, keep trying in the background."""
        try:
            await platform.start(self.receive)
        except PlatformUnavailable as error:
            logger.warning("%s: %s; trying again until it answers", platform.name, error)
            self._start(self._reconnect(platform), f"connect {platform.name}")
        else:
            await self._outbox.begin(platform.name)

    async def _reconnect(self, platform: Platform) -> None:
        wait_s = 1.0
        while True:
            await self._clock.sleep(wait_s)
            try:
                await platform.start(self.receive)
            except PlatformUnavailable:
                wait_s = min(LONGEST_RECONNECT_S, wait_s * 2)
            except PalaestraError as error:
                await self.notify(f"{platform.name} is not connected: {error}")
                return
            except Exception:  # a bug in the platform: the others continue
                logger.exception("%s cannot be started; trying again", platform.name)
                wait_s = min(LONGEST_RECONNECT_S, wait_s * 2)
            else:
                await self._retried(partial(self._outbox.begin, platform.name), "the sending of waiting messages")
                return

    # Messages

    async def receive(self, message: Incoming) -> None:
        """Accept a message from a platform; returns when it is on the disk. Raises `DiskError`."""
        key = session_key(message, per_user=self.config.group_sessions_per_user)
        now = self._clock.wall()
        if not await self._is_allowed(message):
            await self._turn_away(message, key, now)
            return
        if self.platforms[message.address.platform].limits.requests and await self._is_repeated(message):
            return
        session = self._session(key, message.address)
        if refusal := self._unusable(message):
            await self._answer_now(message, key, refusal)
            return
        command = commands.parse(message.text)
        if command is not None and (problem := commands.misused(command)):
            await self._answer_now(message, key, problem)
            return
        if command is not None and command.at_once:
            if (await self.mailbox.take(message, key, now, done=True)).decision == "taken":
                await self._say(message, await self._do_at_once(command, session))
            return
        if session.question is not None and command is None and not message.attachments:
            if session.unanswered:
                how = f"/answer {session.question_code} TEXT"
                text = f"An earlier question was not answered in time. To answer the current one, write {how}."
                await self._answer_now(message, key, text)
            elif (await self.mailbox.take(message, key, now, done=True)).decision == "taken":
                _settle(session.question, message.text)
                if self.platforms[message.address.platform].limits.requests:
                    await self._say(message, "Answered.")
            return
        limits = self.config.limits
        if command is None and (refusal := await self._over_cost(message.address.platform, message.user_id)):
            await self._answer_now(message, key, refusal)
            return
        receipt = await self.mailbox.take(
            message, key, now, most_per_hour=limits.messages_per_hour, most_waiting=self.config.max_queued
        )
        if receipt.decision == "taken":
            self._enqueue(key, message.address, receipt.row)
        elif receipt.decision == "limited":
            minutes = max(1, round((receipt.until - now) / 60))
            text = f"You have sent {limits.messages_per_hour} messages in an hour, which is the limit; "
            await self._answer_now(message, key, f"{text}this one was not accepted. Write again in {minutes} min.")
        elif receipt.decision == "full":
            text = f"{self.config.max_queued} messages are already waiting here; this one was not accepted."
            await self._answer_now(message, key, f"{text} Send it again later, or /stop the running turn.")

    async def _is_repeated(self, message: Incoming) -> bool:
        """Return whether the gateway already has this request. If the request is answered, send its answer again.
        Otherwise, the repeated request waits for the answer."""
        taken = await self.mailbox.answered(message)
        if taken is None or not taken[0]:
            return taken is not None
        turn = self.chat.store.turn_of(taken[1], message.message_id) if taken[1] else None
        answer = "" if turn is None else turn.answer
        await self._say(message, answer or "(This message was answered before; its answer is no longer stored.)")
        return True

    async def _is_allowed(self, message: Incoming) -> bool:
        return message.trusted or await self._is_listed(message.address.platform, message.user_id)

    async def _is_listed(self, platform: str, user_id: str) -> bool:
        settings = self.config.platforms.get(platform)
        allowed = settings.allowed_users if settings is not None else []
        return "*" in allowed or user_id in allowed or await self.mailbox.is_paired(platform, user_id)

    async def _refusal_of_job(self, platform: str, user_id: str) -> str:
        """Return why a person's job may not run now, or the empty string."""
        if not self.platforms[platform].limits.requests and not await self._is_listed(platform, user_id):
            return "The person who created the job may no longer write to the agent."
        return await self._over_cost(platform, user_id)

    async def _over_cost(self, platform: str, user_id: str) -> str:
        """Return why a person may not start a turn now, or the empty string."""
        most = self.config.limits.cost_per_day
        spent = await self.mailbox.cost_since(platform, user_id, self._clock.wall() - 86_400) if most else 0.0
        if not most or spent < most:
            return ""
        return f"You have used ${spent:.2f} of ${most:.2f} in 24 hours; write again later."

    async def _turn_away(self, message: Incoming, key: str, now: float) -> None:
        """Answer a stranger with a pairing code in a direct chat. In a group, strangers get no answer."""
        address = message.address
        logger.warning("%s: rejected a message from user %s, who is not allowed", address.platform, message.user_id)
        receipt = await self.mailbox.take(message, key, now, done=True)
        if address.chat_type != "dm" or receipt.decision != "taken":
            return
        code = await self.mailbox.pairing_code(address.platform, message.user_id, message.user_name, now)
        if code is not None:
            text = f"I do not know you yet. Ask the owner to run: palaestra gateway pair {code} (valid for an hour)."
            await self._say(message, text)

    def _unusable(self, message: Incoming) -> str:
        """Return why a message cannot be accepted, or the empty string."""
        size, most = len(message.text.encode("utf-8", "replace")), self.config.max_message_bytes
        if message.problem:
            return message.problem
        if size > most:
            return f"The message has {_mb(size)}; at most {_mb(most)} are accepted. Send it as a file, or in parts."
        for file in message.attachments:
            if len(file.data) > self.config.max_attachment_bytes:
                most = self.config.max_attachment_bytes
                return f"{file.name} has {_mb(len(file.data))}; at most {_mb(most)} are accepted. Nothing was read."
        if not message.text.strip() and not message.attachments:
            return "The message is empty."
        return ""

    async def _answer_now(self, message: Incoming, key: str, text: str) -> None:
        """Answer a message without a turn of the agent, and record it as answered. A repeated message is not answered
        again."""
        if (await self.mailbox.take(message, key, self._clock.wall(), done=True)).decision == "taken":
            await self._say(message, text)

    def _session(self, key: str, address: ChatAddress) -> _Session:
        return self._sessions.setdefault(key, _Session(key, address))

    def _enqueue(self, key: str, address: ChatAddress, row: int) -> None:
        session = self._session(key, address)
        if row in session.waiting:
            return
        session.waiting.append(row)
        if not session.running:
            session.running = True
            self._start(self._serve(session), f"session {key}")

    async def _serve(self, session: _Session) -> None:
        """Answer the messages that wait in a session. A message whose answer cannot be stored is tried again, so that
        the messages after it stay in order."""
        try:
            while session.waiting:
                await self._retried(partial(self._serve_first, session), f"{session.key}: the answer to a message")
                session.waiting.popleft()
        finally:
            session.running = False

    async def _serve_first(self, session: _Session) -> None:
        while (waiting := await self.mailbox.read(session.waiting[0])) is not None:
            if waiting.unsent < MOST_UNSENT:
                await self._answer(session, waiting)
                return
            await self._clock.sleep(1.0)

    async def _answer(self, session: _Session, waiting: Waiting) -> None:
        """Handle one message, either as a command or as a turn of the agent, and record the answers. An error becomes
        the answer. Raises `DiskError`."""
        message = waiting.message
        session.stopped = False
        if not message.job:
            session.unanswered = bool(waiting.conversation)  # the earlier gateway may have asked in this turn
        try:
            notes = await self._begin(session, waiting)
            command = None if message.job else commands.parse(message.text)
            answer = await (self._turn(session, message) if command is None else self._do(command, session, message))
            answer.texts[:0] = [*notes, f"(Scheduled job {message.job}:)"] if message.job else notes
            outgoing = self._outgoing(message, answer)
        except PalaestraError as error:
            logger.warning("%s: %s", session.key, error)
            answer = _Answer([f"This message could not be answered: {error}"])
            outgoing = self._outgoing(message, answer)
        except Exception:  # a bug: the other sessions continue
            logger.exception("%s: a message could not be answered", session.key)
            answer = _Answer(
                ["This message could not be answered because of an internal error; see the gateway's log."]
            )
            outgoing = self._outgoing(message, answer)
            await self.notify(f"Session {session.key} had an internal error; see the gateway's log.")
        await self.mailbox.finish(waiting.row, message, outgoing, self._clock.wall(), answer.cost)
        self._outbox.wake(self._to(message))

    def _to(self, message: Incoming) -> ChatAddress:
        """Return the chat that gets the answer. If the platform of a job's target is no longer enabled, the answer goes
        to the chat of the message."""
        to = message.deliver
        return message.address if to is None or to.platform not in self.platforms else to

    def _user_of(self, conversation: str) -> str:
        """Return the user id of a conversation's owner, without the platform."""
        return self.chat.store.find(conversation).user.partition(":")[2]

    def _outgoing(self, message: Incoming, answer: _Answer) -> list[Outgoing]:
        """Return the messages of an answer: at least one, unless the answer of a job goes to no chat. Their keys are
        derived from the message that is answered. The answer of a job is not a reply to a person's message."""
        if message.job and message.deliver is None:
            return []
        address = self._to(message)
        limits = self.platforms[address.platform].limits
        origin = message.address
        identity = f"{origin.platform}\0{origin.chat_id}\0{origin.thread_id}\0{message.message_id}"
        stem = hashlib.sha256(identity.encode(errors="replace")).hexdigest()[:24]
        texts = [*answer.texts]
        small = [file for file in answer.files if len(file.data) <= limits.max_file_bytes]
        large = [file for file in answer.files if len(file.data) > limits.max_file_bytes]
        texts += [f"{file.name} has {_mb(len(file.data))}, more than {address.platform} accepts." for file in large]
        pieces = split_reply("\n\n".join(text.rstrip() for text in texts), limits)
        if not pieces and not small:
            pieces = ["(The model gave no answer.)"]
        count = len(pieces) + len(small)
        tokens = answer.prompt_tokens, answer.completion_tokens
        about = [
            None if message.job else Answers(message.message_id, number == count - 1, *tokens)
            for number in range(count)
        ]
        sent = [Outgoing(f"{stem}-{n}", address, text, answers=about[n]) for n, text in enumerate(pieces)]
        return sent + [
            Outgoing(f"{stem}-{n}", address, file=file, answers=about[n]) for n, file in enumerate(small, len(pieces))
        ]

    # Sessions

    async def _begin(self, session: _Session, waiting: Waiting) -> list[str]:
        """Open the conversation in which a message is answered, and record its use. The conversation is new if the
        session has none, if the reset policy requires it, or if the earlier conversation is no longer stored. Returns
        notes for the chat."""
        notes: list[str] = []
        now, monotonic = self._clock.wall(), self._clock.monotonic()
        message, known = waiting.message, waiting.session
        current = waiting.conversation  # not empty if the gateway was killed during this turn
        if not current and known is not None:
            reason = await self._reset_reason(session, known)
            if reason is None:
                current = known.conversation
            else:
                await self._end(session)
                if self.config.reset_policy(session.address.platform, session.address.chat_type).notify:
                    why = "there was no message for a long time" if reason == "idle" else "a new day has begun"
                    notes.append(f"(A new session: {why}.)")
        if current and self.chat.store.get(current) is None:
            notes.append("(A new session: the earlier conversation is no longer stored.)")
            current = ""
        conversation = session.conversation
        if conversation is None or conversation.id != current:
            session.conversation = conversation = self._open(session, current, message.user_id)
        session.used_at = monotonic
        await self.mailbox.begin(waiting.row, SessionRow(session.key, conversation.id, message.address, now))
        return notes

    async def _reset_reason(self, session: _Session, row: SessionRow) -> str | None:
        """Return why the session must be reset, or None. A background process that is young enough prevents a reset."""
        policy = self.config.reset_policy(row.address.platform, row.address.chat_type)
        now = self._clock.wall()
        idle_s = now - row.last_used if session.used_at is None else self._clock.monotonic() - session.used_at
        reason = policy.reason(idle_s, datetime.fromtimestamp(now, UTC).astimezone())
        if reason is None or not row.conversation:
            return None
        max_age_s = policy.bg_process_max_age_hours * 3600
        return None if await self.chat.processes.has_active_for_session(session.key, max_age_s) else reason

    def _open(self, session: _Session, conversation: str, user_id: str) -> Conversation:
        """Return the stored conversation with this id, or a new conversation if the id is empty."""
        people = People(
            approve=lambda request: self._ask_approval(session, request),
            answer=lambda question, choices: self._ask_question(session, question, choices),
            notice=lambda notice: self._notices.put_nowait((session.address, notice.text)),
        )
        if conversation:
            return Conversation.open(self.chat, conversation, people)
        prompt = "\n\n".join(each for each in (self.chat.settings.system_prompt, files.INSTRUCTIONS) if each)
        user = f"{session.address.platform}:{user_id}"
        return Conversation.begin(self.chat, people, key=session.key, user=user, system=prompt)

    async def _end(self, session: _Session) -> None:
        """Close the session's conversation with its sandbox and processes."""
        row = await self.mailbox.session(session.key)
        if session.conversation is None and row is not None and self.chat.store.get(row.conversation) is not None:
            session.conversation = self._open(session, row.conversation, "")
        conversation, session.conversation = session.conversation, None
        if conversation is not None:
            if self.chat.lasting and conversation.history.record.settings.get("sandbox"):
                try:
                    await conversation.seat.sandbox()  # takes over an earlier gateway's sandbox, which `close` ends
                except SandboxError as error:  # a new session must not depend on a sandbox that is broken
                    logger.warning("%s: the earlier sandbox was not taken over: %s", session.key, error)
            await conversation.close()

    async def _sweep(self) -> None:
        """End sessions whose policy requires it, even without a new message, and close idle conversations that have no
        sandbox."""
        while True:
            await self._clock.sleep(SWEEP_EVERY_S)
            for session in list(self._sessions.values()):
                if session.running or session.conversation is None:
                    continue
                row = await self.mailbox.session(session.key)
                if session.running or row is None:
                    continue
                if await self._reset_reason(session, row) and not session.running:
                    await self._end(session)
                elif self._needs_nothing(session):
                    conversation, session.conversation = session.conversation, None
                    await conversation.close()

    def _needs_nothing(self, session: _Session) -> bool:
        """Return whether the session's conversation can be closed until the next message."""
        idle_s = self._clock.monotonic() - (session.used_at or 0.0)
        conversation = session.conversation
        return (
            not session.running and conversation is not None and not conversation.seat.slot and idle_s > CLOSE_AFTER_S
        )

    # Turns

    async def _turn(self, session: _Session, message: Incoming, again: JSON = None) -> _Answer:
        """Let the agent answer a message, or `again`, the content of an earlier one."""
        conversation = session.conversation
        assert conversation is not None  # `_begin` opened it
        if session.stopped:
            return _Answer(["Stopped before it began."])
        async with self._typing(message.address):
            content = again if again is not None else await self._content(conversation, message)
            ended = None
            async with aclosing(conversation.send(content, message_id=message.message_id)) as events:
                async for event in events:
                    if isinstance(event, TurnEnded):
                        ended = event
                    else:
                        await self._show(session, message, event)
            session.doing = ""
            assert ended is not None  # the last event of every turn
            return await self._answer_of(session, conversation, message, ended)

    async def _content(self, conversation: Conversation, message: Incoming) -> JSON:
        text, address = message.text, message.address
        if address.chat_type != "dm" and not message.job and not self.config.group_sessions_per_user:
            text = f"{message.user_name or message.user_id}: {text}"
        lines: list[str] = []
        if message.attachments and self.chat.store.turn_of(conversation.id, message.message_id) is None:
            lines = await files.put_uploads(await conversation.seat.sandbox(), message)
        return files.message_content(text, message, lines, images=self.config.model_sees_images)

    async def _show(self, session: _Session, message: Incoming, event: Event) -> None:
        """Record what the agent is doing, for `/status`, and stream the answer's text if the platform supports it."""
        platform = self.platforms[message.address.platform]
        if isinstance(event, ToolBegun):
            session.doing = f"{event.name}: {event.preview}"
        elif isinstance(event, TextDelta):
            session.doing = ""
            if platform.limits.streams:
                await platform.stream_text(message, event.text)

    async def _answer_of(
        self, session: _Session, conversation: Conversation, message: Incoming, ended: TurnEnded
    ) -> _Answer:
        limits = self.platforms[message.address.platform].limits
        text, sent = await files.take_media(ended.text, conversation.seat.slot, limits.max_file_bytes)
        texts = [text] if text.strip() else []
        if ended.outcome == INTERRUPTED:
            texts.append("Stopped." if session.stopped else _CUT_OFF)
        elif ended.outcome != NATURAL:
            advice = _FULL if isinstance(conversation.failure, ContextExceeded) else "/retry runs it again."
            texts.append(f"(The turn ended early, {ended.outcome}: {ended.error.rstrip('.')}. {advice})")
        cost = 0.0 if ended.replayed else ended.cost or 0.0
        return _Answer(texts, sent, cost, ended.prompt_tokens, ended.completion_tokens)

    @asynccontextmanager
    async def _typing(self, address: ChatAddress) -> AsyncIterator[None]:
        """Show that an answer is being written while the block runs."""
        platform = self.platforms[address.platform]
        if not platform.limits.typing:
            yield
            return

        async def show() -> None:
            while True:
                await platform.set_typing(address, True)
                await self._clock.sleep(TYPING_EVERY_S)

        showing = asyncio.ensure_future(show())
        try:
            yield
        finally:
            await end_tasks(showing)
            with contextlib.suppress(Exception):  # a notice that stays is not worth the answer
                await platform.set_typing(address, False)

    # Commands

    async def _do_at_once(self, command: ChatCommand, session: _Session) -> str:
        match command.name:
            case "help":
                return commands.help_text()
            case "stop":
                return await self._end_processes(session) if command.argument else self._interrupt(session)
            case "status":
                return await self._status(session)
            case "answer":
                return _answer_question(command, session)
            case _:
                return _approve(command, session)

    def _interrupt(self, session: _Session) -> str:
        if not session.running:
            return "Nothing is running in this chat."
        session.stopped = True
        if session.approval is not None:
            _settle(session.approval, ApprovalAnswer.DENY)
        if session.conversation is not None:
            session.conversation.interrupt()
        return "Stopping."

    async def _end_processes(self, session: _Session) -> str:
        conversation = session.conversation
        ended = 0 if conversation is None else await self.chat.processes.kill_all(conversation.id)
        return f"Ended {ended} background process{'' if ended == 1 else 'es'}."

    async def _status(self, session: _Session) -> str:
        lines = ["No turn is running."]
        if session.running:
            lines = [f"A turn is running; waiting messages: {len(session.waiting) - 1}."]
            if session.doing:
                lines.append(f"The turn is running {session.doing}")
        if session.conversation is not None:
            lines.append(f"Session {session.conversation.id}, model {session.conversation.model.name}")
            for each in await self.chat.processes.list_sessions(session.conversation.id):
                lines.append(f"Background process {each['session_id']} {each['status']}: {each['command']}")
        for job in await self.jobs.of_session(session.key):
            lines.append(f"Scheduled job {job.title} ({job.schedule}): {shown(job)['next_run'] or 'paused'}")
        return "\n".join(lines)

    async def _do(self, command: ChatCommand, session: _Session, message: Incoming) -> _Answer:
        """Run a command that waits for the turns before it."""
        conversation = session.conversation
        assert conversation is not None  # `_begin` opened it
        if command.name == "new":
            await self._end(session)
            now = self._clock.wall()
            await self.mailbox.use_session(SessionRow(session.key, "", message.address, now))
            return _Answer(["A new session begins with your next message."])
        if command.name == "undo":
            taken = await conversation.undo()
            return _Answer(["There is nothing to undo." if taken is None else "The last message was undone."])
        if command.name == "compact":
            async with self._typing(message.address):
                summary = await conversation.compact()
            cost = float(conversation.history.turns()[0].report.get("cost") or 0.0)
            return _Answer([f"The history was replaced with this summary:\n\n{summary}"], cost=cost)
        if self.chat.store.turn_of(conversation.id, message.message_id) is not None:
            return await self._turn(session, message, again="")  # the gateway was killed during this turn
        content = await conversation.undo()
        if content is None:
            return _Answer(["There is no message to answer again."])
        return await self._turn(session, message, again=content)

    # Questions to a person

    async def _ask_approval(self, session: _Session, request: ApprovalRequest) -> ApprovalAnswer:
        """Ask the chat whether a command or call may run. If no answer arrives in time, it is denied. The answer names
        the question by a code, so that a late answer does not count for the next question."""
        shown = "\n".join(map(escaped, request.command.split("\n")))
        shown = shown.replace("```", r"\x60" * 3)  # nothing leaves the code block
        asked = escaped(request.question)
        if len(shown) > MOST_SHOWN:
            await self.notify(
                f"Denied: {asked}. It has {len(shown)} characters, but at most {MOST_SHOWN} are shown for approval.",
                session.address,
            )
            return ApprovalAnswer.DENY
        block = f"```\n{shown}\n```"
        code = session.approval_code = "".join(secrets.choice(_CODE_LETTERS) for _ in range(3))
        text = (
            f"May this run? {request.asked(asked, block)}\n"
            f"/approve {code}, /approve {code} session, /approve {code} always or /deny; without an answer in "
            f"{self.config.approval_timeout_s / 60:g} min it does not run."
        )
        session.approval = asyncio.get_running_loop().create_future()
        try:
            await self.notify(text, session.address)
            async with asyncio.timeout(self.config.approval_timeout_s):
                return await session.approval
        except TimeoutError:
            return ApprovalAnswer.DENY
        finally:
            session.approval = None

    async def _ask_question(self, session: _Session, question: str, choices: Sequence[str]) -> str | None:
        """Ask the chat the model's question, and return the answer, or None if no answer arrives in time. The next
        message in the chat is the answer. But if an earlier question of the turn was not answered, an answer must name
        its question by the code."""
        code = session.question_code = "".join(secrets.choice(_CODE_LETTERS) for _ in range(3))
        lines = [question, *(f"- {choice}" for choice in choices)]
        if session.unanswered:
            lines.append(f"(Answer with /answer {code} TEXT, because an earlier question was not answered.)")
        session.question = asyncio.get_running_loop().create_future()
        try:
            await self.notify("\n".join(lines), session.address)
            async with asyncio.timeout(self.config.approval_timeout_s):
                return await session.question
        except TimeoutError:
            session.unanswered = True
            return None
        finally:
            session.question = None

    # Notices

    async def notify(self, text: str, address: ChatAddress | None = None, *, answers: str | None = None) -> None:
        """Send a notice to a chat; if `address` is None, to the home channel. If there is no home channel, or the
        platform is not enabled, write the notice to the log. `answers` is the id of the message that the text answers,
        if any."""
        to = address or self.config.home_channel()
        platform = None if to is None else self.platforms.get(to.platform)
        if to is None or platform is None:
            logger.warning("notice that was not sent, because its chat is not set or not enabled: %s", text)
            return
        stem = uuid.uuid4().hex[:24]
        texts = split_reply(text, platform.limits)
        pieces = [
            Outgoing(f"{stem}-{n}", to, each, answers=Answers(answers, last=n == len(texts) - 1) if answers else None)
            for n, each in enumerate(texts)
        ]
        await self.mailbox.post(pieces, self._clock.wall())
        self._outbox.wake(to)

    async def _post_notices(self) -> None:
        """Send reports from conversations outside of turns, such as new output of background processes."""
        while True:
            address, text = await self._notices.get()
            await self._retried(partial(self.notify, text, address), "a notice")

    async def _say(self, message: Incoming, text: str) -> None:
        """Send `text` as the answer to a message."""
        await self.notify(text, message.address, answers=message.message_id)

    async def _on_refused(self, message: Outgoing, reason: str) -> None:
        home = self.config.home_channel()
        if home is not None and home != message.address:
            place = f"{message.address.platform} chat {message.address.chat_id}"
            await self.notify(f"A message to {place} was refused: {reason}")


def _approve(command: ChatCommand, session: _Session) -> str:
    """Allow or deny the command that waits for approval; returns the reply to the chat."""
    if session.approval is None or session.approval.done():
        return "There is no command to approve in this chat."
    code, _, kind = command.argument.lower().partition(" ")
    answers = {"": ApprovalAnswer.ONCE, **{each.value: each for each in ApprovalAnswer}}
    answer = answers.get(kind.strip())
    if command.name == "deny":
        code, answer = code or session.approval_code, ApprovalAnswer.DENY
    if code != session.approval_code or answer is None:
        code = session.approval_code
        return f"Nothing is approved. Write /approve {code}, /approve {code} session, /approve {code} always or /deny."
    _settle(session.approval, answer)
    return "Not allowed." if answer is ApprovalAnswer.DENY else "Allowed."


def _answer_question(command: ChatCommand, session: _Session) -> str:
    """Pass an answer to the model's open question if the code is right; returns the reply to the chat."""
    if session.question is None or session.question.done():
        return "There is no question to answer in this chat."
    code, _, text = command.argument.partition(" ")
    if code.lower() != session.question_code or not text.strip():
        return f"Nothing is answered. Write /answer {session.question_code} TEXT."
    _settle(session.question, text.strip())
    return "Answered."


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _mb(size: int) -> str:
    return f"{size / (1 << 20):.1f} MB"

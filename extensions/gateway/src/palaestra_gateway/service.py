"""`Gateway`: receives messages from platforms, runs one turn after another in each session, and answers.

It builds on the mailbox (every message is on the disk before it is acknowledged) and on conversations
(`palaestra_chat`, whose journal ensures that each message is answered once). The messages of one session are
answered in order; sessions do not wait for each other.

Invariants: every message of an allowed person gets an answer, or a refusal with the reason, even if the gateway is
killed meanwhile. `/stop` and the answer to a question reach only the session of the chat in which they were written. A
failure of one session or platform does not affect the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial

from palaestra_chat.conversation import Conversation
from palaestra_chat.service import ChatService
from palaestra_chat.turn_events import INTERRUPTED, NATURAL, Event, ReplyRestarted, TextDelta, ToolBegun, TurnEnded
from palaestra_gateway import choices, commands, files
from palaestra_gateway.access import Access
from palaestra_gateway.commands import ChatCommand
from palaestra_gateway.config import GatewayConfig
from palaestra_gateway.connections import Connections, GatewayTasks
from palaestra_gateway.jobs import Jobs, job_json
from palaestra_gateway.mailbox import Mailbox, SessionRow, Waiting
from palaestra_gateway.messaging import Messaging
from palaestra_gateway.notices import Notices
from palaestra_gateway.observe.gateway_status import StatusKeeper
from palaestra_gateway.outbox import AnswerParts, Outbox, answered_chat, outgoing_messages
from palaestra_gateway.platform import (
    ChatAddress,
    Incoming,
    KeepsFiles,
    KeepsNotes,
    Platform,
    session_key,
)
from palaestra_gateway.sessions import GatewaySession, GatewaySessions
from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.errors import (
    ConfigError,
    ContextExceeded,
    PalaestraError,
)
from palaestra_slots.core.types import JSON

logger = logging.getLogger(__name__)

TYPING_EVERY_S = 4.0
MOST_UNSENT = 500
"""The maximum number of unsent messages of one chat. While a chat has as many, its next turn does not begin."""

_FULL = "/undo forgets this message, /compact replaces the history with a summary, /new begins a new session."
_CUT_OFF = "(The gateway was stopped during this turn. /retry runs it again.)"


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
            if isinstance(platform, KeepsFiles):
                platform.folder = mailbox.path.parent / platform.name
        if config.limits.cost_per_day and chat.settings.prices is None:
            raise ConfigError("limits.cost_per_day needs the setting prices (the price of a million tokens)")
        self._clock = clock or SystemClock()
        self._tasks = GatewayTasks(self._clock)
        self._notices = Notices(config, self.platforms, mailbox, self._clock, lambda to: self._outbox.wake(to))
        self._outbox = Outbox(mailbox, self.platforms, self._notices.on_refused, self._tasks.start, self._clock)
        self._connections = Connections(
            self.platforms, self.receive, self._outbox, self._notices, self._tasks, self._clock
        )
        self._access = Access(config, mailbox, self._clock)
        self._sessions = GatewaySessions(config, mailbox, chat, self._notices, self._clock)
        self._keeper = StatusKeeper(mailbox, self.platforms, lambda: self._outbox.connected, self._clock)
        messaging = Messaging(config, self.platforms, mailbox, self._notices.post)
        self.jobs = Jobs(
            mailbox, messaging, self._clock, enqueue=self._enqueue, wake=self._outbox.wake,
            user_of=self._user_of, refusal=self._refusal_of_job,
        )  # fmt: skip
        chat.settings = replace(chat.settings, provided=(*chat.settings.provided, messaging.tool, self.jobs.tool))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Gateway]:
        """Serve while the block runs. At the start, raises an exception group with `PlatformRefused` for a wrong token.

        At the end, running turns are interrupted, and waiting messages are answered after the next start.
        """
        await self.mailbox.prune(self._clock.wall())
        await self._sessions.recover()
        with self._keeper.listening():
            async with self._serving():
                yield self

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        async with self._tasks.running():
            try:
                for row, key in await self.mailbox.waiting():  # before the platforms deliver messages after these
                    waiting = await self.mailbox.read(row)
                    if waiting is not None and waiting.message.address.platform in self.platforms:
                        self._enqueue(key, waiting.message.address, row)
                await self._connections.open()
                self._tasks.start(self._post_reports(), "notices")
                self._tasks.start(self._tasks.retried(self._sessions.sweep, "the check of idle sessions"), "sweep")
                self._tasks.start(self._tasks.retried(self.jobs.run_due, "the check of scheduled jobs"), "jobs")
                self._tasks.start(self._tasks.retried(self._keeper.keep, "the storing of the status"), "status")
                yield
            finally:
                await asyncio.shield(self._connections.close())
                self._tasks.cancel()

    # Messages

    async def receive(self, message: Incoming) -> None:
        """Accept a message from a platform; returns when it is on the disk. Raises `DiskError`."""
        key = session_key(message, per_user=self.config.group_sessions_per_user)
        now = self._clock.wall()
        if not await self._access.is_allowed(message):
            await self._turn_away(message, key, now)
            return
        if self.platforms[message.address.platform].limits.requests and await self._is_repeated(message):
            return
        session = self._sessions.session(key, message.address)
        if refusal := self._access.unusable(message):
            await self._answer_now(message, key, refusal)
            return
        command = commands.parse(message.said)
        if command is not None and (problem := commands.misused(command)):
            await self._answer_now(message, key, problem)
            return
        if command is not None and command.at_once:
            if (await self.mailbox.take(message, key, now, done=True)).decision == "taken":
                await self._notices.answer(message, await self._do_at_once(command, session))
            return
        questions = session.questions
        if questions.waits and command is None and not message.attachments:
            if questions.unanswered:
                text = "An earlier question was not answered in time. To answer the current one, write "
                text += f"{questions.how_to_answer}."
                await self._answer_now(message, key, text)
            else:
                await self._answer_question(session, message, now)
            return
        limits = self.config.limits
        if command is None and (refusal := await self._access.over_cost(message.address.platform, message.user_id)):
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

    async def _answer_question(self, session: GatewaySession, message: Incoming, now: float) -> None:
        """Answer the model's question with a text. A message that arrives meanwhile is not an answer."""
        questions = session.questions
        questions.claim()
        taken = False
        try:
            taken = (await self.mailbox.take(message, session.key, now, done=True)).decision == "taken"
        finally:
            if not taken:
                questions.claim(False)
        if not taken:
            return
        if not questions.answer(message.said):
            await self._notices.answer(message, "The question is no longer open. Send this again if it is needed.")
        elif self.platforms[message.address.platform].limits.requests:
            await self._notices.answer(message, "Answered.")

    async def _is_repeated(self, message: Incoming) -> bool:
        """Return whether the gateway already has this request. If the request is answered, send its answer again.
        Otherwise, the repeated request waits for the answer."""
        taken = await self.mailbox.answered(message)
        if taken is None or not taken[0]:
            return taken is not None
        turn = self.chat.store.turns.of_message(taken[1], message.message_id) if taken[1] else None
        answer = "" if turn is None else turn.answer
        await self._notices.answer(
            message, answer or "(This message was answered before; its answer is no longer stored.)"
        )
        return True

    async def _refusal_of_job(self, platform: str, user_id: str) -> str:
        """Return why a person's job may not run now, or the empty string."""
        if not self.platforms[platform].limits.requests and not await self._access.is_listed(platform, user_id):
            return "The person who created the job may no longer write to the agent."
        return await self._access.over_cost(platform, user_id)

    async def _turn_away(self, message: Incoming, key: str, now: float) -> None:
        """Answer a stranger with a pairing code in a direct chat. In a group, strangers get no answer."""
        address = message.address
        logger.warning("%s: rejected a message from user %s, who is not allowed", address.platform, message.user_id)
        receipt = await self.mailbox.take(message, key, now, done=True)
        if address.chat_type != "dm" or receipt.decision != "taken":
            return
        code = await self.mailbox.pairings.code(address.platform, message.user_id, message.user_name, now)
        if code is not None:
            text = f"I do not know you yet. Ask the owner to run: palaestra gateway pair {code} (valid for an hour)."
            await self._notices.answer(message, text)

    async def _answer_now(self, message: Incoming, key: str, text: str) -> None:
        """Answer a message without a turn of the agent, and record it as answered. A repeated message is not answered
        again."""
        if (await self.mailbox.take(message, key, self._clock.wall(), done=True)).decision == "taken":
            await self._notices.answer(message, text)

    def _enqueue(self, key: str, address: ChatAddress, row: int) -> None:
        session = self._sessions.session(key, address)
        if row in session.waiting:
            return
        session.waiting.append(row)
        if not session.running:
            session.running = True
            self._tasks.start(self._serve_session(session), f"session {key}")

    async def _serve_session(self, session: GatewaySession) -> None:
        """Answer the messages that wait in a session. A message whose answer cannot be stored is tried again, so that
        the messages after it stay in order."""
        try:
            while session.waiting:
                await self._tasks.retried(
                    partial(self._serve_first, session), f"{session.key}: the answer to a message"
                )
                session.waiting.popleft()
        finally:
            session.running = False

    async def _serve_first(self, session: GatewaySession) -> None:
        while (waiting := await self.mailbox.read(session.waiting[0])) is not None:
            if waiting.unsent < MOST_UNSENT:
                await self._answer_message(session, waiting)
                return
            await self._clock.sleep(1.0)

    async def _answer_message(self, session: GatewaySession, waiting: Waiting) -> None:
        """Handle one message, either as a command or as a turn of the agent, and record the answers. An error becomes
        the answer. Raises `DiskError`."""
        message = waiting.message
        session.stopped = False
        if not message.job:
            session.questions.unanswered = bool(waiting.conversation)  # the earlier gateway may have asked in this turn
        try:
            notes = await self._sessions.begin(session, waiting)
            command = None if message.job else commands.parse(message.said)
            answer = await (
                self._turn(session, message) if command is None else self._run_command(command, session, message)
            )
            answer.texts[:0] = [*notes, f"(Scheduled job {message.job}:)"] if message.job else notes
            outgoing = outgoing_messages(message, answer, self.platforms)
        except PalaestraError as error:
            logger.warning("%s: %s", session.key, error)
            answer = AnswerParts([f"This message could not be answered: {error}"])
            outgoing = outgoing_messages(message, answer, self.platforms)
        except Exception:  # a bug: the other sessions continue
            logger.exception("%s: a message could not be answered", session.key)
            answer = AnswerParts(
                ["This message could not be answered because of an internal error; see the gateway's log."]
            )
            outgoing = outgoing_messages(message, answer, self.platforms)
            await self._notices.post(f"Session {session.key} had an internal error; see the gateway's log.")
        await self.mailbox.finish(waiting.row, message, outgoing, self._clock.wall(), answer.cost)
        self._outbox.wake(answered_chat(message, self.platforms))

    def _user_of(self, conversation: str) -> str:
        """Return the user id of a conversation's owner, without the platform."""
        return self.chat.store.find(conversation).user.partition(":")[2]

    async def _post_reports(self) -> None:
        """Send reports from conversations outside of turns."""
        while True:
            address, text = await self._sessions.reports.get()
            await self._tasks.retried(partial(self._notices.post, text, address), "a notice")

    # Turns

    async def _turn(self, session: GatewaySession, message: Incoming, again: JSON = None) -> AnswerParts:
        """Let the agent answer a message, or `again`, the content of an earlier one."""
        conversation = session.conversation
        assert conversation is not None  # `_begin` opened it
        async with self._typing(message.address):
            if session.stopped:
                return AnswerParts(["Stopped before it began."])
            content = again if again is not None else await self._message_content(conversation, message)
            ended = None
            async with aclosing(conversation.send(content, message_id=message.message_id)) as events:
                async for event in events:
                    if isinstance(event, TurnEnded):
                        ended = event
                    else:
                        await self._show_event(session, message, event)
            session.doing = ""
            assert ended is not None  # the last event of every turn
            return await self._answer_of(session, conversation, message, ended)

    async def _message_content(self, conversation: Conversation, message: Incoming) -> JSON:
        text, address = message.text, message.address
        if message.subject:
            text = f"Subject: {message.subject}\n\n{text}"
        if address.chat_type != "dm" and not message.job and not self.config.group_sessions_per_user:
            text = f"{message.user_name or message.user_id}: {text}"
        lines: list[str] = []
        if message.attachments and self.chat.store.turns.of_message(conversation.id, message.message_id) is None:
            lines = await files.put_uploads(await conversation.seat.sandbox(), message)
        return files.message_content(text, message, lines, images=self.config.model_sees_images)

    async def _show_event(self, session: GatewaySession, message: Incoming, event: Event) -> None:
        """Record what the agent is doing, for `/status`, and stream the answer's text if the platform supports it."""
        platform = self.platforms[message.address.platform]
        if isinstance(event, ToolBegun):
            session.doing = f"{event.name}: {event.preview}"
        elif isinstance(event, TextDelta):
            after_tool, session.doing = bool(session.doing), ""
            if platform.limits.streams:
                await platform.stream_text(message, f"\n\n{event.text}" if after_tool else event.text)
        elif isinstance(event, ReplyRestarted) and platform.limits.streams:  # a stream cannot take text back
            await platform.stream_text(message, f"\n\n{event.text}\n\n")

    async def _answer_of(
        self, session: GatewaySession, conversation: Conversation, message: Incoming, ended: TurnEnded
    ) -> AnswerParts:
        limits = self.platforms[message.address.platform].limits
        text, sent = await files.take_media(ended.text, conversation.seat.slot, limits.max_file_bytes)
        texts = [text] if text.strip() else []
        if ended.outcome == INTERRUPTED:
            texts.append("Stopped." if session.stopped else _CUT_OFF)
        elif ended.outcome != NATURAL:
            advice = _FULL if isinstance(conversation.failure, ContextExceeded) else "/retry runs it again."
            texts.append(f"(The turn ended early, {ended.outcome}: {ended.error.rstrip('.')}. {advice})")
        cost = 0.0 if ended.replayed else ended.cost or 0.0
        return AnswerParts(texts, sent, cost, ended.prompt_tokens, ended.completion_tokens, ended.outcome)

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

    async def _do_at_once(self, command: ChatCommand, session: GatewaySession) -> str:
        match command.name:
            case "help":
                return commands.help_text()
            case "stop":
                return await self._end_processes(session) if command.argument else session.stop_turn()
            case "status":
                return await self._status_text(session)
            case "answer":
                return session.questions.answer_named(command)
            case _:
                return session.questions.approve(command)

    async def _end_processes(self, session: GatewaySession) -> str:
        conversation = session.conversation
        ended = 0 if conversation is None else await self.chat.processes.kill_all(conversation.id)
        return f"Ended {ended} background process{'' if ended == 1 else 'es'}."

    async def _status_text(self, session: GatewaySession) -> str:
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
            lines.append(f"Scheduled job {job.title} ({job.schedule}): {job_json(job)['next_run'] or 'paused'}")
        return "\n".join(lines)

    async def _run_command(self, command: ChatCommand, session: GatewaySession, message: Incoming) -> AnswerParts:
        """Run a command that waits for the turns before it."""
        conversation = session.conversation
        assert conversation is not None  # `_begin` opened it
        if command.name == "new":
            await self._sessions.end(session)
            now = self._clock.wall()
            await self.mailbox.use_session(SessionRow(session.key, "", message.address, now))
            return AnswerParts(["A new session begins with your next message."])
        if command.name == "model":
            return AnswerParts([await choices.choose_model(self.chat, conversation, command.argument)])
        if command.name == "toolsets":
            return AnswerParts([await choices.choose_toolsets(self.config, self.chat, conversation, command.argument)])
        if command.name == "undo":
            taken = await conversation.undo()
            return AnswerParts(["There is nothing to undo." if taken is None else "The last message was undone."])
        if command.name == "compact":
            async with self._typing(message.address):
                summary = await conversation.compact()
            cost = float(conversation.history.turns()[0].report.get("cost") or 0.0)
            return AnswerParts([f"The history was replaced with this summary:\n\n{summary}"], cost=cost)
        if self.chat.store.turns.of_message(conversation.id, message.message_id) is not None:
            return await self._turn(session, message, again="")  # the gateway was killed during this turn
        content = await conversation.undo()
        if content is None:
            return AnswerParts(["There is no message to answer again."])
        return await self._turn(session, message, again=content)

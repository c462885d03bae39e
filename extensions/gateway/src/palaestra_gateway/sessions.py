"""The sessions of a gateway: each is one chat, or one person in a group, with a conversation that may change.

A session's conversation is reset by the policy of its platform, and closed while nobody writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime

from palaestra_chat.conversation import Conversation, People
from palaestra_chat.service import ChatService
from palaestra_gateway import choices, files
from palaestra_gateway.config import GatewayConfig
from palaestra_gateway.mailbox import Mailbox, SessionRow, Waiting
from palaestra_gateway.notices import Notices
from palaestra_gateway.platform import ChatAddress
from palaestra_gateway.questions import Questions
from palaestra_slots.core.clock import Clock
from palaestra_slots.core.errors import SandboxError

logger = logging.getLogger(__name__)

SWEEP_EVERY_S = 60.0
CLOSE_AFTER_S = 3600.0
"""The time, in seconds, after which an idle conversation without a sandbox is closed; the next message reopens it."""


@dataclass(slots=True)
class GatewaySession:
    """A session of this process. `used_at` is the monotonic time of its last use, in seconds, or None before the first
    message that this process gets. `waiting` has the rows of the mailbox that are to be answered."""

    key: str
    address: ChatAddress
    questions: Questions
    waiting: deque[int] = field(default_factory=deque)
    running: bool = False
    stopped: bool = False
    used_at: float | None = None
    conversation: Conversation | None = None
    doing: str = ""

    def stop_turn(self) -> str:
        """Stop the running turn; returns the reply to the chat."""
        if not self.running:
            return "Nothing is running in this chat."
        self.stopped = True
        self.questions.deny()
        if self.conversation is not None:
            self.conversation.interrupt()
        return "Stopping."


class GatewaySessions:
    """All sessions of this process, by key. `reports` has what conversations report outside of turns, such as
    new output of background processes, with the chat that gets it."""

    def __init__(
        self, config: GatewayConfig, mailbox: Mailbox, chat: ChatService, notices: Notices, clock: Clock
    ) -> None:
        self.reports: asyncio.Queue[tuple[ChatAddress, str]] = asyncio.Queue()
        self._config, self._mailbox, self._chat, self._notices = config, mailbox, chat, notices
        self._clock = clock
        self._all: dict[str, GatewaySession] = {}

    def __len__(self) -> int:
        return len(self._all)

    def session(self, key: str, address: ChatAddress) -> GatewaySession:
        """Return the session with this key. If there is none, it begins in the chat `address`."""
        if key not in self._all:
            questions = Questions(address, self._notices, self._config.approval_timeout_s)
            self._all[key] = GatewaySession(key, address, questions)
        return self._all[key]

    async def recover(self) -> None:
        """Open the conversations whose sandboxes an earlier gateway left behind. Reports on their background processes
        then reach the chats, and a session's reset ends its sandbox."""
        if not self._chat.lasting:
            return
        await self._chat.start()
        for row in await self._mailbox.sessions():
            record = self._chat.store.get(row.conversation)
            if record is not None and record.settings.get("sandbox"):
                session = self.session(row.key, row.address)
                session.conversation = self.open(session, row.conversation, "")

    async def begin(self, session: GatewaySession, waiting: Waiting) -> list[str]:
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
                await self.end(session)
                if self._config.reset_policy(session.address.platform, session.address.chat_type).notify:
                    why = "there was no message for a long time" if reason == "idle" else "a new day has begun"
                    notes.append(f"(A new session: {why}.)")
        if current and self._chat.store.get(current) is None:
            notes.append("(A new session: the earlier conversation is no longer stored.)")
            current = ""
        conversation = session.conversation
        if conversation is None or conversation.id != current:
            session.conversation = conversation = self.open(session, current, message.user_id)
        session.used_at = monotonic
        await self._mailbox.begin(waiting.row, SessionRow(session.key, conversation.id, message.address, now))
        return notes

    async def _reset_reason(self, session: GatewaySession, row: SessionRow) -> str | None:
        """Return why the session must be reset, or None. A background process that is young enough prevents a reset."""
        policy = self._config.reset_policy(row.address.platform, row.address.chat_type)
        now = self._clock.wall()
        idle_s = now - row.last_used if session.used_at is None else self._clock.monotonic() - session.used_at
        reason = policy.reason(idle_s, datetime.fromtimestamp(now, UTC).astimezone())
        if reason is None or not row.conversation:
            return None
        max_age_s = policy.bg_process_max_age_hours * 3600
        return None if await self._chat.processes.has_active_for_session(session.key, max_age_s) else reason

    def open(self, session: GatewaySession, conversation: str, user_id: str) -> Conversation:
        """Return the stored conversation with this id, or a new conversation if the id is empty."""
        people = People(
            approve=session.questions.ask_approval,
            answer=session.questions.ask,
            notice=lambda notice: self.reports.put_nowait((session.address, notice.text)),
        )
        if conversation:
            opened = Conversation.open(self._chat, conversation, people)
            choices.correct(self._config, self._chat, opened)
            return opened
        prompt = "\n\n".join(each for each in (self._chat.settings.system_prompt, files.INSTRUCTIONS) if each)
        user = f"{session.address.platform}:{user_id}"
        chosen = choices.carried_over(self._config, self._chat, session.key)
        return Conversation.begin(self._chat, people, key=session.key, user=user, system=prompt, settings=chosen)

    async def end(self, session: GatewaySession) -> None:
        """Close the session's conversation with its sandbox and processes."""
        row = await self._mailbox.session(session.key)
        if session.conversation is None and row is not None and self._chat.store.get(row.conversation) is not None:
            session.conversation = self.open(session, row.conversation, "")
        conversation, session.conversation = session.conversation, None
        if conversation is not None:
            if self._chat.lasting and conversation.history.record.settings.get("sandbox"):
                try:
                    await conversation.seat.sandbox()  # takes over an earlier gateway's sandbox, which `close` ends
                except SandboxError as error:  # a new session must not depend on a sandbox that is broken
                    logger.warning("%s: the earlier sandbox was not taken over: %s", session.key, error)
            await conversation.close()

    async def sweep(self) -> None:
        """End sessions whose policy requires it, even without a new message, and close idle conversations that have no
        sandbox."""
        while True:
            await self._clock.sleep(SWEEP_EVERY_S)
            for session in list(self._all.values()):
                if session.running or session.conversation is None:
                    continue
                row = await self._mailbox.session(session.key)
                if session.running or row is None:
                    continue
                if await self._reset_reason(session, row) and not session.running:
                    await self.end(session)
                elif self._needs_nothing(session):
                    conversation, session.conversation = session.conversation, None
                    await conversation.close()

    def _needs_nothing(self, session: GatewaySession) -> bool:
        """Return whether the session's conversation can be closed until the next message."""
        idle_s = self._clock.monotonic() - (session.used_at or 0.0)
        conversation = session.conversation
        return (
            not session.running and conversation is not None and not conversation.seat.slot and idle_s > CLOSE_AFTER_S
        )

"""`Platform`: a service that carries messages between people and the gateway, such as Matrix or e-mail.

A platform knows nothing of sessions, models or permissions. Its rules, which `PlatformConformance` checks:

- `start` returns once messages can arrive. It raises `PlatformRefused` for a wrong token or address, and
  `PlatformUnavailable` if the server does not answer.
- Each message is handed to `deliver` with the platform's own id. `deliver` returns when the message is on the disk;
  only then does the platform acknowledge it. A message that arrives twice has the same id, chat and thread both times.
- Sending raises `PlatformUnavailable` if a later try can succeed (also after the token was revoked, because the owner
  can restore it), and `PlatformRefused` if no later try can. `key` identifies the message: if the platform's API
  accepts such a key (`PlatformLimits.idempotent`), two sends with the same key deliver one message.
- `stop` is idempotent. Nothing is delivered after it returns.
- Where possible, the server stores how far a bot has read, through acknowledgements or in the bot's account data. A
  platform whose server cannot do that stores it in the gateway's mailbox (`KeepsNotes`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, runtime_checkable
from urllib.parse import quote

from palaestra_chat.turn_events import NATURAL

ChatType: TypeAlias = Literal["dm", "group", "channel"]


@dataclass(frozen=True, slots=True)
class ChatAddress:
    """The target of messages: a chat of a platform, or a thread in it."""

    platform: str
    chat_id: str
    chat_type: ChatType = "dm"
    thread_id: str = ""


_MAX_QUOTE = 2000
"""The maximum number of characters of a quoted message that the agent reads."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file. Images have a `media_type` that begins with `image/`."""

    name: str
    media_type: str
    data: bytes

    @property
    def is_image(self) -> bool:
        return self.media_type.startswith("image/")

    @property
    def is_audio(self) -> bool:
        return self.media_type.startswith("audio/") or self.media_type.partition(";")[0] == "application/ogg"


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message from a person. `message_id` is unique in its chat. `problem` names the part that could not be read. For
    a `trusted` message the platform has checked the sender's secret, so no allow-list is needed. The message of a
    scheduled `job` has no sender; its answer goes to `deliver`, or nowhere if that is None. An e-mail that begins a
    conversation has a `subject`."""

    address: ChatAddress
    message_id: str
    user_id: str
    text: str = ""
    attachments: tuple[Attachment, ...] = ()
    user_name: str = ""
    problem: str = ""
    trusted: bool = False
    job: str = ""
    deliver: ChatAddress | None = None
    subject: str = ""

    @property
    def said(self) -> str:
        """The text without the quoted lines at its end: a command or an answer may be a reply to a message."""
        return "\n".join(without_quote(self.text.rstrip().split("\n")))


def without_quote(lines: list[str]) -> list[str]:
    """Return the lines before the quoted and empty ones at the end."""
    end = len(lines)
    while end and (lines[end - 1].startswith(">") or not lines[end - 1].strip()):
        end -= 1
    return lines[:end]


def with_quote(text: str, quoted: str | None) -> str:
    """Return a person's text, followed by the beginning of the message that it replies to, in lines with `>`."""
    lines = [f"> {line}" for line in (quoted or "")[:_MAX_QUOTE].strip().splitlines()]
    return "\n".join([text, "", *lines]) if lines else text


@dataclass(frozen=True, slots=True)
class Answers:
    """The incoming message that an outgoing message answers, whether this is the `last` part of the answer, the tokens
    of all model calls of the turn, and how the turn ended, in the words of `TurnEnded.outcome`."""

    message_id: str
    last: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    outcome: str = NATURAL


@dataclass(frozen=True, slots=True)
class PlatformLimits:
    """The limits and features of a platform. `unit` is what `max_text` counts: characters, UTF-16 units or bytes of
    UTF-8. With `requests`, each incoming message is a request that waits for its answer."""

    max_text: int
    unit: Literal["characters", "utf16", "utf8"] = "characters"
    max_file_bytes: int = 20 << 20
    edits: bool = False
    typing: bool = False
    streams: bool = False
    idempotent: bool = False
    requests: bool = False


Deliver: TypeAlias = Callable[[Incoming], Awaitable[None]]
"""Accepts a message; returns once it is on the disk. Raises `DiskError`."""


class Platform(Protocol):
    """A platform. Implementations follow the rules in the module's docstring."""

    @property
    def name(self) -> str:
        """The name in the configuration and in session keys."""
        ...

    @property
    def limits(self) -> PlatformLimits: ...

    async def start(self, deliver: Deliver) -> None:
        """Connect and begin to deliver messages."""
        ...

    async def stop(self) -> None:
        """Disconnect. Messages that are not acknowledged arrive again after the next start."""
        ...

    async def send_text(self, address: ChatAddress, text: str, *, key: str, answers: Answers | None = None) -> str:
        """Send Markdown of at most `limits.max_text` units. Returns the id that the platform gives the message."""
        ...

    async def edit_text(self, address: ChatAddress, message_id: str, text: str) -> None:
        """Replace the text of a message that the gateway sent. Called only if `limits.edits` is true."""
        ...

    async def send_file(
        self, address: ChatAddress, file: Attachment, *, key: str, answers: Answers | None = None
    ) -> str:
        """Send a file of at most `limits.max_file_bytes`; the chat displays an image. Returns the message's id."""
        ...

    async def stream_text(self, message: Incoming, text: str) -> None:
        """Show a piece of the answer to `message`. The whole answer is sent later. Called only if `limits.streams` is
        true."""
        ...

    async def set_typing(self, address: ChatAddress, typing: bool) -> None:
        """Show or hide a notice that an answer is being written. Called only if `limits.typing` is true. Errors are
        ignored."""
        ...


class PlatformNotes(Protocol):
    """A few strings by name that a platform keeps in the mailbox from one start to the next."""

    async def read(self) -> dict[str, str]: ...

    async def write(self, name: str, value: str) -> None:
        """Store a string. Returns once it survives the death of this process. Raises `DiskError`."""
        ...


@runtime_checkable
class KeepsNotes(Protocol):
    """A platform whose `notes` the gateway sets before `start`."""

    notes: PlatformNotes | None


@runtime_checkable
class KeepsFiles(Protocol):
    """A platform whose `folder`, in the gateway's home, the gateway sets before `start`. The platform makes it."""

    folder: Path | None


def session_key(message: Incoming, *, per_user: bool = True, agent: str = "main") -> str:
    """Return the key of a message's session: `agent:main:PLATFORM:TYPE:CHAT[:THREAD][:USER]`.

    With `per_user`, each member of a group has a separate session. A colon or per cent sign in an id is written `%3A`
    or `%25`, so that two sessions never share a key.
    """
    address = message.address
    parts = ["agent", agent, address.platform, address.chat_type, address.chat_id]
    if address.thread_id:
        parts.append(address.thread_id)
    if per_user and address.chat_type != "dm":
        parts.append(message.user_id)
    return ":".join(_escaped(part) for part in parts)


def _escaped(part: str) -> str:
    return part.replace("%", "%25").replace(":", quote(":", safe=""))

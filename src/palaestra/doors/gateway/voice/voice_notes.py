"""`VoiceNotes`: turns spoken messages into text before the turn, and answers into voice messages.

Invariants: a failure of the speech server loses no message, because the turn runs without the transcript, and the text
of an answer is sent before its recording. A transcript is stored by the hash of its audio as soon as it arrives, so a
gateway that is killed does not request it again. A recording is stored before it is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from palaestra.core.clock import Clock
from palaestra.core.errors import ToolUnavailable
from palaestra.doors.chat.conversation import Conversation
from palaestra.doors.gateway.access import megabytes
from palaestra.doors.gateway.long_replies import split_reply
from palaestra.doors.gateway.mailbox import Mailbox, Outgoing
from palaestra.doors.gateway.platform import Attachment, Incoming, PlatformLimits
from palaestra.doors.gateway.voice.audio_length import audio_seconds, is_ogg_opus
from palaestra.doors.gateway.voice.speech_client import SpeechClient
from palaestra.doors.gateway.voice.speech_config import MODES, SpeechConfig
from palaestra.tools.tool import ToolMistake

logger = logging.getLogger(__name__)

_MEDIA_TYPES = {
    "opus": ("ogg", "audio/ogg"), "mp3": ("mp3", "audio/mpeg"), "aac": ("aac", "audio/aac"),
    "flac": ("flac", "audio/flac"), "wav": ("wav", "audio/wav"),
}  # fmt: skip
_CODE = re.compile(r"^(```|~~~).*?(?:^\1\s*$|\Z)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[([^\[\]\n]*)\]\([^)\s]{0,2000}\)")
_MARKS = re.compile(
    r"^[ \t]*(?:#{1,6}|>|[-*+])[ \t]+|(?<![\w*_`])[*_`]{1,3}(?=\S)|(?<=\S)[*_`]{1,3}(?![\w*_`])", re.MULTILINE
)
_MOST_READ = 20_000
"""The maximum number of characters of an answer among which the spoken ones are looked for."""
_MOST_TRANSCRIBED = 50_000
"""The maximum number of characters of a transcript: more than an hour of speech."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A message with the transcripts of its audio in its text, and notes for its sender about audio without one."""

    message: Incoming
    notes: list[str]


class VoiceNotes:
    """Speech in both directions with the server of `config`; without one, audio is only a file."""

    def __init__(self, config: SpeechConfig | None, mailbox: Mailbox, clock: Clock) -> None:
        self._config = config or SpeechConfig()
        self._client = None if config is None else SpeechClient(config)
        self._mailbox, self._clock = mailbox, clock
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # Incoming messages

    async def heard(self, message: Incoming) -> Heard:
        """Return a message with its audio transcribed."""
        recordings = [file for file in message.attachments if file.is_audio]
        if self._client is None or not self._config.transcription_model or not recordings:
            return Heard(message, [])
        texts, notes = [message.text] if message.text.strip() else [], []
        problem = self._too_long(recordings)
        for file in recordings:
            text, why = ("", problem) if problem else await self._transcript(self._client, file)
            if why:
                texts.append(f"[The user sent a voice message. It could not be transcribed: {why}]")
                notes.append(f"(Your voice message could not be transcribed: {why})")
            else:
                text = text or "(no recognisable speech)"
                texts.append(f"[The user spoke this in a voice message; it was transcribed:]\n\n{text}")
        return Heard(replace(message, text="\n".join(texts)), notes)

    def _too_long(self, recordings: list[Attachment]) -> str:
        """Return why recordings are not transcribed, or the empty string."""
        size, most = sum(len(file.data) for file in recordings), self._config.max_bytes
        if size > most:
            return f"it has {megabytes(size)}; at most {megabytes(most)} are transcribed."
        seconds = sum(audio_seconds(file.data) or 0.0 for file in recordings)
        if seconds > self._config.max_seconds:
            return f"it lasts {seconds:.0f} s; at most {self._config.max_seconds:.0f} s are transcribed."
        return ""

    async def _transcript(self, client: SpeechClient, file: Attachment) -> tuple[str, str]:
        """Return the text of a recording, and why there is none, or the empty string."""
        about = f"{self._config.transcription_model}\0{self._config.language or ''}\0".encode()
        key = hashlib.sha256(about + file.data).hexdigest()
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:  # the same recording is requested once, also by messages that arrive together
            known = await self._mailbox.do(
                lambda db: db.execute("select text from transcripts where hash = ?", (key,)).fetchone()
            )
            if known is not None:
                return str(known[0]), ""
            try:
                text = (await client.transcribe(file.data, file.media_type))[:_MOST_TRANSCRIBED]
            except (ToolMistake, ToolUnavailable) as error:
                logger.warning("a voice message was not transcribed: %s", error)
                return "", str(error)
            row = (key, text, self._clock.wall())
            await self._mailbox.do(lambda db: db.execute("insert or replace into transcripts values (?, ?, ?)", row))
            return text, ""

    # Answers

    def choose(self, conversation: Conversation, mode: str) -> str:
        """Choose when the answers of a conversation are also spoken, or show the choice. Returns the reply."""
        if self._client is None or not self._config.speech_model:
            return "Answers cannot be spoken here: the gateway has no setting speech.speech_model."
        if mode and mode not in MODES:
            return f"Nothing was changed. Use one of /voice {', /voice '.join(MODES)}."
        if mode:
            conversation.history.change_settings(voice=mode)
        chosen = self._mode(conversation)
        effect = {
            "on": "Every answer is also spoken.",
            "off": "No answer is spoken.",
            "auto": "The answer to a voice message is also spoken.",
        }
        return f"Voice is {chosen}. {effect[chosen]}"

    def _mode(self, conversation: Conversation) -> str:
        return str(conversation.history.record.settings.get("voice") or self._config.replies)

    def to_say(self, conversation: Conversation, message: Incoming, text: str, limits: PlatformLimits) -> str:
        """Return which part of an answer is to be spoken: the empty string if the person does not want it, or if the
        platform cannot send it."""
        if self._client is None or not self._config.speech_model or message.job:
            return ""
        if limits.requests or not limits.max_file_bytes:
            return ""
        mode, spoken = self._mode(conversation), any(file.is_audio for file in message.attachments)
        if mode == "off" or (mode == "auto" and not spoken):
            return ""
        pieces = split_reply(speakable(text[:_MOST_READ]), PlatformLimits(self._config.max_spoken_chars))
        return pieces[0].strip() if pieces else ""

    async def voiced(self, message: Outgoing, limits: PlatformLimits) -> Outgoing:
        """Return an outgoing message with the recording of its `spoken` text, or with a note if there is none. The
        chat's later messages wait for it, so this takes no longer than a request and a second."""
        try:
            if self._client is None or not self._config.speech_model:
                raise ToolMistake("the gateway has no setting speech.speech_model any more")
            async with asyncio.timeout(self._config.timeout_s + 1):
                data = await self._client.speak(message.spoken)
            if len(data) > limits.max_file_bytes:
                raise ToolMistake(f"the recording has {megabytes(len(data))}, more than the platform accepts")
        except (ToolMistake, ToolUnavailable, TimeoutError) as error:
            why = str(error) or f"the speech server took more than {self._config.timeout_s:g} s"
            logger.warning("%s: an answer was not spoken: %s", message.address.platform, why)
            return replace(message, spoken="", text=f"(This answer could not be spoken: {why})")
        suffix, media_type = _MEDIA_TYPES[self._config.speech_format]
        file = Attachment(f"answer.{suffix}", media_type, data, voice=is_ogg_opus(data))
        return replace(message, spoken="", file=file)


def speakable(text: str) -> str:
    """Return Markdown as text to read aloud: without code blocks, the addresses of links, and marks."""
    linked = _LINK.sub(r"\1", _CODE.sub("", text))
    return _MARKS.sub("", _LINK.sub(r"\1", linked)).strip()  # twice: a picture may be the text of a link

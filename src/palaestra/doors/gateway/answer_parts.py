"""The parts of an answer, and the messages by which they reach a chat."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from palaestra.doors.gateway.access import megabytes
from palaestra.doors.gateway.long_replies import split_reply
from palaestra.doors.gateway.mailbox import Outgoing
from palaestra.doors.gateway.platform import Answers, Attachment, ChatAddress, Incoming, Platform


@dataclass(slots=True)
class AnswerParts:
    """The texts and files of an answer, the text that is also `spoken`, and what its turn used."""

    texts: list[str]
    files: list[Attachment] = field(default_factory=list)
    spoken: str = ""
    cost: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0


def answered_chat(message: Incoming, platforms: Mapping[str, Platform]) -> ChatAddress:
    """Return the chat that gets the answer. If the platform of a job's target is no longer enabled, the answer goes to
    the chat of the message."""
    to = message.deliver
    return message.address if to is None or to.platform not in platforms else to


def outgoing_messages(message: Incoming, answer: AnswerParts, platforms: Mapping[str, Platform]) -> list[Outgoing]:
    """Return the messages of an answer: at least one, unless the answer of a job goes to no chat. Their keys are
    derived from the message that is answered. The answer of a job is not a reply to a person's message."""
    if message.job and message.deliver is None:
        return []
    address = answered_chat(message, platforms)
    limits = platforms[address.platform].limits
    origin = message.address
    identity = f"{origin.platform}\0{origin.chat_id}\0{origin.thread_id}\0{message.message_id}"
    stem = hashlib.sha256(identity.encode(errors="replace")).hexdigest()[:24]
    texts = [*answer.texts]
    small = [file for file in answer.files if len(file.data) <= limits.max_file_bytes]
    large = [file for file in answer.files if len(file.data) > limits.max_file_bytes]
    texts += [f"{file.name} has {megabytes(len(file.data))}, more than {address.platform} accepts." for file in large]
    pieces = split_reply("\n\n".join(text.rstrip() for text in texts), limits)
    if not pieces and not small:
        pieces = ["(The model gave no answer.)"]
    contents = [
        *({"text": text} for text in pieces),
        *({"file": file} for file in small),
        *([{"spoken": answer.spoken}] if answer.spoken else []),
    ]
    tokens = answer.prompt_tokens, answer.completion_tokens
    return [
        Outgoing(
            f"{stem}-{number}",
            address,
            answers=None if message.job else Answers(message.message_id, number == len(contents) - 1, *tokens),
            **content,  # type: ignore[arg-type]
        )
        for number, content in enumerate(contents)
    ]

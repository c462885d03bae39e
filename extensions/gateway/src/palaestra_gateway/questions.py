"""Questions of a session's agent to the people in its chat: whether a command may run, and what the model asks.

A code names each question, so that a late answer does not count for the next one.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import TypeVar

from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest
from palaestra_gateway.commands import ChatCommand
from palaestra_gateway.notices import Notices
from palaestra_gateway.platform import ChatAddress
from palaestra_slots.core.printable import escaped

T = TypeVar("T")

MOST_SHOWN = 20_000
"""The maximum number of characters of a command or call that waits for approval. Longer ones are denied, because nobody
would see what they approve."""

_CODE_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"


class Questions:
    """The questions to one chat. At most one approval and one question wait; each waits up to `timeout_s` seconds.

    `unanswered` means that the turn asked an earlier question without getting an answer, so a text may be the answer to
    that question.
    """

    def __init__(self, address: ChatAddress, notices: Notices, timeout_s: float) -> None:
        self.unanswered = False
        self._address, self._notices, self._timeout_s = address, notices, timeout_s
        self._approval: asyncio.Future[ApprovalAnswer] | None = None
        self._approval_code = ""
        self._question: asyncio.Future[str] | None = None
        self._code = ""
        self._claimed = False

    @property
    def waits(self) -> bool:
        """Whether the model's question waits for an answer that no message has yet."""
        return self._question is not None and not self._question.done() and not self._claimed

    @property
    def how_to_answer(self) -> str:
        """The command that answers the model's question."""
        return f"/answer {self._code} TEXT"

    async def ask_approval(self, request: ApprovalRequest) -> ApprovalAnswer:
        """Ask the chat whether a command or call may run. If no answer arrives in time, it is denied. The answer names
        the question by a code, so that a late answer does not count for the next question."""
        shown = "\n".join(map(escaped, request.command.split("\n")))
        shown = shown.replace("```", r"\x60" * 3)  # nothing leaves the code block
        asked = escaped(request.question)
        if len(shown) > MOST_SHOWN:
            await self._notices.post(
                f"Denied: {asked}. It has {len(shown)} characters, but at most {MOST_SHOWN} are shown for approval.",
                self._address,
            )
            return ApprovalAnswer.DENY
        block = f"```\n{shown}\n```"
        code = self._approval_code = "".join(secrets.choice(_CODE_LETTERS) for _ in range(3))
        text = (
            f"May this run? {request.asked(asked, block)}\n"
            f"/approve {code}, /approve {code} session, /approve {code} always or /deny; without an answer in "
            f"{self._timeout_s / 60:g} min it does not run."
        )
        self._approval = asyncio.get_running_loop().create_future()
        try:
            await self._notices.post(text, self._address)
            async with asyncio.timeout(self._timeout_s):
                return await self._approval
        except TimeoutError:
            return ApprovalAnswer.DENY
        finally:
            self._approval = None

    async def ask(self, question: str, choices: Sequence[str]) -> str | None:
        """Ask the chat the model's question, and return the answer, or None if no answer arrives in time. The next
        message in the chat is the answer. But if an earlier question of the turn was not answered, an answer must name
        its question by the code."""
        code = self._code = "".join(secrets.choice(_CODE_LETTERS) for _ in range(3))
        lines = [question, *(f"- {choice}" for choice in choices)]
        if self.unanswered:
            lines.append(f"(Answer with /answer {code} TEXT, because an earlier question was not answered.)")
        self._question, self._claimed = asyncio.get_running_loop().create_future(), False
        try:
            await self._notices.post("\n".join(lines), self._address)
            async with asyncio.timeout(self._timeout_s):
                return await self._question
        except TimeoutError:
            self.unanswered = True
            return None
        finally:
            self._question = None

    def approve(self, command: ChatCommand) -> str:
        """Allow or deny the command that waits for approval; returns the reply to the chat."""
        if self._approval is None or self._approval.done():
            return "There is no command to approve in this chat."
        code, _, kind = command.argument.lower().partition(" ")
        answers = {"": ApprovalAnswer.ONCE, **{each.value: each for each in ApprovalAnswer}}
        answer = answers.get(kind.strip())
        if command.name == "deny":
            code, answer = code or self._approval_code, ApprovalAnswer.DENY
        if code != self._approval_code or answer is None:
            code = self._approval_code
            return (
                f"Nothing is approved. Write /approve {code}, /approve {code} session, /approve {code} always or /deny."
            )
        _settle(self._approval, answer)
        return "Not allowed." if answer is ApprovalAnswer.DENY else "Allowed."

    def answer_named(self, command: ChatCommand) -> str:
        """Pass an answer to the model's open question if the code is right; returns the reply to the chat."""
        if self._question is None or self._question.done():
            return "There is no question to answer in this chat."
        code, _, text = command.argument.partition(" ")
        if code.lower() != self._code or not text.strip():
            return f"Nothing is answered. Write /answer {self._code} TEXT."
        _settle(self._question, text.strip())
        return "Answered."

    def claim(self, claimed: bool = True) -> None:
        """Reserve the model's question for a message that is being stored, or give it up, so that only one message
        becomes its answer."""
        self._claimed = claimed

    def answer(self, text: str) -> bool:
        """Answer the model's question. Returns whether it was still open."""
        if self._question is None or self._question.done():
            return False
        _settle(self._question, text)
        return True

    def deny(self) -> None:
        """Deny the command that waits for approval, if any."""
        if self._approval is not None:
            _settle(self._approval, ApprovalAnswer.DENY)


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)

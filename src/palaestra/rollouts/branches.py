"""The conversations of one rollout as they ask the model: its own, which is branch 0, and those of its sub-agents.

A turn that gives work away is long and holds many replies, so each is written down when it arrives and a rollout that
was cut off in the middle does not pay for them again: those of sub-agents, and the rollout's own that they work for.
Every other turn is written down once, when it ends. Not for the turns themselves (`turns`) or for giving them back
(`recall`). Invariant: a reply is handed on as it came, and a sub-agent asks nothing before its work is on record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from palaestra.agent.replies import Reply, read_reply
from palaestra.core.types import JSON, Message
from palaestra.inference.engine import ChatCompletion, ChatServer
from palaestra.inference.ledger import SampledTurn
from palaestra.rollouts.resume.recorded_chat import Recall, checksum


@dataclass(frozen=True, slots=True)
class BranchReply:
    """One reply to the conversation with the checksum `asked`, and what was sampled for it, where the server gives
    tokens. `known`: it was recorded before."""

    branch: int
    asked: str
    reply: Reply
    sampled: list[SampledTurn]
    known: bool


@dataclass(slots=True)
class _Asked:
    """A reply and the conversation it answers: the first `count` messages, since a history grows afterwards."""

    messages: Sequence[Message]
    count: int
    completion: ChatCompletion
    known: bool


class Branches:
    """Of one rollout. `sampled` gives what was sampled since it was last asked; `keep` writes a reply down."""

    def __init__(
        self, recall: Recall | None, sampled: Callable[[], list[SampledTurn]], keep: Callable[[BranchReply], None]
    ) -> None:
        self._recall = recall
        self._sampled = sampled
        self._keep = keep
        self._own: _Asked | None = None
        self._own_kept = False

    def chat(self, server: ChatServer, branch: int) -> ChatServer:
        """The server as the conversation of this branch asks it."""
        return BranchChat(server.inner if isinstance(server, BranchChat) else server, self, branch)

    def let_go(self) -> None:
        """The rollout has ended: forget it, since it holds this. Nothing is asked any more."""
        del self._sampled, self._keep

    def turned(self) -> bool:
        """The rollout's own turn has ended: whether its reply was on record before."""
        own, self._own = self._own, None
        return own is not None and own.known

    def recalled(self, branch: int, messages: Sequence[Message]) -> ChatCompletion | None:
        """What was said to this conversation, where that is on record apart from the recorded turns."""
        if branch and self._own is not None and not self._own_kept:
            self._own_kept = True
            self._note(0, self._own)
        return None if self._recall is None else self._recall.beside(branch, messages)

    def replied(self, branch: int, asked: _Asked) -> None:
        """A reply has come. The rollout's own is noted when a sub-agent asks, which few turns come to."""
        asked.known = asked.known or (self._recall is not None and not self._recall.caught_up)
        if branch:
            self._note(branch, asked)
        else:
            self._own, self._own_kept = asked, False

    def _note(self, branch: int, asked: _Asked) -> None:
        sampled = self._sampled()
        if sampled and self._recall is not None:
            given = [self._recall.gave(each) for each in sampled]
            asked.known = asked.known or all(given)
        said = list(asked.messages[: asked.count])
        turn = 1 + sum(message.get("role") == "assistant" for message in said)
        self._keep(BranchReply(branch, checksum(said), read_reply(asked.completion, turn), sampled, asked.known))


class BranchChat:
    """A chat server as one conversation asks it. Everything else of it is the server's own."""

    def __init__(self, inner: ChatServer, branches: Branches, branch: int) -> None:
        self.inner = inner
        self._branches = branches
        self._branch = branch

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        """The reply on record, or the server's. Raises `EngineReplyError` for a sub-agent's that is none."""
        count, completion = len(messages), self._branches.recalled(self._branch, messages)
        known = completion is not None
        if completion is None:
            completion = await self.inner.chat_completion(messages=messages, **request)
        self._branches.replied(self._branch, _Asked(messages, count, completion, known))
        return completion

    def __getattr__(self, name: str) -> JSON:
        return getattr(self.inner, name)

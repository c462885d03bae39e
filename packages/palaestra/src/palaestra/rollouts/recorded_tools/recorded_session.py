"""Recorded replies for one rollout. Each call of a tool that reaches outside this machine gets a key, by which its
recorded reply is found. The run's policy (`recording_policy.py`) answers the call.

Invariants: the key of a call depends only on the call and on the rollout's earlier calls. The calls of its user are
counted in each turn anew, because a resumed rollout does not ask its user again for recorded messages. So a rollout
that repeats its calls gets the same answers, independently of other rollouts. Equal calls outside a session have equal
keys, however their arguments are written.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

from palaestra.rollouts.recorded_tools.recording_file import RecordedCall
from palaestra.tools.runtime.runtime import JUDGING, CheckedCall, Next
from palaestra.tools.tool import ToolOutcome, ToolReply
from palaestra_slots.core.types import JSON

Ask: TypeAlias = Callable[[], Awaitable[ToolOutcome]]
"""Makes the real call. A failed call is an outcome too; an infrastructure failure is raised."""


Policy: TypeAlias = Callable[[RecordedCall, Ask], Awaitable[ToolOutcome]]
"""Answers one call that has no reply yet. Raises `InfraError`."""


MODEL = "chat_model"
"""The tool by which a model that the environment asks is called."""

_CALLS_PER_TURN = 100_000
_user_turn: ContextVar[int] = ContextVar("user_turn", default=0)


def judges(call: RecordedCall) -> bool:
    """Return whether a check asks a model with this call, which is made now."""
    return call.tool == MODEL and JUDGING.get()


def unpaid(reply: JSON) -> ToolOutcome:
    """Return a model's recorded reply for a rollout that does not pay for it."""
    return ToolOutcome.of({**reply, "tokens": [0, 0], "cached": True})


@contextmanager
def in_user_turn(turn: int) -> Iterator[None]:
    """Number the calls of the block as those of the user in this turn, which counts from 1."""
    token = _user_turn.set(turn)
    try:
        yield
    finally:
        _user_turn.reset(token)


class RolloutWorld:
    """A `ToolMiddleware` that gives the calls of one rollout their keys, counted separately for each conversation."""

    def __init__(self, rollout: str, policy: Policy, *, replayed: bool = False) -> None:
        self.rollout = rollout
        self.replayed = replayed
        self._policy = policy
        self._made: Counter[tuple[str, str, int]] = Counter()
        self._sessions: dict[tuple[str, str], str] = {}

    async def __call__(self, call: CheckedCall, then: Next) -> ToolOutcome:
        """Answer a call with the run's policy if its tool reaches outside this machine; otherwise, make the call.
        Raises `InfraError` if a strict recording lacks the call."""
        tool = call.tool
        if not tool.touches_world:
            return await then(call)
        what = await tool.world_key(with_defaults(call.arguments, tool.schema.parameters), call.run)
        session = (call.conversation, tool.world_session)
        key = call_key(tool.name, what, self._sessions.get(session, ""))
        if tool.world_session:
            self._sessions[session] = key
        # Counted before the call is made, so that concurrent equal calls get different numbers.
        turn = _user_turn.get()
        n = turn * _CALLS_PER_TURN + self._made[call.conversation, key, turn]
        self._made[call.conversation, key, turn] += 1
        name = f"{self.rollout}:{call.conversation}" if call.conversation else self.rollout
        keyed = RecordedCall(
            rollout=name,
            tool=tool.name,
            arguments=dict(call.arguments),
            key=key,
            n=n,
            session=tool.world_session,
            reply=None,
        )
        return await self._policy(keyed, lambda: then(call))


def call_key(tool: str, what: JSON, after: str = "") -> str:
    """Return the key of a call: a hash (hex) of the tool, the values that decide its reply (`what`), and the key of the
    session's previous call (`after`), if the tool has a session."""
    text = json.dumps([tool, _with_integers(what), after], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def with_defaults(arguments: Mapping[str, JSON], parameters: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the arguments, completed with the schema's defaults, because `{}` and `{"limit": 5}` may be the same
    call."""
    defaults = {
        name: each["default"] for name, each in parameters.items() if isinstance(each, dict) and "default" in each
    }
    return {**defaults, **arguments}


def reports_failure(reply: ToolReply) -> bool:
    """Return whether a reply reports that the call failed."""
    return isinstance(reply, Mapping) and bool(reply.get("error"))


def _with_integers(value: JSON) -> JSON:
    """Convert whole numbers to integers, since JSON schemas accept 5.0 for an integer."""
    if isinstance(value, Mapping):
        return {str(name): _with_integers(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_integers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value

"""Two parts of a replay of a recorded run: `Playback` returns the recorded replies, and `Comparison` compares the
observations.

The usual runner replays a run with the environment's tools and slots. The agent repeats its recorded replies, word for
word, whatever it observes, so the compared observations always answer the same calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import msgspec

from palaestra.agent.middleware import Ask, ChatCall, ChatMiddleware
from palaestra.agent.tool_calls import NOT_FINISHED
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.records import Group, SubagentRecord, Trajectory
from palaestra.rollouts.resume.observation_diff import Kind, classify, first_difference
from palaestra_slots.core.errors import ConfigError, InfraError
from palaestra_slots.core.types import JSON, Message, Outcome
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.engine import ChatCompletion, assistant_message
from palaestra_tokens.engines.scripted import POLICIES, NoopPolicy, RecordedReply, recorded_turns

ENDS = "the recording ends here"


class Playback:
    """The model's recorded replies of every rollout, as chat middleware that calls no server."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._said: dict[tuple[str, int], list[RecordedReply]] = {}
        self._read: set[str] = set()

    def chat(self, rollout_id: str) -> ChatMiddleware:
        """Return chat middleware that answers the rollout's conversations. The middleware raises `InfraError` where the
        recording ends."""

        async def answer(call: ChatCall, ask: Ask) -> ChatCompletion:
            said = self._side(rollout_id, call.branch)
            turn: int = sum(message.get("role") == "assistant" for message in call.messages)
            if turn >= len(said):
                raise InfraError(f"{ENDS}: {rollout_id}, after {turn} replies")
            return said[turn].completion()

        return answer

    def _side(self, rollout_id: str, branch: int) -> list[RecordedReply]:
        group_id, _, _ = rollout_id.rpartition("/")
        if group_id not in self._read:
            self._read.add(group_id)
            group = self._recording.group(group_id)
            for each in group.trajectories if group else ():
                self._said[each.rollout_id, 0] = _recorded_replies(each.rollout_id, each)
                self._said |= {
                    (each.rollout_id, sub.number): _recorded_replies(each.rollout_id, sub)
                    for sub in each.every_subagent()
                }
        return self._said.get((rollout_id, branch), [])

    def is_over(self, context: SessionContext, messages: Sequence[Message]) -> bool:
        """Return whether a conversation has ended where the recording ends. A scripted policy ended it without asking a
        user; otherwise the user must end it again."""
        replies = sum(message.get("role") == "assistant" for message in messages)
        scripted = self._recording.meta.model.partition(":")[0] in POLICIES
        return scripted and replies >= len(self._side(context.rollout_id, 0))

    def forget(self, group: Group) -> None:
        """Drop the replies of a group that has been played."""
        played = {trajectory.rollout_id for trajectory in group.trajectories}
        self._said = {key: said for key, said in self._said.items() if key[0] not in played}


class PlayedBack(NoopPolicy):
    """The policy of a replay, which only decides where conversations with users end: middleware has the replies."""

    def __init__(self, playback: Playback) -> None:
        self._playback = playback

    def is_over(self, context: SessionContext, messages: Sequence[Message]) -> bool:
        return self._playback.is_over(context, messages)


def _recorded_replies(rollout_id: str, conversation: Trajectory | SubagentRecord) -> list[RecordedReply]:
    replies = [message for message in conversation.messages if message.get("role") == "assistant"]
    try:
        return recorded_turns([assistant_message(reply) for reply in replies], conversation.turns)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{rollout_id}: a recorded reply cannot be replayed: {error}") from None


@dataclass(frozen=True, slots=True)
class Difference:
    """An observation that differs from the recorded one. `turn` 0 is the prompt; `subagent` is the number of the
    sub-agent that observed it, or 0 for the rollout's own agent."""

    rollout_id: str
    turn: int
    kind: Kind
    call: str
    recorded: str
    replayed: str
    subagent: int = 0


@dataclass(frozen=True, slots=True)
class OtherEnd:
    """A rollout that ended differently. `what` names the difference: `reward`, `ending`, or `played` if the rollout was
    not played to its end. If no rollout of a group was played, `rollout_id` is the group's id."""

    rollout_id: str
    what: str
    recorded: str
    replayed: str


@dataclass(slots=True)
class Comparison:
    """The result of a replay. Observations are the answers to calls of agents and sub-agents; `kinds` counts the
    differences by kind, and `differences` has the first difference of each rollout. `not_recorded` counts the rollouts
    that were recorded without a reward."""

    rollouts: int = 0
    not_recorded: int = 0
    observations: int = 0
    equal: int = 0
    rewards: int = 0
    rewards_equal: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)
    other_ends: list[OtherEnd] = field(default_factory=list)

    @property
    def rate(self) -> float | None:
        """The share of equal observations; None if there are no observations."""
        return self.equal / self.observations if self.observations else None

    @property
    def ok(self) -> bool:
        """Whether no difference is of the kind `other`, and every rollout ended as recorded."""
        return not self.kinds[Kind.OTHER] and not self.other_ends

    def to_dict(self) -> dict[str, JSON]:
        """Return the comparison as JSON data."""
        return {**asdict(self), "kinds": dict(self.kinds), "rate": self.rate, "ok": self.ok}

    def add(self, recorded: Group, replayed: Group) -> None:
        """Compare one group. Raises `ConfigError` if the two groups belong to different tasks."""
        if recorded.task_id != replayed.task_id:
            raise ConfigError(
                f"task {recorded.number} was {recorded.task_id} and is now {replayed.task_id}: the "
                "environment's tasks have changed. Replay with the run's environment and data"
            )
        if recorded.trajectories and not replayed.trajectories:
            self.other_ends.append(OtherEnd(recorded.group_id, "played", "whole", replayed.error))
        played = {each.index: each for each in replayed.trajectories}
        for trajectory in recorded.trajectories:
            if trajectory.index in played:
                self._rollout(trajectory, played[trajectory.index])
            elif played:
                self.other_ends.append(OtherEnd(trajectory.rollout_id, "played", "whole", "its group is now smaller"))

    def _rollout(self, recorded: Trajectory, replayed: Trajectory) -> None:
        self.rollouts += 1
        first = True
        for difference in self._all_differences(recorded, replayed):
            self.kinds[difference.kind] += 1
            if first:
                self.differences.append(difference)
            first = False
        self._compare_ends(recorded, replayed)

    def _all_differences(self, recorded: Trajectory, replayed: Trajectory) -> Iterator[Difference]:
        """Yield all differences. Sub-agents come first, since the agent that started them got its answer later."""
        name, now = recorded.rollout_id, {each.number: each.messages for each in replayed.every_subagent()}
        for each in recorded.every_subagent():
            for difference in self._differences(name, each.messages, now.get(each.number, [])):
                yield replace(difference, subagent=each.number)
        yield from self._differences(name, recorded.messages, replayed.messages)

    def _differences(
        self, rollout_id: str, recorded: Sequence[Message], replayed: Sequence[Message]
    ) -> Iterator[Difference]:
        asked: list[str] = []
        turn = 0
        now = dict(enumerate(replayed))
        for place, message in enumerate(recorded):
            if message.get("role") == "assistant":
                turn, call = turn + 1, _call_arguments(message)
                asked.append(call)
                continue
            if message.get("content") == NOT_FINISHED or place not in now:
                continue  # the model never read it, or the replay ended before it, which `_compare_ends` reports
            was, is_now = _content_text(message), _content_text(now[place])
            self.observations += turn > 0
            if was == is_now:
                self.equal += turn > 0
                continue
            kind = classify(was, is_now, "\n".join(asked)) if turn else Kind.OTHER
            yield Difference(rollout_id, turn, kind, asked[-1][:500] if asked else "", *first_difference(was, is_now))

    def _compare_ends(self, recorded: Trajectory, replayed: Trajectory) -> None:
        """Compare rewards and endings, unless the recorded rollout has no reward."""
        if recorded.reward is None:
            self.not_recorded += 1
        elif replayed.reward is not None:
            self.rewards += 1
            self.rewards_equal += recorded.reward == replayed.reward
            if recorded.reward != replayed.reward:
                self._other(recorded, "reward", f"{recorded.reward:g}", f"{replayed.reward:g}")
            if recorded.outcome is not replayed.outcome:
                self._other(recorded, "ending", recorded.outcome.value, replayed.outcome.value)
        elif ENDS not in replayed.error or recorded.outcome is not Outcome.BUDGET:  # a budget may last longer now
            self._other(recorded, "played", recorded.outcome.value, replayed.error)

    def _other(self, recorded: Trajectory, what: str, was: str, now: str) -> None:
        self.other_ends.append(OtherEnd(recorded.rollout_id, what, was, now))


def _call_arguments(message: Message) -> str:
    """Return the arguments of the message's calls, or the message's text if it has none, because some agents write
    calls as text."""
    calls = message.get("tool_calls") or ()
    return "\n".join(str(call["function"]["arguments"]) for call in calls) or str(message.get("content") or "")


def _content_text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()

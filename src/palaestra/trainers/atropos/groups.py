"""Groups on their way to a trainer: what is sent, what was delivered, and what a server without a store may lose.

Invariant: only sampled tokens go to a trainer; placeholder tokens are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.core.io.durable_files import open_lines
from palaestra.core.types import JSON
from palaestra.rollouts.export.atropos import group_line
from palaestra.rollouts.records import Group, Trajectory

DELIVERIES_SCHEMA = "palaestra.deliveries/1"

_SENT = ("tokens", "masks", "scores", "advantages", "ref_logprobs", "inference_logprobs", "messages")
_SENT_TOO = ("generation_params", "overrides", "images")


def fitting(group: Group, most_tokens: int | None) -> Group:
    """The group without rollouts that have no reward, in which the model said nothing, or with a row of more than
    `most_tokens`."""
    most = most_tokens or 1 << 62
    kept = [each for each in group.scored if not each.unsaid and longest_row(each) <= most]
    return msgspec.structs.replace(group, trajectories=kept)


def longest_row(trajectory: Trajectory) -> int:
    """How many tokens the longest row has."""
    return max((tokens for tokens, _ in trajectory.row_sizes), default=0)


def scored_data(
    group: Group, *, group_size: int, messages: bool = False, placeholders: bool = False
) -> dict[str, JSON] | None:
    """The group in the shape of `/scored_data`, or None if nothing in it can be trained on.

    A group without `group_size` rows says so in `group_overrides`. Raises `ConfigError` for rows without sampled
    tokens, unless `placeholders`.
    """
    line = group_line(group, env="", model="", messages=messages)
    if line is None:
        return None
    if not placeholders and not all(_sampled(trajectory) for trajectory in group.scored):
        raise ConfigError(
            f"group {group.group_id} has no sampled tokens, so it would train nothing: use a token-exact server "
            f"(--openai.server_type vllm, sglang or transformers), or set --env.allow_placeholder_tokens true"
        )
    count = len(line["tokens"])
    overrides = line["group_overrides"] | ({"group_size": count} if count != group_size else {})
    sent = {name: line[name] for name in (*_SENT, *_SENT_TOO) if line.get(name)}
    return sent | ({"group_overrides": overrides} if overrides else {})


def _sampled(trajectory: Trajectory) -> bool:
    return bool(trajectory.row_sizes) and (trajectory.row is None or trajectory.row.source != "placeholder")


class Deliveries:
    """The file of a run that lists the groups which the trainer has, so that a resumed run sends only the others.

    Raises `DiskError` if it cannot be opened, and `ConfigError` for a damaged line or another schema.
    """

    def __init__(self, path: Path) -> None:
        self._done: set[str] = set()
        self._file = open_lines(path, DELIVERIES_SCHEMA)
        for number, line in self._file.lines():
            try:
                self._done.add(msgspec.json.decode(line, type=dict[str, str])["delivery_id"])
            except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
                self._file.close()
                raise ConfigError(
                    f"{path}: line {number} is damaged: {error!r}. Fix or remove it; a group that is not listed is "
                    "sent again"
                ) from None

    def __contains__(self, delivery_id: str) -> bool:
        return delivery_id in self._done

    def __len__(self) -> int:
        return len(self._done)

    def add(self, delivery_id: str) -> None:
        """Record that the trainer's server has this group. Raises `DiskError`, and then nothing of it stays."""
        self._done.add(delivery_id)
        self._file.append(msgspec.json.encode({"delivery_id": delivery_id}) + b"\n")

    def close(self) -> None:
        """Flush and close. Idempotent. Raises `DiskError`."""
        self._file.close()


@dataclass(slots=True)
class GivenGroup:
    """A group that the server accepted and that, as far as known, waits there. `number` is its place among all given
    groups; `waited`: it was seen waiting."""

    number: int
    delivery_id: str
    line: dict[str, JSON]
    waited: bool = False


@dataclass(frozen=True, slots=True)
class QuestionTime:
    """The moment of a question: how many groups had been given, and whether another was being sent."""

    given: int
    busy: bool


class UnsavedGroups:
    """An environment's groups in one process of a server that keeps nothing, given to it one after the other.

    The original server holds groups in memory and does not report which of them its trainer took. But groups of one
    size leave it in the order in which they came, so the number that waits shows which ones wait; and as long as its
    groups make up no batch, none leaves. Therefore it is given one batch at a time. The server combines short groups in
    ways that it does not report: after the first of them nothing is remembered or held back any more.

    Invariant: a group is sent again only if it was waiting at the last question, or cannot have left. A group that made
    a batch full after that question may have been taken, so it is not sent again.
    """

    def __init__(self, group_size: int) -> None:
        self.given: list[GivenGroup] = []
        self._group_size = group_size
        self._short = False
        self._count = 0
        self._busy = False

    def room(self, batch_size: int) -> bool:
        """Whether one more group may be given: with it there is one batch at most."""
        return self._short or not self.given or (len(self.given) + 1) * self._group_size <= batch_size

    def begin(self) -> None:
        """A group is being sent."""
        self._count += 1
        self._busy = True

    def end(self, delivery_id: str, line: dict[str, JSON], *, taken: bool) -> None:
        """The server accepted the group or did not."""
        self._busy = False
        if len(line["tokens"]) != self._group_size:
            self._short = True
            self.given.clear()
        elif taken and not self._short:
            self.given.append(GivenGroup(self._count, delivery_id, line))

    def asking(self) -> QuestionTime:
        """The server is asked now; `heard` takes its answer."""
        return QuestionTime(self._count, self._busy)

    def heard(self, waiting: int, asked: QuestionTime) -> None:
        """The server answered how many of our groups wait."""
        older = sum(each.number <= asked.given for each in self.given)
        del self.given[: max(0, older - waiting)]
        if not asked.busy and not self._busy and self._count == asked.given:
            for each in self.given:
                each.waited = True

    def lost(self, batch_size: int, *, alone: bool) -> tuple[list[GivenGroup], list[GivenGroup]]:
        """The server is gone: the groups to send again, and those not to send again, because its trainer may have them.

        `alone`: no other environment's groups were there to fill a batch with.
        """
        given, self.given, self._short = self.given, [], False
        untouched = alone and len(given) * self._group_size < batch_size
        if untouched or all(each.waited for each in given):
            return given, []
        return [], given

"""A finished group as an environment sends it to a trainer, and the record of what was sent.

Invariant: what a trainer gets was sampled. Tokens that only stand in for a text are refused, not sent.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.core.io.append_file import AppendedFile, writing
from palaestra.core.types import JSON
from palaestra.rollouts.export.atropos import group_line
from palaestra.rollouts.records import Group, Trajectory

DELIVERIES_SCHEMA = "palaestra.deliveries/1"

_SENT = ("tokens", "masks", "scores", "advantages", "ref_logprobs", "inference_logprobs", "messages")
_SENT_TOO = ("generation_params", "overrides", "images")


def fitting(group: Group, most_tokens: int | None) -> Group:
    """The group without rollouts that have no reward, in which nothing was said, or with a row of more than
    `most_tokens`."""
    most = most_tokens or 1 << 62
    kept = [each for each in group.scored if not each.unsaid and longest_row(each) <= most]
    return msgspec.structs.replace(group, trajectories=kept)


def scored_data(
    group: Group, *, group_size: int, messages: bool = False, placeholders: bool = False
) -> dict[str, JSON] | None:
    """The group in the shape of `/scored_data`, or None when nothing in it can be trained on.

    A group that is not of `group_size` rows says so in `group_overrides`. Raises `ConfigError` for rows without sampled
    tokens, unless `placeholders`.
    """
    line = group_line(group, env="", model="", messages=messages)
    if line is None:
        return None
    if not placeholders and not all(_sampled(trajectory) for trajectory in group.scored):
        raise ConfigError(
            f"group {group.group_id} has no sampled tokens, so it would train nothing: ask a token-exact server "
            f"(--openai.server_type vllm, sglang or transformers), or say --env.allow_placeholder_tokens true"
        )
    count = len(line["tokens"])
    overrides = line["group_overrides"] | ({"group_size": count} if count != group_size else {})
    sent = {name: line[name] for name in (*_SENT, *_SENT_TOO) if line.get(name)}
    return sent | ({"group_overrides": overrides} if overrides else {})


def longest_row(trajectory: Trajectory) -> int:
    """How many tokens the longest row has."""
    return max((tokens for tokens, _ in trajectory.row_sizes), default=0)


def _sampled(trajectory: Trajectory) -> bool:
    return bool(trajectory.row_sizes) and (trajectory.row is None or trajectory.row.source != "placeholder")


class Deliveries:
    """The file of a run that says which of its groups a trainer has, so that going on sends only the others.

    A torn last line, which a kill leaves, is cut off. Raises `DiskError` where it cannot be opened, and `ConfigError`
    where a line of it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._done: set[str] = set()
        with writing(path):
            self._file = AppendedFile(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644), path)
        try:
            with writing(path):
                content = path.read_bytes()
                whole = content.rfind(b"\n") + 1
                os.ftruncate(self._file.fd, whole)
            for number, line in enumerate(content[:whole].split(b"\n")[:-1], 1):
                self._take(line, number)
            if not whole:
                self._file.append(msgspec.json.encode({"schema": DELIVERIES_SCHEMA}) + b"\n")
        except BaseException:
            self._file.close()
            raise

    def _take(self, line: bytes, number: int) -> None:
        """A line that was there; the first names the schema."""
        key, path = "schema" if number == 1 else "delivery_id", self._file.path
        try:
            value = msgspec.json.decode(line, type=dict[str, str])[key]
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
            raise ConfigError(
                f"{path}: line {number} is damaged: {error!r}. Mend it or take it out; a group that is not named is "
                "sent again"
            ) from None
        if number > 1:
            self._done.add(value)
        elif value != DELIVERIES_SCHEMA:
            raise ConfigError(f"{path} is of the form {value!r}; this version reads {DELIVERIES_SCHEMA!r}")

    def __contains__(self, delivery_id: str) -> bool:
        return delivery_id in self._done

    def __len__(self) -> int:
        return len(self._done)

    def add(self, delivery_id: str) -> None:
        """Remember that the trainer's server has this one. Raises `DiskError`, and then nothing of it stays."""
        self._done.add(delivery_id)
        self._file.append(msgspec.json.encode({"delivery_id": delivery_id}) + b"\n")

    def close(self) -> None:
        """Flush and close. Idempotent. Raises `DiskError`."""
        self._file.close()

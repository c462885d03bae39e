"""A finished group as an environment sends it to a trainer, and the record of what was sent.

Invariant: what a trainer gets was sampled. Tokens that only stand in for a text are refused, not sent.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON
from palaestra.rollouts.export.atropos import group_line
from palaestra.rollouts.trajectory import Group, TokenRow

DELIVERIES_SCHEMA = "palaestra.deliveries/1"

_SENT = ("tokens", "masks", "scores", "advantages", "ref_logprobs", "inference_logprobs", "messages")
_SENT_TOO = ("generation_params", "overrides", "images")


def fitting(group: Group, most_tokens: int | None) -> Group:
    """The group without rollouts that have no reward, or a row of more than `most_tokens`."""
    kept = [trajectory for trajectory in group.scored if _longest(trajectory.rows) <= (most_tokens or 1 << 62)]
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
    if not placeholders and not all(_sampled(trajectory.rows) for trajectory in group.scored):
        raise ConfigError(
            f"group {group.group_id} has no sampled tokens, so it would train nothing: ask a token-exact server "
            f"(--openai.server_type vllm, sglang or transformers), or say --env.allow_placeholder_tokens true"
        )
    count = len(line["tokens"])
    overrides = line["group_overrides"] | ({"group_size": count} if count != group_size else {})
    sent = {name: line[name] for name in (*_SENT, *_SENT_TOO) if line.get(name)}
    return sent | ({"group_overrides": overrides} if overrides else {})


def _longest(rows: Sequence[TokenRow]) -> int:
    return max((len(row.tokens) for row in rows), default=0)


def _sampled(rows: Sequence[TokenRow]) -> bool:
    return bool(rows) and all(row.source != "placeholder" for row in rows)


class Deliveries:
    """The file of a run that says which of its groups a trainer has, so that going on sends only the others."""

    def __init__(self, path: Path) -> None:
        self._done: set[str] = set()
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True)[1:]:
                if line.endswith(b"\n"):
                    self._done.add(msgspec.json.decode(line)["delivery_id"])
            whole = path.read_bytes().rfind(b"\n") + 1
            os.truncate(path, whole)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if os.fstat(self._fd).st_size == 0:
            os.write(self._fd, msgspec.json.encode({"schema": DELIVERIES_SCHEMA}) + b"\n")

    def __contains__(self, delivery_id: str) -> bool:
        return delivery_id in self._done

    def __len__(self) -> int:
        return len(self._done)

    def add(self, delivery_id: str) -> None:
        """Remember that the trainer's server has this one."""
        self._done.add(delivery_id)
        os.write(self._fd, msgspec.json.encode({"delivery_id": delivery_id}) + b"\n")

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

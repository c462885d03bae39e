"""A verifier's verdict from the files it wrote. Does no I/O.

The rules are Harbor's (verifier/verifier.py of 0.25): `reward.json` wins over `reward.txt`; the text is one finite
number, the JSON an object of finite numbers. What is missing, empty or no number is the grader's failure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from palaestra.core.errors import GraderError

REWARD = "reward"


def read_rewards(json_file: bytes | None, text_file: bytes | None) -> Mapping[str, float]:
    """The rewards by name. None for a file that is not there. Raises `GraderError`."""
    if json_file is not None:
        return _from_json(_decoded(json_file, "reward.json"))
    if text_file is not None:
        return {REWARD: _from_text(_decoded(text_file, "reward.txt"))}
    raise GraderError("the verifier wrote no reward: neither reward.json nor reward.txt is there")


def single(rewards: Mapping[str, float]) -> float:
    """The one number that is trained on: the reward of that name, else the mean of all."""
    return rewards[REWARD] if REWARD in rewards else sum(rewards.values()) / len(rewards)


def _decoded(data: bytes, name: str) -> str:
    text = data.decode("utf-8", "replace").strip()
    if not text:
        raise GraderError(f"the verifier's {name} is empty")
    return text


def _from_text(text: str) -> float:
    try:
        return _finite(float(text), "reward.txt")
    except ValueError:
        raise GraderError(f"the verifier's reward.txt is no number: {text[:80]!r}") from None


def _from_json(text: str) -> Mapping[str, float]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GraderError(f"the verifier's reward.json is not JSON: {error}") from None
    if not isinstance(values, dict) or not values:
        raise GraderError("the verifier's reward.json must be an object of numbers")
    for name, value in values.items():
        if not isinstance(value, int | float):
            raise GraderError(f"the verifier's reward.json: {name} is no number: {value!r}")
    return {name: _finite(float(value), "reward.json") for name, value in values.items()}


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise GraderError(f"the verifier's {name} holds {value}, which is no reward")
    return value

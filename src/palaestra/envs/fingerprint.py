"""What an environment's hooks put into the recipe of a prepared workspace: their code, their settings, their task.

Not for the steps that a task shows itself (`rollouts/group.py` knows those). Invariant: what cannot be named is
refused, never left out. Modules that the code imports are not looked into: a task's `recipe` names their version.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from pydantic import BaseModel

from palaestra.core.errors import TaskError
from palaestra.core.types import JSON

OURS = Path(__file__).parent.parent
"""This package's own code is in every recipe as it is."""


def code(parts: Iterable[Callable[..., object]], task_id: str) -> list[str]:
    """The digests of the files in which functions and classes are. Raises `TaskError` for what is in none."""
    digests = set()
    for part in parts:
        try:
            path = Path(inspect.getsourcefile(part) or "").resolve(strict=True)
            if not path.is_relative_to(OURS):
                digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
        except (OSError, TypeError) as error:
            name = getattr(part, "__qualname__", repr(part))
            raise TaskError(
                f"task {task_id} declares a recipe, and {name} is in no file that can be read ({error}): put it into "
                "one, or declare none"
            ) from None
    return sorted(digests)


def own_settings(config: BaseModel, base: type[BaseModel]) -> JSON:
    """The settings that an environment has besides those of its base."""
    return config.model_dump(mode="json", include=type(config).model_fields.keys() - base.model_fields.keys())


def named(value: object, task_id: str) -> JSON:
    """A value as JSON. Raises `TaskError` for one that is not data."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value, order="deterministic"))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise TaskError(
            f"task {task_id} declares a recipe, and what it is made from cannot be named: {error}; give it plain data "
            "(numbers, text, lists, dicts, dataclasses), or declare none"
        ) from None

"""Computes the parts of a prepared workspace's cache key that depend on the environment: hook code, settings and task
data. `rollouts/group.py` adds the other parts. Modules that hooks import are not part of the key; a task's `recipe`
names their version."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from pydantic import BaseModel

from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON
from palaestra_slots.core.user_code import own_folders


def of_code(parts: Iterable[Callable[..., object]], task_id: str) -> list[str]:
    """Return the digests of the files that define these functions and classes, without our own, which every key
    covers already. Raises
    `TaskError` if one of the files cannot be read."""
    digests = set()
    for part in parts:
        try:
            # Without a source file, this is the working directory, which cannot be read either.
            path = Path(inspect.getsourcefile(part) or "").resolve(strict=True)
            if not any(path.is_relative_to(folder) for folder in own_folders()):
                digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
        except (OSError, TypeError) as error:
            name = getattr(part, "__qualname__", repr(part))
            raise TaskError(
                f"task {task_id} sets a recipe, but the source file of {name} cannot be read ({error}); define {name} "
                "in a file, or do not set a recipe"
            ) from None
    return sorted(digests)


def of_settings(config: BaseModel, base: type[BaseModel]) -> JSON:
    """Return the settings that an environment has in addition to those of its base."""
    return config.model_dump(mode="json", include=type(config).model_fields.keys() - base.model_fields.keys())


def of_data(value: object, task_id: str) -> JSON:
    """Return a value as JSON. Raises `TaskError` if it is not plain data."""
    try:
        # The order of a set of strings differs between processes.
        return msgspec.json.decode(msgspec.json.encode(value, order="deterministic"))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise TaskError(
            f"task {task_id} sets a recipe, but its data is not plain data: {error}; use numbers, strings, lists, "
            "dicts and dataclasses, or do not set a recipe"
        ) from None

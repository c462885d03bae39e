"""Read single values of compose files: variables, durations, sizes, commands and environment files.

Source: the Compose specification (compose-spec, `12-interpolation.md`, `11-extension.md`). Variables come only from
what the caller passes, never from the host's environment.
"""

from __future__ import annotations

import re
import shlex
from collections import ChainMap
from collections.abc import Mapping

from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON
from palaestra_slots.images.task_files import Unsupported
from palaestra_slots.sandbox.slot import is_variable

_REFERENCE = re.compile(r"\$(?:(\$)|(\w+)|\{(\w+)(?:(:?[-?+])([^${}]*))?\}|(.?))")
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)(us|ms|s|m|h))")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3}
_LONGEST = 1 << 20
_LONGEST_COMMAND = 1 << 17  # the kernel takes no longer argument
_LONGEST_DURATION = 100
_SURROGATE = re.compile("[\ud800-\udfff]")


def check_values(value: JSON, file: str) -> None:
    """Raise `TaskError` for a value that its aliases make far larger than its file, or endless, and for text and
    numbers that no slot takes."""
    left, waiting = _LONGEST, [value]
    while waiting and left >= 0:
        found = waiting.pop()
        if isinstance(found, str):
            left -= len(found)
            if "\0" in found or (not found.isascii() and _SURROGATE.search(found)):
                raise TaskError(f"{file} has {found!r:.100}, which is no text")
        elif isinstance(found, int) and found.bit_length() > 64:
            raise TaskError(f"{file} has a number of more than 64 bits")
        elif isinstance(found, list | Mapping):
            left -= len(found)
            if left >= 0:
                waiting += [*found, *found.values()] if isinstance(found, Mapping) else found
    if left < 0:
        raise TaskError(f"{file} has more values than fit into {_LONGEST >> 20} MiB: its aliases repeat too much")


def interpolated(value: JSON, known: Mapping[str, str], key: str) -> JSON:
    """Return a value of a compose file with its variables replaced. Raises `Unsupported` for an unknown variable, and
    `TaskError` for one that cannot be read."""
    left = [_LONGEST]

    def text(found: str) -> str:
        done = _REFERENCE.sub(lambda match: _replaced(match, known, key), found)
        left[0] -= len(done)
        if left[0] < 0:
            raise TaskError(f"the values of {key} are longer than {_LONGEST >> 20} MiB")
        return done

    def each(found: JSON) -> JSON:
        if isinstance(found, str):
            return text(found)
        if isinstance(found, list):
            return [each(one) for one in found]
        if isinstance(found, Mapping):
            return {name: each(one) for name, one in found.items()}
        return found

    return each(value)


def _replaced(match: re.Match[str], known: Mapping[str, str], key: str) -> str:
    if match[1]:
        return "$"
    name, kind, word = match[2] or match[3], match[4] or "", match[5] or ""
    if not name or name[0].isdigit():
        raise TaskError(f"{key} has a `$` that begins no variable: write `$$` for the character")
    found = known.get(name)
    is_set = bool(found) if kind.startswith(":") else found is not None
    if kind.endswith("+"):
        return word if is_set else ""
    if is_set:
        return found or ""
    if kind.endswith("-"):
        return word
    raise Unsupported(f"{key} refers to the variable {name}, which task.toml's [environment.env] does not set")


def seconds(value: JSON, key: str) -> float:
    """Return a duration such as `1m30s`. Raises `TaskError`."""
    text = str(value).strip()
    parts = _DURATION.findall(text) if len(text) <= _LONGEST_DURATION else []
    total = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or not parts or not total <= 86_400:
        raise TaskError(f"{key} must be a duration of at most a day, such as 1m30s, not {value!r:.100}")
    return total


def size_bytes(value: JSON, key: str) -> int:
    """Return a size such as `512m`; a number is in bytes. Raises `TaskError`."""
    match = _SIZE.fullmatch(str(value).strip())
    if match is None or isinstance(value, bool):
        raise TaskError(f"{key} must be a size such as 512m, not {value!r:.100}")
    return int(min(float(match[1]), 2.0**53) * 1024 ** _POWERS[match[2].lower()])


def positive_number(value: JSON, key: str) -> float:
    """Return a number above 0, which may be written as text. Raises `TaskError`."""
    try:
        found = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        found = 0.0
    if not 0 < found < 2**53:
        raise TaskError(f"{key} must be a number above 0, not {value!r:.100}")
    return found


def words(value: JSON, key: str) -> tuple[str, ...] | None:
    """Return a command: a list, or text that is split as a shell does. None if it is not set."""
    if value is None:
        return None
    if isinstance(value, str):
        if len(value) > _LONGEST_COMMAND:
            raise TaskError(f"{key} has more than {_LONGEST_COMMAND >> 10} KiB")
        try:
            return tuple(shlex.split(value))
        except ValueError as error:
            raise TaskError(f"{key}: {error}") from None
    if not isinstance(value, list) or not all(isinstance(each, str | int | float) for each in value):
        raise TaskError(f"{key} must be text or a list of text, not {value!r:.100}")
    return tuple(map(str, value))


def pairs(value: JSON, key: str, known: Mapping[str, str]) -> dict[str, str]:
    """Return variables, from a mapping or a list of `NAME=VALUE`. A name without a value has that of `known`; if it has
    none, it is left out. Raises `TaskError`."""
    if isinstance(value, Mapping):
        given = {str(name): None if one is None else _as_text(one, f"{key}.{name}") for name, one in value.items()}
    elif value is None or (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        given = {each.partition("=")[0]: each.partition("=")[2] if "=" in each else None for each in value or ()}
    else:
        raise TaskError(f"{key} must be a mapping or a list of NAME=VALUE, not {value!r:.100}")
    found = {name: known.get(name) if one is None else one for name, one in given.items()}
    for name, one in found.items():
        if one is not None and not is_variable(name, one):
            raise TaskError(f"{key}: {name!r:.100} cannot be a variable")
    return {name: one for name, one in found.items() if one is not None}


def _as_text(value: JSON, key: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise TaskError(f"{key} must be text, not {value!r:.100}")
    return str(value)


def env_file(text: str, known: Mapping[str, str], key: str) -> dict[str, str]:
    """Return the variables of an environment file. Raises `TaskError`."""
    found: dict[str, str] = {}
    variables, left = ChainMap(found, dict(known)), _LONGEST
    for count, line in enumerate(text.splitlines(), 1):
        line = line.strip().removeprefix("export ").strip()
        if not line or line.startswith("#"):
            continue
        name, separator, value = (part.strip() for part in line.partition("="))
        where = f"{key}, line {count}"
        if not separator or not is_variable(name, value):
            raise TaskError(f"{where} is not NAME=VALUE")
        if value[:1] == "'" and value[-1:] == "'" and len(value) > 1:
            found[name] = value[1:-1]
            continue
        if value[:1] == '"' and value[-1:] == '"' and len(value) > 1:
            value = value[1:-1].replace("\\n", "\n").replace('\\"', '"')
        else:
            value = re.split(r"\s#", value, maxsplit=1)[0].rstrip()
        found[name] = str(interpolated(value, variables, where))
        left -= len(found[name])
        if left < 0:
            raise TaskError(f"the variables of {key} are longer than {_LONGEST >> 20} MiB")
    return found

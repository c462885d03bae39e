"""Read the files and dataset rows that describe tasks. Every problem is a `TaskError` that names the file or key.

`TypedFields` reads a parsed TOML, YAML or JSON table, `RowFields` a dataset row.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path

from palaestra_slots.core.config import read_toml, read_yaml
from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.io.durable_files import read_regular
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import is_variable

# Above this, a float no longer holds every whole number.
_MOST_NUMBER = 1 << 53
_MOST_CONFIG_BYTES = 1 << 20
_shown = reprlib.Repr()  # a YAML alias can make a small file a huge value
_shown.maxlevel, _shown.maxstring, _shown.maxother = 3, 200, 200

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


class Unsupported(TaskError):
    """A well-formed task that needs a feature that slots lack."""


def read_task_bytes(path: Path, max_bytes: int = 256 << 20) -> bytes:
    """Return the bytes of a task's file, which must not be a link, a fifo or a device. Raises `TaskError`.

    Call `check_links` on the task's folder first: it rejects links on the path that point outside the folder.
    """
    try:
        return read_regular(path, max_bytes)
    except FileNotFoundError:
        raise TaskError(f"{path.name} is missing") from None
    except OSError as error:
        problem = "it is a link" if error.errno == errno.ELOOP else f"it {error.strerror}"
        raise TaskError(f"{path.name} cannot be read: {problem}") from None


def read_task_text(path: Path, errors: str = "strict", max_bytes: int = 16 << 20) -> str:
    """Return a UTF-8 file of a task, with lines that end with `\\n`. Raises `TaskError`."""
    try:
        return io.TextIOWrapper(io.BytesIO(read_task_bytes(path, max_bytes)), encoding="utf-8", errors=errors).read()
    except UnicodeDecodeError as error:
        raise TaskError(f"{path.name} cannot be read: {error}") from None


def check_links(folder: Path) -> None:
    """Raise `TaskError` if a task folder contains symbolic links that point outside it.

    Links inside the build context (`environment/`) are not checked, because they are copied into the slot as links.
    """
    root = folder.resolve()
    for place, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(place, name)
            if path.is_symlink() and not _leads_inside(path, root):
                raise TaskError(f"{path.relative_to(root)} is a symbolic link that points outside the task's folder")
        if Path(place) == root and "environment" in folders:
            # `os.walk` does not enter what is removed from its list.
            folders.remove("environment")


def _leads_inside(link: Path, root: Path) -> bool:
    try:
        return link.resolve().is_relative_to(root)
    except (OSError, RuntimeError):  # a loop of links
        return False


def read_toml_file(path: Path) -> JSON:
    """Return the value of a TOML file. Raises `TaskError`."""
    text = read_task_text(path, max_bytes=_MOST_CONFIG_BYTES)
    try:
        return read_toml(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path.name} is not TOML: {error}") from None


def read_yaml_file(path: Path) -> JSON:
    """Return the value of a YAML file. Raises `TaskError`."""
    text = read_task_text(path, max_bytes=_MOST_CONFIG_BYTES)
    try:
        return read_yaml(text)
    except ValueError as error:
        raise TaskError(f"{path.name} is not YAML: {' '.join(str(error).split())}") from None


class TypedFields:
    """One table. `name` is the path of the table in error messages. A key that is missing or null counts as not set.
    `known` are the values of the host's variables to which a table may refer. Methods raise `TaskError` for a value of
    the wrong type."""

    def __init__(self, values: JSON, name: str = "", known: Mapping[str, str] | None = None) -> None:
        if not isinstance(values, Mapping):
            raise TaskError(f"{name or 'the file'} must be a table, not {type(values).__name__}")
        self.values: Mapping[str, JSON] = values
        self._name = name
        self._known = known or {}

    def key(self, name: str) -> str:
        """Return a key's full name for error messages."""
        return f"{self._name}.{name}" if self._name else name

    def section(self, name: str) -> TypedFields:
        """Return a table inside this table, or an empty table if the key is missing."""
        value = self.values.get(name)
        return TypedFields({} if value is None else value, self.key(name), self._known)

    def over(self, other: TypedFields) -> TypedFields:
        """Return this table with the keys of another table that it does not set."""
        return TypedFields({**other.values, **self.values}, self._name, self._known)

    def sections(self, name: str) -> list[TypedFields]:
        """Return a list of tables inside this table."""
        values = enumerate(self._list(name))
        return [TypedFields(value, f"{self.key(name)}[{number}]", self._known) for number, value in values]

    def text(self, name: str) -> str | None:
        """Return a string, or None if the key is missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise TaskError(f"{self.key(name)} must be text, not {_shown.repr(value)}")
        return value

    def required(self, *names: str) -> str:
        """Return the text of the first of these keys whose text is not blank. Raises `TaskError` if there is none."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, str) and value.strip():
                return value
        raise TaskError(f"{self.key(names[0])} is missing or empty")

    def user(self, name: str) -> str | None:
        """Return the name or number of a user as text, or None if the key is missing."""
        value = self.values.get(name)
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else self.text(name)

    def flag(self, name: str) -> bool | None:
        """Return a bool, or None if the key is missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise TaskError(f"{self.key(name)} must be true or false, not {_shown.repr(value)}")
        return value

    def number(self, name: str) -> float | None:
        """Return a number above zero, or None if the key is missing."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST_NUMBER:
            raise TaskError(f"{self.key(name)} must be a number above 0, not {_shown.repr(value)}")
        return float(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings."""
        values = self._list(name)
        if not all(isinstance(value, str) for value in values):
            raise TaskError(f"{self.key(name)} must be a list of strings")
        return tuple(values)

    def variables(self, name: str) -> dict[str, str]:
        """Return environment variables. A value that refers to a variable of the host needs a known variable or a
        default: `${NAME:-default}`."""
        found = self.expanded(name)
        for key, value in found.items():
            if not is_variable(key, value):
                raise TaskError(f"{self.key(f'{name}.{key}')!r:.200} cannot be an environment variable")
        return found

    def expanded(self, name: str) -> dict[str, str]:
        """Return a table of texts that may refer to variables of the host, as in `variables`."""
        return {key: self._expanded(f"{name}.{key}", value) for key, value in self.section(name).values.items()}

    def size_bytes(self, plain: str, megabytes: str) -> int | None:
        """Return a size in bytes, or None. The size is either text (`2G`) under the key `plain`, or a number under the
        key `megabytes`."""
        text, number = self.values.get(plain), self.number(megabytes)
        if text is not None and number is not None:
            raise TaskError(f"{self.key(plain)} and {self.key(megabytes)} are the same setting; keep only the second")
        if text is None:
            return None if number is None else int(number * (1 << 20))
        match = _SIZE.fullmatch(str(text).strip())
        if match is None:
            raise TaskError(f"{self.key(plain)} must be a size such as 2G or 512M, not {_shown.repr(text)}")
        return int(min(float(match[1]) * 1024 ** _POWERS[match[2].upper()], _MOST_NUMBER))

    def _list(self, name: str) -> list[JSON]:
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            raise TaskError(f"{self.key(name)} must be a list, not {type(value).__name__}")
        return value or []

    def _expanded(self, name: str, value: JSON) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise TaskError(f"{self.key(name)} must be text, not {_shown.repr(value)}")

        def default(match: re.Match[str]) -> str:
            found = self._known.get(match[1], match[2])
            if found is None:
                raise Unsupported(
                    f"{self.key(name)} refers to the host's variable {match[1]}, which slots cannot see; set it with "
                    f"--env.task_env_vars {match[1]}=VALUE"
                )
            return found

        return _VARIABLE.sub(default, str(value))


class RowFields(TypedFields):
    """A dataset row. Lists and objects may be JSON text, as in CSV files; lists may be arrays, as in Parquet files."""

    def key(self, name: str) -> str:
        return f"column {name!r}"

    def optional(self, name: str) -> str:
        """Return the value as text, or an empty string if it is missing."""
        return str(self.values.get(name) or "")

    def decoded(self, name: str) -> JSON:
        """Return the value, decoded if it is JSON text. Return None if it is missing or empty."""
        value = self.values.get(name)
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value) if value else None
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{self.key(name)} is not JSON: {error}") from None

    def _list(self, name: str) -> list[JSON]:
        value = self.decoded(name)
        try:
            return [] if value is None else list(value)
        except TypeError:
            raise TaskError(f"{self.key(name)} must be a list, not {type(value).__name__}") from None

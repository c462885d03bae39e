"""Typed reading of a parsed TOML or YAML mapping: what is wrong is one `TaskError` that names the key. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping

from palaestra.core.errors import TaskError
from palaestra.core.types import JSON
from palaestra.suites.images.image_spec import Unsupported

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


class Section:
    """One table of a task's file; `name` is how messages call it. A key that is missing or null has its default."""

    def __init__(self, values: JSON, name: str = "") -> None:
        if not isinstance(values, Mapping):
            raise TaskError(f"{name or 'the file'} must be a table, not {type(values).__name__}")
        self.values: Mapping[str, JSON] = values
        self._name = name

    def key(self, name: str) -> str:
        """A key as messages call it."""
        return f"{self._name}.{name}" if self._name else name

    def section(self, name: str) -> Section:
        """A table below this one; an empty one where there is none."""
        value = self.values.get(name)
        return Section({} if value is None else value, self.key(name))

    def sections(self, name: str) -> list[Section]:
        """A list of tables below this one."""
        return [Section(value, f"{self.key(name)}[{number}]") for number, value in enumerate(self._list(name))]

    def text(self, name: str) -> str | None:
        """A string, or None."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise TaskError(f"{self.key(name)} must be text, not {value!r}")
        return value

    def user(self, name: str) -> str | None:
        """A user by name or number."""
        value = self.values.get(name)
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else self.text(name)

    def flag(self, name: str) -> bool | None:
        """A truth value, or None."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise TaskError(f"{self.key(name)} must be true or false, not {value!r}")
        return value

    def number(self, name: str) -> float | None:
        """A number above zero, or None."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise TaskError(f"{self.key(name)} must be a number above 0, not {value!r}")
        return float(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        values = self._list(name)
        if not all(isinstance(value, str) for value in values):
            raise TaskError(f"{self.key(name)} must be a list of texts")
        return tuple(values)

    def variables(self, name: str) -> dict[str, str]:
        """Environment variables. One whose value is taken from the host is refused, unless it has a default."""
        return {key: self._expanded(f"{name}.{key}", value) for key, value in self.section(name).values.items()}

    def size_bytes(self, plain: str, megabytes: str) -> int | None:
        """A size that may be written as text (`2G`) or as a number of megabytes, and not as both."""
        text, number = self.values.get(plain), self.number(megabytes)
        if text is not None and number is not None:
            raise TaskError(f"{self.key(plain)} and {self.key(megabytes)} say the same thing; keep the second")
        if text is None:
            return None if number is None else int(number * (1 << 20))
        match = _SIZE.fullmatch(str(text).strip())
        if match is None:
            raise TaskError(f"{self.key(plain)} must be a size such as 2G or 512M, not {text!r}")
        return int(float(match[1]) * 1024 ** _POWERS[match[2].upper()])

    def _list(self, name: str) -> list[JSON]:
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            raise TaskError(f"{self.key(name)} must be a list, not {type(value).__name__}")
        return value or []

    def _expanded(self, name: str, value: JSON) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise TaskError(f"{self.key(name)} must be text, not {value!r}")

        def default(match: re.Match[str]) -> str:
            if match[2] is None:
                raise Unsupported(f"{self.key(name)} takes {match[1]} from the host, which no slot may see")
            return match[2]

        return _VARIABLE.sub(default, str(value))

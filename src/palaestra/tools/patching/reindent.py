"""Carry a model's new lines over to the indentation and the line ends that the file really has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reindent:
    """For each indentation that the model wrote, the one that the file has there."""

    mapping: Mapping[str, str]

    @classmethod
    def between(cls, written: Sequence[str], real: Sequence[str]) -> Reindent:
        """Learn from lines that match each other one by one; the first pair that shows an indentation decides."""
        mapping: dict[str, str] = {}
        for model_line, file_line in zip(written, real, strict=True):
            if model_line.strip() and file_line.strip():
                mapping.setdefault(indent_of(model_line), indent_of(file_line))
        return cls(mapping)

    def apply(self, text: str) -> str:
        """The text with every line's indentation translated; unseen deeper ones keep what goes beyond a known one."""
        return "\n".join(self._line(line) for line in text.split("\n"))

    def _line(self, line: str) -> str:
        indent = indent_of(line)
        if not line.strip():
            return line
        known = max((seen for seen in self.mapping if indent.startswith(seen)), key=len, default=None)
        if known is not None:
            return self.mapping[known] + line[len(known) :]
        return self._shallower(indent) + line[len(indent) :]

    def _shallower(self, indent: str) -> str:
        """An indentation less deep than any seen: as much less in the file as it is less in the model's text."""
        nearest = min((seen for seen in self.mapping if seen.startswith(indent)), key=len, default=None)
        if nearest is None:
            return indent
        missing = nearest[len(indent) :]
        return self.mapping[nearest].removesuffix(missing) if self.mapping[nearest].endswith(missing) else indent


def indent_of(line: str) -> str:
    """The leading white space of a line."""
    return line[: len(line) - len(line.lstrip())]


def carriage_return(real: Sequence[str]) -> str:
    """What stands before the line end in each of the file's lines: in files of mixed line ends some have one."""
    return "\r" if real and all(line.endswith("\r") for line in real) else ""

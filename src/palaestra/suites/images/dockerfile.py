"""Reads a Dockerfile: its instructions, and what it says of variables, directory and user. Does no I/O.

For building in a slot without a container runtime (`slot_build.py`), and for what a ready root file system cannot say
of itself. Format: the Dockerfile reference (docs.docker.com/reference/dockerfile); heredocs and continuation lines are
read, several stages are refused.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from posixpath import join, normpath

from palaestra.core.errors import TaskError
from palaestra.suites.images.image_spec import Unsupported

_HEREDOC = re.compile(r"<<(-?)\s*(['\"]?)(\w+)\2")
_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-+])([^}]*))?\})")


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A document that follows an instruction; in a quoted one nothing is replaced."""

    name: str
    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: `RUN`, `apt-get update`. `flags` are those in front of its arguments, `--chown=a:b`."""

    name: str
    arguments: str
    flags: Mapping[str, str] = field(default_factory=dict)
    heredocs: tuple[Heredoc, ...] = ()
    line: int = 0

    def words(self) -> list[str]:
        """The arguments as a list, from either of the two forms that there are."""
        if self.arguments.startswith("["):
            try:
                words = json.loads(self.arguments)
            except ValueError:
                words = None
            if isinstance(words, list) and all(isinstance(word, str) for word in words):
                return words
        try:
            return shlex.split(self.arguments)
        except ValueError as error:
            raise TaskError(f"Dockerfile, line {self.line}: {error}") from None


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """How commands start in an image: variables, directory, user (empty: root). Also of one that docker has built."""

    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""

    @property
    def root(self) -> bool:
        """Whether commands are root's."""
        return self.user.partition(":")[0] in ("", "0", "root")


def parse(text: str) -> tuple[Instruction, ...]:
    """The instructions of a Dockerfile of one stage. Raises `TaskError`; `Unsupported` for several stages."""
    instructions = tuple(_instructions(text.splitlines()))
    stages = [each for each in instructions if each.name == "FROM"]
    if not stages:
        raise TaskError("Dockerfile has no FROM")
    if len(stages) > 1:
        raise Unsupported("its Dockerfile has several stages, which need docker, podman or buildah")
    return instructions


def image_config(instructions: tuple[Instruction, ...]) -> ImageConfig:
    """What the instructions say, together."""
    config = ImageConfig()
    arguments: dict[str, str] = {}
    for each in instructions:
        config, arguments = follow(config, arguments, each)
    return config


def follow(
    config: ImageConfig, arguments: dict[str, str], instruction: Instruction
) -> tuple[ImageConfig, dict[str, str]]:
    """Configuration and build arguments after an instruction; those that concern neither change nothing."""
    known = {**arguments, **config.env}
    if instruction.name == "ENV":
        config = replace(config, env={**config.env, **_assignments(instruction, known)})
    elif instruction.name == "WORKDIR":
        config = replace(config, workdir=normpath(join(config.workdir, expand(instruction.arguments, known))))
    elif instruction.name == "USER":
        config = replace(config, user=expand(instruction.arguments.strip(), known))
    elif instruction.name == "ARG":
        for word in instruction.words():
            name, separator, value = word.partition("=")
            arguments = {**arguments, name: expand(value, known) if separator else arguments.get(name, "")}
    return config, arguments


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$NAME`, `${NAME}`, `${NAME:-word}` and `${NAME:+word}` replaced, as Dockerfiles do."""

    def value(match: re.Match[str]) -> str:
        found = variables.get(match[1] or match[2], "")
        kind, word = match[3] or "", match[4] or ""
        if kind.endswith("-"):
            return found or word
        return (word if found else "") if kind.endswith("+") else found

    return _REFERENCE.sub(value, text)


def _assignments(instruction: Instruction, known: Mapping[str, str]) -> dict[str, str]:
    first = instruction.arguments.partition(" ")[0]
    if "=" not in first:  # the older form: ENV NAME the rest of the line
        return {first: expand(instruction.arguments.partition(" ")[2].strip(), known)}
    pairs = (word.partition("=") for word in instruction.words())
    return {name: expand(value, known) for name, _, value in pairs}


def _instructions(lines: list[str]) -> Iterator[Instruction]:
    number = 0
    while number < len(lines):
        start = number
        joined, number = _joined(lines, number)
        if not joined:
            continue
        name, _, arguments = joined.partition(" ")
        flags, arguments = _flags(arguments.strip())
        heredocs: list[Heredoc] = []
        if name.upper() in ("RUN", "COPY", "ADD"):
            for dash, quote, word in _HEREDOC.findall(arguments):
                document, number = _document(lines, number, word, bool(dash))
                heredocs.append(Heredoc(word, document, bool(quote)))
        yield Instruction(name.upper(), arguments, flags, tuple(heredocs), start + 1)


def _joined(lines: list[str], number: int) -> tuple[str, int]:
    """The instruction that starts at a line, its continuation lines joined and comments dropped; and what follows."""
    parts: list[str] = []
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.lstrip().startswith("#") or (parts and not line.strip()):
            if not parts:
                break
            continue
        going_on = line.rstrip().endswith("\\")
        parts.append(line.rstrip()[:-1] if going_on else line)
        if not going_on:
            break
    return "".join(parts).strip(), number


def _document(lines: list[str], number: int, word: str, strip_tabs: bool) -> tuple[str, int]:
    found: list[str] = []
    for index in range(number, len(lines)):
        line = lines[index].lstrip("\t") if strip_tabs else lines[index]
        if line == word:
            return "".join(f"{each}\n" for each in found), index + 1
        found.append(line)
    raise TaskError(f"Dockerfile, line {number}: the document {word} does not end")


def _flags(arguments: str) -> tuple[dict[str, str], str]:
    flags = {}
    while arguments.startswith("--"):
        word, _, arguments = arguments.partition(" ")
        name, _, value = word[2:].partition("=")
        flags[name] = value
        arguments = arguments.lstrip()
    return flags, arguments

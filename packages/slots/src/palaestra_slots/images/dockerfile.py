"""Parse a Dockerfile into instructions, and compute the variables, directory and user that it sets. Does no I/O.

This module is used for builds in a slot without a container runtime (`slot_build.py`), for prebuilt root file systems
that have no configuration file, and to check files for container tools (`check_images`). Format: the Dockerfile
reference (docs.docker.com/reference/dockerfile) with heredocs, continuation lines and several stages, as BuildKit
(`frontend/dockerfile/parser`) reads it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from posixpath import join, normpath

from palaestra_slots.core.errors import TaskError
from palaestra_slots.images.task_files import Unsupported, read_task_text
from palaestra_slots.sandbox.images.reference import is_image_name, is_transport
from palaestra_slots.sandbox.slot import is_variable

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The value of `$PATH` in a Dockerfile if neither the base image nor the Dockerfile sets it. Source: moby,
`oci/defaults.go` and BuildKit, `util/system/path.go`."""

_WORKDIRS = {"ghcr.io/laude-institute/t-bench/": "/app"}
"""The WORKDIR of base images that are published for tasks, by the start of their names. A build over another root file
system never sees the image itself."""

LONGEST_ARGUMENT = 128 << 10
"""The maximum length of an argument or a variable of a command. Source: execve(2), MAX_ARG_STRLEN."""

_INSTRUCTIONS = frozenset(
    {
        *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "MAINTAINER"),
        *("ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
    }
)
_MOST_INSTRUCTIONS = 2_000
_WORD = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+""")
_HEREDOC = re.compile(r"\d*<<(-?)([^<]+)", re.ASCII)
_FLAG = re.compile(r"""--(?:[^\s'"\\]|\\(?:.|$)|'(?:[^'\\]|\\.)*+(?:'|\\?$)|"(?:[^"\\]|\\.)*+(?:"|\\?$))*""")
_ESCAPED = re.compile(r"""\\(.|$)|'((?:[^'\\]|\\.)*+)(?:'|\\?$)|"((?:[^"\\]|\\.)*+)(?:"|\\?$)""")
_ESCAPE = re.compile(r"(?:\s*#.*\n)*?\s*#\s*escape\s*=[ \t]*(?!\\[ \t]*(?:\n|$))", re.IGNORECASE)
_UNREADABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x85\u2028\u2029]|\r(?!\n)")
_ODD_REFERENCE = re.compile(r"\$\{(?!\w+(?::?[-+][^{}$'\"\\]*)?\})")
_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-+])([^}]*))?\})")


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A here-document of an instruction. If it is `quoted`, variables in it are not expanded."""

    name: str
    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, such as `RUN` with `apt-get update`. `flags` precede the arguments: `--chown=a:b`."""

    name: str
    arguments: str
    flags: Mapping[str, str] = field(default_factory=dict)
    heredocs: tuple[Heredoc, ...] = ()
    line: int = 0

    @property
    def exec_form(self) -> list[str] | None:
        """The arguments if they are in the JSON form, or None if they are in the shell form, which may also begin with
        `[`."""
        if not self.arguments.startswith("["):
            return None
        try:
            words = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None

    def words(self) -> list[str]:
        """Return the arguments as a list, from the JSON form or the shell form."""
        if (words := self.exec_form) is not None:
            return words
        try:
            return shlex.split(self.arguments)
        except ValueError as error:
            raise TaskError(f"Dockerfile, line {self.line}: {error}") from None


@dataclass(frozen=True, slots=True)
class ImageRecipe:
    """The source of a task's root file system: a Dockerfile in the task's folder, or the name of an image.
    `arguments` are values for the Dockerfile's ARG instructions, without `$`, and `target` is the stage to build; empty
    for the last one."""

    folder: Path
    dockerfile: Path | None = None
    docker_image: str | None = None
    build_timeout_s: float = 600.0
    arguments: tuple[tuple[str, str], ...] = ()
    target: str = ""


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The settings of the commands in an image: variables, directory, and user (empty means root). `entrypoint` and
    `command` are what a container of the image runs; slots run `command` only for services."""

    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BuildStage:
    """One stage of a Dockerfile, by its name or number. `instructions` are all that lead to it: those before the first
    FROM, those of the stage that its FROM names, if it names one, and its own."""

    name: str
    instructions: tuple[Instruction, ...]


def parse(text: str) -> tuple[BuildStage, ...]:
    """Return the stages of a Dockerfile. Raises `TaskError`."""
    return _stages(tuple(_instructions(text)))


def _stages(instructions: tuple[Instruction, ...]) -> tuple[BuildStage, ...]:
    starts = [number for number, each in enumerate(instructions) if each.name == "FROM"]
    if not starts:
        raise TaskError("Dockerfile has no FROM")
    before = instructions[: starts[0]]
    arguments: dict[str, str] = {}
    for each in before:
        _, arguments = follow(ImageConfig(), arguments, each)
    found: dict[str, BuildStage] = {}
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(instructions)], strict=True)):
        words = instructions[start].arguments.split()
        name = words[2].lower() if len(words) == 3 and words[1].lower() == "as" else str(number)
        parent = found.get(expand(words[0], arguments).lower()) if words else None
        leading = before if parent is None else parent.instructions
        # Each stage repeats the instructions of its parent, so a chain of stages grows with the square of its length.
        if parent is not None and len(leading) + end - start > _MOST_INSTRUCTIONS:
            raise TaskError(f"Dockerfile: more than {_MOST_INSTRUCTIONS} instructions lead to the stage {name:.100}")
        found[name] = BuildStage(name, (*leading, *instructions[start:end]))
    return tuple(found.values())


def needed(stages: Sequence[BuildStage]) -> list[tuple[int, BuildStage]]:
    """Return the numbers of the stages from which the last one copies, and these stages, in order. Raises
    `Unsupported` for a copy from another image, and `TaskError` for one from a later stage."""
    numbers = {each.name: number for number, each in enumerate(stages)}
    # From the last stage backwards, as Docker does: a stage that nothing copies from is not built.
    wanted, left = set[int](), [len(stages) - 1]
    while left:
        here = left.pop()
        for each in stages[here].instructions:
            if each.name not in ("COPY", "ADD") or "from" not in each.flags:
                continue
            number = stage_number(each, numbers)
            if number >= here:
                raise TaskError(f"Dockerfile, line {each.line}: it copies from a stage that comes later")
            if number not in wanted:
                wanted.add(number)
                left.append(number)
    return [(number, stages[number]) for number in sorted(wanted)]


def stage_number(each: Instruction, numbers: Mapping[str, int]) -> int:
    """Return the number of the stage that a COPY names in `--from`. Raises `Unsupported` for another image."""
    named = each.flags["from"].lower()
    if named in numbers:
        return numbers[named]
    if named.isdecimal() and int(named) < len(numbers):
        return int(named)
    raise Unsupported(f"its Dockerfile copies from another image (line {each.line}), which needs docker")


def parse_recipe(recipe: ImageRecipe) -> tuple[BuildStage, ...]:
    """Return the stages of a recipe's Dockerfile up to its target, with its arguments in place of the defaults of ARG.
    Raises `TaskError`."""
    assert recipe.dockerfile is not None
    given = dict(recipe.arguments)

    def word(each: str) -> str:
        name = each.partition("=")[0]
        return shlex.quote(f"{name}={given[name]}" if name in given else each)

    read = tuple(_instructions(read_task_text(recipe.dockerfile, "replace")))
    found = _stages(
        tuple(
            replace(each, arguments=" ".join(map(word, each.words()))) if given and each.name == "ARG" else each
            for each in read
        )
    )
    if not recipe.target:
        return found
    for number, each in enumerate(found):
        if each.name == recipe.target.lower():
            return found[: number + 1]
    raise TaskError(f"its Dockerfile has no stage {recipe.target!r:.100}")


def check_images(text: str) -> None:
    """Raise `TaskError` if a Dockerfile for a container tool names an image other than by its name: podman and buildah
    also read files of this machine, for example `docker-archive:PATH`.

    What tools read in different ways is refused.
    """
    if _UNREADABLE.search(text):
        raise Unsupported("its Dockerfile has control characters; remove them")
    shared: dict[str, str] | None = None  # those before the first stage; tools differ in whether later ones count too
    arguments: dict[str, str] = {}
    checked = set[tuple[int, str]]()
    # Buildah before 1.33 has no here-documents and runs their lines as instructions, so these are checked at the end.
    for each in _instructions(text):
        if each.name not in _INSTRUCTIONS:
            raise TaskError(f"Dockerfile, line {each.line}: {each.name!r:.100} is not an instruction")
        if each.arguments.endswith("\\\\") or ("<<" in each.arguments and _ODD_REFERENCE.search(each.arguments)):
            raise Unsupported(
                f"its Dockerfile has a line that tools read in different ways (line {each.line}): it ends with two "
                "backslashes, or has << next to an unusual ${…}. Change it"
            )
        named = _images_in_flags(each)
        if each.name == "ARG":
            _, arguments = follow(ImageConfig(), arguments, each)
        elif each.name == "FROM":
            shared = arguments if shared is None else shared
            image = "".join(each.arguments.split(None, 1)[:1])
            named += [expand(image, known) for known in (shared, arguments)]
        for name in named:
            if not is_image_name(name):
                raise _not_an_image(each, name)
        checked.add((each.line, each.arguments))
    _check_heredocs(text, checked)


def _check_heredocs(text: str, checked: Collection[tuple[int, str]]) -> None:
    """Raise `TaskError` if a line of a here-document would name such an image as an instruction. `checked` are the line
    and arguments of the real instructions."""
    # Builders without here-documents would read these lines as instructions, and fetch the images that they name.
    for each in _instructions(text, heredocs=False):
        if (each.line, each.arguments) not in checked:
            words = list(map(_unquoted, each.arguments.split()))
            named = [*(words[:1] if each.name == "FROM" else []), *_images_in_flags(each)]
            values = [word.partition("=")[2] for word in words if each.name in ("ARG", "ENV")]
            for name in (*named, *values):
                if is_transport(name) or ("$" in name and name in named):
                    raise _not_an_image(each, name)


def _images_in_flags(each: Instruction) -> list[str]:
    """Return the images that the flags of an instruction name, those of an instruction inside ONBUILD included."""
    flags = each.flags
    if each.name == "ONBUILD":
        flags, _ = _flags("".join(each.arguments.split(None, 1)[1:]))
    mounted = re.findall(r"\bfrom=([^,\"]*)", flags.get("mount", ""), re.IGNORECASE)
    return [*([flags["from"]] if "from" in flags else []), *mounted]


def _not_an_image(each: Instruction, name: str) -> TaskError:
    return TaskError(
        f"Dockerfile, line {each.line}: {name!r:.200} is not the name of an image; give one such as python:3.13"
    )


def base_name(stages: Sequence[BuildStage]) -> str:
    """Return the name of the image that the last stage starts from. Raises `TaskError` if it is not a name, or
    `scratch`, and `Unsupported` if a stage from which it copies starts from another one."""
    name = _base_of(stages[-1].instructions)
    for _, each in needed(stages):
        if (other := _base_of(each.instructions)) != name:
            raise Unsupported(f"its Dockerfile has stages over {name} and {other}, which needs docker")
    return name


def _base_of(instructions: tuple[Instruction, ...]) -> str:
    arguments: dict[str, str] = {}
    for each in instructions:
        if each.name == "ARG":
            _, arguments = follow(ImageConfig(), arguments, each)
        elif each.name == "FROM":
            name = expand("".join(each.arguments.split(None, 1)[:1]), arguments)
            if name != "scratch" and is_image_name(name):
                return name
            raise TaskError(f"Dockerfile, line {each.line}: {name!r:.200} is not the name of an image")
    raise TaskError("Dockerfile has no FROM")


def image_config(instructions: tuple[Instruction, ...], base: ImageConfig | None = None) -> ImageConfig:
    """Return the configuration that all instructions set together, beginning with that of the base image."""
    config = base or ImageConfig()
    arguments: dict[str, str] = {}
    for each in instructions:
        config, arguments = follow(config, arguments, each)
    return config


def follow(
    config: ImageConfig, arguments: dict[str, str], instruction: Instruction
) -> tuple[ImageConfig, dict[str, str]]:
    """Return the configuration and the build arguments after an instruction; most instructions change neither."""
    known = known_variables(config, arguments)
    if instruction.name == "FROM":
        name = expand(instruction.arguments, known)
        # These base images set a working directory, which a stage inherits before its first WORKDIR.
        own = next((workdir for start, workdir in _WORKDIRS.items() if name.startswith(start)), None)
        config = replace(config, workdir=own if own and config.workdir == "/" else config.workdir)
    elif instruction.name == "ENV":
        config = replace(config, env={**config.env, **_assignments(instruction, known)})
    elif instruction.name == "WORKDIR":
        config = replace(config, workdir=normpath(join(config.workdir, expand(instruction.arguments, known))))
    elif instruction.name == "USER":
        config = replace(config, user=expand(instruction.arguments.strip(), known))
    elif instruction.name == "ENTRYPOINT":  # which drops the command of the base
        config = replace(config, entrypoint=_program_arguments(instruction), command=())
    elif instruction.name == "CMD":
        config = replace(config, command=_program_arguments(instruction))
    elif instruction.name == "ARG":
        for word in instruction.words():
            name, separator, value = word.partition("=")
            # An ARG without a default keeps the value from before the first FROM or from --build-arg.
            arguments = {**arguments, name: expand(value, known) if separator else arguments.get(name, "")}
    return config, arguments


def _program_arguments(instruction: Instruction) -> tuple[str, ...]:
    """Return the arguments of CMD or ENTRYPOINT."""
    if (words := instruction.exec_form) is not None:
        return tuple(words)
    return ("/bin/sh", "-c", instruction.arguments) if instruction.arguments else ()


def known_variables(config: ImageConfig, arguments: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an instruction can refer to."""
    return {"PATH": DEFAULT_PATH, **arguments, **config.env}


def expand(text: str, known: Mapping[str, str]) -> str:
    """Expand `$NAME`, `${NAME}`, `${NAME:-word}` and `${NAME:+word}`, as Dockerfiles do. Raises `TaskError` if the
    values are longer than any argument of a command can be."""
    left = LONGEST_ARGUMENT

    def value(match: re.Match[str]) -> str:
        nonlocal left
        found = known.get(match[1] or match[2], "")
        # A value can contain another one twice, that one a third, and so on: a short file could make gigabytes.
        left -= len(found)
        if left < 0:
            raise TaskError(f"Dockerfile: the variables of a line are longer than {LONGEST_ARGUMENT >> 10} KiB")
        kind, word = match[3] or "", match[4] or ""
        if kind.endswith("-"):
            return found or word
        return (word if found else "") if kind.endswith("+") else found

    return _REFERENCE.sub(value, text)


def _assignments(instruction: Instruction, known: Mapping[str, str]) -> dict[str, str]:
    first = instruction.arguments.partition(" ")[0]
    if "=" not in first:  # the older form: ENV NAME the rest of the line
        found = {first: expand(instruction.arguments.partition(" ")[2].strip(), known)}
    else:
        pairs = (word.partition("=") for word in instruction.words())
        found = {name: expand(value, known) for name, _, value in pairs}
    for name, value in found.items():
        if not is_variable(name, value):
            raise TaskError(f"Dockerfile, line {instruction.line}: {name!r:.200} cannot be an environment variable")
    return found


def _instructions(text: str, *, heredocs: bool = True) -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile. Without `heredocs`, the lines of here-documents are instructions, too."""
    if _ESCAPE.match(text):
        raise Unsupported("its Dockerfile changes the escape character")
    # BuildKit, too, ignores a byte order mark and the carriage returns of Windows.
    lines = [line.removesuffix("\r") for line in text.removeprefix("\ufeff").split("\n")]
    number = 0
    while number < len(lines):
        start = number
        joined, number = _read_instruction(lines, number, r"(?<!\\)\\[ \t]*$" if heredocs else r"\\[ \t]*$")
        if not joined:
            continue
        name, arguments = [*joined.split(None, 1), ""][:2]
        flags, arguments = _flags(arguments.strip())
        instruction, documents = Instruction(name.upper(), arguments, flags, line=start + 1), list[Heredoc]()
        for word, chomp, quoted in _begun(instruction, joined) if heredocs else ():
            document, number = _document(lines, number, word, chomp)
            documents.append(Heredoc(word, document, quoted))
        yield replace(instruction, heredocs=tuple(documents))


def _begun(each: Instruction, line: str) -> Iterator[tuple[str, bool, bool]]:
    """Yield the here-documents that an instruction begins: the name, whether tabs before it are removed, and whether it
    is quoted. `<<` begins one only at the start of a word, after digits at most, so not inside quotes or `$((…))`."""
    name, arguments = each.name, each.arguments
    if name == "ONBUILD":
        name, arguments = [*arguments.split(None, 1), "", ""][:2]
        _, arguments = _flags(arguments)
    if name.upper() not in ("RUN", "COPY", "ADD") or replace(each, arguments=arguments).exec_form is not None:
        return
    if _WORD.sub("", line).strip():  # a quote is not closed
        return
    for word in _WORD.findall(line):
        if (found := _HEREDOC.fullmatch(word)) is not None and len(names := shlex.split(found[2])) == 1 and names[0]:
            yield names[0], bool(found[1]), names[0] != found[2]


def _read_instruction(lines: list[str], number: int, continued: str) -> tuple[str, int]:
    """Return the instruction that starts at a line, without comments and continuations, and the number of the next
    line. A line that the pattern `continued` matches goes on in the next one."""
    parts: list[str] = []
    while number < len(lines):
        line = lines[number]
        number += 1
        # Within an instruction, too, tools skip comments and empty lines.
        if line.lstrip().startswith("#") or (parts and not line.strip()):
            if not parts:
                break
            continue
        end = re.search(continued, line)
        parts.append(line[: end.start()] if end else line)
        if not end:
            break
    return "".join(parts).strip(), number


def _document(lines: list[str], number: int, word: str, strip_tabs: bool) -> tuple[str, int]:
    found: list[str] = []
    for index in range(number, len(lines)):
        line = lines[index].lstrip("\t") if strip_tabs else lines[index]
        if line == word:
            return "".join(f"{each}\n" for each in found), index + 1
        found.append(line)
    raise TaskError(f"Dockerfile, line {number}: the here-document {word} is not closed")


def _flags(arguments: str) -> tuple[dict[str, str], str]:
    """Return the flags at the start of an instruction's arguments, without quotes and escapes, and the rest."""
    flags: dict[str, str] = {}
    while (found := _FLAG.match(arguments)) is not None:
        name, _, value = _unquoted(found[0])[2:].partition("=")
        flags[name] = f"{flags[name]},{value}" if name in flags else value
        arguments = arguments[found.end() :].lstrip()
    return flags, arguments


def _unquoted(word: str) -> str:
    return _ESCAPED.sub(lambda each: re.sub(r"\\(.)", r"\1", each[1] or each[2] or each[3] or ""), word)

"""What the chat reads from the person's folder and from the project's: instructions, skills and commands.

All of it is text for the model. Nothing in a project's folder becomes a program on this machine, a permission or a
setting, and no symbolic link that leads out of the folder is followed, because it could expose private files to the
model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_toolsets.tools.skills import VIEW, Skill, Skills

AGENTS_FILES = ("AGENTS.md", "CLAUDE.md")
"""Files with instructions for agents. The first of them that exists in a folder is used."""
SKILL_FOLDERS = (".agents/skills", ".claude/skills")
COMMAND_FOLDERS = (".agents/commands", ".claude/commands")

MAX_AGENTS_BYTES, MAX_COMMAND_BYTES = 64 << 10, 64 << 10
MAX_NESTED, MAX_SKILLS, MAX_FOLDERS = 50, 50, 5000
"""The maximum numbers of nested instruction files and of skills that are named, and of folders that are searched."""

_NAME = re.compile(r"[A-Za-z0-9][\w-]*")
_FRONT = re.compile(r"\A---\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_SKIPPED = frozenset({"node_modules", "__pycache__", "venv", "site-packages", "target", "build", "dist"})


@dataclass(frozen=True, slots=True)
class Project:
    """The folder that a conversation is about, and the folder of the person's own settings."""

    folder: Path
    own: Path

    def prompt(self, system: str | None) -> str | None:
        """Return the system prompt with the instructions of the person and of the project, the names of nested
        instruction files, and the names of the skills."""
        parts = [system or ""]
        parts += [f"Instructions of {name}:\n\n{text}" for name, text in self._instructions()]
        if nested := self._nested():
            parts.append(
                "Other folders have instructions of their own. Read them before you change files there: "
                + ", ".join(nested)
            )
        if skills := self.skills():
            lines = [f"- {skill.name}: {' '.join(skill.description.split())}" for skill in skills.values()]
            parts.append("Skills, which you read with skill_view before you start such a task:\n" + "\n".join(lines))
        return "\n\n".join(filter(None, parts)) or (None if system is None else "")

    def _instructions(self) -> Iterator[tuple[str, str]]:
        text = _read_inside(self.own, "AGENTS.md", MAX_AGENTS_BYTES)
        if text:
            yield "the user's own AGENTS.md", text.strip()
        for above in self._above():
            for name in AGENTS_FILES:
                text = _read_inside(above, name, MAX_AGENTS_BYTES)
                if text is not None:
                    where = name if above == self.folder else os.path.relpath(above / name, self.folder)
                    yield where, text.strip()
                    break

    def _above(self) -> list[Path]:
        """Return the folders from the root of the git repository down to the folder; without one, only the folder."""
        folders = [self.folder, *self.folder.parents]
        return folders[: (self._depth() or 0) + 1][::-1]

    def _depth(self) -> int | None:
        """Return how many folders above the folder its git repository begins, or None if there is none. A repository of
        another user does not count: anybody may make one in /tmp."""
        for place, each in enumerate([self.folder, *self.folder.parents]):
            if (each / ".git").exists():
                return place if each.stat().st_uid == os.getuid() else None
        return None

    def _nested(self) -> list[str]:
        """Return the instruction files in subfolders of a project: a repository, or a folder with such a file."""
        found: list[str] = []
        if self._depth() is None and not any((self.folder / name).is_file() for name in AGENTS_FILES):
            return found
        for number, (folder, folders, files) in enumerate(os.walk(self.folder)):
            folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
            if number >= MAX_FOLDERS or len(found) >= MAX_NESTED:
                break
            name = next((name for name in AGENTS_FILES if name in files), None)
            if name is not None and number:
                found.append((Path(folder) / name).relative_to(self.folder).as_posix())
        return found

    def skills(self) -> dict[str, Skill]:
        """Return the skills by name, those of the person before those of the project."""
        found: dict[str, Skill] = {}
        for base, name in ((self.own, "skills"), *((self.folder, name) for name in SKILL_FOLDERS)):
            place = (base / name).resolve()
            if place.is_relative_to(base.resolve()) and place.is_dir():
                for skill in Skills(place).all():
                    if self._may_read(skill):
                        found.setdefault(skill.name, skill)
        return dict(list(found.items())[:MAX_SKILLS])

    def _may_read(self, skill: Skill) -> bool:
        """Return whether the skill is the person's own, or in the project's folder without a link that leads out."""
        own = skill.folder.is_relative_to((self.own / "skills").resolve())
        return own or skill.folder.resolve().is_relative_to(self.folder)

    def skill_tools(self) -> Sequence[FunctionTool]:
        """Return the tool `skill_view` for the skills, or nothing if there are none."""
        skills = self.skills()
        if not skills:
            return ()

        async def run(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
            skill = skills.get(arguments["name"])
            if skill is None or not self._may_read(skill):
                raise ToolMistake(f"There is no skill {arguments['name']!r}", skills=list(skills))
            folder = skill.folder.parent if not skill.category else skill.folder.parent.parent
            return Skills(folder).view(skill.name, arguments.get("file_path") or "SKILL.md")

        return (FunctionTool(schema=VIEW, run=run, toolset="skills", parallel_safe=True),)

    def commands(self) -> dict[str, Path]:
        """Return the files of the commands `/name`, those of the person before those of the project."""
        found: dict[str, Path] = {}
        for base, name in ((self.own, "commands"), *((self.folder, name) for name in COMMAND_FOLDERS)):
            for path in sorted((base / name).glob("*.md")):
                if _NAME.fullmatch(path.stem) and path.resolve().is_relative_to(base.resolve()):
                    found.setdefault(f"/{path.stem}", path)
        return found


def command_message(path: Path, arguments: str) -> str:
    """Return the message of a command: its text without the header, with `$ARGUMENTS` replaced. Raises
    `ConfigError`."""
    text = _read_inside(path.parent, path.name, MAX_COMMAND_BYTES)
    if text is None:
        raise ConfigError(f"the command {path} cannot be read")
    body = _FRONT.sub("", text).strip()
    if "$ARGUMENTS" in body:
        return body.replace("$ARGUMENTS", arguments)
    return f"{body}\n\n{arguments}".strip()


def command_description(path: Path) -> str:
    """Return the description in a command's header, or else its first line."""
    text = _read_inside(path.parent, path.name, MAX_COMMAND_BYTES) or ""
    front = _FRONT.match(text)
    described = re.search(r"^description:[ \t]*(.+)$", front[1], re.MULTILINE) if front else None
    first = _FRONT.sub("", text).strip().partition("\n")[0]
    return (described[1].strip("\"' ") if described else first)[:80]


def _read_inside(folder: Path, name: str, most: int) -> str | None:
    """Return the text of a file of this folder. None if there is none, or if a symbolic link leads out of it."""
    where = folder.resolve()
    path = (where / name).resolve()
    if not path.is_relative_to(where) or not path.is_file():
        return None
    try:
        with open(path, "rb") as file:
            return file.read(most).decode(errors="replace")
    except OSError:
        return None

"""The tools `skills_list`, `skill_view` and `skill_manage`, over a folder of skills that the settings name.

A skill is a folder with a `SKILL.md`: YAML between two `---` lines with `name` and `description`, then Markdown
(https://agentskills.io/specification). A skill's folder is directly in the folder of skills, or in a subfolder of it,
the skill's category. Rollouts must not learn from each other, so there are no skills unless `skills_dir` is set.

Invariants: no path leaves the folder of its skill, and no symbolic link in that folder is followed; a file is replaced
atomically; a lock orders the changes of concurrent processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath

import yaml

from palaestra.tools import parameters
from palaestra.tools.tool import FunctionTool, Tool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.io.durable_files import replaced
from palaestra_slots.core.io.file_lock import thread_lock
from palaestra_slots.core.types import JSON
from palaestra_toolsets.settings import ToolsetSettings

logger = logging.getLogger(__name__)

DOCUMENT = "SKILL.md"
MAX_BYTES = 256 << 10
"""The maximum number of bytes of one file of a skill."""
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_MAX_NAME, _MAX_DESCRIPTION = 64, 1024
_FRONT = re.compile(r"---\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_LOOSE_VALUE = re.compile(r"^(name|description)(:[ \t]+)([^'\"|>\[{\s].*)$", re.MULTILINE)
_FILE = parameters.text("Path of a file, relative to the skill's directory.")

LIST = ToolSchema(
    name="skills_list",
    description=(
        "List the available skills: documents that describe how to do a task. Read the relevant one with "
        "skill_view before you start such a task."
    ),
    parameters={"category": parameters.text("Only list skills of this category.")},
    required=(),
)
VIEW = ToolSchema(
    name="skill_view",
    description="Read a skill or one of its files. The reply lists the files of the skill.",
    parameters={"name": parameters.text("The name of the skill."), "file_path": _FILE},
    required=("name",),
)
MANAGE = ToolSchema(
    name="skill_manage",
    description=(
        "Create a skill from a procedure that worked, or edit or delete one. A skill is a Markdown document with a "
        "header that contains its name and description:\n"
        "---\nname: run-the-tests\ndescription: How the tests of this project run\n---"
    ),
    parameters={
        "action": parameters.choice(
            "The action to perform.", ["create", "patch", "edit", "delete", "write_file", "remove_file"]
        ),
        "name": parameters.text("The name of the skill: lowercase letters, digits and hyphens."),
        "content": parameters.text("For create and edit: the complete document with its header."),
        "old_string": parameters.text(
            "For patch: the text to replace. It must occur exactly once unless replace_all is set."
        ),
        "new_string": parameters.text("For patch: the replacement."),
        "replace_all": parameters.flag("For patch: replace all occurrences."),
        "category": parameters.text("The category of a new skill."),
        "file_path": _FILE,
        "file_content": parameters.text("For write_file: the content of the file."),
    },
    required=("action", "name"),
)


@dataclass(frozen=True, slots=True)
class Skill:
    """One skill: its folder, and the fields of its header."""

    name: str
    description: str
    category: str
    folder: Path


class Skills:
    """The skills of one folder. Methods block while they read or write small files.

    They raise `OSError` if the file system reports an error. They raise `ToolMistake` for an unknown skill or file, an
    invalid name, path or header, and a file of more than `MAX_BYTES`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[Skill]:
        """Return the skills whose header is valid, by category and name. Of several skills with the same name, the one
        whose path sorts first counts. The others are named in the log once."""
        found: dict[str, Skill] = {}
        for document in sorted([*self.folder.glob(f"*/{DOCUMENT}"), *self.folder.glob(f"*/*/{DOCUMENT}")]):
            folder = document.parent
            category = "" if folder.parent == self.folder else folder.parent.name
            try:
                name, description = read_header(_read_skill_file(folder, DOCUMENT))
            except (ToolMistake, OSError) as error:
                _leave_out(document, str(error))
            else:
                name = name if name.split() == [name] else folder.name  # a name is one word of a line for the model
                found.setdefault(name, Skill(name, description, category, folder))
        return sorted(found.values(), key=lambda skill: (skill.category, skill.name))

    def find(self, name: str) -> Skill:
        """Return the skill called `name`. If there is none, raises `ToolMistake` with the known names."""
        skills = self.all()
        for skill in skills:
            if skill.name == name:
                return skill
        raise ToolMistake(f"There is no skill {name!r}", skills=[skill.name for skill in skills])

    def view(self, name: str, file_path: str = DOCUMENT) -> dict[str, JSON]:
        """Return the text of one file of the skill, and a list of all files of the skill."""
        skill = self.find(name)
        text = _read_skill_file(skill.folder, file_path)
        return {"name": name, "file_path": file_path, "content": text, "files": _skill_files(skill.folder)}

    def create(self, name: str, content: str, category: str = "") -> None:
        """Write a new skill. Raises `ToolMistake` also if a skill with this name exists."""
        for what, value in (("name", name), ("category", category)):
            if (value or what == "name") and not (_NAME.fullmatch(value) and len(value) <= _MAX_NAME):
                raise ToolMistake(
                    f"The {what} {value!r} must consist of at most 64 characters: lowercase letters, digits and single "
                    "hyphens"
                )
        _check_header(name, content)
        with self._changing():
            # With the lock held, because another process may be creating the same skill.
            if any(skill.name == name for skill in self.all()):
                raise ToolMistake(f"The skill {name!r} already exists; change it with edit or patch")
            _write_skill_file(_skill_path(self.folder, f"{category}/{name}".lstrip("/")), DOCUMENT, content)

    def edit(self, name: str, content: str) -> None:
        """Replace the skill's document."""
        _check_header(name, content)
        with self._changing():
            _write_skill_file(self._own(name), DOCUMENT, content)

    def patch(self, name: str, old: str, new: str, file_path: str = DOCUMENT, *, everywhere: bool = False) -> None:
        """Replace a text in the document or in another file. The text must occur exactly once or, if `everywhere` is
        true, at least once; otherwise, raises `ToolMistake`."""
        with self._changing():
            folder = self._own(name)
            text = _read_skill_file(folder, file_path)
            count = text.count(old)
            if count == 0 or (count > 1 and not everywhere):
                raise ToolMistake(
                    f"old_string occurs {count} times in {file_path}, but must occur once; nothing was changed"
                )
            text = text.replace(old, new)
            if file_path == DOCUMENT:
                _check_header(name, text)
            _write_skill_file(folder, file_path, text)

    def delete(self, name: str) -> None:
        """Remove a skill with its files."""
        with self._changing():
            shutil.rmtree(self._own(name))

    def write_file(self, name: str, file_path: str, content: str) -> None:
        """Write a file of the skill other than its document."""
        if file_path == DOCUMENT:
            raise ToolMistake(f"Change {DOCUMENT} with edit or patch")
        with self._changing():
            _write_skill_file(self._own(name), file_path, content)

    def remove_file(self, name: str, file_path: str) -> None:
        """Remove a file of the skill other than its document."""
        if file_path == DOCUMENT:
            raise ToolMistake(f"A skill needs its {DOCUMENT}; remove the whole skill with delete")
        with self._changing():
            path = _skill_path(self._own(name), file_path)
            if not path.is_file():
                raise ToolMistake(f"The skill has no file {file_path!r}")
            path.unlink()

    def _own(self, name: str) -> Path:
        """Return the folder of a skill to change. A skill in another folder, to which a link leads, can only be
        read."""
        return _skill_path(self.folder, str(self.find(name).folder.relative_to(self.folder)))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with thread_lock(self.folder / ".lock"):
            yield


def read_header(text: str) -> tuple[str, str]:
    """Return the name and description in a document's header. Raises `ToolMistake` if one is missing or invalid."""
    match = _FRONT.match(text.removeprefix("\ufeff"))
    try:
        header = _fields(match[1]) if match else None
    except yaml.YAMLError as error:
        raise ToolMistake(f"The header is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(header, dict):
        raise ToolMistake("The document must begin with a header: ---, then name and description, then ---")
    name, description = header.get("name"), header.get("description")
    if not isinstance(name, str) or not isinstance(description, str) or not description.strip():
        raise ToolMistake("The header must have a name and a description, both text")
    return name, " ".join(description.split())[:_MAX_DESCRIPTION]


@cache
def _leave_out(document: Path, why: str) -> None:
    """Say once why a skill is missing."""
    logger.warning("the skill %s is left out: %s", document, why)


def _fields(header: str) -> JSON:
    """Return the fields of a header. Where it is not YAML because a value without quotes contains `: `, as in many
    published skills, the rest of a line is the value."""
    try:
        return yaml.safe_load(header)
    except yaml.YAMLError:
        quoted = _LOOSE_VALUE.sub(lambda line: f"{line[1]}{line[2]}{json.dumps(line[3])}", header)
        if quoted == header:
            raise
        return yaml.safe_load(quoted)


def skills_tools(settings: ToolsetSettings) -> tuple[Tool, ...]:
    """Return the three tools with these settings."""
    return tuple(
        FunctionTool(
            schema,
            partial(run, settings),
            toolset="skills",
            missing=partial(_lack, settings),
            touches_world=True,
            world_session="skills",
        )
        for schema, run in ((LIST, _list_skills), (VIEW, _view_skill), (MANAGE, _manage))
    )


def _lack(settings: ToolsetSettings) -> str | None:
    if settings.skills_dir is None:
        return "no folder for skills is set: set skills_dir (--env.skills_dir FOLDER)"
    return None


def _skills(settings: ToolsetSettings) -> Skills:
    if (reason := _lack(settings)) is not None or settings.skills_dir is None:
        raise ToolMistake(f"This tool cannot be used here: {reason}")
    return Skills(Path(settings.skills_dir).expanduser())


async def _list_skills(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    wanted = arguments.get("category")
    skills = [skill for skill in await asyncio.to_thread(_skills(settings).all) if wanted in (None, "", skill.category)]
    shown = [{"name": each.name, "description": each.description, "category": each.category} for each in skills]
    return {"success": True, "skills": shown}


async def _view_skill(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    path = arguments.get("file_path") or DOCUMENT
    return {"success": True, **await asyncio.to_thread(_skills(settings).view, arguments["name"], path)}


_NEEDED: Mapping[str, tuple[str, ...]] = {
    "create": ("content",),
    "edit": ("content",),
    "patch": ("old_string", "new_string"),
    "delete": (),
    "write_file": ("file_path", "file_content"),
    "remove_file": ("file_path",),
}


async def _manage(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    action, name = str(arguments["action"]), str(arguments["name"])
    for needed in _NEEDED[action]:
        if needed not in arguments or (needed != "new_string" and not arguments[needed]):
            raise ToolMistake(f"{needed} is needed for {action}; nothing was changed")
    values = [str(arguments[needed]) for needed in _NEEDED[action]]
    work = partial(getattr(_skills(settings), action), name, *values)
    if action == "create":
        work = partial(work, category=str(arguments.get("category") or ""))
    elif action == "patch":
        work = partial(work, arguments.get("file_path") or DOCUMENT, everywhere=bool(arguments.get("replace_all")))
    await asyncio.to_thread(work)
    return {"success": True, "action": action, "name": name}


def _check_header(name: str, content: str) -> None:
    if read_header(content)[0] != name:
        raise ToolMistake(f"The header's name must be {name!r}, the name of the skill")


def _skill_path(folder: Path, file_path: str) -> Path:
    """Return the path of a file of the skill. Raises `ToolMistake` for a path that could lead outside or has a hidden
    part."""
    parts = PurePosixPath(file_path).parts
    if not parts or file_path.startswith("/") or "\0" in file_path or any(part.startswith(".") for part in parts):
        raise ToolMistake(f"{file_path!r} is not a path in this folder: use a relative path without hidden names")
    path = folder
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise ToolMistake(f"{file_path!r} contains a symbolic link, which is not followed")
    return path


def _read_skill_file(folder: Path, file_path: str) -> str:
    path = _skill_path(folder, file_path)
    if not path.is_file():
        raise ToolMistake(f"The skill has no file {file_path!r}", files=_skill_files(folder))
    with path.open("rb") as file:
        # One byte more shows that the file is too long, even if it grows meanwhile.
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ToolMistake(f"{file_path} has more than {MAX_BYTES} bytes")
    return data.decode("utf-8", "replace")


def _write_skill_file(folder: Path, file_path: str, text: str) -> None:
    data = text.encode()
    if len(data) > MAX_BYTES:
        raise ToolMistake(f"{file_path} would have {len(data)} bytes, more than {MAX_BYTES}; nothing was changed")
    path = _skill_path(folder, file_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        file.write(data)


def _skill_files(folder: Path) -> list[str]:
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [str((Path(place) / name).relative_to(folder)) for name in names if not name.startswith(".")]
    return sorted(found)

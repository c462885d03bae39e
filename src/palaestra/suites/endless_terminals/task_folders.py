"""Task folders of the public recipe: their native form, and the same tasks in Harbor's form. Reading only.

    native   task.json {description, truth, name}, container.def, test_initial_state.py, test_final_state.py
    Harbor   instruction.md, environment/{Dockerfile, task.json, test_initial_state.py}, tests/test_final_state.py,
             solution/solve.sh

The recipe: "Endless Terminals: Scaling RL Environments for Terminal Agents", arXiv 2601.16443. A container definition
names a base image and a `%post` script. With the local root (or `image`) in place of the base, its script is run as a
set-up, and the tests of the first state decide whether that was enough. A Dockerfile is a recipe that others follow
(`envs/images`). A ready root file system, `ROOTS/<name of the folder>`, goes before both. `truth` is not even read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from palaestra.core.errors import ConfigError, TaskError
from palaestra.suites.images.image_spec import ImageRecipe

_INSTALLERS = re.compile(
    r"(DEBIAN_FRONTEND=\w+\s+)?(sudo\s+)?"
    r"(apt-get|apt|apk|dnf|yum|pip3?|python3? -m pip|rm -rf /var/lib/apt)\b"
)
_ROOT_ENDINGS = ("", ".tar", ".tar.gz")


@dataclass(frozen=True, slots=True)
class FolderTask:
    """One task of a folder. `image` None is the slots' own root, unless there is a `recipe` for one; `setup` is empty
    when the image is ready."""

    id: str
    prompt: str
    setup: str
    initial_tests: str
    final_tests: str
    image: str | None = None
    solution: str | None = None
    recipe: ImageRecipe | None = None


def read_folder(
    root: Path, roots: Path | None = None, build_timeout_s: float = 600.0
) -> Iterator[FolderTask | TaskError]:
    """The tasks below `root` in the order of their names, and an error for each that cannot be used here.

    Raises `ConfigError` when there is no folder, or no task in it.
    """
    if not root.is_dir():
        raise ConfigError(f"there is no folder of tasks {root}")
    places = [root] if _is_task(root) else sorted(path for path in root.iterdir() if path.is_dir() and _is_task(path))
    if not places:
        raise ConfigError(f"{root} has no task: a folder with task.json or instruction.md, or such folders")
    for place in places:
        try:
            yield read_task(place, roots, build_timeout_s)
        except TaskError as error:
            yield error


def _is_task(place: Path) -> bool:
    return (place / "task.json").is_file() or (place / "instruction.md").is_file()


def read_task(place: Path, roots: Path | None = None, build_timeout_s: float = 600.0) -> FolderTask:
    """The task of one folder. Raises `TaskError` for what is missing."""
    image = _ready_root(place.name, roots)
    harbor = (place / "instruction.md").is_file()
    prompt = _text(place / "instruction.md") if harbor else _description(place / "task.json")
    environment, tests = (place / "environment", place / "tests") if harbor else (place, place)
    solution = place / "solution" / "solve.sh"
    dockerfile = environment / "Dockerfile"
    built = image is None and dockerfile.is_file() and not (environment / "container.def").is_file()
    recipe = ImageRecipe(environment, dockerfile, build_timeout_s=build_timeout_s) if built else None
    return FolderTask(
        id=place.name,
        prompt=prompt.strip(),
        setup="" if image or recipe else _setup(place, environment),
        initial_tests=_optional(environment / "test_initial_state.py"),
        final_tests=_text(tests / "test_final_state.py"),
        image=image,
        solution=_text(solution) if solution.is_file() else None,
        recipe=recipe,
    )


def _ready_root(name: str, roots: Path | None) -> str | None:
    """The root file system that was made for a task."""
    found = [roots / f"{name}{ending}" for ending in _ROOT_ENDINGS if roots is not None]
    return next((str(path) for path in found if path.exists()), None)


def _setup(place: Path, environment: Path) -> str:
    definition = environment / "container.def"
    if definition.is_file():
        return post_script(_text(definition), place.name)
    raise TaskError(f"{place.name}: it has neither a container.def nor a Dockerfile, and --env.roots has no root of it")


def post_script(definition: str, name: str) -> str:
    """The `%post` section as a script, without commands that install packages. Raises `TaskError`.

    Packages cannot be installed without a network; the tests of the first state say whether they are missed.
    """
    sections = re.split(r"^%(\w+).*$", definition, flags=re.MULTILINE)
    named = dict(zip(sections[1::2], sections[2::2], strict=True))
    if "files" in named and named["files"].strip():
        raise TaskError(f"{name}: its container definition copies files of the machine it was made on (%files)")
    body = re.sub(r"\\\n\s*", "", named.get("post", ""))
    lines = (_without_installers(line) for line in body.splitlines())
    return "".join(f"{line}\n" for line in lines if line is not None)


def _without_installers(line: str) -> str | None:
    """A command line without its installing parts; None where nothing is left of it."""
    if not _INSTALLERS.match(line.strip()):
        return line
    kept = [part for part in line.strip().split("&&") if not _INSTALLERS.match(part.strip())]
    return "&&".join(kept).strip() or None


def _description(path: Path) -> str:
    try:
        described = json.loads(_text(path))["description"]
    except (ValueError, TypeError, KeyError):
        raise TaskError(f"{path.parent.name}: task.json has no description") from None
    if not isinstance(described, str) or not described.strip():
        raise TaskError(f"{path.parent.name}: the description in task.json is empty or no text")
    return described


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read: {error}") from None


def _optional(path: Path) -> str:
    return _text(path) if path.is_file() else ""

"""Find Harbor tasks by the name of a dataset or package: `harbor:NAME[@VERSION]` and `harbor:ORG/NAME[@REF]`.

A name is looked up as a folder, in a `registry.json` of Harbor's form, and among the packages that Harbor has
downloaded. Repositories that a registry names are fetched with git (`git_checkout.py`).

Source: `harbor/models/registry.py`, `harbor/models/task/id.py` and `resolve_version` of Harbor 0.26.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from palaestra.envs.discovery import DatasetForm, load_environment, tasks_form
from palaestra.envs.form import Form
from palaestra_slots.core.config import local_path, nearest
from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_slots.core.types import JSON
from palaestra_suites.git_checkout import checked_path, checked_url, git_checkout, inside

PREFIX = "harbor:"
REGISTRY = "registry.json"
HARBOR_CACHE = "~/.cache/harbor"
_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_ALPHABET = "23456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_ENVIRONMENT = "terminalbench_2"

Folders = list[tuple[str, Path | TaskError, bool]]
"""The folder of each task by its name, or the reason why it has none. The last item is whether it is graded live."""


def harbor_form(name: str) -> Form:
    """Return the form of `harbor:NAME`: of the tasks in a folder, or of a dataset that is found when its tasks are
    read. Raises `ConfigError` for text that is neither."""
    name = name.removeprefix("//")
    if (tasks := tasks_form(local_path(name))) is not None:
        return tasks
    _name_and_version(name)
    reference = f"{PREFIX}{name}"
    return DatasetForm(load_environment(_ENVIRONMENT, Path()), reference, reference)


@dataclass(frozen=True, slots=True)
class _Named:
    """A task of a registry: a folder of a git repository or, if `git_url` is None, below the registry's folder."""

    name: str
    path: str
    git_url: str | None = None
    commit: str | None = None

    def in_harbors_cache(self) -> Path | None:
        """Return the folder in which Harbor keeps this task, if its commit is fixed and Harbor has downloaded it."""
        if self.git_url is None or self.commit is None or not re.fullmatch("[0-9a-fA-F]{40,64}", self.commit):
            return None
        path = Path(checked_path(self.path))
        about = f"git_url={self.git_url!r} git_commit_id={self.commit!r} path={path!r}"
        place = local_path(HARBOR_CACHE) / "tasks" / _short_uuid(about) / path.name
        return place if place.is_dir() else None


async def named_folders(name: str, registry: str | None, cache: Path) -> Folders:
    """Return the tasks of a dataset or package. `registry` is a registry or its folder, by default that of the current
    folder. Raises `ConfigError` if nothing has this name; the error names the places that were searched."""
    base, version = _name_and_version(name)
    places: list[str] = [f"the folder {name}"]
    file = local_path(registry or ".")
    file = file / REGISTRY if file.is_dir() else file
    if file.is_file():
        datasets = _read_registry(file)
        if base in datasets:
            if not (tasks := _of_version(base, version, datasets[base])):
                raise ConfigError(f"the dataset {name} of {file} has no tasks")
            return await _fetched(tasks, file.parent, cache)
        known = ", ".join(sorted(datasets)[:20])
        places.append(f"{file} (its datasets: {known}){nearest(base, datasets)}")
    elif registry is not None:
        raise ConfigError(f"the registry {file} does not exist")
    else:
        places.append(f"{file.absolute()}, which does not exist")
    package = local_path(HARBOR_CACHE) / "tasks" / "packages" / base
    if "/" in base:
        if found := _downloaded(package, version, base):
            return [(package.name, found, False)]
        places.append(f"{package}, where Harbor keeps downloaded packages")
    raise ConfigError(
        f"no Harbor dataset or package is called {name!r}. Searched: {'; '.join(places)}. Name a registry with "
        f"--env.registry PATH, or run `harbor download {name}` and give the folder"
    )


def _name_and_version(name: str) -> tuple[str, str | None]:
    base, at, version = name.partition("@")
    if not _NAME.fullmatch(base) or (at and not re.fullmatch(r"[\w][\w.:+-]*", version)):
        raise ConfigError(
            f"{PREFIX}{name[:200]} names no tasks: there is no folder of tasks {name[:200]!r}, and a dataset is "
            f"written {PREFIX}NAME, {PREFIX}NAME@VERSION, {PREFIX}ORG/NAME or {PREFIX}ORG/NAME@REF"
        )
    return base, version if at else None


def _read_registry(file: Path) -> dict[str, dict[str, list[_Named]]]:
    """Return the tasks of a registry by dataset and version. Raises `ConfigError`."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the registry {file} cannot be read: {error}") from None
    found: dict[str, dict[str, list[_Named]]] = {}
    try:
        for row in rows:
            tasks = [_named(each) for each in row["tasks"]]
            found.setdefault(str(row["name"]), {})[str(row["version"])] = tasks
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} is not a registry of Harbor, which is a list of datasets with name, version and tasks: "
            f"{type(error).__name__}: {error}"
        ) from None
    return found


def _named(row: JSON) -> _Named:
    url, commit = row.get("git_url"), row.get("git_commit_id")
    return _Named(
        str(row["name"]), str(row["path"]), None if url is None else str(url), None if commit is None else str(commit)
    )


def _of_version(base: str, version: str | None, versions: dict[str, list[_Named]]) -> list[_Named]:
    """Return the tasks of a version: by default `head`, else the highest number, else the last name."""
    if version is not None:
        if version not in versions:
            raise ConfigError(f"the dataset {base} has no version {version!r}. Versions: {', '.join(versions)}")
        return versions[version]
    numbered = {tuple(map(int, each.split("."))): each for each in versions if re.fullmatch(r"\d+(\.\d+)*", each)}
    last = "head" if "head" in versions else numbered[max(numbered)] if numbered else max(versions)
    return versions[last]


async def _fetched(tasks: Sequence[_Named], folder: Path, cache: Path) -> Folders:
    """Return the folder of each task, in order. The tasks of one commit are fetched together."""
    groups: dict[tuple[str | None, str | None], list[_Named]] = {}
    found: dict[int, Path | TaskError] = {}
    for task in tasks:
        try:
            checked_path(task.path)
            if (cached := task.in_harbors_cache()) is not None:
                found[id(task)] = cached
                continue
            if task.git_url is not None:
                _check_place(checked_url(task.git_url), folder)
            groups.setdefault((task.git_url, task.commit), []).append(task)
        except TaskError as error:
            found[id(task)] = error
    for (url, commit), members in groups.items():
        found |= await _of_repository(url, commit, members, folder, cache)
    return [(task.name.rpartition("/")[2], found[id(task)], False) for task in tasks]


def _check_place(url: str, folder: Path) -> None:
    """Raise `TaskError` for a repository of this machine outside the registry's folder, because agents see the files of
    their tasks, and the registry may be somebody else's."""
    parts = urlsplit(url)
    if parts.scheme == "file" and not Path(unquote(parts.path)).resolve().is_relative_to(folder.resolve()):
        raise TaskError(f"the repository {url} is not below the registry's folder {folder}")


async def _of_repository(
    url: str | None, commit: str | None, tasks: Iterable[_Named], folder: Path, cache: Path
) -> dict[int, Path | TaskError]:
    found: dict[int, Path | TaskError] = {}
    tasks = list(tasks)
    try:
        checkout = folder if url is None else await git_checkout(url, commit, [each.path for each in tasks], cache)
    except TaskError as error:
        return {id(task): error for task in tasks}
    for task in tasks:
        try:
            found[id(task)] = inside(checkout, task.path)
        except TaskError as error:
            found[id(task)] = error
    return found


def _downloaded(package: Path, ref: str | None, base: str) -> Path | None:
    """Return the folder of a package that Harbor has downloaded, or None. Without a digest, there must be one version
    only, because tags are known to Harbor's hub alone."""
    versions = sorted(each for each in package.iterdir() if each.is_dir()) if package.is_dir() else []
    digest = (ref or "").removeprefix("sha256:")
    chosen = [each for each in versions if ref is None or (each.name.startswith(digest) and len(digest) >= 8)]
    if len(chosen) == 1:
        return chosen[0]
    if versions:
        names = ", ".join(f"{PREFIX}{base}@sha256:{each.name[:12]}" for each in versions)
        raise ConfigError(f"Harbor has downloaded {len(versions)} versions of {base}, choose one of them: {names}")
    return None


def _short_uuid(text: str) -> str:
    """Return the name that the package shortuuid derives from a text, which Harbor uses for folders."""
    space = uuid.NAMESPACE_URL if text.lower().startswith(("http://", "https://")) else uuid.NAMESPACE_DNS
    number, digits = uuid.uuid5(space, text).int, ""
    while number:
        number, digit = divmod(number, len(_ALPHABET))
        digits += _ALPHABET[digit]
    return digits.ljust(22, _ALPHABET[0])[::-1]

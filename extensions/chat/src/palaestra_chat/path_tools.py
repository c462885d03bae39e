"""The programs of the person's PATH that a sandbox sees, read-only, beside those of the system.

Which folders of this machine are mounted is decided by the tables here alone, because PATH may have folders that a
project chose (`direnv`, an activated environment), and because a folder in the home directory may hold secrets. A
folder of PATH that no table has is not mounted, and is named to the person. The tables have no folder with settings or
keys: of `~/.cargo`, for example, only `bin`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from palaestra_slots.sandbox.server_backend import host_path
from palaestra_slots.sandbox.slot import Mount

_UV = (".local/share/uv/python", ".local/share/uv/tools")
_PIPX = (".local/share/pipx/venvs", ".local/pipx/venvs")
_HOME: Mapping[str, Sequence[str]] = {
    ".asdf": (),
    ".bun/bin": (),
    ".cargo/bin": (".rustup",),
    ".deno/bin": (),
    ".dotnet": (),
    ".fnm": (),
    ".ghcup/bin": (".ghcup/ghc",),
    ".juliaup/bin": (".julia/juliaup",),
    ".local/bin": (*_UV, *_PIPX),
    ".local/go": (),
    ".local/share/fnm": (),
    ".local/share/mise/shims": (".local/share/mise/installs",),
    ".local/share/mise/installs": (),
    ".local/share/pnpm": (),
    ".nvm/versions": (),
    ".pyenv": (),
    ".rbenv": (),
    ".sdkman/candidates": (),
    ".volta/bin": (".volta/tools",),
    "anaconda3": (),
    "bin": (),
    "go/bin": (),
    "mambaforge": (),
    "miniconda3": (),
    "miniforge3": (),
}
"""Folders of the home directory that are mounted if PATH has them or a folder in them, and further folders that their
programs need."""

_MACHINE = ("/opt/*", "/nix/store")
"""Folders outside the home directory that are mounted likewise, if they belong to the system and everybody may read
them."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
_MOST_PROGRAMS = 5000


@dataclass(frozen=True, slots=True)
class PathTools:
    """What a sandbox gets: mounts and the variable PATH. `missing` are the folders and programs of the person's PATH
    that it does not see."""

    mounts: Sequence[Mount] = ()
    path: str = ""
    missing: Sequence[str] = ()


def tools_from(path: str, home: Path, project: Path | None) -> PathTools:
    """Return what a sandbox with a copy of the folder `project` gets of this PATH."""
    home, mounted, shown, missing = home.resolve(), dict[str, None](), list[str](), list[str]()
    for entry in dict.fromkeys(filter(os.path.isabs, path.split(":"))):
        if not os.path.isdir(entry):
            continue
        folder = Path(entry).resolve()
        trees = [] if _in(folder, _SYSTEM) or _is_inside(folder, project) else list(_trees(folder, home, project))
        mounted.update(dict.fromkeys(trees))
        if _in(folder, _SYSTEM):
            shown.append(entry)
        elif trees or _is_inside(folder, project):
            shown.append(str(folder))
        else:
            missing.append(str(folder))
    trees = [tree for tree in mounted if not any(tree != other and _in(Path(tree), [other]) for other in mounted)]
    seen = [*_SYSTEM, *trees, *([str(project)] if project is not None else [])]
    for entry in shown:
        if not _in(Path(entry), _SYSTEM):
            missing += _dangling(entry, seen)
    default = [entry for entry in host_path().split(":") if entry not in shown]
    return PathTools([Mount(tree, tree, whole=True) for tree in trees], ":".join([*shown, *default]), missing)


def tool_variables(tools: PathTools, home: Path) -> tuple[tuple[str, str], ...]:
    """Return the variables with which the programs find their own folders, because a sandbox has another home."""
    names = {"PYENV_ROOT": ".pyenv", "RBENV_ROOT": ".rbenv", "DOTNET_ROOT": ".dotnet", "RUSTUP_HOME": ".rustup"}
    names |= {"ASDF_DATA_DIR": ".asdf", "VOLTA_HOME": ".volta", "UV_PYTHON_INSTALL_DIR": _UV[0]}
    names |= {"JULIAUP_DEPOT_PATH": ".julia"}
    folders = {name: home.resolve() / folder for name, folder in names.items()}
    trees = [Path(mount.target) for mount in tools.mounts]
    found = [(name, str(path)) for name, path in folders.items() if any(tree.is_relative_to(path) for tree in trees)]
    return (("PATH", tools.path), *found) if tools.path else ()


def _trees(folder: Path, home: Path, project: Path | None) -> Iterator[str]:
    """Yield the folders to mount for a folder of PATH; nothing if no table has it."""
    for name, needed in _HOME.items():
        if folder.is_relative_to(home / name):
            for tree in (home / name, *(home / each for each in needed)):
                # A link in place of such a folder may lead anywhere.
                if tree.is_dir() and tree.resolve() == tree and not _is_inside(project, tree):
                    yield str(tree)
            return
    for pattern in _MACHINE:
        tree = Path(*folder.parts[: len(Path(pattern).parts)])
        if (
            tree.match(pattern)
            and folder.is_relative_to(tree)
            and _is_world_readable(tree)
            and not _is_inside(project, tree)
        ):
            yield str(tree)
            return


def _is_world_readable(tree: Path) -> bool:
    """Return whether a folder belongs to the system, so that everybody may read what everybody may read in it."""
    about = tree.stat()
    return about.st_uid == 0 and about.st_mode & 0o007 == stat.S_IROTH | stat.S_IXOTH


def _dangling(folder: str, seen: Sequence[str]) -> list[str]:
    """Return the programs in a folder that are links to places that the sandbox does not see."""
    found = []
    with os.scandir(folder) as entries:
        for _, entry in zip(range(_MOST_PROGRAMS), entries, strict=False):
            if entry.is_symlink() and os.access(entry.path, os.X_OK) and not _in(Path(entry.path).resolve(), seen):
                found.append(entry.path)
    return sorted(found)


def _in(path: Path, folders: Sequence[str]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _is_inside(path: Path | None, folder: Path | None) -> bool:
    return path is not None and folder is not None and path.is_relative_to(folder)

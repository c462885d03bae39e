"""Pass the declared part of an agent's work to a verifier that has a root file system of its own.

Order and rules: `SingleStepTrial`, `ArtifactHandler` and `resolve_verifier_environment_definition` of Harbor 0.25. The
collect hooks run in the agent's slot; then those of the services run and the artifacts of the services are copied,
while the agent's processes are stopped; then all slots end. The artifacts are copied out, and into a fresh slot, at the
same paths. An artifact that does not exist is left out. What is copied are files, directories and links that stay
inside their artifact; a link that leaves it could stand for a file of the verifier. Files lose their setuid and setgid
bits.
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
import posixpath
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from palaestra_slots.core.errors import InfraError
from palaestra_slots.core.printable import one_line
from palaestra_slots.sandbox.slot import Slot
from palaestra_slots.sandbox.transfer import download_dir, upload_dir
from palaestra_suites.terminal_bench.service import MAIN
from palaestra_suites.terminal_bench.terminal_task import Artifact, CollectHook

MOST_BYTES = 2 << 30
"""The maximum size of all artifacts of a rollout, in bytes. Larger ones are left out."""

_MOST_ENTRIES = 200_000

COLLECT_S = 30.0
"""The time limit of copying all artifacts out of one slot, because the agent decides how many files they have."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The artifacts of a rollout on this machine: where each one belongs, and its copy. `left_out` says what the
    verifier does not get, and why, and `late` has those whose copy was not complete in time."""

    copies: Sequence[tuple[str, Path]]
    left_out: Sequence[str]
    late: Sequence[str] = ()


async def run_hooks(
    hooks: Sequence[CollectHook], place_of: Callable[[CollectHook], Awaitable[tuple[Slot, str]]]
) -> list[str]:
    """Run the hooks in order, and return the problem of each one that failed. `place_of` returns the slot of a hook
    with the rights of its user, and the working directory. As in Harbor, the main service has bash."""
    problems = []
    for hook in hooks:
        slot, workdir = await place_of(hook)
        argv = ["bash" if hook.service == MAIN else "sh", "-c", hook.command]
        result = await slot.execute(argv, cwd=workdir, timeout_s=hook.timeout_s, spill=False)
        if not result.success:
            problems.append(f"`{one_line(hook.command, 100)}`: {one_line(result.output or result.error, 300)}")
    return problems


async def copy_artifacts(slot: Slot, artifacts: Sequence[Artifact], folder: Path) -> Collected:
    """Copy artifacts from a slot to numbered entries of an empty folder."""
    copies: list[tuple[str, Path]] = []
    left_out: list[str] = []
    late: list[str] = []
    room, end_s = MOST_BYTES, asyncio.get_running_loop().time() + COLLECT_S
    for number, artifact in enumerate(artifacts):
        place, path = folder / str(number), artifact.source
        try:
            entry = await slot.stat(path)
            if entry is None:
                continue
            if entry.kind not in ("file", "dir"):
                left_out.append(f"{path}: it is neither a file nor a directory")
                continue
            async with asyncio.timeout_at(end_s):
                size = entry.size if entry.kind == "file" else await _size(slot, path, room)
                if size > room:
                    left_out.append(f"{path}: more than {MOST_BYTES >> 20} MB")
                    continue
                if entry.kind == "file":
                    size = await slot.download(path, place)
                    place.chmod(entry.mode & 0o777)
                else:
                    done = await download_dir(slot, path, place)
                    size = done.size
                    left_out += done.left_out
            if size > room:  # a program of the slot let it grow meanwhile
                await asyncio.to_thread(_remove_path, place)
                left_out.append(f"{path}: more than {MOST_BYTES >> 20} MB")
                continue
            room -= size
            if entry.kind == "dir":
                left_out += await asyncio.to_thread(_cleaned, place, path, artifact.exclude)
        except InfraError:
            raise
        except TimeoutError:
            late.append(path)
            left_out.append(f"{path}: it could not be copied within {COLLECT_S:g} s")
            continue
        except OSError as error:
            left_out.append(f"{path}: {error}")
            continue
        copies.append((path, place))
    return Collected(copies, left_out[:50], late)


def join_artifacts(first: Collected, then: Collected) -> Collected:
    """Return the artifacts of the agent's slot and then those of the services. If two belong at the same place, or one
    below the other, the first counts."""
    copies, left_out = list(first.copies), [*first.left_out]
    for path, copy in then.copies:
        taken = next((known for known, _ in copies if _overlaps(known, path)), None)
        if taken is None:
            copies.append((path, copy))
        else:
            left_out.append(f"{path}: another artifact is at {taken}")
    return Collected(copies, [*left_out, *then.left_out][:50], [*first.late, *then.late])


def _overlaps(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


async def put(slot: Slot, collected: Collected) -> None:
    """Copy the artifacts to their places in a verifier's slot, in place of what is there."""
    for path, copy in collected.copies:
        await slot.remove(path)
        if copy.is_dir():
            await upload_dir(slot, copy, path)
        else:
            await slot.make_dir(posixpath.dirname(path))
            await slot.upload(copy, path)


async def _size(slot: Slot, path: str, most: int) -> int:
    """Return the size of a directory, in bytes; more than `most` if it has too many entries."""
    total, entries, trail = 0, 0, [path]
    while trail and total <= most:
        for entry in await slot.list_dir(trail.pop()):
            entries += 1
            if entry.kind == "dir":
                trail.append(entry.path)
            elif entry.kind == "file":
                total += entry.size
        if entries > _MOST_ENTRIES:
            return most + 1
    return total


def _cleaned(place: Path, source: str, exclude: Sequence[str]) -> list[str]:
    """Remove excluded entries, links that leave the artifact, and bits that change the user of a program. Returns the
    links that were removed."""
    removed = []
    for here, folders, files in os.walk(place):
        for name in (*folders, *files):
            path = Path(here, name)
            inside = str(path.relative_to(place))
            if any(fnmatch.fnmatchcase(each, pattern) for pattern in exclude for each in (inside, name)):
                _remove_path(path)
            elif path.is_symlink():
                if _leaves(place, inside, os.readlink(path)):
                    path.unlink()
                    removed.append(f"{source}/{inside}: a link that leaves {source}")
            elif path.is_file():
                path.chmod(path.stat().st_mode & 0o777)
        folders[:] = [name for name in folders if Path(here, name).is_dir() and not Path(here, name).is_symlink()]
    return removed


def _leaves(place: Path, inside: str, target: str) -> bool:
    """Return whether a link leaves the artifact, by itself or through `..` of another link, whose end is elsewhere."""
    here = (place / inside).parent
    for part in target.split("/"):
        if part == "..":
            if here == place or here.is_symlink():
                return True
            here = here.parent
        elif part not in ("", "."):
            here /= part
    return target.startswith("/")


def _remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

"""Build a task's image with a container tool and export it once to a root file system.

The result is a tar file in the cache, named by a digest of the build folder and of the image's name, next to a JSON
file with the image's configuration. Slots use the tar file (`sandbox/images`); no container runs during a rollout. The
tool is the first of docker, podman and buildah that answers, or the command that a setting specifies.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from palaestra_slots.core.errors import ImageError, TaskError
from palaestra_slots.core.io.file_lock import file_lock
from palaestra_slots.core.io.host_process import ProcessResult, check_process, run_process
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.types import JSON
from palaestra_slots.images.dockerfile import ImageConfig, ImageRecipe, check_images
from palaestra_slots.images.task_files import read_task_bytes, read_task_text
from palaestra_slots.sandbox.images.reference import is_image_name
from palaestra_slots.sandbox.images.unpack import stated_config
from palaestra_slots.sandbox.slot import read_variables

TOOLS = ("docker", "podman", "buildah")
SCHEMA, VERSION = "palaestra.root", 1

_ASK_S, _EXPORT_S = 20.0, 600.0
_SHOWN = 1500

_LAYER_REMOVED, _TRIES = "unknown parent image ID", 5
"""Docker's message if the removal of another image also removed a layer that a build had started with, and the maximum
number of attempts to build."""


class ImageBuilder:
    """Builds the root file system of each task once. Safe across processes.

    `tool` is a command line (`docker -H unix:///run/other.sock`); if it is empty, the first tool that answers is used.
    `network` allows RUN lines to use the tool's default network, which is never the host's, so that they cannot reach
    services on the host's loopback. `force` rebuilds cached roots.
    """

    def __init__(self, folder: Path, *, tool: str = "", network: bool = True, force: bool = False) -> None:
        self._folder = folder
        self._wanted = shlex.split(tool)
        self._network = network
        self.force = force
        self._tool: list[str] | None = None

    async def root(self, recipe: ImageRecipe) -> tuple[Path, ImageConfig]:
        """Return the recipe's root file system and configuration. Raises `TaskError` if it cannot be built."""
        tool = await self._found(recipe)
        key = content_key(recipe)
        self._folder.mkdir(parents=True, exist_ok=True)
        archive = self._folder / f"{key}.tar"
        async with file_lock(self._folder / f"{key}.lock", timeout_s=recipe.build_timeout_s + _EXPORT_S):
            if self.force or not archive.is_file() or not _config_path(archive).is_file():
                await self._make_archive(tool, recipe, f"palaestra-task:{key}", archive)
        return archive, read_config(archive)

    async def _found(self, recipe: ImageRecipe) -> list[str]:
        """Return the command of the tool. Raises a `TaskError` that quotes the error of every installed tool that does
        not answer."""
        if self._tool is not None:
            return self._tool
        silent = []
        for command in [self._wanted] if self._wanted else [[tool] for tool in TOOLS]:
            if shutil.which(command[0]) is None:
                continue
            # `info` asks the daemon. The version is known to a client without one.
            answer = await run_process([*command, "info"], timeout_s=_ASK_S)
            if answer.returncode == 0:
                self._tool = command
                return command
            silent.append(f"{shlex.join(command)} does not answer: {_error_line(answer.text)}")
        reason = "; ".join(silent) or f"none of {', '.join(self._wanted[:1] or TOOLS)} is installed"
        named = recipe.docker_image
        pull = f"pull it without one (`palaestra images pull {named}`), " if named and is_image_name(named) else ""
        raise TaskError(
            f"{reason.rstrip('.?')}. Its image needs a container tool: {pull}start one, build its Dockerfile in a slot "
            f"with --env.base_image host, or give a prebuilt root file system with --env.image_dir"
        )

    async def _make_archive(self, tool: list[str], recipe: ImageRecipe, tag: str, archive: Path) -> None:
        image = await self._prebuilt(tool, recipe)
        if image is None:
            image = tag
            await self._build(tool, recipe, tag)
        partial = archive.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        try:
            config = await _export(tool, image, partial)
            _write_config(archive, config, recipe)
            partial.rename(archive)
        finally:
            partial.unlink(missing_ok=True)
            if image == tag:
                await run_process([*tool, "rmi", tag], timeout_s=_ASK_S)

    async def _prebuilt(self, tool: list[str], recipe: ImageRecipe) -> str | None:
        """Return the image that the task names, which is pulled if necessary. Return None if the Dockerfile must be
        built: there is no such image, it cannot be pulled, or `force` is set. Raises `TaskError` if it cannot be pulled
        and there is no Dockerfile."""
        if recipe.docker_image is None or (self.force and recipe.dockerfile is not None):
            return None
        if not is_image_name(recipe.docker_image):
            raise TaskError(f"{recipe.docker_image!r:.200} is not the name of an image; give one such as python:3.13")
        try:
            await self._pull(tool, recipe.docker_image)
        except TaskError:
            if recipe.dockerfile is None:
                raise
            return None
        return recipe.docker_image

    async def _build(self, tool: list[str], recipe: ImageRecipe, tag: str) -> None:
        assert recipe.dockerfile is not None
        check_images(read_task_text(recipe.dockerfile, "replace"))
        docker = Path(tool[0]).name == "docker"
        inspect = [*tool, "network", "inspect", "bridge"]
        # A daemon that runs with --bridge=none has no network for builds, and fails unless the build asks for none.
        bridge = not docker or (await run_process(inspect, timeout_s=_ASK_S)).returncode == 0
        network = [] if self._network and bridge else ["--network", "none"]
        tidy = ["--force-rm"] if docker else []  # the other tools leave no failed container
        given = [f"--build-arg={name}={value}" for name, value in recipe.arguments]
        given += [f"--target={recipe.target}"] if recipe.target else []
        command = [*tool, "build", *tidy, *network, *given, "-t", tag, "-f", str(recipe.dockerfile), str(recipe.folder)]
        # Builds of several processes share layers, and the tool may remove one that another build is about to use.
        for _ in range(_TRIES):
            done = await run_process(command, timeout_s=recipe.build_timeout_s)
            if done.returncode == 0:
                return
            if _LAYER_REMOVED not in done.text:
                break
        lacks = (
            "" if bridge or not self._network else ", whose daemon has no bridge network, so RUN lines had no network"
        )
        raise TaskError(f"its image does not build with {tool[0]}{lacks}:\n{without_middle(done.text.strip(), _SHOWN)}")

    async def _pull(self, tool: list[str], image: str) -> None:
        there = [*tool, *(["inspect", "--type", "image"] if tool[0] == "buildah" else ["image", "inspect"]), image]
        if (await run_process(there, timeout_s=_ASK_S)).returncode == 0:
            return
        done = await run_process([*tool, "pull", image], timeout_s=_EXPORT_S)
        if done.returncode:
            raise TaskError(f"its image {image} cannot be pulled: {without_middle(done.text.strip(), _SHOWN)}")


async def _export(tool: list[str], image: str, archive: Path) -> ImageConfig:
    if Path(tool[0]).name == "buildah":
        shown = await _export_step([*tool, "inspect", "--type", "image", "--format", "{{json .OCIv1.Config}}", image])
        await _export_step([*tool, "push", image, f"docker-archive:{archive}"])
        return _config(json.loads(shown.stdout))
    shown = await _export_step([*tool, "image", "inspect", "--format", "{{json .Config}}", image])
    made = await _export_step([*tool, "create", image, "/bin/true"])
    container = made.stdout.decode().split()[-1]
    try:
        await _export_step([*tool, "export", "-o", str(archive), container])
    finally:
        await run_process([*tool, "rm", "-f", container], timeout_s=_ASK_S)
    return _config(json.loads(shown.stdout))


def _error_line(text: str) -> str:
    """Return the line of a tool's output that names the error: `docker info` prints other facts around it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search("cannot|error|denied|refused|failed", line, re.IGNORECASE)]
    return (errors or lines or ["it printed nothing"])[0][:200]


async def _export_step(command: Sequence[str]) -> ProcessResult:
    problem = f"its image cannot be exported: {' '.join(command[:4])}"
    return await check_process(command, problem, timeout_s=_EXPORT_S, error=TaskError, shown=_SHOWN)


def _config(found: JSON) -> ImageConfig:
    # Docker writes null for an image without variables.
    env = read_variables((found or {}).get("Env") or ())
    found = found or {}
    started = [tuple(map(str, found.get(name) or ())) for name in ("Entrypoint", "Cmd")]
    return ImageConfig(env, str(found.get("WorkingDir") or "/"), str(found.get("User") or ""), *started)


@functools.lru_cache(maxsize=256)
def _stated(image: str, _changed_ns: int) -> ImageConfig | None:
    """Return the configuration that an image states. Cached, because an archive is read whole for it."""
    found = stated_config(image)
    try:
        return _config(found) if found else None
    except (AttributeError, TypeError, ValueError) as error:
        raise ImageError(f"{image} has a configuration that cannot be read: {error}") from None


def content_key(recipe: ImageRecipe) -> str:
    """Return the cache key of a build: a digest of the image's name and, with a Dockerfile, of the folder's files and
    modes. Raises `TaskError` if the Dockerfile is a link, which a container tool would follow out of the folder."""
    digest = hashlib.sha256(f"{VERSION}\0{recipe.docker_image or ''}\0".encode())
    if recipe.arguments or recipe.target:
        digest.update(f"{recipe.arguments!r}{recipe.target}\0".encode())
    if recipe.dockerfile is not None:
        if recipe.dockerfile != recipe.folder / "Dockerfile":
            digest.update(f"{recipe.dockerfile.relative_to(recipe.folder)}\0".encode())
        # Only to refuse a link: the loop would record where it points, and not what the tool builds from.
        read_task_bytes(recipe.dockerfile)
        for path in sorted(recipe.folder.rglob("*")):
            mode = path.lstat().st_mode
            digest.update(f"{path.relative_to(recipe.folder)}\0{mode:o}\0".encode())
            if stat.S_ISLNK(mode):
                digest.update(os.fsencode(os.readlink(path)))
            elif stat.S_ISREG(mode):
                digest.update(hashlib.sha256(read_task_bytes(path)).digest())
    return digest.hexdigest()[:32]


def _config_path(image: Path) -> Path:
    return image.with_name(f"{image.name.removesuffix('.tar')}.json")


def _write_config(image: Path, config: ImageConfig, recipe: ImageRecipe) -> None:
    record = {"schema": SCHEMA, "version": VERSION, "source": str(recipe.folder), **asdict(config)}
    _config_path(image).write_text(json.dumps(record), encoding="utf-8")


def read_config(image: Path) -> ImageConfig:
    """Return the configuration of a root file system, or the default configuration if none is known."""
    return known_config(image) or ImageConfig()


def known_config(image: Path) -> ImageConfig | None:
    """Return the configuration of a root file system from the JSON file next to it, `NAME.json`, or from the image
    itself if it is an OCI layout or an archive of `docker save`. Return None if neither states it."""
    path = _config_path(image)
    if not path.is_file():
        # The time is part of the key of a cache, so that an image that was replaced is read again.
        return _stated(str(image), image.stat().st_mtime_ns) if image.exists() else None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("version", VERSION) > VERSION:
            raise ImageError(f"{path} was written by a newer version")
        started = [tuple(map(str, record.get(name) or ())) for name in ("entrypoint", "command")]
        return ImageConfig(
            dict(record.get("env") or {}), record.get("workdir") or "/", record.get("user") or "", *started
        )
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ImageError(f"{path} is not the configuration of {image.name}: {error}") from None

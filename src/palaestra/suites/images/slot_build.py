"""Build a Dockerfile in a slot over a given base, without a container runtime or registry.

FROM is ignored, because the slot starts from the given base, except that a base image with a known WORKDIR sets it.
RUN, COPY and ADD of local files, ENV, ARG, WORKDIR, USER and SHELL are executed, instructions about the start of a
container are skipped, and any other instruction is rejected.
Files in `/tmp` are lost, because the saved file system does not contain them.
"""

from __future__ import annotations

import fnmatch
import io
import os
import re
import shlex
import tarfile
from collections.abc import Iterator
from pathlib import Path
from posixpath import basename, join, normpath

from palaestra.core.errors import TaskError
from palaestra.sandbox.slot import Slot
from palaestra.suites.images.as_user import as_user
from palaestra.suites.images.dockerfile import (
    Heredoc,
    ImageConfig,
    ImageRecipe,
    Instruction,
    expand,
    follow,
    parse_recipe,
    variables,
)
from palaestra.suites.slot_commands import check_execute
from palaestra.suites.task_files import Unsupported, read_text

_CONFIGURED = frozenset({"FROM", "ENV", "ARG", "USER", "WORKDIR", "CMD", "ENTRYPOINT"})
_SKIPPED = frozenset({"EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME"})
_SHELL = ("/bin/sh", "-c")


async def build_in_slot(slot: Slot, recipe: ImageRecipe, base: ImageConfig | None = None) -> ImageConfig:
    """Build the recipe's Dockerfile in the slot, whose root file system has the configuration `base`. Raises
    `TaskError`, or `PrepareError` if a command fails."""
    if recipe.dockerfile is None:
        raise Unsupported(f"it has no Dockerfile, and its image {recipe.docker_image} is not available")
    config, arguments, shell = base or ImageConfig(), dict[str, str](), list(_SHELL)
    for each in parse_recipe(recipe):
        known = variables(config, arguments)
        if each.name == "RUN":
            await _run(slot, each, config, known, shell, recipe.build_timeout_s)
        elif each.name in ("COPY", "ADD"):
            await _copy(slot, each, config, known, recipe.folder)
        elif each.name == "SHELL":
            shell = each.words()
        elif each.name in _CONFIGURED:
            before = config.workdir
            config, arguments = follow(config, arguments, each)
            if each.name == "WORKDIR" or config.workdir != before:
                await _must(slot, ["mkdir", "-p", config.workdir], each)
        elif each.name not in _SKIPPED:
            raise Unsupported(
                f"its Dockerfile uses {each.name} (line {each.line}), which needs docker, podman or buildah"
            )
    return config


async def _run(
    slot: Slot, each: Instruction, config: ImageConfig, known: dict[str, str], shell: list[str], timeout_s: float
) -> None:
    script = b""
    if (words := each.exec_form) is not None:
        argv = words
    elif each.heredocs and each.arguments.startswith("<<") and len(each.arguments.split()) == 1:
        text = each.heredocs[0].text
        argv = [*shell, text]
        if text.startswith("#!"):
            argv, script = [*shlex.split(text[2:].partition("\n")[0]), "/dev/stdin"], text.encode()
    else:
        documents = "".join(f"\n{document.text}{document.name}" for document in each.heredocs)
        argv = [*shell, f"{each.arguments}{documents}"]
    await check_execute(
        slot,
        as_user(argv, config.user),
        f"Dockerfile, line {each.line}: RUN {each.arguments[:200]} failed",
        cwd=config.workdir,
        env=known,
        timeout_s=timeout_s,
        stdin=script,
        shown=2000,
    )


async def _copy(slot: Slot, each: Instruction, config: ImageConfig, known: dict[str, str], context: Path) -> None:
    """Copy files of the build context into the slot as one tar archive."""
    if "from" in each.flags:
        raise Unsupported(f"its Dockerfile copies from another image (line {each.line}), which needs docker")
    words = [expand(word, known) for word in each.words()]
    if len(words) < 2:
        raise TaskError(f"Dockerfile, line {each.line}: {each.name} needs a source and a target")
    *sources, target = words
    into = target.endswith("/") or len(sources) > 1 or target in (".", "..")
    place = normpath(join(config.workdir, target))
    documents = {document.name: document for document in each.heredocs}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for source in sources:
            name = source.removeprefix("<<").lstrip("-").strip("'\"")
            if source.startswith("<<") and name in documents:
                _add_document(archive, documents[name], join(place, name) if into else place, known)
                continue
            for path in _matching(context, source, each):
                _add(archive, path, join(place, basename(path)) if into and not path.is_dir() else place, each)
    await _must(slot, ["tar", "-x", "--no-overwrite-dir", "-C", "/"], each, packed.getvalue())
    owner = expand(each.flags.get("chown", ""), known)
    if owner:
        await _must(slot, ["chown", "-R", owner, place], each)


def _matching(context: Path, source: str, each: Instruction) -> Iterator[Path]:
    """Yield the files of the build context that a source names: at least one, and none outside the context."""
    relative = normpath(source.lstrip("/"))
    if "://" in source or relative.startswith(".."):
        raise Unsupported(f"its Dockerfile adds {source} (line {each.line}), which is not in its folder")
    found = [context] if relative == "." else []
    if not found:
        root, pattern = context.resolve(), relative
        found = sorted(path for path in context.glob(pattern) if path.resolve().is_relative_to(root))
    if not found:
        raise TaskError(f"Dockerfile, line {each.line}: {source} is not in {context.name}/")
    yield from found


def _add(archive: tarfile.TarFile, path: Path, target: str, each: Instruction) -> None:
    mode = int(each.flags["chmod"], 8) if re.fullmatch("[0-7]{3,4}", each.flags.get("chmod", "")) else None

    def owned_by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        if mode is not None and info.isfile():
            info.mode = mode
        return info

    if path.is_dir():
        ignored = _ignored(path)
        for entry in sorted(path.iterdir()):
            if entry.name not in ignored:
                archive.add(entry, join(target, entry.name).lstrip("/"), filter=owned_by_root)
    else:
        archive.add(path, target.lstrip("/"), filter=owned_by_root)


def _ignored(folder: Path) -> frozenset[str]:
    """Return the top-level entries of the folder that `.dockerignore` excludes. Patterns for paths below them and
    exceptions (`!`) have no effect."""
    listed = folder / ".dockerignore"
    if not listed.is_file():
        return frozenset()
    patterns = [line.strip().strip("/") for line in read_text(listed).splitlines()]
    return frozenset(n for n in os.listdir(folder) if any(fnmatch.fnmatch(n, p) for p in patterns if p))


def _add_document(archive: tarfile.TarFile, document: Heredoc, target: str, known: dict[str, str]) -> None:
    data = (document.text if document.quoted else expand(document.text, known)).encode()
    info = tarfile.TarInfo(target.lstrip("/"))
    info.size, info.mode = len(data), 0o644
    archive.addfile(info, io.BytesIO(data))


async def _must(slot: Slot, argv: list[str], each: Instruction, stdin: bytes = b"") -> None:
    await check_execute(slot, argv, f"Dockerfile, line {each.line}: {each.name} failed", stdin=stdin)

"""Build a Dockerfile in a slot over a given base, without a container runtime or registry.

FROM is ignored, because the slot starts from the given base, except that a base image with a known WORKDIR sets it, and
that a stage which starts from another one begins with its instructions. A stage from which files are copied is built
in a fork of the slot as it was.
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
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from posixpath import basename, join, normpath

from palaestra_slots.core.errors import PrepareError, TaskError
from palaestra_slots.core.types import Limits
from palaestra_slots.images.as_user import as_user
from palaestra_slots.images.dockerfile import (
    BuildStage,
    Heredoc,
    ImageConfig,
    ImageRecipe,
    Instruction,
    expand,
    follow,
    known_variables,
    needed,
    parse_recipe,
    stage_number,
)
from palaestra_slots.images.slot_commands import check_execute
from palaestra_slots.images.task_files import Unsupported, read_task_text
from palaestra_slots.sandbox.slot import Slot

_CONFIGURED = frozenset({"FROM", "ENV", "ARG", "USER", "WORKDIR", "CMD", "ENTRYPOINT"})
_SKIPPED = frozenset({"EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "ONBUILD", "STOPSIGNAL", "VOLUME"})
_BUILD_BYTES, _BUILD_PIDS = 8 << 30, 4096
_SHELL = ("/bin/sh", "-c")
_UNREACHED = re.compile(
    r"^.*(?:Could not resolve host|Temporary failure (?:in name resolution|resolving)"
    r"|unable to resolve host address|Failed to connect to).*$",
    re.MULTILINE,
)


def limits_of_build(limits: Limits) -> Limits:
    """Return the limits of a slot that builds a Dockerfile. Container tools do not build under the limits that a task
    sets for its containers, and what is built lies in memory here."""
    return replace(
        limits,
        memory_bytes=limits.memory_bytes and max(limits.memory_bytes, _BUILD_BYTES),
        disk_bytes=limits.disk_bytes and max(limits.disk_bytes, _BUILD_BYTES),
        pids=limits.pids and max(limits.pids, _BUILD_PIDS),
    )


async def build_in_slot(slot: Slot, recipe: ImageRecipe, base: ImageConfig | None = None) -> ImageConfig:
    """Build the recipe's Dockerfile in the slot, whose root file system has the configuration `base`. Raises
    `TaskError`, or `PrepareError` if a command fails."""
    if recipe.dockerfile is None:
        raise Unsupported(f"it has no Dockerfile, and its image {recipe.docker_image} is not available")
    stages = parse_recipe(recipe)
    numbers = {each.name: number for number, each in enumerate(stages)}
    built: dict[int, Slot] = {}

    def stage_slot(each: Instruction) -> Slot:
        return built[stage_number(each, numbers)]

    async with AsyncExitStack() as opened:
        wanted = needed(stages)
        built |= {number: await opened.enter_async_context(slot.fork()) for number, _ in wanted}
        for number, stage in wanted:
            await _build(built[number], stage, recipe, base or ImageConfig(), stage_slot)
        return await _build(slot, stages[-1], recipe, base or ImageConfig(), stage_slot)


async def _build(
    slot: Slot, stage: BuildStage, recipe: ImageRecipe, config: ImageConfig, source: Callable[[Instruction], Slot]
) -> ImageConfig:
    """Build one stage. `source` returns the slot of the stage from which an instruction copies."""
    arguments, shell, unreached = dict[str, str](), list(_SHELL), ""
    for each in stage.instructions:
        known = known_variables(config, arguments)
        if each.name == "RUN":
            try:
                output = await _run_instruction(slot, each, config, known, shell, recipe.build_timeout_s)
            except PrepareError as error:  # `curl … | sh` succeeds without a network; the error comes later
                if unreached:
                    raise PrepareError(f"{error}\n{unreached}") from None
                raise
            if not unreached and (match := _UNREACHED.search(output)) is not None:
                unreached = f"The RUN in line {each.line} printed: {match[0].strip()[:300]}"
        elif each.name in ("COPY", "ADD") and "from" in each.flags:
            await _copy_built(slot, source(each), each, config, known)
        elif each.name in ("COPY", "ADD"):
            await _copy(slot, each, config, known, recipe.folder)
        elif each.name == "SHELL":
            shell = each.words()
        elif each.name in _CONFIGURED:
            before = config.workdir
            config, arguments = follow(config, arguments, each)
            if each.name == "WORKDIR" or config.workdir != before:
                # Docker makes the directory too, even if no later instruction uses it.
                await _must(slot, ["mkdir", "-p", config.workdir], each)
        elif each.name not in _SKIPPED:
            raise Unsupported(
                f"its Dockerfile uses {each.name} (line {each.line}), which needs docker, podman or buildah"
            )
    return config


async def _run_instruction(
    slot: Slot, each: Instruction, config: ImageConfig, known: dict[str, str], shell: list[str], timeout_s: float
) -> str:
    """Run a command and return its output."""
    script = b""
    if (words := each.exec_form) is not None:
        argv = words
    elif each.heredocs and each.arguments.startswith("<<") and len(each.arguments.split()) == 1:
        text = each.heredocs[0].text
        argv = [*shell, text]
        # BuildKit runs such a text as a script of its own; here, its interpreter reads it from standard input.
        if text.startswith("#!"):
            argv, script = [*shlex.split(text[2:].partition("\n")[0]), "/dev/stdin"], text.encode()
    else:
        documents = "".join(f"\n{document.text}{document.name}" for document in each.heredocs)
        argv = [*shell, f"{each.arguments}{documents}"]
    result = await check_execute(
        slot,
        as_user(argv, config.user),
        f"Dockerfile, line {each.line}: RUN {each.arguments[:200]} failed",
        cwd=config.workdir,
        env=known,
        timeout_s=timeout_s,
        stdin=script,
        shown=2000,
    )
    return result.output


async def _copy(slot: Slot, each: Instruction, config: ImageConfig, known: dict[str, str], context: Path) -> None:
    """Copy files of the build context into the slot as one tar archive."""
    sources, place, into = _copy_paths(each, config, known)
    into = await _into(slot, place, into)
    documents = {document.name: document for document in each.heredocs}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for source in sources:
            name = source.removeprefix("<<").lstrip("-").strip("'\"")
            if source.startswith("<<") and name in documents:
                _add_document(archive, documents[name], join(place, name) if into else place, known)
                continue
            for path in _matching(context, source, each):
                _add_path(archive, path, join(place, basename(path)) if into and not path.is_dir() else place, each)
    # By default, tar gives existing directories, such as /usr, the mode and owner that they have in the archive.
    await _must(slot, ["tar", "-x", "--no-overwrite-dir", "-C", "/"], each, packed.getvalue())
    await _change_owner(slot, each, place, known)


def _copy_paths(each: Instruction, config: ImageConfig, known: dict[str, str]) -> tuple[list[str], str, bool]:
    """Return the sources of a COPY, its target, and whether files are copied into the target."""
    words = [expand(word, known) for word in each.words()]
    if len(words) < 2:
        raise TaskError(f"Dockerfile, line {each.line}: {each.name} needs a source and a target")
    *sources, target = words
    into = target.endswith("/") or len(sources) > 1 or target in (".", "..")
    return sources, normpath(join(config.workdir, target)), into


async def _into(slot: Slot, place: str, into: bool) -> bool:
    """Return whether a file is copied into its target, as it also is into a directory that exists."""
    return into or (await slot.execute(["/bin/sh", "-c", '[ -d "$1" ]', "sh", place], cwd="/", spill=False)).success


async def _change_owner(slot: Slot, each: Instruction, place: str, known: dict[str, str]) -> None:
    owner = expand(each.flags.get("chown", ""), known)
    if owner:
        await _must(slot, ["chown", "-R", owner, place], each)


_GATHER = """\
place=$1 into=$2; shift 2; rm -rf /tmp/palaestra-copy; mkdir /tmp/palaestra-copy; cd /
for path in "$@"; do
  if [ -d "$path" ]; then cp -a "$path/." /tmp/palaestra-copy/
  elif [ -n "$into" ]; then cp -a "$path" /tmp/palaestra-copy/
  else cp -a "$path" "/tmp/palaestra-copy/${place##*/}"; fi || exit 1
done
if [ $# = 1 ] && [ -z "$into" ] && [ ! -d "$1" ]; then echo "${place%/*}/" > /tmp/palaestra-copy.into
else echo "$place" > /tmp/palaestra-copy.into; fi
tar -C /tmp/palaestra-copy -cf /tmp/palaestra-copy.tar .
"""
"""Collects files for a COPY in the slot of another stage, with their owners and links, and says where they belong."""


async def _copy_built(slot: Slot, source: Slot, each: Instruction, config: ImageConfig, known: dict[str, str]) -> None:
    """Copy files of another stage's slot into the slot."""
    sources, place, into = _copy_paths(each, config, known)
    into = await _into(slot, place, into)
    names = " ".join(_pattern(normpath(join("/", name))) for name in sources)
    script = f"set -- {shlex.quote(place)} '{'yes' if into else ''}' {names}\n{_GATHER}"
    await _must(source, ["/bin/sh", "-c", script], each)
    kept = "/tmp/palaestra-copy.tar"  # noqa: S108  in the slots
    with tempfile.TemporaryDirectory() as folder:
        target = (await source.read_text("/tmp/palaestra-copy.into")).strip() or "/"  # noqa: S108
        await source.download(kept, Path(folder, "copy.tar"))
        await slot.upload(Path(folder, "copy.tar"), kept)
    await _must(slot, ["mkdir", "-p", target], each)
    await _must(slot, ["tar", "-x", "--no-overwrite-dir", "-f", kept, "-C", target], each)
    await slot.remove(kept)
    mode = each.flags.get("chmod", "")
    if re.fullmatch("[0-7]{3,4}", mode):
        await _must(slot, ["chmod", "-R", mode, place], each)
    await _change_owner(slot, each, place, known)


def _pattern(path: str) -> str:
    """Return a path as a word of a shell in which only `*`, `?` and `[…]` are special."""
    parts = [part for part in re.split(r"([*?\[\]])", path) if part]
    return "".join(part if part in "*?[]" else shlex.quote(part) for part in parts)


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


def _add_path(archive: tarfile.TarFile, path: Path, target: str, each: Instruction) -> None:
    mode = int(each.flags["chmod"], 8) if re.fullmatch("[0-7]{3,4}", each.flags.get("chmod", "")) else None

    def owned_by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
        # Container tools give copied files to root, whoever owns them in the build folder.
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
    patterns = [line.strip().strip("/") for line in read_task_text(listed).splitlines()]
    return frozenset(n for n in os.listdir(folder) if any(fnmatch.fnmatch(n, p) for p in patterns if p))


def _add_document(archive: tarfile.TarFile, document: Heredoc, target: str, known: dict[str, str]) -> None:
    data = (document.text if document.quoted else expand(document.text, known)).encode()
    info = tarfile.TarInfo(target.lstrip("/"))
    info.size, info.mode = len(data), 0o644
    archive.addfile(info, io.BytesIO(data))


async def _must(slot: Slot, argv: list[str], each: Instruction, stdin: bytes = b"") -> None:
    await check_execute(slot, argv, f"Dockerfile, line {each.line}: {each.name} failed", stdin=stdin)

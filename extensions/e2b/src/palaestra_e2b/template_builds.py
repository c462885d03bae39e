"""Builds templates in slots, from the steps that the SDK makes of a template or of a Dockerfile.

A build starts from another template: the SDK's `from_template`, or its `from_image` where this server has an image of
that name. Each step runs in the slot, as the step's user; the files of COPY arrive as a tar archive, which the slot's
own `tar` unpacks. What comes out is a snapshot, saved in the server's folder so that it outlives the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import posixpath
import secrets
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from palaestra_e2b.api_keys import ApiKey
from palaestra_e2b.templates import BASE, DEFAULT_USER, Template, Templates, absolute, spec_of
from palaestra_e2b.wire_errors import FULL, ApiError
from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.errors import AcquireTimeout, PalaestraError, PrepareError
from palaestra_slots.core.io.durable_files import replaced
from palaestra_slots.core.types import JSON, Network
from palaestra_slots.images.as_user import as_user, home_of, is_root
from palaestra_slots.images.dockerfile import ImageConfig
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import Slot, is_variable

MOST_STEPS, MOST_ARCHIVE_BYTES, MOST_LOG_LINES = 200, 256 << 20, 5000
_MOST_BUILDS, _MOST_LINKS, _MOST_KEPT_BYTES = 200, 1000, 1 << 30  # of one key; its older ones are dropped
_STEP_S, _RUNNING_BUILDS = 1800.0, 4
_BASE_IMAGES = ("e2bdev/base", "e2bdev/base:latest")
SCHEMA, VERSION = "palaestra-e2b-template", 1

_COPY = r"""set -e
rm -rf /tmp/e2b-copy; mkdir -p /tmp/e2b-copy; cd /tmp/e2b-copy
tar -xf /tmp/e2b-copy.tar; target=$2
set -- $1
several=; [ $# -le 1 ] || several=1
for each in "$@"; do
  if [ -d "$each" ]; then mkdir -p "$target"; cp -a "$each/." "$target/"
  elif [ -n "$several" ] || [ -d "$target" ] || [ "${target%/}" != "$target" ]; then
    mkdir -p "$target"; cp -a "$each" "$target/"
  else mkdir -p "$(dirname "$target")"; cp -a "$each" "$target"; fi
done
"""


@dataclass(slots=True)
class Build:
    """One build of a template. `status` is waiting, building, ready or error; `reason` is why it failed."""

    template: Template
    key: ApiKey
    build_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    status: str = "waiting"
    reason: str = ""
    failed_step: str = ""
    log: list[tuple[float, str, str]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    def note(self, text: str, level: str = "info") -> None:
        """Add lines to the log."""
        for line in text.splitlines():
            if len(self.log) < MOST_LOG_LINES:
                self.log.append((time.time(), level, line[:2000]))


class BuildFailed(Exception):
    """A step of a build failed. The message is for its author."""


class TemplateBuilds:
    """The builds of all keys. `folder` keeps finished templates; without it, they end with the server. `network` is
    the network of builds."""

    def __init__(self, pool: SlotPool, templates: Templates, folder: Path | None, network: Network) -> None:
        self._pool, self._templates, self._folder, self._network = pool, templates, folder, network
        self._builds: dict[str, Build] = {}
        self._archives: dict[tuple[str, str], Path] = {}  # by key and hash
        self._links: dict[str, tuple[str, str]] = {}
        self._incoming = None if folder is None else folder / "incoming"
        self._room = asyncio.Semaphore(_RUNNING_BUILDS)

    async def aclose(self) -> None:
        """End the running builds and drop the archives."""
        tasks = [build.task for build in self._builds.values() if build.task is not None]
        await end_tasks(*tasks)
        if self._incoming is not None:
            shutil.rmtree(self._incoming, ignore_errors=True)

    def new(self, key: ApiKey, names: Sequence[str]) -> Build:
        """Make a build, which `start` begins."""
        template = Template("t" + secrets.token_hex(10), tuple(names), key.name)
        build = Build(template, key)
        own = [each for each in self._builds.values() if each.key == key]
        for old in [each for each in own if each.status != "building"][: max(0, len(own) + 1 - _MOST_BUILDS)]:
            del self._builds[old.build_id]
        if len(own) >= _MOST_BUILDS and all(each.status == "building" for each in own):
            raise ApiError(429, f"the key {key.name} has {_MOST_BUILDS} builds; wait until one ends")
        self._builds[build.build_id] = build
        return build

    def find(self, key: ApiKey, template_id: str, build_id: str) -> Build:
        """Return a build of a key. Raises `ApiError`."""
        build = self._builds.get(build_id)
        if build is None or build.key != key or build.template.template_id != template_id:
            raise ApiError(404, f"build '{build_id[:100]}' not found")
        return build

    def latest(self, template: Template) -> Build | None:
        """Return the build of a template that this server made; None for others."""
        return next((each for each in self._builds.values() if each.template is template), None)

    def start(self, build: Build, base: Template, steps: Sequence[JSON], start: str, ready: str) -> None:
        """Begin a build. Raises `ApiError` if it has begun already."""
        if build.status != "waiting":
            raise ApiError(409, f"build '{build.build_id}' has begun already")
        build.status = "building"
        build.template.start_command, build.template.ready_command = start, ready
        build.task = asyncio.get_running_loop().create_task(self._run_build(build, base, steps))

    # Files of COPY

    def link(self, key: ApiKey, digest: str) -> tuple[bool, str]:
        """Return whether the files with a hash are here, and the last part of an address to which they can be sent.
        Raises `ApiError` if this server keeps no files."""
        if self._incoming is None:
            raise ApiError(400, "this server has no folder for the files of templates")
        token = secrets.token_urlsafe(24)
        self._links[token] = (key.name, digest)
        own = [each for each, (name, _) in self._links.items() if name == key.name]
        if len(own) > _MOST_LINKS:
            del self._links[own[0]]
        return (key.name, digest) in self._archives, token

    def place(self, token: str) -> tuple[str, Path]:
        """Return the name of the key that an upload to a link belongs to, and the file for it. Raises `ApiError`."""
        if token not in self._links or self._incoming is None:
            raise ApiError(403, "the address for the upload is not valid any more; ask for another")
        self._incoming.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._links[token][0], self._incoming / f"{secrets.token_hex(16)}.tar"

    def arrived(self, token: str, file: Path) -> None:
        """Note that the files of a link are complete."""
        of = self._links.pop(token, None)
        if of is None:  # two uploads to one link
            file.unlink(missing_ok=True)
            return
        if of in self._archives:
            self._archives.pop(of).unlink(missing_ok=True)
        self._archives[of] = file
        own = [name for name in self._archives if name[0] == of[0]]
        while len(own) > 1 and sum(self._archives[name].stat().st_size for name in own) > _MOST_KEPT_BYTES:
            self._archives.pop(own.pop(0)).unlink(missing_ok=True)

    # The build

    def base_of(self, key: ApiKey, image: str, template: str) -> Template:
        """Return the template that a build starts from. Raises `ApiError`."""
        if template:
            return self._templates.find(key, template)
        if image in _BASE_IMAGES:
            return self._templates.find(key, BASE)
        for name in (image, image.replace(":", "-").replace("/", "-")):
            try:
                return self._templates.find(key, name)
            except ApiError:
                continue
        known = ", ".join(each.name for each in self._templates if each.owner is None)
        raise ApiError(
            400, f"the image {image[:200]!r} is not on this server, which pulls none; its images are {known} "
            "(`palaestra images make` makes more, `palaestra serve e2b --template NAME=PATH` adds one)"
        )  # fmt: skip

    async def _run_build(self, build: Build, base: Template, steps: Sequence[JSON]) -> None:
        try:
            async with self._room:
                await self._build(build, base, steps)
            build.status = "ready"
            build.note("Build finished")
        except (BuildFailed, ApiError) as error:
            build.status, build.reason = "error", str(error)
        except AcquireTimeout:
            build.status, build.reason = "error", FULL
        except (PalaestraError, OSError, ValueError) as error:
            build.status, build.reason = "error", f"the build failed on this server: {error}"
        if build.reason:
            build.note(build.reason, "error")

    async def _build(self, build: Build, base: Template, steps: Sequence[JSON]) -> None:
        template, snapshot = build.template, await self._templates.prepared(base)
        template.image, template.config, template.home = base.image, base.config, base.home
        if not template.start_command:
            template.start_command, template.ready_command = base.start_command, base.ready_command
        spec = replace(spec_of(base, snapshot), network=self._network)
        slot = await self._pool.acquire(f"build {build.build_id}", spec=spec, snapshot=snapshot)
        try:
            for number, step in enumerate(steps, 1):
                build.failed_step = str(number)
                template.config = await self._step(build, slot, template, step)
            if template.user != DEFAULT_USER:
                await _home(slot, template.user, "the last USER")
        except BaseException:
            await self._pool.release(slot)
            raise
        build.failed_step = ""
        template.snapshot = await self._pool.seal(slot)
        self._templates.add(template)
        await self._save_template(template)

    async def _step(self, build: Build, slot: Slot, template: Template, step: JSON) -> ImageConfig:
        kind, args = _parse_step(step)
        build.note(f"{kind} {' '.join(args)}"[:500])
        config = template.config
        if kind == "RUN":
            await self._run_in_slot(build, slot, template, args[0], args[1] if len(args) > 1 else "")
        elif kind == "COPY":
            await self._copy(build, slot, template, args, str(step.get("filesHash") or ""))
        elif kind == "WORKDIR":
            path = absolute(args[0], template.workdir)
            await self._run_in_slot(build, slot, template, 'mkdir -p "$1"', "root", path)
            return replace(config, workdir=path)
        elif kind == "USER":
            return replace(config, user="" if args[0] in (DEFAULT_USER, "root") else args[0])
        elif kind == "ENV":
            pairs = dict(zip(args[::2], args[1::2], strict=True)) if len(args) % 2 == 0 else {}
            if not pairs or not all(is_variable(name, value) for name, value in pairs.items()):
                raise BuildFailed(f"ENV {args!r:.200} does not name variables and values")
            return replace(config, env={**config.env, **pairs})
        else:
            raise BuildFailed(f"the step {kind[:50]!r} is not supported; RUN, COPY, WORKDIR, USER and ENV are")
        return config

    async def _run_in_slot(
        self, build: Build, slot: Slot, template: Template, command: str, user: str, *arguments: str
    ) -> None:
        name = user or template.user
        argv, home = ["/bin/sh", "-c", command, "step", *arguments], "/root"
        what = f"command '{command[:500]}'" if not arguments else f"the step for {' '.join(arguments)[:500]}"
        if name == DEFAULT_USER:
            home = template.home
        elif not is_root(name):
            argv, home = as_user(argv, name), await _home(slot, name, f"failed to run {what}: command failed")
        env = {"HOME": home, "USER": name, **template.config.env}
        done = await slot.execute(argv, cwd=template.workdir, env=env, timeout_s=_STEP_S)
        build.note(done.output)
        if not done.success:
            raise BuildFailed(f"failed to run {what}: {done.error.lower()}")

    async def _copy(self, build: Build, slot: Slot, template: Template, args: Sequence[str], digest: str) -> None:
        if len(args) < 2:
            raise BuildFailed("COPY needs a source and a destination")
        archive = self._archives.get((build.key.name, digest))
        if archive is None:
            raise BuildFailed(f"the files of COPY {args[0][:200]} were not uploaded")
        source, user, mode = posixpath.normpath(args[0]), *(*args[2:4], "", "")[:2]
        target = absolute(args[1], template.workdir) + ("/" if args[1].endswith("/") else "")
        await slot.upload(archive, "/tmp/e2b-copy.tar")  # noqa: S108 - in the slot
        await self._run_in_slot(build, slot, template, _COPY, "root", source, target)
        if mode:
            await self._run_in_slot(build, slot, template, 'chmod -R "$1" "$2"', "root", mode, target)
        if user and user not in (DEFAULT_USER, "root"):
            await self._run_in_slot(build, slot, template, 'chown -R "$1" "$2"', "root", user, target)

    # Saved templates

    async def _save_template(self, template: Template) -> None:
        if self._folder is None or template.snapshot is None:
            return
        folder = self._folder / template.template_id
        (folder / "files").mkdir(parents=True, mode=0o700)
        await self._pool.snapshots.save(template.snapshot, folder / "files")
        record = {
            "schema": SCHEMA, "version": VERSION, "id": template.template_id, "names": list(template.names),
            "owner": template.owner, "image": template.image, "config": asdict(template.config),
            "start": template.start_command, "ready": template.ready_command, "home": template.home,
            "created_at": template.created_at,
        }  # fmt: skip
        with replaced(folder / "template.json") as file:
            file.write(json.dumps(record).encode())
        template.folder = folder

    async def delete(self, key: ApiKey, name: str) -> None:
        """Delete a template or snapshot of a key with its saved files. Files that sandboxes use in place go with the
        next start of a server. Raises `ApiError`."""
        template = self._templates.find(key, name)
        await self._templates.remove(key, name)
        if template.folder is not None:
            (template.folder / "template.json").unlink(missing_ok=True)
            await asyncio.to_thread(_remove_unused, template.folder)

    def read_saved(self) -> list[str]:
        """Add the templates of the folder, and return what is wrong with those that cannot be read."""
        problems: list[str] = []
        for folder in self._folder.glob("t*") if self._folder is not None else ():
            if not (folder / "template.json").exists():  # it was deleted while sandboxes used it, or is half a save
                shutil.rmtree(folder, ignore_errors=True)
        files = [] if self._folder is None else self._folder.glob("t*/template.json")
        for file in sorted(files, key=lambda each: each.stat().st_mtime_ns):  # in the order in which they were built
            try:
                record = json.loads(file.read_bytes())
                if record["schema"] != SCHEMA or record["version"] > VERSION:
                    raise ValueError(f"{record['schema']} {record['version']} is not {SCHEMA} {VERSION}")
                self._templates.add(
                    Template(
                        record["id"],
                        tuple(record["names"]),
                        record["owner"],
                        record["image"],
                        ImageConfig(**record["config"]),
                        record["start"],
                        record["ready"],
                        home=record["home"],
                        created_at=record["created_at"],
                        folder=file.parent,
                    )
                )
            except (OSError, ValueError, KeyError, TypeError) as error:
                problems.append(f"the template in {file.parent} cannot be read and is left out: {error}")
        return problems


async def _home(slot: Slot, user: str, what: str) -> str:
    """Return the home of a user. Raises `BuildFailed` if the image has no such user."""
    try:
        return await home_of(slot, user)
    except PrepareError as error:
        raise BuildFailed(f"{what}: unauthenticated: invalid username: {user!r:.100}: {error}") from None


def _remove_unused(folder: Path) -> None:
    """Remove a saved template unless the slot server uses it, which holds a shared lock on its files then."""
    with contextlib.suppress(OSError):
        files = os.open(folder / "files", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(files, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(files)


def _parse_step(step: JSON) -> tuple[str, list[str]]:
    args = step.get("args") or [] if isinstance(step, dict) else []
    if not isinstance(step, dict) or not isinstance(args, list) or not all(isinstance(each, str) for each in args):
        raise BuildFailed("a step must be an object with a type and a list of strings")
    kind = str(step.get("type", ""))
    if not args or any("\0" in each or len(each) > 128 << 10 for each in args):
        raise BuildFailed(f"the step {kind[:50]!r} has no arguments, or an argument that no command can have")
    return kind, args

"""The templates that sandboxes start from: images by name, what keys have built, and snapshots of sandboxes.

A template is prepared once, in a slot of its own: the home of `user`, an account of that name and a `sudo` that runs
its command. The user `user` and the user `root` are both the slot's root, which is nobody outside, so whatever needs
`sudo` at E2B works here. Sandboxes then start from the prepared workspace, however large it is.

Images belong to everybody; what a key has built or saved belongs to that key. Invariant: no text of a request becomes a
path of this machine. Names are looked up in tables.
"""

from __future__ import annotations

import asyncio
import posixpath
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from palaestra_e2b.api_keys import ApiKey
from palaestra_e2b.wire_errors import ApiError
from palaestra_slots.core.errors import PrepareError
from palaestra_slots.images.as_user import is_root
from palaestra_slots.images.dockerfile import ImageConfig
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.server_backend import host_path
from palaestra_slots.sandbox.slot import WORKSPACE, Slot, SlotSpec, Snapshot

DEFAULT_USER = "user"
BASE = "base"
_TAGS = (":default", ":latest")
_PREPARE_S = 60.0

# Each line may fail, because at some isolation levels the system directories cannot be changed.
_PREPARE = r"""
mkdir -p /home/user 2>/dev/null
grep -q '^user:' /etc/passwd 2>/dev/null || echo 'user:x:0:0::/home/user:/bin/bash' >> /etc/passwd 2>/dev/null
grep -q '^user:' /etc/group 2>/dev/null || echo 'user:x:0:' >> /etc/group 2>/dev/null
[ -e /usr/local/bin/sudo ] || { mkdir -p /usr/local/bin && cat > /usr/local/bin/sudo && chmod 755 /usr/local/bin/sudo
} 2>/dev/null
if [ -d /etc/profile.d ]; then printf 'PATH=%s\nexport PATH\n' "$1" > /etc/profile.d/zz-image-path.sh; fi 2>/dev/null
[ -w /home/user ] && echo /home/user
true
"""
_SUDO = b"""#!/bin/sh
# Commands of this sandbox run as its root user already, so sudo has nothing to do.
while [ $# -gt 0 ]; do
  case $1 in
    -u|-g|-h|-p|-C|-r|-t|-T|-U|-D) shift 2 ;;
    -i|-s) shift; [ $# -gt 0 ] || exec "${SHELL:-/bin/sh}" ;;
    --) shift; break ;;
    -*) shift ;;
    *=*) export "$1"; shift ;;
    *) break ;;
  esac
done
[ $# -gt 0 ] || exit 0
exec "$@"
"""


@dataclass(slots=True)
class Template:
    """One template. `owner` is the name of its key, or None if it belongs to everybody. `image` is a path on this
    machine; None means this machine's system directories. `home` is the home of `user`, known once `snapshot` is."""

    template_id: str
    names: tuple[str, ...]
    owner: str | None = None
    image: str | None = None
    config: ImageConfig = ImageConfig()
    start_command: str = ""
    ready_command: str = ""
    snapshot: Snapshot | None = None
    home: str = "/home/user"
    source: str = ""  # the sandbox that a snapshot was made of; empty for other templates
    spawned: int = 0
    created_at: float = field(default_factory=time.time)
    folder: Path | None = None  # where a built template is saved

    @property
    def name(self) -> str:
        """The name that a list shows."""
        return self.names[0] if self.names else self.template_id

    @property
    def user(self) -> str:
        """The user of commands that name none."""
        return DEFAULT_USER if is_root(self.config.user) else self.config.user

    @property
    def workdir(self) -> str:
        """The directory of commands that name none."""
        return self.home if self.config.workdir == "/" else self.config.workdir


class Templates:
    """All templates of one server."""

    def __init__(self, pool: SlotPool, images: Mapping[str, tuple[str | None, ImageConfig]]) -> None:
        self._pool = pool
        self._known = {name: Template(name, (name,), None, image, config) for name, (image, config) in images.items()}
        self._preparing = asyncio.Lock()

    def __iter__(self) -> Iterator[Template]:
        return iter(list(self._known.values()))

    def of_key(self, key: ApiKey) -> list[Template]:
        """Return the templates that a key can use, oldest first."""
        return [each for each in self if each.owner in (None, key.name)]

    def kept_by(self, key: ApiKey) -> int:
        """Return the number of templates and snapshots that belong to a key."""
        return sum(each.owner == key.name for each in self)

    def find(self, key: ApiKey, name: str) -> Template:
        """Return the template with an id or a name. Raises `ApiError` with status 404."""
        for each in reversed(self.of_key(key)):  # the key's own before an image of the same name
            if _untagged(name) in (each.template_id, *map(_untagged, each.names)):
                return each
        known = ", ".join(sorted(each.name for each in self.of_key(key) if not each.source)[:20])
        raise ApiError(404, f"template '{name[:200]}' not found; the templates are {known}")

    def add(self, template: Template) -> None:
        """Add a template. A name that an older template of the same key has passes to the new one."""
        self._known[template.template_id] = template
        self.rename(template, template.names)

    def rename(self, template: Template, names: Sequence[str]) -> None:
        """Give a template these names, which other templates of its key then lose."""
        for each in self:
            if each is not template and each.owner == template.owner and set(each.names) & set(names):
                each.names = tuple(name for name in each.names if name not in names)
        template.names = tuple(dict.fromkeys(names))

    async def remove(self, key: ApiKey, name: str) -> None:
        """Remove a template or snapshot of a key. Sandboxes that started from it go on. Raises `ApiError`."""
        template = self.find(key, name)
        if template.owner is None:
            raise ApiError(403, f"the template {template.name} belongs to this server and cannot be deleted")
        del self._known[template.template_id]
        if template.snapshot is not None:
            await self._pool.snapshots.forget(template.snapshot)

    async def is_lost(self, template: Template) -> bool:
        """Return whether a template's workspace has been lost with the process that held it, and forget it then."""
        if template.snapshot is None or await self._pool.snapshots.holds(template.snapshot):
            return False
        template.snapshot = None
        return True

    async def prepared(self, template: Template) -> Snapshot:
        """Return the workspace from which sandboxes of a template start, and prepare it first if it is not there.
        Raises `ApiError` if it cannot be made again."""
        ready = template.snapshot
        if ready is not None:
            return ready
        async with self._preparing:
            if template.snapshot is not None:
                return template.snapshot
            if template.folder is not None:
                spec = SlotSpec(image=template.image)
                template.snapshot = await self._pool.snapshots.load(template.folder / "files", spec)
                return template.snapshot
            if template.owner is not None:
                raise ApiError(410, f"the files of {template.name} were lost with the process that held them; make it "
                               "again")  # fmt: skip
            slot = await self._pool.acquire(f"template {template.name}", spec=SlotSpec(image=template.image))
            try:
                template.home = await prepare(slot, template.config)
            except BaseException:
                await self._pool.release(slot)
                raise
            template.snapshot = await self._pool.seal(slot)
            return template.snapshot


async def prepare(slot: Slot, config: ImageConfig) -> str:
    """Prepare a slot as the workspace of a template, and return the home directory of `user`. Raises
    `PrepareError`."""
    path = config.env.get("PATH") or host_path()
    done = await slot.execute(
        ["/bin/sh", "-c", _PREPARE, "prepare", shlex.quote(path)], cwd="/", stdin=_SUDO, timeout_s=_PREPARE_S
    )
    if not done.success:
        raise PrepareError(f"the image cannot be used as a template: {done.output.strip()[-500:] or done.error}")
    return "/home/user" if "/home/user" in done.output.split() else WORKSPACE


def _untagged(name: str) -> str:
    """Return a name without the tags that mean the same template as no tag."""
    for tag in _TAGS:
        name = name.removesuffix(tag)
    return name


def spec_of(template: Template, snapshot: Snapshot) -> SlotSpec:
    """Return the settings of a template's slots, with the variables of its image."""
    return replace(snapshot.spec, env=tuple(template.config.env.items()))


def absolute(path: str, home: str) -> str:
    """Return a path of a request as an absolute path in the sandbox; a relative path and `~` start at `home`."""
    if path == "~" or path.startswith("~/"):
        path = path[2:]
    return posixpath.normpath(posixpath.join(home, path)) if path else home

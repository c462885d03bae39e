"""Make root file systems of Debian and Ubuntu without a container tool, and list them.

`mmdebstrap` (any user with user namespaces) or `debootstrap` (root) downloads the packages and, by default, verifies
their signatures. A root file system is a file `NAME.tar` in the folder of roots, next to its configuration `NAME.json`.
The settings `base_image`, `image_dir` and `images` of the terminal environments accept it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from palaestra_slots.core.config import nearest
from palaestra_slots.core.errors import ConfigError, ImageError
from palaestra_slots.core.io.host_process import check_process
from palaestra_slots.images.build_once import CACHE_DIR
from palaestra_slots.images.dockerfile import ImageConfig
from palaestra_slots.images.image_builder import SCHEMA, VERSION, read_config

ROOTS = f"{CACHE_DIR}/roots"
_MAKE_S = 1800.0


@dataclass(frozen=True, slots=True)
class Release:
    """One release of a distribution, and where its packages come from."""

    suite: str
    mirror: str
    components: str
    keyring: str


def _debian(suite: str) -> Release:
    return Release(suite, "http://deb.debian.org/debian", "main", "debian-archive-keyring")


def _ubuntu(suite: str) -> Release:
    return Release(suite, "http://archive.ubuntu.com/ubuntu", "main,universe", "ubuntu-archive-keyring")


RELEASES = {
    "debian:11": _debian("bullseye"),
    "debian:12": _debian("bookworm"),
    "debian:13": _debian("trixie"),
    "ubuntu:22.04": _ubuntu("jammy"),
    "ubuntu:24.04": _ubuntu("noble"),
}


@dataclass(frozen=True, slots=True)
class Root:
    """A root file system in the folder of roots."""

    name: str
    path: str
    bytes: int
    source: str


async def make_root(
    name: str, folder: Path, *, include: Sequence[str] = (), mirror: str = "", verify: bool = True, keyring: str = ""
) -> Path:
    """Make the root of a release with further packages in `folder`, and return its tar file.

    `verify` checks the signatures of the release with `keyring`, by default the installed keyring of its distribution.
    Raises `ConfigError` for an unknown release, and `ImageError` if the keyring is missing, no tool is installed, or
    the tool fails.
    """
    if name not in RELEASES:
        raise ConfigError(f"unknown release {name!r}; the releases are {', '.join(RELEASES)}.{nearest(name, RELEASES)}")
    release = RELEASES[name]
    target = folder / f"{'-'.join([name.replace(':', '-'), *sorted(include)])}.tar"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="new-") as temporary:
        fresh = Path(temporary, "root.tar")
        key = keyring or f"/usr/share/keyrings/{release.keyring}.gpg"
        if verify and not os.path.isfile(key):
            raise ImageError(
                f"verifying {name} needs the keyring {key}: install {release.keyring}, copy the file from another "
                "machine and name it with --keyring FILE, or use --insecure"
            )
        for command in _commands(release, fresh, include, mirror or release.mirror, key if verify else None):
            problem = f"making {name} failed: {command[0]}"
            await check_process(command, problem, timeout_s=_MAKE_S, error=ImageError)
        # The record first, and the name of the root last, so that whoever finds a root finds it whole and described.
        record = {"schema": SCHEMA, "version": VERSION, "source": name, **asdict(ImageConfig())}
        target.with_suffix(".json").write_text(json.dumps(record), encoding="utf-8")
        fresh.rename(target)
    return target


def _commands(release: Release, tar: Path, include: Sequence[str], mirror: str, key: str | None) -> list[list[str]]:
    """Return the commands that write the tar file, using the first installed tool. Without `key`, signatures are not
    verified."""
    # Ubuntu does not count apt among the required packages, but its published images have it.
    options = ["--variant=minbase", f"--include={','.join(sorted({'apt', *include}))}"]
    if shutil.which("mmdebstrap"):
        options += [f"--keyring={key}"] if key else []
        trusted = "" if key else "[trusted=yes] "
        source = f"deb {trusted}{mirror} {release.suite} {release.components.replace(',', ' ')}"
        return [["mmdebstrap", "--quiet", *options, release.suite, str(tar), source]]
    if shutil.which("debootstrap"):
        if os.geteuid() != 0:
            raise ImageError("debootstrap needs root; install mmdebstrap, which does not")
        options += [f"--keyring={key}", "--force-check-gpg"] if key else ["--no-check-gpg"]
        options += [f"--components={release.components}"]
        root = str(tar.with_name("root"))
        return [
            ["debootstrap", *options, release.suite, root, mirror],
            # Every slot has devices of its own.
            ["tar", "--numeric-owner", "--xattrs", "--exclude=./dev/*", "-C", root, "-cf", str(tar), "."],
        ]
    raise ImageError("making a root file system needs mmdebstrap or debootstrap: apt-get install mmdebstrap")


def roots(folder: Path) -> list[Root]:
    """Return the root file systems of a folder, by name: tar files and directories with a JSON file next to them."""
    found = []
    for config in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        for path in (config.with_suffix(""), config.with_suffix(".tar")):
            if path.exists():
                read_config(path)
                source = json.loads(config.read_text(encoding="utf-8")).get("source") or ""
                found.append(Root(config.stem, str(path), path.stat().st_size if path.is_file() else 0, str(source)))
    return found

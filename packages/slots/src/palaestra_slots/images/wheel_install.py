"""Installs wheels in a slot and brings the files to the host.

Names of packages come from rows and test scripts, and an installer runs code: build scripts, plug-ins, and whatever a
new version of it does. It therefore runs in a slot of its own with a network, as `pip` or `uv` of this Python, mounted
read-only, with the user's settings for the package index. The host only unpacks the files that the slot made.

Invariant: nothing that a requirement names runs on the host. Isolation: the best level of this machine; on a machine
without any, the installation fails.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import re
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from palaestra_slots.core.errors import PrepareError
from palaestra_slots.core.io.host_process import run_process
from palaestra_slots.core.redaction import redacted
from palaestra_slots.core.types import Limits, Network
from palaestra_slots.images.requirements import check_requirements
from palaestra_slots.images.slot_commands import check_execute
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.images.unpack import unpack_file
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import WORKSPACE, Mount, SlotSpec

_SITE, _PACKED, _CERTIFICATES = "site", "site.tar", "certificates.pem"
"""Names in the slot's workspace."""
_INDEX_SETTINGS = frozenset(
    {
        *("cert", "client-cert", "default-timeout", "extra-index-url", "find-links", "index-url", "no-index", "proxy"),
        *("retries", "timeout", "trusted-host"),
    }
)
"""The settings of pip that select and reach package indexes. No other setting of the user enters the slot."""

_MOST_BYTES = 16 << 30
_MEMORY_BYTES = 4 << 30
_SETTINGS_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """How a slot reaches the user's package indexes: variables for pip and uv, read-only folders of the host, and the
    file of trusted certificates. Folders keep their paths, because level `confined` cannot mount them elsewhere."""

    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    certificate: Path | None = None


async def pip_settings() -> dict[str, str]:
    """Return pip's settings from its environment variables and configuration files; none if pip is not installed.

    Variables have precedence over settings for `pip install`, and these over global ones.
    """
    if not importlib.util.find_spec("pip"):
        return {}
    result = await run_process([sys.executable, "-P", "-m", "pip", "config", "list"], timeout_s=_SETTINGS_TIMEOUT_S)
    found: dict[str, dict[str, str]] = {}
    for section, name, value in re.findall(r"^(:env:|[\w-]+)\.\.?([\w-]+)=('.*'|\".*\")$", result.text, re.MULTILINE):
        found.setdefault(section, {})[name] = str(ast.literal_eval(value))
    return {**found.get("global", {}), **found.get("install", {}), **found.get(":env:", {})}


async def index_settings() -> IndexSettings:
    """Return the user's settings for package indexes, as a slot can use them. Folders of the host that they name are
    mounted; folders that do not exist are left out."""
    env: dict[str, str] = {}
    mounts: list[Mount] = []
    certificate: Path | None = None
    for name, value in (await pip_settings()).items():
        if name == "cert":
            certificate = Path(value) if Path(value).is_file() else None
        elif name in ("find-links", "extra-index-url", "index-url"):
            places = [place for word in value.split() if (place := _in_slot(word, mounts))]
            if places:
                env[_variable(name)] = " ".join(places)
        elif name in _INDEX_SETTINGS:
            env[_variable(name)] = value
    for scheme, address in urllib.request.getproxies().items():
        env[f"{scheme}_proxy"] = address
    if certificate is not None:
        env |= {"PIP_CERT": _CERTIFICATES, "SSL_CERT_FILE": _CERTIFICATES}
    for name in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS"):  # uv reads the same settings under its own names
        if f"PIP_{name}" in env:
            env[f"UV_{name}"] = env[f"PIP_{name}"]
    return IndexSettings(env, tuple(dict.fromkeys(mounts)), certificate)


def _variable(name: str) -> str:
    return f"PIP_{name.upper().replace('-', '_')}"


def _in_slot(word: str, mounts: list[Mount]) -> str:
    """Return a place where pip looks for packages, or an empty string for a missing folder. Mount it if it is one."""
    address = urlsplit(word)
    if address.scheme not in ("", "file"):
        return word
    folder = Path(url2pathname(address.path) if address.scheme else word).expanduser()
    if not folder.is_dir():
        return ""
    mounts.append(_mount(folder))
    # Pages of an index in a folder link to files in a folder beside it; mirroring programs use these names.
    mounts += [_mount(beside) for name in ("files", "packages") if (beside := folder.parent / name).is_dir()]
    return f"{'file://' if address.scheme else ''}{folder.resolve()}"


def _mount(folder: Path) -> Mount:
    place = str(folder.resolve())
    return Mount(place, place)


async def install_wheels(
    requirements: Sequence[str],
    site: Path,
    python: str,
    mounts: Sequence[Mount],
    *,
    image: str | None = None,
    closed: bool,
    timeout_s: float,
) -> None:
    """Install requirements, from wheels only, into the empty folder `site` of the host.

    `python` is the interpreter in a slot with this image and `mounts`. If `closed`, what the requirements depend on is
    not installed. Raises `TaskError` for a text that is not a requirement, `ImageError` for an image that this machine
    does not have, and `PrepareError` with the end of the installer's output.
    """
    check_requirements(requirements)
    command, installer = _installer(python)
    flags = [*(["--no-deps"] if closed else []), "--only-binary", ":all:", "--quiet", "--target", _SITE]
    settings = await index_settings()
    spec = SlotSpec(
        image=image,
        network=Network.ON,
        mounts=(*mounts, installer, *settings.mounts),
        limits=Limits(memory_bytes=_MEMORY_BYTES, disk_bytes=_MOST_BYTES),
    )
    problem = f"cannot install {', '.join(requirements)}"
    async with SlotPool(SlotPoolConfig(), LocalBackend.from_isolation("best")) as pool:
        slot = await pool.acquire("install", spec=spec)
        if settings.certificate is not None:
            await slot.upload(settings.certificate, _CERTIFICATES)
        env = {
            **settings.env,
            "PYTHONPATH": installer.target,
            "PIP_NO_CACHE_DIR": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
        }
        argv = [*command, *flags, "--", *requirements]
        try:
            await check_execute(slot, argv, problem, cwd=WORKSPACE, env=env, timeout_s=timeout_s, shown=2000)
        except PrepareError as error:
            raise PrepareError(redacted(str(error))) from None
        pack = f"mkdir -p {_SITE} && tar -c -f {_PACKED} -C {_SITE} ."
        await check_execute(slot, pack, problem, cwd=WORKSPACE, timeout_s=timeout_s)
        with tempfile.TemporaryDirectory(dir=site.parent) as temporary:
            packed = Path(temporary, "site.tar")
            await slot.download(_PACKED, packed)
            await asyncio.to_thread(unpack_file, str(packed), str(site), packed.name, _MOST_BYTES)


def _installer(python: str) -> tuple[list[str], Mount]:
    """Return the start of `pip install` or `uv pip install`, whichever this Python has, and the folder that a slot
    needs for it."""
    if found := importlib.util.find_spec("pip"):
        assert found.origin is not None
        command = [python, "-s", "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        return command, _mount(Path(found.origin).parent.parent)
    if uv := shutil.which("uv"):
        program = Path(uv).resolve()
        return [str(program), "pip", "install", "--python", python, "--compile-bytecode"], _mount(program.parent)
    raise PrepareError("installing packages needs pip or uv; run `python -m ensurepip`")

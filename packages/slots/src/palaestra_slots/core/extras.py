"""Determines the command that installs an extra of our packages in this environment, and whether its package is there
in a version that was tested."""

from __future__ import annotations

import json
import re
from importlib import metadata
from urllib.parse import unquote, urlsplit

_CPU_TORCH = "; without a GPU, first install the CPU build of PyTorch, as pytorch.org describes"


def install_command(extra: str, package: str = "palaestra") -> str:
    """Return the command that installs `extra` in this process's environment. An editable install is named by its path,
    and a package that was installed from a URL by this URL, because a package index may lack its version."""
    name = f"{package}[{extra}]"
    try:
        origin = json.loads(metadata.distribution(package).read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        origin = {}
    if origin.get("dir_info", {}).get("editable"):
        command = f"pip install -e '{unquote(urlsplit(origin['url']).path)}[{extra}]'"
    elif "url" in origin:
        command = f"pip install '{name} @ {origin['url']}'"
    else:
        command = f"pip install '{name}'"
    return command + (_CPU_TORCH if extra == "train" else "")


def extra_version(extra: str) -> str:
    """Return the package of an extra with its installed version, and the required versions if it is not one of them;
    empty for an unknown extra. Only the extra's first requirement counts."""
    for each in metadata.requires("palaestra") or ():
        requirement, _, marker = each.partition(";")
        found = re.match(r"([\w.-]+)(\[.*\])?\s*(.*)", requirement)
        if found is None or f"extra == '{extra}'" not in marker.replace('"', "'"):
            continue
        name, bounds = found[1], found[3].strip(" ()")
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"{name} not installed"
        return f"{name} {version}" if _is_within(version, bounds) else f"{name} {version} (needs {bounds})"
    return ""


def _is_within(version: str, bounds: str) -> bool:
    have = _version_numbers(version)
    limits = re.findall(r"(>=|<)\s*([\d.]+)", bounds)
    return all((have >= _version_numbers(limit)) == (sign == ">=") for sign, limit in limits)


def _version_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:4]))

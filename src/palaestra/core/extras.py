"""Determines the command that installs an extra of this package in this environment."""

from __future__ import annotations

import json
from importlib import metadata
from urllib.parse import unquote, urlsplit

_CPU_TORCH = "; without a GPU, first install the CPU build of PyTorch, as pytorch.org describes"


def install_command(extra: str) -> str:
    """Return the command that installs `extra` in this process's environment. An editable install is named by its path,
    and a package that was installed from a URL by this URL, because a package index may lack its version."""
    name = f"palaestra[{extra}]"
    try:
        origin = json.loads(metadata.distribution("palaestra").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        origin = {}
    if origin.get("dir_info", {}).get("editable"):
        command = f"pip install -e '{unquote(urlsplit(origin['url']).path)}[{extra}]'"
    elif "url" in origin:
        command = f"pip install '{name} @ {origin['url']}'"
    else:
        command = f"pip install '{name}'"
    return command + (_CPU_TORCH if extra == "train" else "")

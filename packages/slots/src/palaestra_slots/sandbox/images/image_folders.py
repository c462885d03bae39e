"""Decides where a user's images and other stored data are on this machine."""

from __future__ import annotations

import os
import pwd
from pathlib import Path


def made_root(name: str, folder: Path | None = None) -> str | None:
    """Return the root file system that `palaestra images make` has made under this name, or None. `folder` is that of
    root file systems, by default this user's."""
    roots = folder or Path.home() / ".cache/palaestra/roots"
    if "/" in name or ":" in name or not (roots / f"{name}.json").is_file():
        return None
    return next((str(path) for path in (roots / name, roots / f"{name}.tar") if path.exists()), None)


def default_folder(kind: str = "images") -> str:
    """Return the folder for this user's images, or for stored data of another kind."""
    if os.geteuid() == 0:
        return f"/var/lib/palaestra/{kind}"
    try:
        return os.path.join(pwd.getpwuid(os.geteuid()).pw_dir, ".cache", "palaestra", kind)
    except KeyError:  # a uid without an account
        return f"/var/tmp/palaestra-{kind}-{os.geteuid()}"  # noqa: S108

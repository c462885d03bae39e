"""Decides where a user's images and other stored data are on this machine."""

from __future__ import annotations

import os
import pwd


def default_folder(kind: str = "images") -> str:
    """Return the folder for this user's images, or for stored data of another kind."""
    if os.geteuid() == 0:
        return f"/var/lib/palaestra/{kind}"
    try:
        return os.path.join(pwd.getpwuid(os.geteuid()).pw_dir, ".cache", "palaestra", kind)
    except KeyError:  # a uid without an account
        return f"/var/tmp/palaestra-{kind}-{os.geteuid()}"  # noqa: S108

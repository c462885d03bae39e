"""What a sandbox gets of git on this machine: the person's name and address. It gets no other setting, because aliases,
hooks, filters and credential helpers would be programs and secrets. Also why git does not work in a copy of a folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from palaestra_slots.core.errors import SandboxError
from palaestra_slots.core.io.host_process import run_process
from palaestra_slots.core.printable import escaped
from palaestra_slots.sandbox.slot import Slot

_IDENTITY = ("user.name", "user.email")
_TIMEOUT_S = 10.0


async def give_identity(slot: Slot, folder: Path) -> None:
    """Set the name and the address of the person's own git settings for the repositories in the slot; those that hold
    for this folder, because git's settings can depend on it. Does nothing where git or the settings are missing."""
    for name in _IDENTITY:
        # The settings of the repository itself are in its copy. Reading a value starts no program of a setting.
        asked = ["git", "-C", str(folder), "config", "--global", "--includes", "--get", name]
        try:
            found = await run_process(asked, timeout_s=_TIMEOUT_S)
        except OSError:
            return
        value = found.stdout.decode(errors="replace").strip()
        if found.returncode or not value:
            continue
        try:
            await slot.execute(["git", "config", "--global", name, value], cwd="/", timeout_s=_TIMEOUT_S)
        except SandboxError:
            raise
        except OSError:
            return


def without_history(folder: Path) -> str:
    """Return why git has no history in a copy of this folder; nothing if it has one, or if the folder is in no
    repository."""
    own = folder / ".git"
    if own.is_dir():
        return ""
    if own.is_file():
        try:
            where = own.read_text(errors="replace")[:4096].strip().removeprefix("gitdir:").strip()
        except OSError:
            return ""
        main = (folder / where).resolve()
        if main.is_relative_to(folder):
            return ""
        kind = "submodule" if "modules" in main.parts else "worktree"
        top = next((each.parent for each in main.parents if each.name == ".git"), main)
        return (
            f"git does not work in the sandbox: {escaped(str(folder))} is a {kind}, and its history is in "
            f"{escaped(str(top))}, which is not shared. Start the chat there to let the agent use git"
        )
    for each in folder.parents:
        if (each / ".git").exists():
            if each.stat().st_uid != os.getuid():
                return ""
            return (
                f"git does not work in the sandbox: the repository begins at {escaped(str(each))}, and only "
                f"{escaped(str(folder))} is shared. Start the chat there to let the agent use git"
            )
    return ""

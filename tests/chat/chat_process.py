"""The variables of `palaestra chat` as a process: no keys of the host, and folders of its own."""

from __future__ import annotations

import os
from pathlib import Path


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "PALAESTRA"))}
    return {**kept, "PALAESTRA_STATE": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config")}

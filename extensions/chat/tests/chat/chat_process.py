"""The variables of `palaestra chat` as a process: this environment's commands, no keys of the host, own folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def environment(folder: Path) -> dict[str, str]:
    # COLUMNS and LINES, which some test runners set, would hide the size of the test's own terminal.
    without = ("OPENAI", "PALAESTRA", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**kept, "PALAESTRA_STATE": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config")}

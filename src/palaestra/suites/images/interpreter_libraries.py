"""The libraries that this machine's interpreter loads, gathered in one folder that slots of any image can mount.

Those of the C library itself are left out: they must be the image's own.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import tempfile
from pathlib import Path

from palaestra.suites.swe.host_process import run_process
from palaestra.suites.swe.locked_file import locked

_C_LIBRARY = re.compile(r"(?:ld-linux|ld-musl|lib(?:c|m|dl|rt|pthread|util|resolv|nsl|crypt)[.-])")
_TIMEOUT_S = 60.0


async def gathered(cache: Path) -> Path:
    """The folder, filled now if it was not before. One that could not be filled is empty: images may have them, too."""
    key = hashlib.sha256(f"{sys.executable}\0{sys.version}".encode()).hexdigest()[:20]
    place = cache / f"libraries-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    async with locked(cache / f"libraries-{key}.lock", timeout_s=_TIMEOUT_S):
        if not place.is_dir():
            with tempfile.TemporaryDirectory(dir=cache, prefix="new-") as temporary:
                fresh = Path(temporary, "lib")
                fresh.mkdir(mode=0o755)
                for library in await _loaded():
                    shutil.copy2(library, fresh / library.name)
                fresh.rename(place)
    return place


async def _loaded() -> set[Path]:
    """What the interpreter's own extension modules load, as the loader here finds it."""
    if shutil.which("ldd") is None:
        return set()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    modules = sorted(map(str, Path(sys.base_exec_prefix, sys.platlibdir, version, "lib-dynload").glob("*.so")))
    modules = [name for name in modules if "_tkinter" not in name]
    shown = await run_process(["ldd", sys.executable, *modules], timeout_s=_TIMEOUT_S)
    found = {Path(word) for word in shown.stdout.decode(errors="replace").split() if word.startswith("/")}
    return {path for path in found if path.is_file() and ".so" in path.name and not _C_LIBRARY.match(path.name)}

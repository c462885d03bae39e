"""A source distribution as files, and those files as a bare git repository with one reproducible commit.

Nothing is unpacked to disk and nothing of the package is executed: archive members go straight to git.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from palaestra.core.errors import PrepareError
from palaestra.suites.swe.host_process import run_process

MAX_TREE_BYTES = 256 << 20
_IDENTITY = "Palaestra <palaestra@localhost> 946684800 +0000"
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a tree."""

    data: bytes
    executable: bool = False


def read_sdist(archive: bytes, name: str) -> dict[str, SourceFile]:
    """The regular files of an archive, by path below its top directory. Links and special files are left out.

    Raises `PrepareError` for an archive that is broken, unsafe (a member outside its directory) or far too large.
    """
    files: dict[str, SourceFile] = {}
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
            for member in tar:
                total += member.size
                if total > MAX_TREE_BYTES:
                    raise PrepareError(f"{name}: more than {MAX_TREE_BYTES >> 20} MiB unpacked")
                names = PurePosixPath(member.name.lstrip("/")).parts
                if ".." in names:
                    raise tarfile.TarError(f"{member.name!r} leads out of its directory")
                path = PurePosixPath(*names[1:])
                content = (
                    tar.extractfile(member) if member.isreg() and path.parts and ".git" not in path.parts else None
                )
                if content is not None:
                    files[str(path)] = SourceFile(content.read(), bool(member.mode & 0o100))
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise PrepareError(f"{name} is not a safe source archive: {problem}") from problem
    return files


async def make_repository(files: Mapping[str, SourceFile], path: Path, message: str) -> str:
    """Write a bare repository whose only commit holds these files; the same files give the same commit.

    Returns the commit's name. An existing repository at `path` is used when it has that very commit.
    """
    settings = ["git", "-c", "init.defaultBranch=main", "-c", "core.hooksPath=/", "-c", "safe.directory=*"]
    await _git([*settings, "init", "--quiet", "--bare", "--template=", str(path)], b"")
    await _git([*settings, f"--git-dir={path}", "fast-import", "--quiet", "--force"], _stream(files, message))
    commit = await _git([*settings, f"--git-dir={path}", "rev-parse", "refs/heads/main"], b"")
    return commit.decode().strip()


async def _git(argv: list[str], stdin: bytes) -> bytes:
    result = await run_process(argv, stdin=stdin, timeout_s=_TIMEOUT_S)
    if result.returncode:
        raise PrepareError(f"making a repository failed: {result.text.strip()[-500:]}")
    return result.stdout


def _stream(files: Mapping[str, SourceFile], message: str) -> bytes:
    """The input of git-fast-import(1) for one commit on main."""
    parts = [b"commit refs/heads/main\n", f"committer {_IDENTITY}\n".encode(), _data(message.encode())]
    for path, file in sorted(files.items()):
        mode = b"100755" if file.executable else b"100644"
        quoted = path.replace("\\", "\\\\").replace('"', '\\"').encode()
        parts += [b"M " + mode + b' inline "' + quoted + b'"\n', _data(file.data)]
    return b"".join(parts)


def _data(content: bytes) -> bytes:
    return f"data {len(content)}\n".encode() + content + b"\n"

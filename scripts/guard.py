"""Refuse to commit text that belongs to one machine or is secret: registry addresses, home directories, workspace
paths, keys.

Checks every tracked text file except this one. Prints each offending line, and exits with code 1 if there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_PATTERNS = {
    "registry address": re.compile(
        r"https?://(?:[\w.-]+\.)?(?:pypi\.org|pythonhosted\.org|artifactory[\w.-]*)"
        r"|://(?!localhost|127\.|[\w.-]+\.(?:test|invalid|example)\b)[^\s\"'\[\]()]*/simple(?![-\w])"
    ),
    "index option": re.compile(r"--(?:extra-)?index-url[= ](?! *URL\b)|--find-links[= ]"),
    "machine path": re.compile(r"(?<![\w.])/(?:home|Users)/(?!agent\b|user\b)\w+|(?<![\w./-])/work/(?:main|shared)\b"),
    "key": re.compile(r"\bsk-[A-Za-z0-9]{20,}|-----BEGIN [A-Z ]*PRIVATE KEY"),
}
_ITSELF = Path("scripts/guard.py")


def offences(path: Path, text: str) -> list[str]:
    """Return `path:line: what: text` for each line that must not be committed."""
    return [
        f"{path}:{number}: {what}: {line.strip()[:100]}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in _PATTERNS.items()
        if pattern.search(line)
    ]


def main() -> int:
    """Check all tracked files."""
    listed = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True).stdout
    found: list[str] = []
    for name in filter(None, listed.decode().split("\0")):
        path = Path(name)
        if path == _ITSELF or not path.is_file():
            continue
        data = path.read_bytes()
        if b"\0" not in data:
            found += offences(path, data.decode(errors="replace"))
    print("\n".join(found) or "no tracked file contains a machine's addresses, paths or keys")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

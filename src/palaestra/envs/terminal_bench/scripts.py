"""Test scripts without the network: what the stock bootstrap would install is there already. Does no I/O.

Published test scripts install curl, uv and pytest before they test anything. Without a network that fails, and a script
that goes on then writes a reward of 0 for work that nobody looked at. So the lines that only install are taken out, and
`pytest`, `uv` and `uvx` are commands of ours in front of PATH while the script runs (`launcher.py`).

Invariant: only lines that are recognised as a whole are changed, and each is in `Script.replaced`. What a script
installs besides is in `requirements` (Python packages) or is checked in its place (system packages).
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

PROVIDED = frozenset({"pytest", "pytest-json-ctrf", "pip", "uv", "setuptools", "wheel", "pluggy", "iniconfig"})
"""Python packages that a script may ask for and that are there, or are not needed."""

_PACKAGES = frozenset(
    {"curl", "wget", "ca-certificates", "python3", "python3-pip", "python3-venv", "python3-pytest", "python-is-python3"}
)
"""System packages that serve the bootstrap alone."""

_APT = re.compile(r"(?:sudo\s+)?(?:DEBIAN_FRONTEND=\S+\s+)?(?:apt|apt-get|apk)\b(.*)")
_PIP = re.compile(r"(?:sudo\s+)?(?:python3?\s+-m\s+pip|uv\s+pip|pip3?)\s+install\b(.*)")
_UV_ADD = re.compile(r"uv\s+add\b(.*)")
_BOOTSTRAP = (
    re.compile(r"(?:curl|wget)\b[^;|]*astral\.sh/uv[^;|]*\|\s*(?:env\s+\S+\s+)?(?:ba)?sh\b[^;|]*"),
    re.compile(r"(?:source|\.)\s+\S*\.local/bin/env\S*"),
    re.compile(r"(?:source|\.)\s+\S*venv/bin/activate\S*"),
    re.compile(r"export\s+PATH=\S*\.local/bin\S*"),
    re.compile(r"(?:source|\.|bash|sh)\s+\S*setup-uv-pytest\.sh\S*"),
)
_RUN_STOCK = re.compile(r"(?:source|\.|bash|sh)\s+\S*run-uv-pytest\.sh\S*")
_MODULE = re.compile(r"\bpython3?\s+-m\s+pytest\b")
_WITH = re.compile(r"(?:--with|-w)[= ]\s*(['\"]?)([^\s'\"]+)\1")
_RUNNER = re.compile(r"\b(?:pytest|py\.test|uvx)\b|\buv\s+run\b")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VALUED = frozenset({"-i", "--index-url", "--extra-index-url", "-r", "--requirement", "-p", "--python", "--target"})

STARTUP_FILES = re.compile(r"\.bashrc|\.bash_profile|\.profile|/etc/profile|bash\s+-\w*[il]|\.local/bin")
"""What shows that a script starts a shell with its start-up files, or looks into the user's own programs."""


@dataclass(frozen=True, slots=True)
class Script:
    """A test script as it is run. `pytest` says whether its verdict comes from pytest, as far as can be seen."""

    text: str
    replaced: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    pytest: bool = False


def offline(text: str) -> Script:
    """The script without its bootstrap."""
    lines, replaced, requirements = [], list[str](), list[str]()
    for line in _whole_lines(text):
        requirements += _asked_for(line)
        new = _replaced(line)
        if new != line:
            replaced.append(line.strip())
        lines.append(new)
    whole = "\n".join(lines) + "\n"
    return Script(whole, tuple(replaced), tuple(dict.fromkeys(requirements)), uses_pytest(whole))


def uses_pytest(text: str) -> bool:
    """Whether the script starts pytest, comments left out."""
    return any(_RUNNER.search(line) for line in text.splitlines() if not line.lstrip().startswith("#"))


def _whole_lines(text: str) -> list[str]:
    """Lines as the shell sees them, when a continued one is an installation; others keep their line breaks."""
    found: list[str] = []
    pending = ""
    for line in text.splitlines():
        pending = f"{pending}\n{line}" if pending else line
        if not line.endswith("\\"):
            found.append(pending)
            pending = ""
    return [*found, pending] if pending else found


def _replaced(line: str) -> str:
    flat = " ".join(line.replace("\\\n", " ").split())
    if not flat or flat.startswith("#"):
        return line
    if _RUN_STOCK.fullmatch(flat):
        return "pytest $TEST_DIR/test_outputs.py -rA"
    parts = [part.strip() for part in re.split(r"&&|;", flat)]
    instead = [_instead(part) for part in parts]
    if all(part is not None for part in instead):
        return "; ".join(part for part in instead if part) or ":"
    return _MODULE.sub("pytest", line)


def _instead(command: str) -> str | None:
    """What runs in place of one installing command; None for a command that installs nothing."""
    if any(pattern.fullmatch(command) for pattern in _BOOTSTRAP):
        return ""
    if "|" in command:
        return None
    if _PIP.fullmatch(command):
        return ""
    match = _APT.fullmatch(command)
    if match is None:
        return None
    words = [word for word in match[1].split() if not word.startswith("-") and ">" not in word and word != "/dev/null"]
    if words[:1] and words[0] in ("update", "upgrade", "clean"):
        return ""
    if words[:1] not in (["install"], ["add"]):
        return None
    missing = [word.partition("=")[0] for word in words[1:] if word.partition("=")[0] not in _PACKAGES]
    return f"palaestra-needs {shlex.join(missing)}" if missing else ""


def _asked_for(line: str) -> list[str]:
    """Python packages that the line installs, without those that are provided."""
    flat = " ".join(line.replace("\\\n", " ").split())
    if flat.startswith("#"):
        return []
    found = [match[2] for match in _WITH.finditer(flat)] if "uv" in flat else []
    for part in re.split(r"&&|;", flat):
        match = _PIP.fullmatch(part.strip()) or _UV_ADD.fullmatch(part.strip())
        if match is not None:
            found += _names(match[1].split())
    return [name for name in found if not _provided(name)]


def _names(words: list[str]) -> list[str]:
    found, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in _VALUED:
            skip = True
        elif not word.startswith("-") and ">" not in word[:2]:
            found.append(word.strip("'\""))
    return found


def _provided(requirement: str) -> bool:
    match = _NAME.match(requirement)
    return match is None or match[0].lower().replace("_", "-") in PROVIDED

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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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

_REACHES_OUT = re.compile(r"\b(?:git\s+clone|curl|wget|npm|npx|cargo|go\s+(?:get|install)|gem|apt-get|pip3?)\b")
_CANNOT_REACH = re.compile(
    r"Could not resolve host|Temporary failure (?:in name resolution|resolving)|Network is unreachable"
    r"|unable to resolve host address|EAI_AGAIN|ENOTFOUND|Failed to fetch"
)

STARTUP_FILES = re.compile(r"\.bashrc|\.bash_profile|\.profile|/etc/profile|bash\s+-\w*[il]|\.local/bin")
"""What shows that a script starts a shell with its start-up files, or looks into the user's own programs."""


@dataclass(frozen=True, slots=True)
class Script:
    """A test script as it is run. `pytest` says whether its verdict comes from pytest, as far as can be seen.

    `others` are the shell scripts beside it, by their path below the tests' folder, changed in the same way.
    """

    text: str
    replaced: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    pytest: bool = False
    others: Mapping[str, str] = field(default_factory=dict)


def offline(text: str) -> Script:
    """The script without its bootstrap.

    Packages for a script that starts no pytest would be for the image's own Python: those are checked in their place.
    """
    lines = _whole_lines(text)
    provided = [_replaced(line, "") for line in lines]
    pytest = uses_pytest("\n".join(provided))
    new = provided if pytest else [_replaced(line, "palaestra-needs-python") for line in lines]
    requirements = dict.fromkeys(name for line in lines for name in _asked_for(line)) if pytest else {}
    replaced = tuple(line.strip() for line, other in zip(lines, new, strict=True) if line != other)
    return Script("\n".join(new) + "\n", replaced, tuple(requirements), pytest)


def offline_at(text: str, output: str) -> bool:
    """Whether a script fetches something itself, and its output says that there was no network for it."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return _CANNOT_REACH.search(output) is not None and any(_REACHES_OUT.search(line) for line in lines)


def with_others(script: Script, others: Mapping[str, str]) -> Script:
    """A script and those that it may call, as one: what any of them asks for, it asks for."""
    changed = {name: offline(text) for name, text in others.items()}
    every = (script, *changed.values())
    return replace(
        script,
        replaced=tuple(line for each in every for line in each.replaced),
        requirements=tuple(dict.fromkeys(name for each in every for name in each.requirements)),
        pytest=any(each.pytest for each in every),
        others={name: each.text for name, each in changed.items()},
    )


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


def _replaced(line: str, python_check: str) -> str:
    """The line as it is run; `python_check` is the command that looks for Python packages, empty for none."""
    flat = " ".join(line.replace("\\\n", " ").split())
    if not flat or flat.startswith("#"):
        return line
    if _RUN_STOCK.fullmatch(flat):
        return "pytest $TEST_DIR/test_outputs.py -rA"
    parts = [part.strip() for part in re.split(r"&&|;", flat)]
    instead = [_instead(part, python_check) for part in parts]
    if all(part is not None for part in instead):
        return "; ".join(part for part in instead if part) or ":"
    return _MODULE.sub("pytest", line)


def _instead(command: str, python_check: str) -> str | None:
    """What runs in place of one installing command; None for a command that installs nothing."""
    if any(pattern.fullmatch(command) for pattern in _BOOTSTRAP):
        return ""
    if "|" in command:
        return None
    if _PIP.fullmatch(command):
        missing = _asked_for(command) if python_check else []
        return f"{python_check} {shlex.join(missing)}" if missing else ""
    match = _APT.fullmatch(command)
    if match is None:
        return None
    words = [word for word in match[1].split() if not word.startswith("-") and ">" not in word and word != "/dev/null"]
    if words[:1] and words[0] in ("update", "upgrade", "clean"):
        return ""
    if words[:1] not in (["install"], ["add"]):
        return None
    missing = [name for name in (word.partition("=")[0] for word in words[1:]) if name not in _PACKAGES]
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

"""Rewrite test scripts so that they run without a network.

Published test scripts install curl, uv and pytest before they test anything. Without a network these installations
fail, and a script that continues writes a reward of 0 for work that it never tested. Lines that only install are
therefore removed, and `pytest`, `uv` and `uvx` are replaced while the script runs
(`grading/in_slot/pytest_launcher.py`).

Invariant: apart from `python -m pytest`, which becomes `pytest`, only lines that are recognised as a whole are changed.
`OfflineScript.replaced` lists all changed lines. Other Python packages that a script with pytest installs are in
`requirements`. Other system packages are not installed; instead, the script checks whether the slot has them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from palaestra_slots.images.requirements import check_requirements
from palaestra_slots.images.task_files import read_task_text
from palaestra_suites.terminal_bench.terminal_task import TaskStep, TerminalTask

PROVIDED = frozenset({"pytest", "pytest-json-ctrf", "pip", "uv", "setuptools", "wheel", "pluggy", "iniconfig"})
"""Python packages that scripts request and that are provided or not needed."""

_PACKAGES = frozenset(
    {"curl", "wget", "ca-certificates", "python3", "python3-pip", "python3-venv", "python3-pytest", "python-is-python3"}
)
"""System packages that only the installation of the test tools needs."""

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
_CARGO_ENV = re.compile(r"(?:source|\.)\s+(\S*\.cargo/env\S*)")
"""The file by which older versions of uv put themselves into PATH. Rust's installer writes one too."""
_RUN_STOCK = re.compile(r"(?:source|\.|bash|sh)\s+\S*run-uv-pytest\.sh\S*")
_MODULE = re.compile(r"\bpython3?\s+-m\s+pytest\b")
_WITH = re.compile(r"(?:--with|-w)[= ]\s*(['\"]?)([^\s'\"]+)\1")
_RUNNER = re.compile(r"\b(?:pytest|py\.test|uvx)\b|\buv\s+run\b")
_FILTER = re.compile(r"(?:\s*\|&?\s*(?:head|tail|grep|cat|tee)\b[^|]*)+$")
"""What shortens the output of an installation, as in `pip install pytest | tail -1`."""
_REDIRECTS = frozenset({">", ">>", "1>", "2>", "&>", "<"})
_PROGRAM = re.compile(r"\b(?:python[\d.]*|node|perl|ruby)\b[^|;&]*<<-?\s*(['\"]?)(\w+)\1")
"""The begin of a program that a script contains, as in `python3 - <<'END'`."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VALUED = frozenset({"-i", "--index-url", "--extra-index-url", "-r", "--requirement", "-p", "--python", "--target"})

_REACHES_OUT = re.compile(r"\b(?:git\s+clone|curl|wget|npm|npx|cargo|go\s+(?:get|install)|gem|apt-get|pip3?)\b")
_CANNOT_REACH = re.compile(
    r"Could not resolve host|Temporary failure (?:in name resolution|resolving)|Network is unreachable"
    r"|unable to resolve host address|EAI_AGAIN|ENOTFOUND|Failed to fetch"
)
_OF_LOOPBACK = re.compile(r"^.*(?:\blocalhost\b|\b127(?:\.\d+){3}\b|(?<![\w:])::1\b).*$", re.MULTILINE)
"""Lines about a service of the slot itself, which is no part of the network that slots lack."""
_JUDGE = re.compile(r"\b(?:anthropic|openai|litellm|genai|[A-Z]+_API_KEY)\b")
_NO_JUDGE = re.compile(
    rf"{_CANNOT_REACH.pattern}|APIConnectionError|ConnectError|NewConnectionError|NameResolutionError"
    r"|Name or service not known"
)

STARTUP_FILES = re.compile(r"\.bashrc|\.bash_profile|\.profile|/etc/profile|bash\s+-\w*[il]|\.local/bin")
"""Signs that a script loads start-up files of a shell, or runs programs from the user's own folder."""


@dataclass(frozen=True, slots=True)
class OfflineScript:
    """A rewritten test script. `pytest` is true if the script's verdict appears to come from pytest.

    `others` maps the paths of the other shell scripts in the tests' folder to their rewritten text.
    """

    text: str
    replaced: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    pytest: bool = False
    others: Mapping[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> str:
        """The text of all scripts."""
        return "\n".join([self.text, *self.others.values()])


_ABOUT_SERVICES = re.compile(
    r"\b(?:serv(?:e|es|ing|ers?|ices?)|daemons?|listen(?:s|ing)?|ports?|background|process(?:es)?|running)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class GradedPart:
    """A whole task, or one of its steps as a separate task, with its test script."""

    task: TerminalTask
    script: OfflineScript
    step: TaskStep | None = None

    @property
    def step_name(self) -> str:
        """The name of the step; empty for a whole task."""
        return self.step.name if self.step else ""

    @property
    def asks_for_service(self) -> bool:
        """Whether the instruction asks for something that runs until the check."""
        return _ABOUT_SERVICES.search(self.task.instruction) is not None


def parts_of(task: TerminalTask) -> tuple[GradedPart, ...]:
    """Return the parts of a task in order. Raises `TaskError` if a test script cannot be read."""
    if not task.steps:
        return (GradedPart(task, _read_script(task)),)
    return tuple(GradedPart(each, _read_script(each), step) for step in task.steps for each in [task.of_step(step)])


def _read_script(task: TerminalTask) -> OfflineScript:
    name, files = task.verifier.script, task.verifier.files()
    text = read_task_text(
        files.pop(name, task.verifier.folder / name)
    )  # Terminal-Bench 1 has the script next to the folder
    others = {each: read_task_text(found) for each, found in files.items() if each.endswith(".sh")}
    script = with_others(offline(text), others)
    check_requirements(script.requirements)
    # In Terminal-Bench 1, the only verdict is pytest's.
    return replace(script, pytest=script.pytest or task.format is task.format.TERMINAL_BENCH_1)


def offline(text: str) -> OfflineScript:
    """Return the script without its bootstrap, the lines that install what the tests need.

    If a script does not start pytest, the packages that it installs are meant for the image's own Python. They are not
    provided; the script checks whether the image has them.
    """
    lines = _whole_lines(text)
    provided = [_replaced(line, "") for line in lines]
    pytest = _uses_pytest("\n".join(provided))
    new = provided if pytest else [_replaced(line, "palaestra-needs-python") for line in lines]
    requirements = dict.fromkeys(name for line in lines for name in _asked_for(line)) if pytest else {}
    replaced = tuple(line.strip() for line, other in zip(lines, new, strict=True) if line != other)
    return OfflineScript("\n".join(new) + "\n", replaced, tuple(requirements), pytest)


def lacks_network(scripts: str, helpers: Iterable[str], output: str) -> bool:
    """Return whether the output of a verifier has the words of a failed connection, and its scripts download something
    or its files ask a model. Work can print such words too, so they only raise a doubt."""
    failed = _OF_LOOPBACK.sub("", output)
    lines = [line for line in scripts.splitlines() if not line.lstrip().startswith("#")]
    if _CANNOT_REACH.search(failed) and any(map(_REACHES_OUT.search, lines)):
        return True
    return _NO_JUDGE.search(failed) is not None and any(map(_JUDGE.search, [*lines, *helpers]))


def with_others(script: OfflineScript, others: Mapping[str, str]) -> OfflineScript:
    """Return the script together with the rewritten scripts `others`, which it may call. Its requirements include those
    of the other scripts."""
    changed = {name: offline(text) for name, text in others.items()}
    every = (script, *changed.values())
    return replace(
        script,
        replaced=tuple(line for each in every for line in each.replaced),
        requirements=tuple(dict.fromkeys(name for each in every for name in each.requirements)),
        pytest=any(each.pytest for each in every),
        others={name: each.text for name, each in changed.items()},
    )


def _uses_pytest(text: str) -> bool:
    """Return whether a line that is neither a comment nor part of a program in another language starts pytest."""
    end = ""
    for line in text.splitlines():
        if end:
            end = "" if line.strip() == end else end
        elif not line.lstrip().startswith("#"):
            if _RUNNER.search(line):
                return True
            program = _PROGRAM.search(line)
            end = program[2] if program else ""
    return False


def _whole_lines(text: str) -> list[str]:
    """Return the lines of a script, each together with its continuation lines."""
    found: list[str] = []
    pending = ""
    for line in text.splitlines():
        pending = f"{pending}\n{line}" if pending else line
        if not line.endswith("\\"):
            found.append(pending)
            pending = ""
    return [*found, pending] if pending else found


def _replaced(line: str, python_check: str) -> str:
    """Return the line to run instead. `python_check` is the command that checks for Python packages; if it is empty,
    nothing is checked."""
    flat = " ".join(line.replace("\\\n", " ").split())
    if not flat or flat.startswith("#"):
        return line
    if _RUN_STOCK.fullmatch(flat):
        return "pytest $TEST_DIR/test_outputs.py -rA"
    instead = [_instead(part, python_check) for part in _commands(flat)]
    if all(part is not None for part in instead):
        return "; ".join(dict.fromkeys(part for part in instead if part)) or ":"
    return _MODULE.sub("pytest", line)


def _commands(line: str) -> list[str]:
    """Return the commands of a line, split at `&&`, `||` and `;`. Installations lose the filters of their output."""
    parts = [part.strip() for part in re.split(r"&&|\|\||;", line)]
    return [_FILTER.sub("", part) if any(each.match(part) for each in (_APT, _PIP)) else part for part in parts]


def _instead(command: str, python_check: str) -> str | None:
    """Return the replacement for a command that only installs, which may be empty, or None for any other command."""
    if command in ("true", ":"):  # as in `pip install pytest || true`
        return ""
    if any(pattern.fullmatch(command) for pattern in _BOOTSTRAP):
        return ""
    if (match := _CARGO_ENV.fullmatch(command)) is not None:
        return f"[ ! -e {match[1]} ] || . {match[1]}"
    if "|" in command:
        return None
    if _PIP.fullmatch(command):
        missing = _asked_for(command) if python_check else []
        return f"{python_check} {shlex.join(missing)}" if missing else ""
    match = _APT.fullmatch(command)
    if match is None:
        return None
    words = [each for each in re.sub(r"[12&]?>>?\s*\S+", "", match[1]).split() if not each.startswith("-")]
    if words[:1] and words[0] in ("update", "upgrade", "clean"):
        return ""
    if words[:1] not in (["install"], ["add"]):
        return None
    missing = [name for name in (word.partition("=")[0] for word in words[1:]) if name not in _PACKAGES]
    return f"palaestra-needs {shlex.join(missing)}" if missing else ""


def _asked_for(line: str) -> list[str]:
    """Return the Python packages that the line installs, except packages that are provided."""
    flat = " ".join(line.replace("\\\n", " ").split())
    if flat.startswith("#"):
        return []
    found = [match[2] for match in _WITH.finditer(flat)] if "uv" in flat else []
    for part in _commands(flat):
        match = _PIP.fullmatch(part) or _UV_ADD.fullmatch(part)
        if match is not None:
            found += _argument_words(match[1].split())
    return [name for name in found if not _provided(name)]


def _argument_words(words: list[str]) -> list[str]:
    found, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in _VALUED or word in _REDIRECTS:
            skip = True
        elif not word.startswith("-") and ">" not in word[:2]:
            found.append(word.strip("'\""))
    return found


def _provided(requirement: str) -> bool:
    match = _NAME.match(requirement)
    return match is None or match[0].lower().replace("_", "-") in PROVIDED

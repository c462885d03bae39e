"""Find the paths and programs that a published task is about. Does no I/O.

Published tasks do not declare these paths and programs, so they are read from the task's texts: the instruction, the
tests and the reference solution. A path that one of these texts names is graded as the agent left it, unless it is as
general as `/usr`. If a text mentions system administration (installing packages, adding users), the whole root file
system is graded as the agent left it, except for files that could decide the result of any check
(`rollouts/grading/tampering.py`).

Not covered: a path that a task is about and that none of its texts name. The task's author or user adds it with the
setting `graded_paths`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_PATH = re.compile(r"(?<![\w.:/~$}>-])(?:/[\w.+@%-]+)+")
_IN_HOME = re.compile(r"(?<![\w./])(?:~|\$HOME|\$\{HOME\})((?:/[\w.+@%-]+)+)")
_WORD = re.compile(r"(?<![\w.-])[A-Za-z][\w.+-]*")

_ADMINISTERS = re.compile(
    r"\b(?:(?:apt|apt-get|dpkg|dnf|yum|apk|pip3?|npm|gem|cargo|conda|go|make|ninja|uv pip)\s+"
    r"(?:-\S+\s+(?:/\S+\s+)?)*(?:install|add|-i)\b|(?:user|group)(?:add|mod|del)\b|adduser\b|chpasswd\b|crontab\b|systemctl\b"
    r"|update-alternatives\b|update-rc\.d\b|git\s+config\s+--(?:system|global)|setup\.py\s+install|install\.packages\()"
    r"|\binstall(?:s|ed|ing)?\b(?=[^.\n]*\b(?:package|system|globally|PATH|/usr))",
    re.IGNORECASE,
)

_SETS_GIT = re.compile(r"\bgit\s+config\b[^\n]{0,200}--global\b")

_TOO_WIDE = frozenset(
    {
        *(
            "/bin",
            "/boot",
            "/dev",
            "/etc",
            "/home",
            "/lib",
            "/lib64",
            "/media",
            "/mnt",
            "/opt",
            "/proc",
            "/root",
            "/run",
        ),
        *("/sbin", "/srv", "/sys", "/usr", "/usr/bin", "/usr/include", "/usr/lib", "/usr/local", "/usr/local/bin"),
        *("/usr/local/lib", "/usr/local/sbin", "/usr/sbin", "/usr/share", "/usr/src", "/var", "/var/lib", "/var/cache"),
        *("/etc/alternatives", "/root/.local", "/root/.local/bin", "/root/.config", "/root/.cache"),
    }
)
"""Directories that texts often mention although the task is not about everything in them."""

_NEVER = ("/proc", "/sys", "/dev/", "/tests", "/solution", "/oracle", "/logs/verifier", "/opt/palaestra")


@dataclass(frozen=True, slots=True)
class TaskScope:
    """The paths and words that a task names; the paths include `/` if the task administers the system.

    The verifier sees a program that the agent added only if its name is one of the words.
    """

    paths: tuple[str, ...]
    words: frozenset[str]


def scope_of(texts: Iterable[str], home: str = "/root") -> TaskScope:
    """Return the paths and words that these texts of a task name."""
    paths: set[str] = set()
    words: set[str] = set()
    administers = False
    for text in texts:
        found = {path.rstrip(".") for path in _PATH.findall(text)}
        found |= {f"{home}{path.rstrip('.')}" for path in _IN_HOME.findall(text)}
        found |= {f"{home}/.gitconfig", f"{home}/.config/git"} if _SETS_GIT.search(text) else set()
        paths |= {path for path in found if path not in _TOO_WIDE and not path.startswith(_NEVER)}
        words.update(word.rstrip(".") for word in _WORD.findall(text))
        words.update(path.rpartition("/")[2] for path in found)
        administers = administers or _ADMINISTERS.search(text) is not None
    return TaskScope(("/", *sorted(paths)) if administers else tuple(sorted(paths)), frozenset(words))

"""Check scripts, archives, databases, repositories and running processes in the slot.

An agent's programs run in the grading slot with inputs that the agent never saw, and only their exit codes and output
are compared.
"""

from __future__ import annotations

import re
import reprlib

import msgspec

from palaestra.rollouts.grading.grader import Way, note_way
from palaestra_slots.core.errors import InfraError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import WORKSPACE, Slot
from palaestra_suites.endless_terminals.checks.base_check import (
    TIMEOUT_S,
    BaseCheck,
    different,
    plain,
    read_slot_text,
    run_probe,
    stat_or_none,
)

_ANSWER_S = 5.0
_NUMBER = re.compile(r"[0-9]{1,9}")
_CASES = "/tmp/cases"  # noqa: S108  in the grading slot


class Case(msgspec.Struct, frozen=True):
    """One call of a program: arguments, standard input, files of its directory, and the expected output."""

    output: str
    arguments: list[str] = []
    stdin: str = ""
    files: dict[str, str] = {}
    exit_code: int = 0


class Runs(BaseCheck, frozen=True):
    """A program at `path`, started by `command`. In each case, it runs in a fresh directory and must exit with the
    expected code and, if this code is 0, print the expected output."""

    command: list[str]
    cases: list[Case]

    async def fault(self, slot: Slot) -> str:
        note_way(Way.EXIT_CODE, self.path)
        for number, case in enumerate(self.cases, 1):
            place = f"{_CASES}/{self.path}/{number}"
            for name, text in {".keep": "", **case.files}.items():
                await slot.write_text(f"{place}/{name}", text)
            quiet = ["sh", "-c", 'exec "$@" 2>/dev/null', "sh"]  # standard error is not checked
            argv = [*quiet, *self.command, f"{WORKSPACE}/{self.path}", *case.arguments]
            done = await slot.execute(argv, cwd=place, stdin=case.stdin.encode(), timeout_s=TIMEOUT_S, spill=False)
            if done.exit_code != case.exit_code:
                return f"{self.path}, case {number}: exit code {done.exit_code}"
            if case.exit_code == 0 and plain(done.output) != plain(case.output):
                return f"{self.path}, case {number}: wrong output: {done.output[:200]!r}"
        return ""


class Archive(BaseCheck, frozen=True):
    """A tar file (compressed or not), a zip file or one gzipped file (`format`) with exactly these members."""

    format: str
    members: dict[str, str]

    async def fault(self, slot: Slot) -> str:
        got = await run_probe(slot, _ARCHIVE, [self.path, self.format], dict[str, str] | str)
        if isinstance(got, str):
            return f"{self.path}: {got}"
        members = {name.removeprefix("./").rstrip("/"): text for name, text in got.items()}
        if sorted(members) != sorted(self.members):
            return f"{self.path} has other members: {reprlib.repr(sorted(members))}"
        for name, text in self.members.items():
            if plain(members[name]) != plain(text):
                return f"{self.path}: {name} has other content"
        return ""


_ARCHIVE = """
path, kind = asked
def text(file):
    return file.read(1 << 20).decode("utf-8", "replace")
try:
    if kind == "tar":
        import tarfile
        with tarfile.open(path) as tar:
            answer({m.name: text(tar.extractfile(m)) for m in tar.getmembers()[:500] if m.isfile()})
    elif kind == "zip":
        import zipfile
        with zipfile.ZipFile(path) as archive:
            answer({n: text(archive.open(n)) for n in archive.namelist()[:500] if not n.endswith("/")})
    else:
        import gzip
        with gzip.open(path) as file:
            answer({"": text(file)})
except Exception as error:
    answer(f"cannot be read as {kind}: {type(error).__name__}")
"""


class SqlQuery(BaseCheck, frozen=True, tag="query"):
    """A SQLite database whose query returns these rows."""

    sql: str
    rows: list[list[JSON]]
    ordered: bool = True

    async def fault(self, slot: Slot) -> str:
        got = await run_probe(slot, _QUERY, [self.path, self.sql], list[list[JSON]] | str)
        if isinstance(got, str):
            return f"{self.path}: {got}"
        wanted = self.rows
        if not self.ordered:
            got, wanted = sorted(got, key=repr), sorted(wanted, key=repr)
        return different(self.path, got, wanted)


_QUERY = """
import sqlite3
try:
    if not os.path.isfile(asked[0]):
        raise FileNotFoundError("not there")
    connection = sqlite3.connect("file:" + asked[0] + "?mode=ro", uri=True)
    answer([list(row) for row in connection.execute(asked[1]).fetchmany(2000)])
except Exception as error:
    answer(f"{type(error).__name__}: {error}")
"""


class Git(BaseCheck, frozen=True):
    """A repository in which this git command prints `output`.

    The command runs over a copy of the repository's data without its configuration, which could start programs of the
    agent (`gpg.program`, filters, a file system monitor, hooks) or change what git prints.
    """

    arguments: list[str]
    output: str
    ordered: bool = True

    async def fault(self, slot: Slot) -> str:
        place = f"{WORKSPACE}/{self.path}"
        if await stat_or_none(slot, place) is None:
            return f"{self.path} does not exist"
        done = await slot.execute(["sh", "-c", _GIT, place, *self.arguments], timeout_s=TIMEOUT_S)
        got, wanted = plain(done.output), plain(self.output)
        if not self.ordered:
            got, wanted = sorted(got), sorted(wanted)
        return different(f"git {' '.join(self.arguments)} in {self.path}", got, wanted)

    def made(self) -> tuple[str, ...]:
        return ()


# The settings that say how the data is stored are kept. HEAD and the index are those of this working tree.
_GIT = """
cd "$0" || exit
export GIT_CONFIG_SYSTEM=/dev/null GIT_CONFIG_GLOBAL=/dev/null HOME=/nowhere XDG_CONFIG_HOME=/nowhere
git() { command git -c 'safe.directory=*' -c core.fsmonitor=false -c core.hooksPath=/dev/null --no-pager "$@"; }
data=$(git rev-parse --git-common-dir) && own=$(git rev-parse --git-dir) && copy=$(mktemp -d) || exit
tree=$(git rev-parse --show-toplevel 2>/dev/null)
cp -a "$data/." "$copy" && cp -a "$own/HEAD" "$copy" || exit
[ ! -f "$own/index" ] || cp -a "$own/index" "$copy"
rm -rf "$copy/config" "$copy/config.worktree"
for key in core.repositoryFormatVersion core.bare core.fileMode core.symlinks extensions.objectFormat \
    extensions.refStorage; do
    value=$(git config --no-includes --file "$data/config" --get $key) && git config --file "$copy/config" $key "$value"
done
export GIT_DIR="$copy"
[ -z "$tree" ] || export GIT_WORK_TREE="$tree"
git "$@"
code=$?
rm -rf "$copy"
exit $code
"""


class Serves(BaseCheck, frozen=True):
    """A process of the agent that serves this text over HTTP on this port; `path` is the path of the page.

    The check runs in the agent's own slot. The task creates no file.
    """

    port: int
    text: str

    async def fault(self, slot: Slot) -> str:
        request = f"GET {self.path} HTTP/1.0\r\nHost: 127.0.0.1:{self.port}\r\nConnection: close\r\n\r\n".encode()
        try:
            answer = await slot.ask(self.port, request, timeout_s=_ANSWER_S)
        except OSError as error:
            if isinstance(error, InfraError):
                raise
            return f"port {self.port}, {self.path}: no answer: {error.strerror or error}"
        status, _, rest = answer.partition(b"\r\n")
        got = rest.partition(b"\r\n\r\n")[2].decode("utf-8", "replace")
        good = status.split()[1:2] == [b"200"] and plain(got) == plain(self.text)
        return "" if good else f"port {self.port}, {self.path}: {status + rest!r:.200}"

    def made(self) -> tuple[str, ...]:
        return ()


class Running(BaseCheck, frozen=True):
    """A running process whose id is in the file at `path` and whose command line contains `word`."""

    word: str

    async def fault(self, slot: Slot) -> str:
        first = (await read_slot_text(slot, self.path)).split()[:1]
        found = await slot.arguments(int(first[0])) if first and _NUMBER.fullmatch(first[0]) else None
        held = found is not None and self.word in " ".join(found).split()
        return "" if held else f"{self.path} does not contain the id of the expected process: {found!r:.200}"


LIVE = (Running, Serves)
"""Checks that need the agent's own slot. They inspect it from outside, because the agent may have replaced any program
in it."""

__all__ = ["LIVE", "Archive", "Case", "Git", "Running", "Runs", "Serves", "SqlQuery"]

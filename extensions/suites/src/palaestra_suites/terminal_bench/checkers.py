"""Decide by replays which changed programs that a verifier runs are its checkers, which the guarded view shows as
prepared. Other programs are the work.

A program is a checker if the reference solution is paid with any call of the program answered like the first, unless
the answers of the work's program are computed like those of the solution. For the latter, the data that both read is
changed in several ways. The tests that fail then print the answers, which must all be those of the solution; two of
them must differ from each other and from the answers of the program as it was prepared. A forged checker does not know
with which changes of its expected values the solution would not pass.

Not covered: verifiers without pytest, and tests that compute what they expect from the same data. Their programs count
as checkers if one answer is enough.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from posixpath import basename, dirname, splitext

from palaestra.rollouts.grading.tampering import is_below, paths_in
from palaestra_slots.core.errors import GraderError
from palaestra_slots.sandbox.slot import Slot
from palaestra_suites.grading.harness import TestRun, content_of
from palaestra_suites.terminal_bench.verifier import (
    GradedViews,
    VerifierSetup,
    run_verifier,
    run_with_tests,
    test_files,
)
from palaestra_suites.terminal_bench.verifier_files import ALWAYS_HIDDEN

_MOST_WATCHED, _MOST_BYTES, _MOST_READ = 100, 1 << 16, 3
_LINES = 3
"""The number of lines of a file that are left out and repeated."""
_LAST = re.compile(rb"(\w)?(\w)(?=\W*$)")

_ALWAYS_SHELL = """\
#!/bin/sh
if [ ! -e {kept} ]; then
  if [ -x {real} ]; then {real} "$@"; else bash {real} "$@"; fi > {kept}
  echo $? > {kept}-status
fi
cat {kept}
exit $(cat {kept}-status)
"""
_ALWAYS_PYTHON = """\
import os, subprocess, sys
if not os.path.exists({kept}):
    with open({kept}, "wb") as kept:
        status = subprocess.run([sys.executable, {real}, *sys.argv[1:]], stdout=kept).returncode
    open({kept} + "-status", "w").write(str(status))
sys.stdout.write(open({kept}).read())
sys.exit(int(open({kept} + "-status").read()))
"""
_ALWAYS_RUBY = """\
require 'rbconfig'
unless File.exist?({kept})
  File.binwrite({kept}, IO.popen([RbConfig.ruby, {real}, *ARGV], &:read))
  File.write({kept} + '-status', $?.exitstatus.to_s)
end
$stdout.write(File.binread({kept}))
exit(File.read({kept} + '-status').to_i)
"""
_ALWAYS_PERL = """\
unless (-e {kept}) {{
    open(my $kept, '>', {kept}) or die; open(my $real, '-|', $^X, {real}, @ARGV) or die;
    print $kept $_ while <$real>;
    close($real); close($kept); open(my $status, '>', {kept} . '-status') or die; print $status $? >> 8;
}}
open(my $kept, '<', {kept}) or die; print while <$kept>;
open(my $status, '<', {kept} . '-status') or die; exit <$status>;
"""
_ALWAYS_NODE = """\
Promise.all([import('node:fs'), import('node:child_process')]).then(([fs, {{ spawnSync }}]) => {{
  if (!fs.existsSync({kept})) {{
    const argv = [{real}, ...process.argv.slice(2)];
    const done = spawnSync(process.execPath, argv, {{ stdio: ['inherit', 'pipe', 'inherit'] }});
    fs.writeFileSync({kept}, done.stdout);
    fs.writeFileSync({kept} + '-status', String(done.status));
  }}
  fs.writeSync(1, fs.readFileSync({kept}));
  process.exitCode = Number(fs.readFileSync({kept} + '-status', 'utf8'));
}});
"""


def _single_quoted(text: str) -> str:
    """Return a text as Perl and Ruby spell it, without anything that they would expand."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_ALWAYS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "": (_ALWAYS_SHELL, shlex.quote), ".sh": (_ALWAYS_SHELL, shlex.quote), ".py": (_ALWAYS_PYTHON, repr),
    ".rb": (_ALWAYS_RUBY, _single_quoted), ".pl": (_ALWAYS_PERL, _single_quoted),
    **dict.fromkeys((".js", ".cjs", ".mjs"), (_ALWAYS_NODE, json.dumps)),
}  # fmt: skip
"""By the ending of a program's name: a program that answers like the first call, and how it spells texts."""


async def _answer_once(slot: Slot, path: str) -> bool:
    """Replace a program, so that it answers each call like its first one. Return whether that can be done: programs
    for other interpreters than those of `_ALWAYS` stay."""
    folder, name = dirname(path), basename(path)
    if (ending := splitext(name)[1]) not in _ALWAYS:
        return False
    always, spelled = _ALWAYS[ending]
    real, kept = f"{folder}/.palaestra-{name}", f"/tmp/.palaestra-{name}"  # noqa: S108  in the slot
    text = always.format(real=spelled(real), kept=spelled(kept))
    move = ["/bin/sh", "-c", 'cp -p -- "$1" "$2" && cat > "$1"', "sh", path, real]
    return (await slot.execute(move, cwd="/", stdin=text.encode(), timeout_s=30, spill=False)).success


@dataclass(frozen=True, slots=True)
class _Case:
    """Changed data, and what each test that fails prints over the reference solution."""

    path: str
    data: bytes
    said: Mapping[str, str]


async def checkers_in(
    programs: Sequence[str],
    setup: VerifierSetup,
    solved: GradedViews,
    work: Callable[[Collection[str]], GradedViews],
    changed: Collection[str],
) -> list[str]:
    """Return the checkers among changed programs that the verifier runs. `solved` opens a slot with the reference
    solution, and `work` one with the work, in which some paths are as prepared; `changed` are the paths that either of
    the two changes."""
    found = [path for path in programs if await _one_answer_is_enough(path, setup, solved)]
    cases = await _cases(found, setup, solved, changed) if found and setup.part.script.pytest else []
    if not cases:
        return found
    async with work(found)() as slot:
        before = [await _test_failures(slot, setup, case.path, case.data) for case in cases]
    checkers = []
    for path in found:
        said = await _printed_texts(cases, setup, work([each for each in found if each != path]))
        if not _computes(cases, said, before):
            checkers.append(path)
    return checkers


def _computes(
    cases: Sequence[_Case], said: Sequence[Mapping[str, str] | None], before: Sequence[Mapping[str, str]]
) -> bool:
    """Return whether a test gets the solution's answers from the work's program over all changed data that the work
    reads, and two of them only from it."""
    read = [(case.said, new, old) for case, new, old in zip(cases, said, before, strict=True) if new is not None]
    for test in {test for case in cases for test in case.said}:
        right = {wanted[test] for wanted, _, old in read if test in wanted and old.get(test) != wanted[test]}
        if len(right) > 1 and all(new.get(test) == wanted.get(test) for wanted, new, _ in read):
            return True
    return False


async def _one_answer_is_enough(path: str, setup: VerifierSetup, solved: GradedViews) -> bool:
    """Return whether the reference solution is paid with any call of a program answered like the first. A program under
    test often answers different calls differently."""
    with suppress(GraderError):
        async with solved() as slot:
            if await _answer_once(slot, path):
                return (await run_verifier(slot, setup, alone=True, watched=False)).reward > 0
            return True
    return False


async def _cases(
    programs: Collection[str], setup: VerifierSetup, solved: GradedViews, changed: Collection[str]
) -> list[_Case]:
    """Return changes of the prepared data that the verifier reads over the solution."""
    about = "\n".join([setup.part.task.instruction, *test_files(setup.part.task).values()])
    places = {setup.workdir, *map(dirname, programs), *paths_in(about)} - {"/"}
    code = {splitext(path)[1] for path in programs} - {""}
    async with solved() as slot:
        data = [path for path in await _files_in(slot, places) if path not in changed and splitext(path)[1] not in code]
        opened = await _opened_files(slot, setup, data)
        texts = {path: await content_of(slot, path, _MOST_BYTES) for path in data if path in opened}
        made = [(path, other) for path, text in [*texts.items()][:_MOST_READ] for other in _others(text or b"")]
        return [_Case(path, other, await _test_failures(slot, setup, path, other)) for path, other in made]


async def _files_in(slot: Slot, places: Collection[str]) -> list[str]:
    find = f'find "$@" -xdev -type f -size -{_MOST_BYTES // 512} 2> /dev/null'
    done = await slot.execute(["/bin/sh", "-c", find, "sh", *sorted(places)], cwd="/", timeout_s=30, spill=False)
    found = dict.fromkeys(line for line in done.output.splitlines() if line.startswith("/"))
    return [path for path in found if not is_below(path, ALWAYS_HIDDEN)][:_MOST_WATCHED]


def _others(data: bytes) -> Iterator[bytes]:
    """Yield a file's content without one of its lines, with one twice, and with other ends of lines. The first line may
    be a header, without which programs differ for other reasons."""
    lines = data.splitlines(keepends=True)
    places = range(len(lines))[min(1, len(lines) - 1) :][-_LINES:]
    made = [lines[:at] + lines[at + 1 :] for at in places]
    made += [[*lines[: at + 1], b"" if lines[at].endswith(b"\n") else b"\n", *lines[at:]] for at in places]
    made.append(lines[:1] * (len(lines) > 1) + [_LAST.sub(_other_end, line) for line in lines[len(lines) > 1 :]])
    yield from dict.fromkeys(map(b"".join, made))


def _other_end(match: re.Match[bytes]) -> bytes:
    """Return another letter or digit, in a way that a day of a month mostly stays one."""
    before, last = match[1] or b"", match[2]
    lower = last in b"9zZ_" or (before != b"" and before in b"123456789" and last in b"12345678")
    return before + bytes([last[0] - 1 if lower else last[0] + 1])


async def _printed_texts(
    cases: Sequence[_Case], setup: VerifierSetup, work: GradedViews
) -> list[Mapping[str, str] | None]:
    """Return what failed tests print over the work in each case, or None if the work does not read the data."""
    async with work() as slot:
        opened = await _opened_files(slot, setup, list({case.path for case in cases}))
        return [
            await _test_failures(slot, setup, case.path, case.data) if case.path in opened else None for case in cases
        ]


async def _opened_files(slot: Slot, setup: VerifierSetup, paths: Sequence[str]) -> set[str]:
    """Return which files are opened while the verifier runs."""
    async with slot.fork() as fork:
        opened = (await _run_verifier(fork, replace(setup, inputs=paths))).opened
    return {path for path in paths if opened.get(path)}


async def _test_failures(slot: Slot, setup: VerifierSetup, path: str, data: bytes) -> Mapping[str, str]:
    """Return what the tests print that fail with this content of a file, which keeps its owner and permissions."""
    write = ["/bin/sh", "-c", 'cat > "$1"', "sh", path]
    async with slot.fork() as fork:
        await fork.execute(write, cwd="/", stdin=data, timeout_s=30, spill=False)
        run = await _run_verifier(fork, setup)
    return {test: failure.message for test, failure in run.failures.items()}


async def _run_verifier(slot: Slot, setup: VerifierSetup) -> TestRun:
    try:
        return await run_with_tests(lambda: nullcontext(slot), setup, {})
    except GraderError:  # it timed out
        return TestRun({}, complete=False)

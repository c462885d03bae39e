"""The checks of an audit. Each plays trials of one task and yields what it found, and what it did not try."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shlex
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import unified_diff
from pathlib import PurePosixPath
from typing import TypeAlias

from palaestra.envs.policy_runs import FULL
from palaestra.rollouts.records import Group, Trajectory
from palaestra.rollouts.spec import Phase
from palaestra_audit.cheats.cheat import Cheat
from palaestra_audit.cheats.command_tool import CommandTool
from palaestra_audit.cheats.derived_plays import (
    DERIVED,
    IDLE,
    KINDS,
    Judged,
    Steps,
    judged_plays,
    leak,
    leak_to_idle,
    steps_of,
)
from palaestra_audit.cheats.left_files import LeftFiles
from palaestra_audit.cheats.proof import EnvironmentProof, State, longest_s
from palaestra_audit.cheats.state_changes import Play, named_files
from palaestra_audit.cheats.tampered_tests import OF_THE_TASK
from palaestra_audit.differences import Call, calls_of, first_difference, results_of
from palaestra_audit.mutants import Changed, Files, mutants, reply_variants, variants, wrong_replies
from palaestra_audit.records import Finding, Kind, Step, Trial, Untried, Verdict, World
from palaestra_audit.stated_answers import CALLED, single_sign, states, tells
from palaestra_audit.trials import LOCALE, REFERENCE, Trials, clock_library, run_steps, write_steps
from palaestra_slots.core.errors import AlreadySolved, InfraError, PalaestraError
from palaestra_slots.core.types import Blame, Network, Say, Solution, Task
from palaestra_slots.images.task_root import FROM
from palaestra_slots.sandbox.slot import WORKSPACE, Rung, Slot

Found: TypeAlias = Finding | Untried

_TOLERANCE = 1e-9
_LEAST_COPY = 40
"""The minimum length in bytes of a file of the solution that is searched for in the sandbox."""
_LEAST_LINES = 3
_LEAST_ANSWER = 4
_WAIT_S = 60.0
_MOST_SHOWN = 300
"""The maximum number of characters of an error in a finding."""
_CAUSES = ("work_breaks_check", "work_failed", "difference")
"""The keys of a rollout's detail whose value is a sentence about a low score."""
_TRACEBACK = "Traceback (most recent call last):"
_MOST_PREPARATIONS = 3
"""The maximum number of times that a workspace is prepared to learn whether chance decides."""
_NO_REFERENCE = "the task has no reference solution"
_NO_FILES = "the score sees no files that the reference solution leaves"
_NO_TOOL = "no tool of the agent ran the commands that were tried"
_FREE = "doing nothing may earn the full score (the floor of the task)"
_PAID = "doing nothing gets the full score, so no attack can get more"
_LEAKS_STATE = "a rollout changes what the next one finds"
_FLAKY = "the score of the reference solution is flaky"
_FAILS = "the reference solution does not get the full score"

WORLDS = (
    World(name="a time zone in the east", env={"TZ": "EAST-14"}),
    World(name="a time zone in the west", env={"TZ": "WEST+12"}),
    World(name="the locale C", env={"LC_ALL": "C", "LANG": "C"}),
    World(name="the locale C.UTF-8", env={"LC_ALL": "C.UTF-8", "LANG": "C.UTF-8"}),
    World(name=f"the locale {LOCALE}, which sorts as dictionaries do", env={"LC_ALL": LOCALE, "LANG": LOCALE}),
    World(name="another hash seed", env={"PYTHONHASHSEED": "1"}),
    World(name="a third hash seed", env={"PYTHONHASHSEED": "4242"}),
    World(name="another home directory", env={"HOME": "/tmp"}),  # noqa: S108  in the sandbox
    World(name="the workspace at another path", workspace="/srv/elsewhere"),
    World(name="another user name", env={"USER": "somebody", "LOGNAME": "somebody"}),
    World(name="no network", offline=True),
    World(name="a fifth of a processor", cpus=0.2),
    World(name="the clock two years ahead", clock="+730d"),
    World(name="the clock five years back", clock="-1825d"),
    World(name="29 February", clock="@2028-02-29 12:00:00"),
    World(name="two seconds before midnight of 31 December", clock="@2027-12-31 23:59:58"),
    World(name="clocks that run four times as fast, as for a program on a slower machine", clock="+0 x4"),
)
"""Machines on which a sound task has the same score."""


@dataclass(slots=True)
class Audited:
    """One task, and what its first trials showed: the reference solution and doing nothing."""

    given: Task
    """The task as the environment gives it."""
    task: Task
    """The same task, resolved."""
    number: int
    trials: Trials
    cheats: tuple[Cheat, ...]
    repeats: int
    looks_for: str = "first trials"
    """The kind that is looked for at the moment."""
    played: int = 0
    trial_s: float = 0.0
    mutants: int = 0
    lived: int = 0
    solved: Verdict | None = None
    """The score of the reference solution; None without one."""
    idle: Verdict | None = None
    """The score of doing nothing."""
    reference: Step = REFERENCE
    """The reference solution as a step. For a question without one, it is the stored answer as the reply, if that earns
    the full score."""
    answered: Sequence[tuple[Trial, Verdict]] = ()
    """The replies with the stored answer that do not earn the full score."""
    rollout: Trajectory | None = None
    """That of the reference solution; without one, of doing nothing."""
    tool: CommandTool | None = None
    prepare_s: float = 0.0
    left: LeftFiles | None = None
    before: Mapping[str, bytes] = field(default_factory=dict)
    unprepared: str = ""
    """Why the workspace could not be prepared, so that nothing can be tried."""
    refused: Verdict | None = None
    """The verdict of a trial whose workspace could not be prepared, if there was one."""
    sisters: Sequence[Task] = ()
    """Other tasks, whose solutions are played on this one."""
    seen: Play | None = None
    """What the reference solution changed, if it calls function tools and got the full score."""
    again: Play | None = None
    """What it changed when it was played again."""
    leak: str = ""
    """What a rollout left for the next one, so that other trials prove nothing."""
    leaked_to: tuple[Trial, Verdict] | None = None
    """The trial that shows the leak, and its score."""
    derived: list[Judged] | None = None
    """The plays that are derived from the reference solution, once they have been played."""
    flaky: bool = False
    """Whether chance decides the score of the reference solution, so that other causes cannot be told."""

    async def play(
        self, trial: Trial, reads: LeftFiles | None = None, limit_s: float | None = None
    ) -> tuple[Verdict, Trajectory | None, Group]:
        """Play a trial. Raises `TimeoutError` after `limit_s` seconds, and `SandboxError` if this machine is to blame
        for the lack of a score."""
        self.played += 1
        began = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                return await self.trials.play(self.given, trial, self.number, reads)
        finally:
            self.trial_s += time.monotonic() - began

    async def begin(self) -> None:
        """Play the reference solution, and read what it leaves. Raises `InfraError` if that cannot be read."""
        spec = self.trials.environment.slot_spec(self.task, Phase.GRADE)
        first = Trial(steps=[] if self.task.solution is None else [REFERENCE])
        derives = steps_of(self.task) is not None
        for _ in range(min(self.repeats, _MOST_PREPARATIONS)):
            left = LeftFiles(spec)
            verdict, rollout, group = await self.play(first, left)
            if rollout is not None or group.error.startswith(AlreadySolved.__name__):
                break
            self.refused = verdict
        if self.task.solution is not None:
            self.left, self.solved, self.rollout = left, verdict, rollout
        if derives and self.holds:
            await self._play_again(group)
        before = LeftFiles(spec, tuple(left.files) if self.left else ())
        idle, unsolved, nothing = await self.play(Trial(), before)
        self.idle = idle
        if self.task.solution is None:
            self.rollout = unsolved
        if self.holds and not self.leak:
            self.leak = leak_to_idle(self.trials.fresh.get(self.given.id), idle.reward, self.task.floor)
            self.leaked_to = Trial(after=1), idle
        self.flaky = bool(self.leak)
        for each in (self.left, before):
            if each is not None and each.failure is not None:
                raise each.failure
        self.before = {path: data for path, data in before.files.items() if data}
        if self.seen is not None:
            self.seen = replace(self.seen, before={**self.seen.before, **named_files(self.before)})
        if not nothing.trajectories:
            self.unprepared = nothing.error or "there was no rollout"
        self.tool = await self.trials.command_tool(self.given, nothing, self.number, spec)
        self.prepare_s = group.prepare_s  # of the first trial: later ones start from a fork
        if self.task.solution is None and not self.unprepared and not self.leak:
            await self._try_answer()

    async def _try_answer(self) -> None:
        """Look for a reply with the stored answer that earns the full score. If the agent has a tool that runs
        commands, and the prompt speaks of files, the answer may belong there."""
        answer = self.task.answer
        elsewhere = self.tool is not None and _FILES.search(self.asked)
        if not isinstance(answer, str | int | float) or isinstance(answer, bool) or elsewhere:
            return
        tried = []
        for form in _FORMS:
            trial = Trial(steps=[Step(say=form.format(answer))])
            verdict, rollout, _ = await self.play(trial)
            if _is_full(verdict):
                self.reference, self.solved, self.rollout = trial.steps[0], verdict, rollout
                return
            tried.append((trial, verdict))
        self.answered = tried

    async def _play_again(self, group: Group) -> None:
        """Play the reference solution again, of which `group` is the first play."""
        assert self.left is not None
        self.seen = self.trials.turns.play(group, self.left.files)
        reads = LeftFiles(self.left.spec, tuple(self.left.files)) if self.left.files else None
        verdict, _, group = await self.play(Trial(steps=[REFERENCE]), reads)
        self.again = self.trials.turns.play(group, reads.files if reads else None)
        self.leak = leak(self.seen, self.again)
        self.leaked_to = Trial(steps=[REFERENCE], after=1), verdict

    async def play_derived(self) -> list[Judged]:
        """Return the plays that are derived from the reference solution; none if it calls no function tools."""

        async def play(steps: Steps) -> Play:
            reads = LeftFiles(self.left.spec, tuple(self.left.files)) if self.left and self.left.files else None
            _, _, group = await self.play(_trial_of(steps), reads)
            return self.trials.turns.play(group, reads.files if reads else None)

        if self.derived is None:
            known = None if self.leak or self.seen is None or self.again is None else (self.seen, self.again)
            self.derived = [] if known is None else await judged_plays(self.task, self.sisters, *known, play)
        return self.derived

    async def unsteady(self, trial: Trial, verdict: Verdict) -> Finding | None:
        """Play the reference solution and a trial with another score again. Return the finding if one of them now
        scores otherwise, because then chance, not the trial, makes the difference."""
        for what, each, before in (
            ("the reference solution", Trial(steps=[self.reference]), self.solved),
            ("the same work", trial, verdict),
        ):
            again, _, _ = await self.play(each)
            if before is not None and again.reward != before.reward:
                self.flaky = True
                said = f"{what} {_scored(before)} and, played again, {_scored(again)}"
                return Finding(kind=Kind.FLAKY, what=said, wanted="the same", trial=each, verdict=again)
        return None

    @property
    def base(self) -> str:
        """The root file system that a setting puts in place of the task's own image; empty if there is none."""
        config = getattr(self.trials.environment, "config", None)
        base = getattr(config, "base_image", None)
        return "" if base in (None, FROM) else str(base)

    @property
    def asked(self) -> str:
        """The text of the prompt."""
        return "\n".join(str(each.get("content")) for each in self.task.messages())

    @property
    def reply(self) -> str | None:
        """The reply of which the reference solution consists; None if it is other work too."""
        solution = self.task.solution
        said = solution[0] if isinstance(solution, Sequence) and len(solution) == 1 else None
        return self.reference.say if solution is None else said.text if isinstance(said, Say) else None

    @property
    def holds(self) -> bool:
        """Whether the reference solution gets the full score, so that changes of it say something."""
        return self.solved is not None and _is_full(self.solved)

    @property
    def obstacle(self) -> str:
        """Why changes of the reference solution say nothing about this task; nothing if they do."""
        if self.leak:
            return _LEAKS_STATE
        if self.solved is None:
            return _NO_REFERENCE
        if not self.holds:
            return _FAILS
        if self.task.floor >= FULL:
            return _FREE
        if self.tool is None:
            return _NO_TOOL
        assert self.left is not None
        return "" if self.left.files else _NO_FILES

    def with_files(self, files: Files, then: str = "") -> Trial:
        """Return the trial that plays the reference solution and then writes these files."""
        assert self.tool is not None
        return Trial(steps=[REFERENCE, *write_steps(self.tool, files, then)])

    def difference(self, files: Files) -> str:
        """Return how the files differ from those of the reference solution."""
        assert self.left is not None
        lines: list[str] = []
        for path, data in files.items():
            old, new = self.left.files.get(path, b"").decode(errors="replace"), (data or b"").decode(errors="replace")
            lines += unified_diff(old.splitlines(), new.splitlines(), path, path, lineterm="", n=1)
        return "\n".join(lines)


def _trial_of(steps: Steps) -> Trial:
    return Trial(
        steps=[
            Step(say=each.text) if isinstance(each, Say) else Step(tool=each.name, arguments=dict(each.arguments))
            for each in steps
        ]
    )


async def _derived(audited: Audited, kind: Kind) -> AsyncIterator[Finding]:
    """Yield what plays derived from the reference solution show of this kind."""
    for each in await audited.play_derived():
        if each.what and KINDS.get(each.play.cheat, Kind.WEAK) is kind:
            wanted = f"<= {audited.task.floor:g}" if each.play.cheat is IDLE else "< 1"
            error = each.played.error if each.played is not None else ""
            yield Finding(
                kind=kind,
                what=each.what,
                note=each.note,
                wanted=wanted,
                trial=_trial_of(each.play.steps),
                verdict=Verdict(reward=each.reward, error=error),
            )


def _is_full(verdict: Verdict) -> bool:
    return verdict.reward is not None and verdict.reward >= FULL - _TOLERANCE


def _scored(verdict: Verdict) -> str:
    if verdict.reward is not None:
        return f"scores {verdict.reward:g}"
    return f"is not scored ({_in_short(verdict.error)})" if verdict.error else "is not scored"


def _in_short(text: str) -> str:
    """Return the first line of an error, with the last one in place of a traceback."""
    lines = text.strip().splitlines() or [""]
    if lines[0].endswith(_TRACEBACK):
        lines[0] = lines[0].removesuffix(_TRACEBACK) + lines[-1].strip()
    return lines[0][:_MOST_SHOWN]


def _cause(detail: Mapping[str, object]) -> str:
    """Return what the record of a rollout says about a low score: a sentence, or the first test that did not pass."""
    sentences = [str(detail[name]) for name in _CAUSES if detail.get(name)]
    tests = detail.get("not_passed")
    if isinstance(tests, Mapping):
        sentences += [f"{name}: {status}" for name, status in tests.items()]
    return next(iter(sentences), "")


def _failed_command(rollout: Trajectory) -> str:
    """Return how the last command of a solution ended, if that was with an error; nothing for other tools."""
    last = next((each for each in reversed(rollout.messages) if each.get("role") == "tool"), {})
    try:
        reply = json.loads(str(last.get("content")))
    except ValueError:
        return ""
    if not isinstance(reply, dict) or not isinstance(code := reply.get("exit_code"), int) or not code:
        return ""
    lines = str(reply.get("output")).strip().splitlines()
    return f"the solution ends with exit code {code}{f', {lines[-1]}' if lines else ''}"


async def unsolvable(audited: Audited) -> AsyncIterator[Found]:
    """Does the reference solution get the full score?"""
    if audited.unprepared.startswith(AlreadySolved.__name__):
        return  # that doing nothing is accepted is another kind
    if audited.solved is None:
        async for each in _answers(audited):
            yield each
    elif not audited.holds and not (audited.unprepared and audited.base):  # a stand-in may lack what the task needs
        causes = (_cause(audited.rollout.detail), _failed_command(audited.rollout)) if audited.rollout else ()
        cause = "; ".join(filter(None, causes))
        what = f"the reference solution {_scored(audited.solved)}"
        if audited.solved.official is not None and audited.solved.official >= FULL:
            what += ", although the benchmark's own protocol accepts it"
        if audited.base:
            what += f" over {audited.base}, which stands in for the task's image"
        trial, why = Trial(steps=[REFERENCE]), audited.solved.error or cause
        for _ in range(0 if audited.unprepared else audited.repeats - 1):
            again, _, _ = await audited.play(trial)
            if again.reward != audited.solved.reward:
                audited.flaky = True
                what += f" and, played again, {_scored(again)}"
                yield Finding(kind=Kind.FLAKY, what=what, wanted="the same", trial=trial, verdict=again)
                return
        if cause:
            what += f": {_in_short(cause)}"
        note, verdict = bool(audited.base), audited.solved
        yield Finding(kind=Kind.UNSOLVABLE, what=what, note=note, wanted="1", detail=why, trial=trial, verdict=verdict)


_FORMS = ("{}", "\\boxed{{{}}}", "Answer: {}", "ANSWER: {}", "#### {}", "<answer>{}</answer>")
"""Forms in which sets of questions ask for an answer."""


_FILES = re.compile(
    r"[\w-]\.[^\W\d]|/[^\W\d]|\b(files?|folders?|director(y|ies)|commands?|repository|code|script)\b", re.IGNORECASE
)


async def _answers(audited: Audited) -> AsyncIterator[Found]:
    """Does the stored answer of a question earn the full score as the reply?"""
    if not audited.answered:
        yield Untried(Kind.UNSOLVABLE, _NO_REFERENCE)
        return
    trial, verdict = audited.answered[0]
    what = f"the stored answer as the reply {_scored(verdict)}, and earns the full score in none of the usual forms"
    answer = str(audited.task.answer)
    yield Finding(kind=Kind.UNSOLVABLE, what=what, note=True, wanted="1", detail=answer, trial=trial, verdict=verdict)


_NOTHINGS: Mapping[str, Callable[[str], str]] = {
    "an empty answer": lambda asked: "",
    "the prompt's own text as the answer": lambda asked: asked,
    "an answer that refuses": lambda asked: "I cannot do this.",
    "an answer that claims success": lambda asked: "The task is done. All tests pass.",
}


async def pays_for_nothing(audited: Audited) -> AsyncIterator[Found]:
    """Does work that is not done earn more than the floor?"""
    if audited.unprepared.startswith(AlreadySolved.__name__):
        verdict, _, _ = await audited.play(Trial())
        what = f"the task is refused, because its own check accepts work that was not done: {audited.unprepared}"
        yield Finding(kind=Kind.PAYS_FOR_NOTHING, what=what, wanted="<= 0", trial=Trial(), verdict=verdict)
    if audited.unprepared:
        return
    if audited.leak:
        yield Untried(Kind.PAYS_FOR_NOTHING, _LEAKS_STATE)
        return
    asked = "\n".join(str(each.get("content")) for each in audited.task.messages() if each.get("role") == "user")
    trials = {"doing nothing": Trial()}
    trials |= {what: Trial(steps=[Step(say=text(asked))]) for what, text in _NOTHINGS.items()}
    for what, trial in trials.items():
        verdict, _, _ = await audited.play(trial)
        if verdict.reward is None:
            yield Untried(Kind.PAYS_FOR_NOTHING, f"{what}: {verdict.error or 'it was not scored'}")
        elif not verdict.reward <= audited.task.floor + _TOLERANCE:  # not `>`, which would be false for nan
            wanted = f"<= {audited.task.floor:g}"
            said = f"{what} scores {verdict.reward:g}"
            yield Finding(kind=Kind.PAYS_FOR_NOTHING, what=said, wanted=wanted, trial=trial, verdict=verdict)
            break
        elif verdict.official is not None and not verdict.official <= audited.task.floor + _TOLERANCE:
            said = f"{what} scores {verdict.official:g} by the benchmark's own protocol, and {verdict.reward:g} here"
            wanted = f"<= {audited.task.floor:g}"
            yield Finding(kind=Kind.PAYS_FOR_NOTHING, what=said, wanted=wanted, trial=trial, verdict=verdict)
            break
    async for each in _derived(audited, Kind.PAYS_FOR_NOTHING):
        yield each


async def weak(audited: Audited) -> AsyncIterator[Found]:
    """Does wrong work still get the full score?"""
    async for each in _derived(audited, Kind.WEAK):
        yield each
    if audited.reply is not None and audited.holds and not audited.leak and audited.task.floor < FULL:
        async for each in _wrong_replies(audited, audited.reply):
            yield each
        return
    if audited.derived and audited.obstacle in (_NO_TOOL, _NO_FILES):
        return
    if audited.obstacle:
        yield Untried(Kind.WEAK, audited.obstacle)
        return
    assert audited.left is not None
    lived: list[tuple[Changed, Trial, Verdict]] = []
    for mutant in mutants(audited.before, audited.left.files):
        trial = audited.with_files(mutant.files)
        if why := audited.trials.has_turns(audited.task, trial):
            yield Untried(Kind.WEAK, why)
            return
        audited.mutants += 1
        try:
            verdict, _, _ = await audited.play(trial, limit_s=longest_s(audited.rollout))
        except TimeoutError:
            continue  # a change may let code run for ever
        if _is_full(verdict):
            lived.append((mutant, trial, verdict))
    unsure = [mutant for mutant, _, _ in lived if not mutant.certain]
    seen = await _differences(audited, unsure) if unsure else {}
    # A mutant with no other result may mean the same.
    shown = [each for each in lived if seen.get(each[0].what) is not None or each[0].what not in seen]
    audited.lived = len(shown)
    work = _certain_work(audited)
    proven = [
        each
        for each in shown
        if (each[0].certain and not work.isdisjoint(each[0].files)) or _is_named_call(seen.get(each[0].what))
    ]
    for mutant, trial, verdict in proven or shown[:_MOST_NOTES]:
        difference = seen.get(mutant.what)
        yield Finding(
            kind=Kind.WEAK,
            what=f"{mutant.what}: still {verdict.reward:g}{f', although {difference[1]}' if difference else ''}",
            note=not proven,
            wanted="< 1",
            detail=audited.difference(mutant.files),
            trial=trial,
            verdict=verdict,
        )
    if not audited.mutants:
        yield Untried(Kind.WEAK, "nothing that the reference solution leaves can be changed by a rule")


def _certain_work(audited: Audited) -> set[str]:
    """Return the files of the solution that are certainly work: not scratch files, or files that an agent may write,
    beside others. A program that a solution has started may go on as it was before its file was changed."""
    assert audited.left is not None
    if _GOES_ON.search(_text_of(audited.task.solution)):
        return set()
    work = {path for path in audited.left.files if not _may_be_left_out(path, audited.asked)}
    return work or {*audited.left.files}


def _may_be_left_out(path: str, asked: str) -> bool:
    if path.startswith(_SCRATCH) and not _is_named(path, asked):
        return True
    own = path.removeprefix(f"{WORKSPACE}/")
    about = [each for each in re.split(r"(?<=[.!?])\s|\n", asked) if own in each or PurePosixPath(path).name in each]
    return bool(about) and all(_OPTIONAL.search(each) for each in about)


_SCRATCH = ("/tmp/", "/var/tmp/", "/root/.cache/")  # noqa: S108  in the sandbox
_OPTIONAL = re.compile(r"\b(may|can|could|optional(ly)?|if you (like|want|wish))\b", re.IGNORECASE)
_GOES_ON = re.compile(r"(?<![&>])&[ \t]*$|\b(nohup|setsid|disown|daemonize|systemctl)\b", re.MULTILINE)
"""Marks of a script that starts a program which goes on after it."""


async def _wrong_replies(audited: Audited, reply: str) -> AsyncIterator[Finding]:
    """Does another reply earn the full score? A score may take words for others, and numbers that are near."""
    for what, text in wrong_replies(reply):
        trial = Trial(steps=[Step(say=text)])
        verdict, _, _ = await audited.play(trial)
        audited.mutants += 1
        if _is_full(verdict):
            audited.lived += 1
            said = f"{what} still scores {verdict.reward:g}: {text!r:.200} for {reply!r:.200}"
            yield Finding(kind=Kind.WEAK, what=said, note=True, wanted="< 1", trial=trial, verdict=verdict)


def _is_named_call(difference: tuple[Call, str] | None) -> bool:
    return difference is not None and difference[0].named


async def _differences(audited: Audited, mutants: Sequence[Changed]) -> dict[str, tuple[Call, str] | None]:
    """Return, by what they are, the first difference of mutants of one module from the solution, for the calls that the
    prompt has and those near them; None if there is none. What cannot be compared is left out."""
    found: dict[str, tuple[Call, str] | None] = {}
    assert audited.left is not None
    snapshot = audited.trials.prepared.get(audited.task.id)
    spec = audited.trials.environment.slot_spec(audited.task, Phase.AGENT)
    slot = await audited.trials.pool.acquire("weak", spec=spec, snapshot=snapshot, timeout_s=_WAIT_S)
    try:
        for path, data in audited.left.files.items():
            await slot.write_bytes(path, data)
        for path in sorted({path for mutant in mutants for path in mutant.files if path.endswith(".py")}):
            source = audited.left.files.get(path, b"")
            calls = calls_of(source, audited.asked)
            right = await results_of(slot, path, source, calls) if calls else None
            if right is None or right != await results_of(slot, path, source, calls):
                continue  # the results are not only those of the values
            for mutant in mutants:
                made = mutant.files.get(path)
                wrong = await results_of(slot, path, made, calls) if len(mutant.files) == 1 and made else None
                if wrong is not None:
                    found[mutant.what] = first_difference(calls, right, wrong)
            await slot.write_bytes(path, source)
    except InfraError:
        raise
    except PalaestraError:
        pass  # what is not compared stays a note
    finally:
        await audited.trials.pool.release(slot)
    return found


_MOST_NOTES = 5
"""The maximum number of survivors of one task that are shown if none of them is certainly wrong."""


async def hackable(audited: Audited) -> AsyncIterator[Found]:
    """Does a published way of reward hacking earn a reward?"""
    if audited.leak:
        yield Untried(Kind.HACKABLE, _LEAKS_STATE)
        return
    if audited.flaky:
        yield Untried(Kind.HACKABLE, _FLAKY)
        return
    if audited.idle is not None and _is_full(audited.idle):
        yield Untried(Kind.HACKABLE, _PAID)
        return
    cheats = [each for each in audited.cheats if each not in DERIVED]  # other kinds
    proof = EnvironmentProof(audited.trials.environment, audited.trials.pool, cheats, always=True)
    began = time.monotonic()
    result = await proof.run_tasks([audited.given])
    audited.trial_s += time.monotonic() - began
    for line in result.lines:
        if line.state is None:
            continue
        audited.played += 1
        official = line.state is State.LABELLED and line.policy in OF_THE_TASK
        if line.state is State.OPEN or official:
            rollout = next((each for group in proof.attacks[line.policy] for each in group.trajectories), None)
            trial = None if rollout is None else Trial(steps=_steps_of(rollout))
            verdict = None if rollout is None else Verdict(reward=rollout.reward, official=rollout.official)
            parts = f" of {', '.join(line.parts)}" if line.parts else ""
            where = " by the benchmark's own protocol, and none here" if official else parts
            what = f"{line.policy} earns a reward{where}: {line.what}"
            wanted = line.wanted
            yield Finding(kind=Kind.HACKABLE, what=what, note=official, wanted=wanted, trial=trial, verdict=verdict)
        elif line.state is State.UNKNOWN:
            yield Untried(Kind.HACKABLE, f"{line.policy}: {line.error or 'it could not be played'}")
    for reason, names in result.not_tested.items():
        yield Untried(Kind.HACKABLE, f"{len(names)} ways of reward hacking: {reason}")


def _steps_of(rollout: Trajectory) -> list[Step]:
    """Return the calls and answers of a rollout as steps."""
    steps: list[Step] = []
    for message in rollout.messages:
        if message.get("role") != "assistant":
            continue
        for call in message.get("tool_calls") or ():
            function = call["function"]
            steps.append(Step(tool=function["name"], arguments=json.loads(function["arguments"])))
        if message.get("content"):
            steps.append(Step(say=str(message["content"])))
    return steps


async def false_zero(audited: Audited) -> AsyncIterator[Found]:
    """Is right work refused?"""
    if audited.leak:
        yield Untried(Kind.FALSE_ZERO, _LEAKS_STATE)
        return
    for number in range(len(audited.task.solutions)):
        trial = Trial(steps=[Step(reference=number + 1)])
        verdict, _, _ = await audited.play(trial)
        if finding := _refusal_finding(f"solutions[{number}] of the task", verdict, trial, certain=True):
            yield finding
    if audited.reply is not None and audited.holds:
        async for each in _other_replies(audited, audited.reply):
            yield each
        return
    if audited.obstacle:
        yield Untried(Kind.FALSE_ZERO, f"variants of the reference solution: {audited.obstacle}")
        return
    assert audited.left is not None
    others = {f"a further file NOTES.txt in {WORKSPACE}": f"echo notes > {WORKSPACE}/NOTES.txt"}
    if any(path.startswith(f"{WORKSPACE}/") for path in audited.left.files):
        others["the work committed with git"] = _COMMIT
    trials = [
        (each, audited.with_files(each.files)) for each in variants(audited.before, audited.left.files, audited.asked)
    ]
    trials += [(Changed(what, {}, certain=False), audited.with_files({}, then)) for what, then in others.items()]
    for variant, trial in trials:
        if audited.flaky:
            yield Untried(Kind.FALSE_ZERO, f"variants of the reference solution: {_FLAKY}")
            return
        if audited.trials.has_turns(audited.task, trial):
            continue
        verdict, _, _ = await audited.play(trial)
        if finding := _refusal_finding(variant.what, verdict, trial, certain=variant.certain, names=variant.names):
            finding.detail = audited.difference(variant.files)
            yield await audited.unsteady(trial, verdict) or finding


async def _other_replies(audited: Audited, reply: str) -> AsyncIterator[Found]:
    """Is the right reply refused in another form?"""
    for what, text in reply_variants(reply):
        if audited.flaky:
            yield Untried(Kind.FALSE_ZERO, f"variants of the reply: {_FLAKY}")
            return
        trial = Trial(steps=[Step(say=text)])
        verdict, _, _ = await audited.play(trial)
        if finding := _refusal_finding(f"the right reply {what}", verdict, trial, certain=False):
            yield await audited.unsteady(trial, verdict) or finding


_COMMIT = (
    f"cd {WORKSPACE} && git rev-parse --git-dir > /dev/null 2>&1 && git add -A && "
    "git -c user.name=agent -c user.email=agent@example.com commit -q -m work || true"
)


def _refusal_finding(
    what: str, verdict: Verdict, trial: Trial, *, certain: bool, names: bool = False
) -> Finding | None:
    """Return the finding if right work was refused. If the benchmark's own protocol refuses it too, it is a note: the
    task may ask for the very form. It cannot ask for `names` that its prompt does not have."""
    if _is_full(verdict):
        return None
    note = not certain or (not names and verdict.official is not None and verdict.official < FULL)
    said = f"{what} {_scored(verdict)}"
    return Finding(kind=Kind.FALSE_ZERO, what=said, note=note, wanted="1", trial=trial, verdict=verdict)


async def flaky(audited: Audited) -> AsyncIterator[Found]:
    """Does the same work get different scores?"""
    if audited.leak and audited.leaked_to is not None:
        trial, verdict = audited.leaked_to
        yield Finding(kind=Kind.FLAKY, what=audited.leak, wanted="the same", trial=trial, verdict=verdict)
        return
    if audited.refused is not None and not audited.unprepared:
        audited.flaky = True
        what = "the workspace could not be prepared, and could be when this was tried again"
        why, trial = audited.refused.error, Trial()
        yield Finding(kind=Kind.FLAKY, what=what, wanted="the same", detail=why, trial=trial, verdict=audited.refused)
        return
    if audited.flaky:
        return  # another check has seen it
    work, trial = "the reference solution", Trial(steps=[audited.reference])
    if audited.task.solution is None and audited.holds:
        work = "the answer as the reply"
    if audited.solved is not None:
        rewards = [audited.solved.reward]
    elif isinstance(audited.task.answer, str):
        work, trial = "the answer as the reply", Trial(steps=[Step(say=audited.task.answer)])
        rewards = [(await audited.play(trial))[0].reward]
    else:
        yield Untried(Kind.FLAKY, _NO_REFERENCE)
        return
    for _ in range(audited.repeats - 1):
        verdict, _, _ = await audited.play(trial)
        rewards.append(verdict.reward)
        if verdict.reward != rewards[0]:
            listed = ", ".join("unscored" if each is None else f"{each:g}" for each in rewards)
            audited.flaky = True
            what = f"{work} scores {listed} in {len(rewards)} trials"
            yield Finding(kind=Kind.FLAKY, what=what, wanted="the same", trial=trial, verdict=verdict)
            return
    if audited.solved is None and not any(rewards):
        yield Untried(Kind.FLAKY, f"{_NO_REFERENCE}, and its answer as the reply earns nothing")


async def world(audited: Audited) -> AsyncIterator[Found]:
    """Does the score of the reference solution depend on the machine?"""
    answer, present = audited.task.answer, _PRESENT.search(audited.asked)
    if audited.task.solution is None and present is not None and isinstance(answer, str | int):
        what = f"the prompt asks about the time when it is read ({present[0]!r}), and has one stored answer"
        yield Finding(kind=Kind.WORLD, what=what, note=True, detail=str(answer))
    if not audited.holds:
        yield Untried(Kind.WORLD, _NO_REFERENCE if audited.solved is None else _FAILS)
        return
    spec = audited.trials.environment.slot_spec(audited.task, Phase.GRADE)
    policy = audited.task.network
    follows: bool | None = None
    online = any(each != Network.OFF for each in (spec.network, policy.agent, policy.grade))
    for each in WORLDS:
        if audited.flaky:
            yield Untried(Kind.WORLD, _FLAKY)
            return
        if each.clock and clock_library() is None:
            yield Untried(
                Kind.WORLD, f"{each.name}: this machine has no libfaketime (Debian: apt-get install faketime)"
            )
            continue
        if each.offline and not online:
            continue
        if each.workspace and (spec.workspace or audited.trials.pool.rung < Rung.USERNS):
            yield Untried(Kind.WORLD, f"{each.name}: the slots of this task have it at one path only")
            continue
        if each.clock and follows is None:
            follows = await audited.trials.follows_clock(spec)
        if each.clock and not follows:
            yield Untried(Kind.WORLD, f"{each.name}: the programs of the sandbox do not follow another clock")
            continue
        if each.env.get("LC_ALL") == LOCALE and not await audited.trials.sorts_like_dictionaries(spec):
            yield Untried(Kind.WORLD, f"the locale {LOCALE}: the programs of the sandbox do not follow it")
            continue
        trial = Trial(steps=[audited.reference], world=each)
        verdict, _, _ = await audited.play(trial)
        if _is_full(verdict):
            continue
        if verdict.reward is None and verdict.blame is not Blame.GRADER:
            yield Untried(Kind.WORLD, f"{each.name}: {verdict.error}")
            continue
        if chance := await audited.unsteady(trial, verdict):
            # With little of a processor, a limit of time is met or not.
            if not each.slow or chance.trial == Trial(steps=[audited.reference]):
                yield chance
            continue
        what = f"with {each.name}, the reference solution {_scored(verdict)}"
        # An honest task may need a fast machine, a network, or the workspace, home directory and locale of its sandbox.
        place = bool(each.workspace) or "HOME" in each.env
        note = each.slow or each.offline or place or each.env.get("LC_ALL") == LOCALE
        yield Finding(
            kind=Kind.WORLD, what=what, note=note, wanted="1", detail=verdict.error, trial=trial, verdict=verdict
        )
    yield Untried(Kind.WORLD, "host name and user id: not changed")


_PRESENT = re.compile(
    r"\b(current|present|this|today's)\s+(year|month|week|day|date|time|hour|version|president|price)\b"
    r"|\b(today|right now|at the moment|as of now)\b|\blatest (version|release)\b",
    re.IGNORECASE,
)


async def leaks(audited: Audited) -> AsyncIterator[Found]:
    """Can the agent read the solution or the answer before it acts?"""
    async for each in _leaked(audited):
        if isinstance(each, Finding) and audited.tool is not None:
            files = [place for place in each.places if not place.startswith(_HISTORY)]
            if files:
                each.trial = Trial(steps=run_steps(audited.tool, [_READ.format(shlex.join(files))]))
                each.verdict = audited.idle
        yield each


_READ = "head -c 2000 -- {}"


async def _leaked(audited: Audited) -> AsyncIterator[Found]:
    """Yield what the agent can read, without the trial in which it does."""
    task, asked = audited.task, audited.asked
    answer = task.answer if isinstance(task.answer, str) and len(task.answer.strip()) >= _LEAST_ANSWER else None
    if answer is not None and answer.strip() in asked:
        yield Finding(kind=Kind.LEAKS, what="the answer stands in the prompt", note=True, detail=answer)
    left = audited.left.files if audited.left is not None else {}
    made = {path: data for path, data in left.items() if data != audited.before.get(path)}
    long = {path: data for path, data in made.items() if len(data) >= _LEAST_COPY}
    contents = (data.decode(errors="replace") for data in made.values() if len(data) < _LEAST_COPY)
    signs = [single_sign(task.answer, audited.reply), *(single_sign(None, each) for each in contents)]
    sign = next(filter(None, signs), None)
    if sign is not None:
        for each in _stated_to_agent(audited, sign):
            yield each
    for path, data in long.items():
        if data.decode(errors="replace").strip() in asked:
            what = f"the whole content of {path}, as the solution leaves it, stands in the prompt"
            yield Finding(kind=Kind.LEAKS, what=what, note=True)
        elif added := _told_lines(audited.before.get(path, b""), data, asked):
            what = f"the lines that the solution adds to {path} stand in the prompt"
            yield Finding(kind=Kind.LEAKS, what=what, note=True, detail="\n".join(added))
    short = _short_texts(task.answer, [data for path, data in made.items() if path not in long])
    if answer is None or answer.strip() not in asked:
        for text in (each for each in short if "\n" not in each and _is_told(each, asked)):
            yield Finding(kind=Kind.LEAKS, what="the prompt tells what the solution writes", note=True, detail=text)
    files = audited.trials.environment.hidden_files(task)
    hidden = {name: data for name, data in files.items() if len(data) >= _LEAST_COPY}
    if answer is None and sign is None and not short and not long and not hidden:
        yield Untried(Kind.LEAKS, "the task has no answer in text, and its solution leaves no file")
        return
    snapshot = audited.trials.prepared.get(task.id)
    spec = audited.trials.environment.slot_spec(task, Phase.AGENT)
    slot = await audited.trials.pool.acquire("leaks", spec=spec, snapshot=snapshot, timeout_s=_WAIT_S)
    try:
        for name, data in hidden.items():
            places = [each for each in await _copies(slot, data) if not _is_named(each, asked)]
            if places:
                what = f"{name} stands in {', '.join(places[:3])} before the agent acts"
                yield Finding(kind=Kind.LEAKS, what=what, places=places)
        for path, data in long.items():
            # The same bytes in another file, or in an object of a git repository.
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324
            places = [each for each in await _copies(slot, data) if each != path]
            places += [f"{_HISTORY}{line}" for line in await _printed_lines(slot, _STORED.format(blob=blob))]
            if places:
                what = f"{path}, as the solution leaves it, stands in {', '.join(places[:3])} before the agent acts"
                # The task may ask for a copy or another name of this very file.
                asks = all(_names_file(_text_of(task.solution), place, path) for place in places)
                yield Finding(kind=Kind.LEAKS, what=what, note=asks, places=places)
        for line in await _telling_variables(slot, sign, answer):
            what = f"the variable {line.partition('=')[0]} of the sandbox has the answer"
            yield Finding(kind=Kind.LEAKS, what=what, detail=line)
        if sign is not None:
            for place in await _stating_files(slot, asked, sign):
                what = f"{place} states the answer before the agent acts"
                yield Finding(kind=Kind.LEAKS, what=what, note=sign.isdigit(), detail=sign, places=[place])
        texts = [*short, *(data.decode(errors="replace") for data in long.values()), *([sign] if sign else [])]
        texts += [text for path, data in long.items() if (text := _added_text(audited.before.get(path, b""), data))]
        for place, text in await _telling_files(slot, asked, texts):
            what = f"{place} has what the solution writes, before the agent acts"
            named = _names_file(_text_of(task.solution), place, "")
            unsure = named or (len(text) < _LEAST_COPY and text.count("\n") + 1 < _LEAST_LINES)
            yield Finding(kind=Kind.LEAKS, what=what, note=unsure, detail=text, places=[place])
        if answer is not None:
            line = max(answer.strip().split("\n"), key=len)  # for grep, each line of a pattern is one of its own
            # What the task gives the agent to read may have the answer among other things.
            places = await _files_with(slot, asked, f"-wF -e {shlex.quote(line)}")
            if "\n" in answer.strip():
                places = [each for each in places if answer.strip() in await slot.read_text(each, missing="")]
            if places:
                what = f"the answer stands in {', '.join(places[:5])} before the agent acts"
                texts = [await slot.read_text(each, missing="") for each in places]
                called = any(_is_called_answer(text, line) for text in texts)
                yield Finding(kind=Kind.LEAKS, what=what, note=not called, detail=answer, places=places)
    except InfraError:
        raise
    except PalaestraError as error:
        yield Untried(Kind.LEAKS, str(error))
    finally:
        await audited.trials.pool.release(slot)


def _stated_to_agent(audited: Audited, sign: str) -> Iterator[Finding]:
    """Yield where the prompt, or what a tool returns in the reference solution, states an answer of one letter or
    digit. A tool that runs commands, or that counts, may have it from the work."""
    if tells(audited.asked, sign):
        yield Finding(kind=Kind.LEAKS, what="the prompt states the answer", note=True, detail=sign)
    done = ""
    for message in audited.rollout.messages if audited.rollout is not None and audited.holds else ():
        text = str(message.get("content") or "")
        if message.get("role") == "assistant":
            done += f"{text}\n{json.dumps(message.get('tool_calls') or '')}\n"
        elif message.get("role") == "tool" and states(text, sign) and not re.search(rf"(?<!\w){sign}(?!\w)", done):
            note = audited.tool is not None or sign.isdigit()
            yield Finding(kind=Kind.LEAKS, what="a tool returns the answer to the agent", note=note, detail=text[:500])
            return


async def _stating_files(slot: Slot, asked: str, sign: str) -> list[str]:
    found = await _files_with(slot, asked, f"-iE -e {shlex.quote(CALLED)}")
    return [each for each in found if states(await slot.read_text(each, missing=""), sign)]


async def _telling_variables(slot: Slot, sign: str | None, answer: str | None) -> list[str]:
    """Return the environment variables whose names call their value the answer."""
    lines = await _printed_lines(slot, "env")
    told = [each for each in lines if answer is not None and _is_called_answer(each, answer.strip())]
    return told + [each for each in lines if sign is not None and states(each, sign)]


async def _files_with(slot: Slot, asked: str, pattern: str) -> list[str]:
    """Return the files of the task that have a pattern of `grep`, unless the prompt names them."""
    found = await _printed_lines(slot, _SEARCHED.format(pattern=pattern))
    return [each for each in found if not _is_named(each, asked)]


async def _printed_lines(slot: Slot, command: str) -> list[str]:
    """Return the lines that a command prints and that are not empty. Raises `PalaestraError` if it takes too long."""
    done = await slot.execute(command, cwd="/", timeout_s=_WAIT_S)
    if done.metadata.get("timeout"):
        raise PalaestraError(f"a search of the sandbox's files took more than {_WAIT_S:.0f} s")
    return [each for each in done.output.split("\n") if each.strip()]


def _told_lines(before: bytes, after: bytes, asked: str) -> list[str]:
    """Return the lines that a solution adds to a file, if they are several and all of them are lines of the prompt,
    such as those of a patch in it."""
    added = _added_lines(before, after)
    told = {each.strip().lstrip("+").strip() for each in asked.split("\n")}
    several = len(added) >= _LEAST_LINES or sum(map(len, added)) >= _LEAST_COPY
    return added if several and told.issuperset(added) else []


def _added_lines(before: bytes, after: bytes) -> list[str]:
    old = {each.strip() for each in before.decode(errors="replace").split("\n")}
    lines = [each.strip() for each in after.decode(errors="replace").split("\n")]
    return [each for each in lines if each and each not in old]


def _added_text(before: bytes, after: bytes) -> str:
    """Return the lines that a solution adds to a file, as a patch has them; nothing if the file is new or they are
    short."""
    text = "\n".join(_added_lines(before, after)) if before else ""
    return text if len(text) >= _LEAST_COPY else ""


async def _copies(slot: Slot, data: bytes) -> list[str]:
    """Return the paths of the files of a slot that have these bytes."""
    digest = hashlib.sha256(data).hexdigest()
    return await _printed_lines(slot, _SAME.format(size=len(data), digest=digest))


def _is_named(place: str, asked: str) -> bool:
    """Return whether a prompt names a file, or a folder below which it lies."""
    path = PurePosixPath(place)
    own = path.relative_to(WORKSPACE) if path.is_relative_to(WORKSPACE) else path
    names = {str(each) for each in (path, own, *own.parents, *path.parents)} | {path.name}
    return any(
        re.search(rf"(?<![\w.-]){re.escape(each)}(?![\w-]|\.\w|/\w)", asked) for each in names - {".", "/", WORKSPACE}
    )


def _short_texts(answer: object, contents: list[bytes]) -> list[str]:
    """Return the answer and the contents of short files; letters and truth values tell nothing."""
    texts = [str(answer)] if isinstance(answer, str | int | float) and not isinstance(answer, bool) else []
    texts += [each.decode(errors="replace") for each in contents]
    stripped = dict.fromkeys(each.strip() for each in texts)
    return [each for each in stripped if 2 <= len(each) < _LEAST_COPY]


def _is_told(text: str, asked: str) -> bool:
    """Return whether a prompt gives this text as the answer or as an example of it, and not as one of several."""
    told = rf"(?:{_TELLING})\b[^\n]{{0,60}}?(?<![\w.])(?<!or )(?<!/){re.escape(text)}(?![\w/]|, | or\b|\.\w)"
    return re.search(told, asked, re.IGNORECASE) is not None


_TELLING = "answer|expected|solution|result|for example|like this|should be|must be|e\\.g\\.,?"


async def _telling_files(slot: Slot, asked: str, texts: list[str]) -> list[tuple[str, str]]:
    """Return the files whose names promise the solution and that have one of these texts, unless the prompt names
    them."""
    found: list[tuple[str, str]] = []
    for place in await _printed_lines(slot, _TELLING_NAMES):
        if any(part and part in asked for part in PurePosixPath(place).parts if re.search(_PROMISES, part, re.I)):
            continue
        content = await slot.read_text(place, missing="")
        text = next((each for each in texts if _has(content, each)), None)
        if text is not None:
            found.append((place, text))
    return found


def _has(content: str, text: str) -> bool:
    """Return whether a file has a text: a letter as its whole content, a short text as a word, a longer one with all of
    its lines."""
    if len(text) == 1:
        return content.strip() == text
    if len(text) < _LEAST_COPY:
        return re.search(rf"(?<![\w.]){re.escape(text)}(?![\w.])", content) is not None
    lines = {line for each in content.split("\n") for line in (each.strip(), each.strip().lstrip("+").strip())}
    return all(each.strip() in lines for each in text.split("\n") if each.strip())


_FIND = (
    "find $(for each in / /*; do case $each in /proc|/sys|/dev|/usr|/etc|/bin|/sbin|/lib*) ;; "
    "*) [ -d $each ] && echo $each ;; esac; done) -xdev"
)
"""Finds files of a sandbox, whose folders may be file systems of their own. Those of the system are searched only if
they are part of the image."""
_PROMISING = "(answers?|expected|solutions?|solve|oracle|gold(en)?|truth|targets?|references?)"
_PROMISES = f"(?<![a-z]){_PROMISING}(?![a-z])"


def _is_called_answer(content: str, text: str) -> bool:
    """Return whether a line of a file gives a text and calls it the answer."""
    lines = [each for each in content.split("\n") if text in each]
    return any(re.search(_PROMISES, each.replace(text, ""), re.I) for each in lines)


_TELLING_NAMES = (
    _FIND + r" \( -path /proc -o -path /sys -o -path /dev -o -path /usr -o -path /etc -o -path '/lib*' "
    r"-o -path /var/lib -o -name .git \) -prune -o -type f -size -64k -print 2>/dev/null | sort -u | "
    rf"grep -iE '(^|[^a-z]){_PROMISING}([^a-z]|$)' "
    r"| head -50"
)


def _text_of(solution: Solution | None) -> str:
    steps = [solution] if isinstance(solution, str) else solution or ()
    return "\n".join(each if isinstance(each, str) else repr(each) for each in steps)


def _names_file(solution: str, place: str, written: str) -> bool:
    """Return whether the text of a solution names the file at `place`, whose content it leaves in `written`: by its
    path or its name, or, for a command that copies, by a folder above it. A name without a dot may be a word of the
    content, so it counts only for such a command too. A history counts as named for a command of git that takes files
    from one."""
    if place.startswith(_HISTORY):
        return _FROM_HISTORY.search(solution) is not None
    path = PurePosixPath(place)
    own = path.relative_to(WORKSPACE) if path.is_relative_to(WORKSPACE) else path
    words, copies = {place, str(own)}, _COPIES.search(solution)
    if path.name != PurePosixPath(written).name and (copies or "." in path.name):
        words.add(path.name)
    if copies:
        words |= {str(each) for each in own.parents if str(each) not in (".", "/")}
    return any(re.search(rf"(?<![\w.-]){re.escape(each)}(?![\w-]|\.\w)", solution) for each in words)


_HISTORY = "the history of "

_FROM_HISTORY = re.compile(
    r"\bgit\b[^\n;&|]*?\s(merge|revert|cherry-pick|rebase|restore|reset|stash|show|am|(checkout|switch)(?!\s+-[bBcC]))\b"
)

_COPIES = re.compile(r"\b(cp|mv|ln|rsync|tar|install|rename|copy\w*|move)\b")

_SAME = (
    _FIND + " -path /proc -prune -o -type f -size {size}c -print 2>/dev/null | sort -u | head -2000 | "
    'while IFS= read -r each; do sha256sum < "$each" 2>/dev/null | grep -q ^{digest} && printf \'%s\\n\' "$each"; done'
)
_SEARCHED = (
    f"find {WORKSPACE} /tmp /home /root -xdev \\( -name .git -o -name node_modules -o -path '/root/.*' "
    "-o -path '/home/*/.*' -o -path '*/lib/*' -o -path '*/share/*' \\) -prune -o -type f -size -64k -print "
    "2>/dev/null | head -2000 | tr '\\n' '\\0' | xargs -0 -r grep -Il {pattern} 2>/dev/null | head -20"
)
"""Searches the files of the task, and not those of what is installed."""
_STORED = (
    _FIND
    + " -type d -name objects -path '*.git/objects' 2>/dev/null | sort -u | head -20 | while IFS= read -r each; do "
    'git --git-dir="${{each%/objects}}" -c safe.directory="*" cat-file -e {blob} 2>/dev/null && '
    "printf '%s\\n' \"${{each%/.git/objects}}\"; done"
)

CHECKS: Mapping[Kind, Callable[[Audited], AsyncIterator[Found]]] = {
    Kind.UNSOLVABLE: unsolvable,
    Kind.PAYS_FOR_NOTHING: pays_for_nothing,
    Kind.FLAKY: flaky,
    Kind.WORLD: world,
    Kind.LEAKS: leaks,
    Kind.FALSE_ZERO: false_zero,
    Kind.WEAK: weak,
    Kind.HACKABLE: hackable,
}
"""The checks of one task, the cheapest first."""

JOBS = os.cpu_count() or 1

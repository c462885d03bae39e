"""Plays that a check derives from the reference solution of a task whose agent acts by function tools: its words
without its calls, its calls without its words, all but one of its calls, one of its arguments changed, and the solution
of another task.

Such a play is a fault only if it earns the full score and the state (or a file) lacks what the calls of the reference
solution change. A lookup changes nothing, so a score may be full without it. Likewise, tasks may have the same answer,
and a score need not read the words.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from palaestra.envs.policy_runs import FULL
from palaestra_audit.cheats.cheat import Cheat
from palaestra_audit.cheats.replies import GOES_ON, NUMBER
from palaestra_audit.cheats.state_changes import Changes, Play, carried_over
from palaestra_audit.records import Kind
from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON, Message, Say, Task, ToolStep
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.engines.scripted import COMMANDS, Act, Policy, solution_steps, turns_taken

IDLE = Cheat("idle-words", "meaningless words in place of each step of the solution", "")
WORDS = Cheat("words-only", "the solution's words without its calls", "")
CALLS = Cheat("calls-only", "the solution's calls with meaningless words", "")
WITHOUT = Cheat("without-call", "the solution without one of its calls, each in turn", "")
SISTER = Cheat("other-solution", "the solution of another task", "")
ARGUMENT = Cheat("other-argument", "the solution with another value of one argument, each in turn", "")
DERIVED = (IDLE, WORDS, CALLS, WITHOUT, ARGUMENT, SISTER)

KINDS = {IDLE: Kind.PAYS_FOR_NOTHING, WORDS: Kind.PAYS_FOR_NOTHING}
"""The kinds of fault of these plays, unless it is `Kind.WEAK`."""

MOST_SISTERS = 3
_MOST_CALLS, _MOST_ARGUMENTS = 8, 12
_TOLERANCE = 1e-9
_ENDING = "Done."
_SHOWN = 3

Steps = Sequence[ToolStep | Say]


@dataclass(frozen=True, slots=True)
class DerivedPlay:
    """One play: what it does with the reference solution, as words that can follow "with"."""

    cheat: Cheat
    what: str
    steps: Steps


@dataclass(frozen=True, slots=True)
class Judged:
    """A play and what it shows: a fault, a note (what a reader could dispute), or nothing if `what` is empty."""

    play: DerivedPlay
    reward: float | None
    what: str = ""
    note: bool = False
    played: Play | None = None


class StepsPolicy(Policy):
    """Makes these steps, one per turn."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        turn = turns_taken(context, messages)
        if turn >= len(self._steps):
            return _ENDING
        step = self._steps[turn]
        return step.text if isinstance(step, Say) else [step]

    def is_over(self, context: SessionContext, messages: Sequence[Message]) -> bool:
        return turns_taken(context, messages) >= len(self._steps)


WANTED = {IDLE: "<= the floor", CALLS: "any", WORDS: "< 1 if it lacks a change"}
"""What these plays may score, as words; the others as `WORDS`."""


def steps_of(task: Task) -> Steps | None:
    """Return the steps of a reference solution that calls function tools; None for a script or commands, whose work is
    files."""
    try:
        steps = solution_steps(task) if task.solution is not None else ()
    except TaskError:
        return None
    known = [step for step in steps if not isinstance(step, str)]
    calls = [step for step in known if isinstance(step, ToolStep)]
    return known if len(known) == len(steps) and calls and all(each.name != COMMANDS for each in calls) else None


def derived_plays(task: Task, sisters: Sequence[Task]) -> Iterator[DerivedPlay]:
    """Yield the plays that can be derived from a task's solution, and from those of other tasks."""
    steps = steps_of(task)
    if steps is None:
        return
    words = [step for step in steps if isinstance(step, Say)]
    if len(words) > 1:
        yield DerivedPlay(IDLE, "meaningless words", [*[Say(GOES_ON)] * (len(words) - 1), Say(_ENDING)])
    if words:
        yield DerivedPlay(WORDS, "its words without its calls", words)
        meaningless = [Say(GOES_ON) if isinstance(step, Say) else step for step in steps]
        yield DerivedPlay(CALLS, "its calls with meaningless words", meaningless)
    calls = [place for place, step in enumerate(steps) if isinstance(step, ToolStep)]
    for place in calls[:_MOST_CALLS]:
        rest = [*steps[:place], *steps[place + 1 :]]
        if len(calls) > 1:  # otherwise these are its words, or nothing
            yield DerivedPlay(WITHOUT, f"its steps without {shown_step(steps[place])}", rest)
    yield from [*_other_arguments(steps, sisters[:MOST_SISTERS])][:_MOST_ARGUMENTS]
    for sister in sisters[:MOST_SISTERS]:
        others = steps_of(sister)
        if others is not None and _steps_key(others) != _steps_key(steps):
            yield DerivedPlay(SISTER, f"the solution of the task {sister.id}", others)


def _other_arguments(steps: Steps, sisters: Sequence[Task]) -> Iterator[DerivedPlay]:
    """Yield the plays with one argument changed: a number, or a text for which another task's solution has another
    value, such as an id. Any other text may be free words, which a score need not read."""
    known: dict[tuple[str, str], list[JSON]] = {}
    for each in sisters:
        for _, call, name in _scalar_arguments(steps_of(each) or ()):
            known.setdefault((call.name, name), []).append(call.arguments[name])
    for place, call, name in _scalar_arguments(steps):
        value = call.arguments[name]
        others = [2 * value + 1] if isinstance(value, int | float) else known.get((call.name, name), [])
        other = next((each for each in others if type(each) is type(value) and each != value), None)
        if other is None or (isinstance(other, str) and len(other.split()) != 1):
            continue
        changed = replace(call, arguments={**call.arguments, name: other})
        what = f"its steps with {shown_step(changed)} for {shown_step(call)}"
        yield DerivedPlay(ARGUMENT, what, [*steps[:place], changed, *steps[place + 1 :]])


def _scalar_arguments(steps: Steps) -> Iterator[tuple[int, ToolStep, str]]:
    """Yield the place of each call, the call, and the name of each of its arguments that is a text or a number."""
    for place, step in enumerate(steps):
        if not isinstance(step, ToolStep):
            continue
        for name, value in step.arguments.items():
            if isinstance(value, str | int | float) and not isinstance(value, bool):
                yield place, step, name


def shown_step(step: ToolStep | Say) -> str:
    """Return a step as a person reads it."""
    if isinstance(step, Say):
        return f"say {step.text!r}"
    return f"{step.name}({', '.join(f'{name}={value!r:.80}' for name, value in step.arguments.items())})"


def _steps_key(steps: Steps) -> str:
    return json.dumps([[each.name, each.arguments] if isinstance(each, ToolStep) else each.text for each in steps],
                      sort_keys=True, default=repr)  # fmt: skip


async def judged_plays(
    task: Task, sisters: Sequence[Task], solved: Play, again: Play, play: Callable[[Steps], Awaitable[Play]]
) -> list[Judged]:
    """Play what can be derived from a task's reference solution, which got the full score in the plays `solved` and
    `again`, and judge it."""
    played = [(each, await play(each.steps)) for each in derived_plays(task, sisters)]
    changes = Changes(solved, again, [own for each, own in played if each.cheat is SISTER])
    return [_judged(task, each, own, solved, changes) for each, own in played]


def _judged(task: Task, play: DerivedPlay, own: Play, solved: Play, changes: Changes) -> Judged:
    silent = Judged(play, own.reward, played=own)
    if own.reward is None:
        return replace(silent, what=f"{play.what} are not scored: {own.error}", note=True)
    earned = f"{play.what} earn {own.reward:g}".replace("the solution of the task", "the steps of the task")
    full, paid = own.reward >= FULL - _TOLERANCE, own.reward > task.floor + _TOLERANCE
    if not paid or task.floor >= FULL:
        return silent
    if play.cheat is IDLE:
        return replace(silent, what=f"{earned}, and the floor of the task is {task.floor:g}")
    if play.cheat is CALLS:
        unread = _unread_numbers(task, solved) if full else ""
        what = f"{earned}, although its last words give {unread}, which a tool returned" if unread else ""
        return replace(silent, what=what, note=True)
    return _judged_by_state(silent, own, earned, changes, full=full)


def _judged_by_state(silent: Judged, own: Play, earned: str, changes: Changes, *, full: bool) -> Judged:
    play = silent.play
    lacks, certain = changes.lacking(own)
    if not lacks or (not certain and (changes.works or play.cheat is not WORDS)):
        return silent  # what is missing may only be the record of a lookup
    what = f"{earned}, although {_listed(lacks)} {'lack' if len(lacks) > 1 else 'lacks'} what the solution changes"
    if not full:
        return replace(silent, what=what if play.cheat is WORDS else "", note=True)
    return replace(silent, what=what, note=not certain or _is_tolerable(play, [own.after.get(path) for path in lacks]))


def _is_tolerable(play: DerivedPlay, values: Sequence[object]) -> bool:
    """Return whether a score may tolerate these values, such as another sum that is nearly right."""
    return play.cheat is ARGUMENT and all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in values
    )


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths[:_SHOWN]) + (", …" if len(paths) > _SHOWN else "")


def _unread_numbers(task: Task, solved: Play) -> str:
    """Return the numbers of the solution's last words that a tool returned, and that nobody had said before."""
    steps = steps_of(task) or ()
    messages = solved.rollout.messages if solved.rollout is not None else []
    texts = {role: " ".join(str(each.get("content")) for each in messages if each.get("role") == role)
             for role in ("system", "user", "tool")}  # fmt: skip
    numbers = NUMBER.findall(steps[-1].text) if steps and isinstance(steps[-1], Say) else []
    known = NUMBER.findall(texts["system"] + " " + texts["user"])
    return ", ".join(dict.fromkeys(each for each in numbers
                                   if each in NUMBER.findall(texts["tool"]) and each not in known))  # fmt: skip


def leak(first: Play, second: Play) -> str:
    """Return what a play of the reference solution left for the next play; nothing if both began and ended alike."""
    if first.reward is None or second.reward is None:
        return ""
    kept = carried_over(first, second)
    scored = [f"{each.reward:g}" for each in (first, second)]
    if scored[0] == scored[1] and not kept:
        return ""
    found = f"the reference solution scores {scored[0]} and, played again in the same process, {scored[1]}"
    if not kept:
        return f"{found}. Either chance decides its score, or it changes data that the next rollout reads: {_REMEDY}"
    began = f"the second rollout began with {_listed(kept)} as the first had left it: {_REMEDY}"
    return began if scored[0] == scored[1] else f"{found}; {began}"


def leak_to_idle(fresh: float | None, later: float | None, floor: float) -> str:
    """Return that doing nothing is paid only after the reference solution was played; nothing otherwise."""
    if fresh is None or later is None or not fresh <= floor < later:
        return ""
    return (
        f"doing nothing scores {fresh:g}, and {later:g} after the reference solution was played in the same process, "
        f"which changes data that the next rollout reads: {_REMEDY}"
    )


_REMEDY = "let @env.state return a fresh copy of the data for each rollout"

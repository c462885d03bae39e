"""Audits the tasks of an environment, and keeps what it has found in a file.

A first pass over some tasks plays the reference solution and doing nothing, which shows many faults at once. A second
pass over the same tasks makes the other checks.

A task is audited again only if what its result depends on has changed: the task, the settings, the checks, or the
files of the environment. So an audit that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from palaestra import __version__
from palaestra.envs.config.dotenv import exported, read_keys
from palaestra.envs.config.secret_flags import missing_settings, split_secrets
from palaestra.envs.form import Form
from palaestra.envs.policy_runs import first_tasks
from palaestra.envs.run.run_folder import RunLine
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.journal.journal import plain, without_secrets
from palaestra.rollouts.records import Trajectory
from palaestra_audit.cheats.derived_plays import MOST_SISTERS, steps_of
from palaestra_audit.cheats.proof import BANK
from palaestra_audit.checks import CHECKS, Audited
from palaestra_audit.code_digests import code_digests
from palaestra_audit.opening import load
from palaestra_audit.records import (
    Audit,
    Finding,
    Kind,
    TaskAudit,
    Trial,
    Untried,
    Verdict,
    World,
    read_audit,
    write_audit,
)
from palaestra_audit.trials import REFERENCE, Trials, clock_library, open_trials
from palaestra_slots.core.errors import ConfigError, DiskError, InfraError, PalaestraError, TaskError
from palaestra_slots.core.types import JSON, Task

ROWS = "swe_smith_oracle"
"""The environment that plays a file of SWE rows."""
logger = logging.getLogger(__name__)

_SHINGLE = 5
_LIKE = 0.9
"""Prompts whose sets of `_SHINGLE` words overlap this much (Jaccard) are near-duplicates (Broder, 1997)."""
_MOST_NEIGHBOURS = 50
_NEAR = 10
"""The number of tasks on each side among which solutions are chosen that are also played on a task."""
_SHARED = 0.6
"""Prompts of tasks with one solution that share this much of their words are near-duplicates."""
_LEAST_SHARED = 4
_LEAST_FORM = 10
"""The number of prompts from which on words of most prompts do not count."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to audit. `tasks` is the maximum number of tasks (None: all), chosen at random with `seed` if it is not
    None; `budget_s` ends the audit, with what has been found. `ids` are the only tasks that are audited, if there are
    any."""

    reference: str
    settings: Sequence[str]
    out: Path
    tasks: int | None = None
    seed: int | None = None
    budget_s: float | None = None
    only: Collection[Kind] = ()
    skip: Collection[Kind] = ()
    jobs: int = 1
    repeats: int = 5
    against: Path | None = None
    ids: Collection[str] = ()

    @property
    def kinds(self) -> list[Kind]:
        return [kind for kind in Kind if (not self.only or kind in self.only) and kind not in self.skip]


class Progress:
    """Is told how an audit goes on, and tells nobody."""

    def opened(self, tasks: int) -> None:
        """The environment is open, and has this number of tasks."""

    def ended(self, task: TaskAudit, kept: bool) -> None:
        """A task has ended; `kept` results are those of an earlier audit."""

    def begun(self, task: TaskAudit) -> None:
        """The first pass over a task has ended; `task` has what it found."""

    def playing(self, running: Mapping[str, tuple[str, int]]) -> None:
        """These tasks are being audited, each with the kind that is looked for and the number of its trials so far; at
        first, all tasks are prepared."""


_FIRST = (Kind.UNSOLVABLE, Kind.PAYS_FOR_NOTHING)
"""The kinds that the first pass looks for, with a few trials per task."""
_AHEAD = 64
"""The number of tasks by which the first pass is ahead of the second. Each keeps a prepared workspace."""
_TOLD_S = 20
"""After this many seconds, the tasks that are audited are named again."""


def audit_environment(plan: Plan, progress: Progress) -> Audit:
    """Audit an environment, and write the result after each task. Raises `ConfigError` if it cannot be loaded."""
    with exported(read_keys(Path.cwd())):
        earlier = _earlier(plan)
        others = {} if plan.against is None else dict(_jsonl_lines(plan.against))
        form, parsed = load_audited(plan.reference, plan.settings)
        return asyncio.run(_audit(form, parsed, plan, progress, earlier, others))


def load_audited(reference: str, settings: Sequence[str]) -> tuple[Form, RunLine]:
    """Return the form that `reference` names, which may be a file of SWE rows, and its settings. Raises
    `ConfigError`."""
    if reference.endswith(".jsonl"):
        reference, settings = ROWS, ["--env.dataset_name", reference, *settings]
    return load("audit", reference, settings)


async def _audit(
    form: Form, parsed: RunLine, plan: Plan, progress: Progress, earlier: Audit | None, others: dict[str, str]
) -> Audit:
    began = time.monotonic()
    async with open_trials(plan.reference, form, parsed) as trials:
        environment = trials.environment
        tasks = await _tasks_to_audit(environment, plan)
        audit = Audit(
            environment=environment.name,
            reference=plan.reference,
            version=__version__,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            kinds=plan.kinds,
        )
        audit.settings, audit.secrets = split_secrets(plan.settings)
        known = {} if earlier is None else {each.id: each for each in earlier.tasks}
        beyond = _beyond(tasks, earlier, audit, plan)
        refused = [*_refused(environment, {each.id for each in tasks})] if plan.tasks is None and not plan.ids else []
        progress.opened(len(tasks) + len(refused))
        for each in refused:
            progress.ended(each, False)
        beyond += refused
        passes = _Passes(trials, tasks, plan, progress, audit, known, beyond, _salt(form, parsed, plan), began)
        telling = asyncio.create_task(passes.tell())
        with contextlib.suppress(InfraError):  # the audit of each task meets it again, and reports it
            done = {name for name, each in known.items() if each.complete}
            await trials.play_fresh({place: task for place, task in enumerate(tasks) if task.id not in done})
        try:
            await passes.play()
        except ExceptionGroup as errors:  # a full disk, for example, is one error for the user
            for error in errors.exceptions:
                if isinstance(error, PalaestraError):
                    raise error from errors
            raise
        finally:
            telling.cancel()
        passes.list_tasks()
        if Kind.DUPLICATE in plan.kinds:
            _add_duplicates(audit, tasks, passes.solved, others, asked_later=environment.has_user)
        write_audit(audit, plan.out)
        return audit


@dataclass(slots=True)
class _Passes:
    """The two passes over the tasks of an audit, whose results are stored in `audit` and its file."""

    trials: Trials
    tasks: Sequence[Task]
    plan: Plan
    progress: Progress
    audit: Audit
    known: Mapping[str, TaskAudit]
    """What an earlier audit found, by task id."""
    beyond: Sequence[TaskAudit]
    """What an earlier audit found about other tasks."""
    salt: str
    began: float
    solved: dict[str, str] = field(default_factory=dict)
    """The solution and the answer of each task."""
    _found: dict[str, TaskAudit] = field(default_factory=dict)
    _running: dict[str, Audited] = field(default_factory=dict)
    _cases: list[asyncio.Future[_Case | None]] = field(default_factory=list)

    async def play(self) -> None:
        """Audit the tasks, `plan.jobs` at a time. Raises `ExceptionGroup`."""
        self._cases = [asyncio.get_running_loop().create_future() for _ in self.tasks]
        waiting = self._passes()

        async def work() -> None:
            for each in waiting:
                await each

        async with asyncio.TaskGroup() as group:
            for _ in range(self.plan.jobs):
                group.create_task(work())

    def _passes(self) -> Iterator[Awaitable[None]]:
        numbered = [*enumerate(self.tasks)]
        for start in range(0, len(numbered), _AHEAD):
            some = numbered[start : start + _AHEAD]
            yield from (self._begin(position, task) for position, task in some)
            yield from (self._finish(position) for position, _ in some)

    async def tell(self) -> None:
        """Tell again and again which tasks are being audited."""
        while True:
            await asyncio.sleep(_TOLD_S)
            self.progress.playing({name: (each.looks_for, each.played) for name, each in self._running.items()})

    def list_tasks(self) -> None:
        """Put what is known so far into the audit. What an earlier audit found about tasks that are still to come stays
        there."""
        every = {**self.known, **self._found}
        self.audit.tasks = [*(every[each.id] for each in self.tasks if each.id in every), *self.beyond]

    def _keep(self, name: str, result: TaskAudit) -> None:
        """Keep the result for a task, whose `name` may have characters that no file of results can hold."""
        self._found[name] = result
        self.list_tasks()
        write_audit(self.audit, self.plan.out)

    async def _begin(self, position: int, task: Task) -> None:
        """Make the first pass over a task, or keep what an earlier audit found."""
        case, resolved, error = None, *await _resolved(self.trials.environment, task)
        digest = _task_digest(resolved, self.salt)
        if resolved is not None and (resolved.solution or resolved.answer) is not None:
            self.solved[task.id] = _stable_json([repr(resolved.solution), repr(resolved.answer)])
        old, result = self.known.get(task.id), TaskAudit(id=task.id, digest=digest)
        if old is not None and old.digest == digest and old.complete:
            self._found[task.id] = old
            self.progress.ended(old, True)
        elif self._left_s == 0:
            self.audit.left += 1
        elif resolved is None:  # often because of what this machine lacks
            self._keep(task.id, _unusable(task.id, digest, error))
            self.progress.ended(self._found[task.id], False)
        else:
            sisters = _sisters(self.tasks, position)
            audited = Audited(task, resolved, position, self.trials, BANK, self.plan.repeats, sisters=sisters)
            case = _Case(audited, result, self.plan.kinds)
            whole = await self._look_for(case, _FIRST)
            if whole and case.result.complete and self._rest:
                self._keep(task.id, case.recorded(whole=False))
                self.progress.begun(self._found[task.id])
            else:
                await self._end(case, whole=whole)
                case = None
        self._cases[position].set_result(case)

    async def _finish(self, position: int) -> None:
        """Make the second pass over a task, once the first one has ended."""
        case = await self._cases[position]
        if case is None:
            return
        await self._end(case, whole=await self._look_for(case, self._rest))

    @property
    def _rest(self) -> set[Kind]:
        """The kinds that the second pass looks for."""
        return {kind for kind in self.plan.kinds if kind in CHECKS and kind not in _FIRST}

    async def _end(self, case: _Case, *, whole: bool) -> None:
        for name in {case.result.id, case.audited.task.id}:
            await self.trials.forget(name)
        self._keep(case.result.id, case.recorded(whole=whole))
        self.progress.ended(self._found[case.result.id], False)

    async def _look_for(self, case: _Case, kinds: Collection[Kind]) -> bool:
        """Make the checks for some kinds. Return False if the budget ended them."""
        self._running[case.result.id] = case.audited
        try:
            async with asyncio.timeout(self._left_s):
                await case.look_for(kinds)
        except TimeoutError:
            self.audit.left += 1
            return False
        finally:
            del self._running[case.result.id]
        return True

    @property
    def _left_s(self) -> float | None:
        """The seconds that are left of the budget; None without one."""
        return None if self.plan.budget_s is None else max(0.0, self.began + self.plan.budget_s - time.monotonic())


async def _tasks_to_audit(environment: Environment, plan: Plan) -> list[Task]:
    """Return the tasks to audit. Raises `ConfigError` if there are none, two with one id, or one whose floor is not a
    number."""
    tasks = await first_tasks(environment, plan.tasks if plan.seed is None and not plan.ids else None, unique=True)
    if plan.ids:
        return [task for task in tasks if task.id in plan.ids]
    if plan.seed is not None and plan.tasks is not None:
        # By digest, so that a larger number of tasks contains the smaller one, and the order of the set is kept.
        ranked = sorted(tasks, key=lambda task: hashlib.sha256(ascii(f"{plan.seed} {task.id}").encode()).digest())
        chosen = {task.id for task in ranked[: plan.tasks]}
        tasks = [task for task in tasks if task.id in chosen]
    return tasks


def _earlier(plan: Plan) -> Audit | None:
    """Return the audit that this one continues; None if there is none. Raises `ConfigError` if the file has another
    audit, which would be lost."""
    if not plan.out.exists():
        return None
    try:
        earlier = read_audit(plan.out)
    except ConfigError as error:
        raise ConfigError(f"{error}; give another folder with --out") from None
    if earlier.reference != plan.reference:
        what = f"the audit of {earlier.reference}"
    elif not set(earlier.kinds) <= set(plan.kinds):  # findings of these kinds would be lost
        what = f"an audit for other kinds ({', '.join(earlier.kinds)})"
    else:
        return earlier
    raise ConfigError(f"{plan.out} has {what}; give another folder with --out")


def _beyond(tasks: Sequence[Task], earlier: Audit | None, audit: Audit, plan: Plan) -> list[TaskAudit]:
    """Return what an earlier audit of more tasks found about those that are not audited now. Raises `ConfigError` if it
    had other settings."""
    if earlier is None or plan.tasks is None:
        return []
    chosen = {task.id for task in tasks}
    others = [each for each in earlier.tasks if each.id not in chosen]
    if others and (earlier.settings, earlier.secrets) != (audit.settings, audit.secrets):
        raise ConfigError(f"{plan.out} has an audit of more tasks, with other settings; give another folder with --out")
    return others


def _refused(environment: Environment, usable: Collection[str]) -> Iterator[TaskAudit]:
    """Yield the results for tasks of the set that cannot be used, such as a folder without tests."""
    for name, why in environment.refused.items():
        if name and name not in usable:
            yield _unusable(name, "", why)


def _unusable(name: str, digest: str, why: str) -> TaskAudit:
    untried = [Untried(Kind.UNSOLVABLE, f"the task cannot be used here: {why}")]
    return plain(TaskAudit(id=name, digest=digest, untried=untried, complete=False))


async def _resolved(environment: Environment, task: Task) -> tuple[Task | None, str]:
    try:
        return await environment.resolve(task), ""
    except (TaskError, InfraError) as error:
        return None, str(error)
    except Exception as error:  # code of the task's author
        logger.debug("task %s cannot be resolved", task.id, exc_info=True)
        return None, _error_text(error)


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _salt(form: Form, parsed: RunLine, plan: Plan) -> str:
    """Return what the results of all tasks depend on, as text."""
    settings = [parsed.env_config.recorded(), *(server.recorded() for server in parsed.server_configs)]
    parts = [
        *(without_secrets(each) for each in settings),
        [list(plan.kinds), plan.repeats, __version__, clock_library() is not None],
        code_digests(plan.reference, form),
    ]
    return json.dumps(parts, sort_keys=True, default=repr)


def _task_digest(task: Task | None, salt: str) -> str:
    """Return what identifies a task's content. Objects that are not data count by their names."""

    def content(value: object) -> object:
        if isinstance(value, bytes):
            return hashlib.sha256(value).hexdigest()
        if isinstance(value, Path) and value.is_file():
            return [str(value), hashlib.sha256(value.read_bytes()).hexdigest()]
        if isinstance(value, Path) and value.is_dir():
            files = sorted(each for each in value.rglob("*") if each.is_file())
            return [str(value), *((str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in files)]
        if hasattr(value, "__dict__") and not isinstance(value, type):
            return vars(value)
        return repr(value)

    try:
        text = repr(msgspec.to_builtins(task, enc_hook=content, order="deterministic")) if task is not None else ""
    except (TypeError, ValueError, OSError, RecursionError):  # such as a mapping whose keys are objects
        text = repr(task)
    return hashlib.sha256(f"{salt}\0{re.sub(' at 0x[0-9a-f]+', '', text)}".encode()).hexdigest()[:32]


def _sisters(tasks: Sequence[Task], position: int) -> list[Task]:
    """Return some tasks after this one, and before it, whose solutions can be played on it."""
    near = [*tasks[position + 1 : position + 1 + _NEAR], *tasks[max(0, position - _NEAR) : position]]
    return [each for each in near if steps_of(each) is not None][:MOST_SISTERS]


@dataclass(slots=True)
class _Case:
    """A task that is being audited, and what has been found about it."""

    audited: Audited
    result: TaskAudit
    kinds: Collection[Kind]
    """The kinds that are reported."""
    begun: bool = False

    async def look_for(self, some: Collection[Kind]) -> None:
        """Make the checks for some kinds. An error that ends the audit of the task becomes a part of its result, and
        nothing more is looked for. Raises `DiskError`."""
        began, result = time.monotonic(), self.result
        try:
            if result.complete:
                await self._check(some)
        except InfraError as failure:
            result.untried.append(Untried(Kind.COSTLY, f"the audit of this task ended early: {failure}"))
            result.complete = False
        except DiskError:
            raise
        except Exception as failure:  # one odd task must not end the audit of the others
            logger.warning("the audit of task %s ended early", result.id, exc_info=True)
            result.untried.append(Untried(Kind.COSTLY, f"the audit of this task ended early: {_error_text(failure)}"))
            result.complete = False
        finally:
            result.seconds += time.monotonic() - began

    async def _check(self, some: Collection[Kind]) -> None:
        audited, result = self.audited, self.result
        if not self.begun:
            self.begun = True
            await audited.begin()
        for kind, check in CHECKS.items():
            if kind in some and kind in self.kinds and (not audited.unprepared or kind in _FIRST):
                audited.looks_for = kind
                async for each in check(audited):
                    if isinstance(each, Untried):
                        result.untried.append(each)
                        continue
                    count = sum(other.kind is each.kind for other in result.findings) + 1
                    # A check may come upon another kind, which is reported once.
                    if each.kind is kind or (each.kind in self.kinds and count == 1):
                        each.id = f"{result.id}/{each.kind}/{count}"
                        result.findings.append(each)
        if audited.unprepared:  # often because of what this machine lacks
            first, *more = audited.unprepared.strip().splitlines()
            why = f"the workspace could not be prepared: {first}{f' ({more[-1].strip()})' if more else ''}"
            result.untried.append(Untried(Kind.UNSOLVABLE, why))
            result.complete = False

    def recorded(self, *, whole: bool) -> TaskAudit:
        """Return the result for the file of the audit. If it is not the `whole` one, the next audit begins again."""
        audited, result = self.audited, self.result
        stages = {"prepare": audited.prepare_s}
        if audited.rollout is not None:
            beside = audited.rollout.beside
            stages |= {"grade": beside.stages.get("grade", 0.0), "whole": beside.duration_s}
        made = msgspec.structs.replace(
            result,
            stages={name: round(seconds, 3) for name, seconds in stages.items()},
            trials=audited.played,
            mutants=audited.mutants,
            lived=audited.lived,
            trial_s=round(audited.trial_s, 3),
            seconds=round(result.seconds, 3),
            complete=result.complete and whole,
        )
        return plain(made)  # prompts and files may have characters that no file of the result can hold


def _add_duplicates(
    audit: Audit, tasks: Sequence[Task], solved: dict[str, str], others: dict[str, str], *, asked_later: bool
) -> None:
    """Add a finding for each task that another one equals, and a note for each whose prompt another one nearly has.
    `solved` has the solution and the answer of each task, `others` the prompts of another file by their places. If a
    user asks later (`asked_later`), tasks begin alike, and differ in what the user knows."""
    by_id = {each.id: each for each in audit.tasks}
    texts = {task.id: _prompt_text(task) for task in tasks if task.id in by_id}
    for name in texts:
        by_id[name].findings = [each for each in by_id[name].findings if each.kind is not Kind.DUPLICATE]
    first_of: dict[str, str] = {}
    same: dict[str, str] = {}
    for task in tasks:
        # Data often has the task's own name, so it counts only if nothing else says what is right, or a user knows it.
        right = [solved.get(task.id), task.answer, task.data]
        if not asked_later and right[0]:
            right = right[:1]
        key = (" ".join(_prompt_text(task).split()), dict(task.files), task.setup, task.image, right)
        if task.id in by_id and (first := first_of.setdefault(_stable_json(key), task.id)) != task.id:
            same[task.id] = first
    single = {name: text for name, text in texts.items() if name not in same}
    known = {task.id: _stable_json([solved.get(task.id), task.data, task.answer]) for task in tasks if asked_later}

    def pairs(found: Iterator[tuple[str, str, float]]) -> dict[str, tuple[str, float]]:
        return {second: (first, like) for first, second, like in found if known.get(first) == known.get(second)}

    reworded, alike = pairs(_reworded(single, solved)), pairs(_alike(single))
    for second in texts:
        finding = Finding(kind=Kind.DUPLICATE, id=f"{second}/duplicate/1", what="")
        if second in same:
            finding.what = f"it is the same task as {same[second]}"
        elif second in alike:
            first, like = alike[second]
            finding.what, finding.note = f"its prompt is {like:.0%} that of {first}", True
        elif second in reworded:
            first, like = reworded[second]
            what = f"it has the solution of {first}, and {like:.0%} of the words of its prompt"
            finding.what, finding.note = what, True
        if finding.what:
            by_id[second].findings.append(plain(finding))
    for first, second, like in _alike({**others, **texts}) if others else ():
        if (first in others) != (second in others):
            own, other = (second, first) if first in others else (first, second)
            what = f"its prompt is {like:.0%} that of line {other}"
            finding = Finding(kind=Kind.DUPLICATE, id=f"{own}/duplicate/2", what=what, note=True)
            by_id[own].findings.append(plain(finding))


def _stable_json(value: JSON) -> str:
    try:
        return json.dumps(value, sort_keys=True, default=repr)
    except (TypeError, ValueError, RecursionError):  # such as a mapping with keys of several types
        return repr(value)


def _prompt_text(task: Task) -> str:
    return "\n".join(str(each.get("content")) for each in task.messages())


def _jsonl_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each line of a JSONL file of tasks or rows. Raises `ConfigError`."""
    try:
        # Not `splitlines`, because JSON may have other line ends in its strings.
        for place, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), start=1):
            row = json.loads(line)
            text = next((row[name] for name in ("prompt", "problem_statement", "question") if name in row), row)
            yield f"of {path.name}: {place}", str(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--against {path}: {error}") from error


def _alike(texts: dict[str, str]) -> Iterator[tuple[str, str, float]]:
    """Yield pairs of texts with their likeness: equal ones, and those that share nearly all of their words' groups."""
    # Signs count, because "3 + 4" is not "3 - 4".
    words = {name: re.findall(r"\w+|[^\w\s]", text.lower()) for name, text in texts.items()}
    first_of: dict[tuple[str, ...], str] = {}
    shingles: dict[str, frozenset[tuple[str, ...]]] = {}
    holders: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, each in words.items():
        if (first := first_of.setdefault(tuple(each), name)) != name:
            yield first, name, 1.0
            continue
        own = frozenset(tuple(each[start : start + _SHINGLE]) for start in range(len(each) - _SHINGLE + 1))
        shared: defaultdict[str, int] = defaultdict(int)
        for group in own:
            # What very many prompts share is the form of the set, not of one task.
            for other in holders[group][:_MOST_NEIGHBOURS]:
                shared[other] += 1
            holders[group].append(name)
        shingles[name] = own
        for other, count in shared.items():
            like = count / len(own | shingles[other])
            if like >= _LIKE:
                yield other, name, like
                break


def _reworded(texts: dict[str, str], solved: dict[str, str]) -> Iterator[tuple[str, str, float]]:
    """Yield pairs of texts of tasks with one solution that share most of their words and all of their numbers. Words
    that most texts have belong to the form of the set."""
    words = {name: frozenset(re.findall(r"[\w-]+", text.lower())) for name, text in texts.items()}
    held = Counter(word for each in words.values() for word in each)
    form = {word for word, count in held.items() if count > len(words) / 2} if len(words) >= _LEAST_FORM else set()
    same: defaultdict[tuple[str, frozenset[str]], list[str]] = defaultdict(list)
    for name, each in words.items():
        if name not in solved:
            continue
        others = same[solved[name], frozenset(word for word in each if any(map(str.isdigit, word)))]
        for other in others[:_MOST_NEIGHBOURS]:
            own, theirs = each - form, words[other] - form
            if len(own & theirs) >= _LEAST_SHARED and (like := len(own & theirs) / len(own | theirs)) >= _SHARED:
                yield other, name, like
                break
        others.append(name)


async def _replay(
    reference: str, form: Form, parsed: RunLine, task_id: str, trial: Trial
) -> tuple[Verdict, Trajectory | None]:
    async with open_trials(reference, form, parsed) as trials:
        async for task in trials.environment.tasks():
            if task.id == task_id:
                if trial.world != World():  # the audit prepared the workspace on the task's own machine
                    await trials.play(task, Trial())
                for _ in range(trial.after):
                    await trials.play(task, Trial(steps=[REFERENCE]))
                verdict, played, _ = await trials.play(task, trial)
                return verdict, played
    raise ConfigError(f"the environment has no task {task_id} any more")


def replay(
    audit: Audit, task: TaskAudit, finding: Finding, settings: Sequence[str] = ()
) -> tuple[Verdict, Trajectory | None]:
    """Play the witness of a finding again, with further settings, and return its verdict and its rollout. Raises
    `ConfigError` if the finding has no witness, if its task has gone, or if a key is missing, which an audit does not
    keep."""
    if finding.trial is None:
        raise ConfigError(f"{finding.id} has nothing to play: {finding.what}")
    with exported(read_keys(Path.cwd())):
        hint = "the audit does not keep secret settings; give them again after ID: {}"
        try:
            form, parsed = load_audited(audit.reference, [*audit.settings, *settings])
        except ConfigError as error:
            if missing := missing_settings(audit.secrets, settings, {}):
                raise ConfigError(f"{error}. Also, {hint.format(', '.join(missing))}") from error
            raise
        if missing := missing_settings(audit.secrets, settings, parsed.sources):
            raise ConfigError(hint.format(", ".join(missing)))
        return asyncio.run(_replay(audit.reference, form, parsed, task.id, finding.trial))

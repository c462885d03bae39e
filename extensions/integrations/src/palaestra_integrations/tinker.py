"""Lets the Tinker cookbook train on the rollouts of an environment, and lets its recipes run commands in Palaestra's
slots.

    config = train.Config(
        dataset_builder=DatasetBuilder(env="note_env.py", model=model, group_size=8, groups_per_batch=4),
        rollout_error_tolerance=RolloutStrategy(), model_name=model, …,
    )
    asyncio.run(train.main(config))

With `RolloutStrategy`, Palaestra's agent loop runs, and the cookbook's policy samples. Exact tokens, sealed grading and
retries after infrastructure failures work as in a run, and an unscored rollout is a `RolloutError`, never a reward.
With the cookbook's own strategies, the cookbook's loop steps the environments of `EnvGroupBuilder`.

`sandbox_factory` replaces Modal in `tinker_cookbook.recipes.harbor_rl`; each sandbox is a slot.

Source: `rl/types.py`, `rl/rollout_strategy.py` and `sandbox.py` of tinker-cookbook 0.6.1, which must be installed.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import threading
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import chz  # type: ignore[import-not-found]
import tinker
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import AllTrajectoriesFailedError
from tinker_cookbook.rl import rollout_strategy, types
from tinker_cookbook.sandbox import SandboxResult, SandboxTerminatedError

from palaestra import JSON, ConfigError, Group, Sandbox, Session, SyncSession, Trajectory, training_rows
from palaestra_slots import EngineRefused
from palaestra_tokens import FunctionEngine, Sampled

MOST_OUTPUT_BYTES = 128 * 1024
"""The maximum size of a command's output in bytes if the recipe sets no limit. It is the cookbook's own default."""

Ask: TypeAlias = Callable[[list[int], int | None, Collection[int]], Awaitable[Sampled]]
_ASK: ContextVar[tuple[asyncio.AbstractEventLoop, Ask]] = ContextVar("ask")
"""The cookbook's event loop, and the function that samples in it for the rollouts of this context."""


@dataclass
class EnvGroupBuilder(types.EnvGroupBuilder):  # type: ignore[misc]
    """One group of rollouts of one task. `env` is an environment in any form that `palaestra.run` accepts. If rollouts
    run in other processes, `env` must be picklable, so give the name of its file. `model` names the tokenizer.
    `settings` are those of `palaestra.Session`, except those that select a policy or a model. All groups of a process
    with the same environment, model and settings that are rolled out in the same way (by `RolloutStrategy`, or stepped
    by the cookbook) belong to one run."""

    env: object
    task_id: str
    model: str
    group_size: int
    settings: Mapping[str, JSON] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._envs: list[RolloutEnv] = []

    async def make_envs(self) -> Sequence[RolloutEnv]:
        """Return environments for the cookbook's loop to step. In their record, all log-probabilities are 0.0, because
        the loop does not pass the real ones on."""
        made = [RolloutEnv(self) for _ in range(self.group_size)]
        self._envs += made
        return made

    async def roll_out(self, ask: Ask, group_size: int, *, retried: bool = True) -> Group:
        """Play a group of rollouts of the task and return it. `ask` samples their tokens in the caller's event loop."""
        session = await asyncio.to_thread(_session, self, retried)
        _ASK.set((asyncio.get_running_loop(), ask))
        (group,) = await asyncio.to_thread(session.roll_out, self.task_id, group_size=group_size)
        return group

    async def cleanup(self) -> None:
        """End the rollouts that the cookbook did not finish."""
        while self._envs:
            await self._envs.pop().aclose()

    def logging_tags(self) -> list[str]:
        return [Path(str(self.env)).stem]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_envs": []}


class RolloutEnv(types.Env):  # type: ignore[misc]
    """One rollout of Palaestra's agent loop. The tokens of each reply are one action."""

    def __init__(self, builder: EnvGroupBuilder) -> None:
        self._builder = builder
        self._prompts: asyncio.Queue[tuple[list[int], Collection[int]]] = asyncio.Queue()
        self._actions: asyncio.Queue[Sampled | None] = asyncio.Queue()
        self._rollout: asyncio.Task[Group] | None = None

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        self._rollout = asyncio.create_task(self._builder.roll_out(self._ask_trainer, 1, retried=False))
        if (asked := await self._next_prompt()) is None:
            raise RuntimeError(f"the agent of task {self._builder.task_id} ended without a model call")
        return asked

    async def step(self, action: list[int], *, extra: types.ActionExtra | None = None) -> types.StepResult:
        """Pass the sampled tokens to the agent loop, and return the next prompt or the final reward. Raises
        `RuntimeError` for a rollout that cannot be scored."""
        reason = (extra or {}).get("stop_reason", "stop")
        self._actions.put_nowait(Sampled(action, [0.0] * len(action), reason))
        if (asked := await self._next_prompt()) is not None:
            return types.StepResult(0.0, False, *asked)
        trajectory = self._finished()
        return types.StepResult(trajectory.reward, True, tinker.ModelInput.empty(), [], _metrics(trajectory))

    async def aclose(self) -> None:
        """End the rollout. Idempotent."""
        if self._rollout is not None and not self._rollout.done():
            self._actions.put_nowait(None)
            await asyncio.wait([self._rollout])

    async def _ask_trainer(self, prompt: list[int], most_tokens: int | None, stop_ids: Collection[int]) -> Sampled:
        self._prompts.put_nowait((prompt, stop_ids))
        if (action := await self._actions.get()) is None:
            raise EngineRefused("the trainer ended the rollout")
        return action

    async def _next_prompt(self) -> tuple[tinker.ModelInput, list[int]] | None:
        """Return the next prompt with its stop tokens, or None if the rollout has ended."""
        assert self._rollout is not None, "the cookbook asks for the initial observation first"
        asked = asyncio.ensure_future(self._prompts.get())
        try:
            await asyncio.wait([asked, self._rollout], return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                self._finished()
                return None
            prompt, stop_ids = asked.result()
            return tinker.ModelInput.from_ints(prompt), list(stop_ids)
        finally:
            asked.cancel()

    def _finished(self) -> Trajectory:
        """Return the rollout that has ended. Raises `RuntimeError` if it has no score."""
        assert self._rollout is not None
        group = self._rollout.result()
        if not group.scored:
            raise RuntimeError(_rollout_errors(group)[0].error_message)
        return group.scored[0]


@dataclass(frozen=True)
class RolloutStrategy(rollout_strategy.RolloutStrategy):  # type: ignore[misc]
    """Rolls out the groups of this module's `EnvGroupBuilder` with Palaestra's agent loop; the cookbook's policy
    samples."""

    @property
    def catches_group_errors(self) -> bool:
        return True

    async def execute(
        self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter
    ) -> rollout_strategy.RolloutResult:
        """Return scored rollouts as trajectories, with the reward on the last transition, and unscored rollouts as
        errors. A scored rollout without tokens to train on is left out. Raises `AllTrajectoriesFailedError` if none was
        scored, and `ConfigError` for a different kind of group builder."""
        if not isinstance(env_group_builder, EnvGroupBuilder):
            raise ConfigError(f"this strategy rolls out its own EnvGroupBuilder, not {type(env_group_builder)}")
        said: dict[tuple[tuple[int, ...], tuple[int, ...]], TokensWithLogprobs] = {}

        async def ask(prompt: list[int], most_tokens: int | None, stop_ids: Collection[int]) -> Sampled:
            reply = await policy(tinker.ModelInput.from_ints(prompt), list(stop_ids), max_tokens=most_tokens)
            said[tuple(prompt), tuple(reply.tokens)] = reply
            return Sampled(reply.tokens, reply.logprobs, reply.stop_reason)

        group = await env_group_builder.roll_out(ask, env_group_builder.group_size)
        errors = _rollout_errors(group)
        if not group.scored:
            raise AllTrajectoriesFailedError(f"no rollout of {env_group_builder.task_id} was scored: {errors[:1]}")
        trajectories = [made for each in group.scored if (made := _trajectory(each, said)).transitions]
        return rollout_strategy.RolloutResult(
            trajectories, [RolloutEnv(env_group_builder) for _ in trajectories], errors
        )


@chz.chz
class DatasetBuilder(types.RLDatasetBuilder):  # type: ignore[misc]
    """The tasks of an environment as groups, in the environment's order. `tasks` limits the number of tasks; None means
    all of them. `passes` is the number of passes over the tasks. The last `held_out` tasks are the cookbook's test
    set."""

    env: str
    model: str
    group_size: int
    groups_per_batch: int
    tasks: int | None = None
    held_out: int = 0
    passes: int = 1
    settings: dict[str, Any] = chz.field(default_factory=dict)

    async def __call__(self) -> tuple[Dataset, Dataset | None]:
        found = await asyncio.to_thread(self._tasks)
        builders = [EnvGroupBuilder(self.env, each, self.model, self.group_size, self.settings) for each in found]
        kept = len(builders) - self.held_out
        if kept < self.groups_per_batch:
            raise ConfigError(f"{self.env} has {kept} tasks to train on, but a batch needs {self.groups_per_batch}")
        test = Dataset(builders[kept:], self.held_out) if self.held_out else None
        return Dataset(builders[:kept] * self.passes, self.groups_per_batch), test

    def _tasks(self) -> list[str]:
        with Session(self.env, policy="noop", **self.settings) as session:
            return [task.id for task in session.tasks(self.tasks)]


class Dataset(types.RLDataset):  # type: ignore[misc]
    """The groups in batches. An incomplete last batch is left out."""

    def __init__(self, builders: Sequence[EnvGroupBuilder], groups_per_batch: int) -> None:
        self._builders = list(builders)
        self._size = groups_per_batch

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return self._builders[index * self._size : (index + 1) * self._size]

    def __len__(self) -> int:
        return len(self._builders) // self._size


def close() -> None:
    """End the runs of this process, which otherwise end together with the process. Idempotent."""
    with _LOCK:
        while _SESSIONS:
            _, session = _SESSIONS.popitem()
            session.__exit__()


_LOCK = threading.Lock()
_SESSIONS: dict[tuple[object, ...], SyncSession] = {}
atexit.register(close)


def _session(builder: EnvGroupBuilder, retried: bool) -> SyncSession:
    """Return the open run of an environment with these settings. If `retried` is false, a failed rollout is not rolled
    out again, because the cookbook cannot step an episode from its beginning twice."""
    env = builder.env if isinstance(builder.env, str) else id(builder.env)
    key = (env, builder.model, retried, json.dumps(dict(builder.settings), sort_keys=True, default=str))
    with _LOCK:
        if key not in _SESSIONS:
            settings = {"concurrency": 64, **({} if retried else {"infra_retries": 0}), **builder.settings}
            engine = FunctionEngine(_sample, model=builder.model)
            _SESSIONS[key] = Session(builder.env, server=engine, **settings).__enter__()
        return _SESSIONS[key]


async def _sample(prompt: list[int], most_tokens: int | None, stop_ids: Collection[int]) -> Sampled:
    """Sample in the cookbook's event loop, where the policy lives."""
    loop, ask = _ASK.get()

    async def ask_prompt() -> Sampled:
        return await ask(prompt, most_tokens, stop_ids)

    try:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask_prompt(), loop))
    except tinker.TinkerError as error:
        raise EngineRefused(f"the policy did not sample: {error}") from error


def _trajectory(
    trajectory: Trajectory, said: Mapping[tuple[tuple[int, ...], tuple[int, ...]], TokensWithLogprobs]
) -> types.Trajectory:
    """Return a scored rollout as transitions, one for each reply to train on. If the history was rewritten, the rollout
    has several rows, whose transitions follow each other; the cookbook makes one datum from each row."""
    steps: list[types.Transition] = []
    tokens: list[int] = []
    for row in training_rows(trajectory):
        tokens, start = [*row.prompt_ids, *row.completion_ids], len(row.prompt_ids)
        for begin, end in _runs(row.mask):
            prompt, reply = tokens[: start + begin], tokens[start + begin : start + end]
            action = said.get((tuple(prompt), tuple(reply)))
            if action is None:  # the ledger divides the reply differently, for example after an interruption
                action = TokensWithLogprobs(reply, (row.logprobs or [])[begin:end])
            steps.append(types.Transition(tinker.ModelInput.from_ints(prompt), action, 0.0, False))
    if steps:
        last = steps[-1]
        last.reward, last.episode_done, last.metrics = float(trajectory.reward or 0.0), True, _metrics(trajectory)
    return types.Trajectory(steps, tinker.ModelInput.from_ints(tokens))


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges in which the mask is 1, as (begin, end)."""
    found: list[tuple[int, int]] = []
    for on, places in itertools.groupby(range(len(mask)), key=lambda place: mask[place]):
        if on:
            run = list(places)
            found.append((run[0], run[-1] + 1))
    return found


def _metrics(trajectory: Trajectory) -> dict[str, float]:
    official = {} if trajectory.official is None else {"official": trajectory.official}
    labels = {f"labels/{label.name}": 1.0 for label in trajectory.labels}
    return {f"outcome/{trajectory.outcome}": 1.0, **official, **labels}


def _rollout_errors(group: Group) -> list[types.RolloutError]:
    """Return an error for each rollout of a group that has no score. If there is no such rollout, return the group's
    error, if it has one."""
    found = [
        types.RolloutError(f"{each.outcome}/{each.blame}", each.error or "the rollout was not scored")
        for each in group.trajectories
        if not each.scored
    ]
    return found or ([types.RolloutError("group", group.error)] if group.error else [])


class SlotSandbox:
    """One slot as a `SandboxInterface`. It ends with `cleanup`, or after `lifetime_s` seconds. A call after its end
    raises the cookbook's `SandboxTerminatedError`."""

    def __init__(self, sandbox: Sandbox, lifetime_s: float) -> None:
        self.sandbox_id = f"slot-{uuid.uuid4().hex[:12]}"
        self._sandbox = sandbox
        self._open = AsyncExitStack()
        self._lifetime_s = lifetime_s
        self._end: asyncio.Task[None] | None = None
        self._ended = False

    async def start(self) -> None:
        await self._open.enter_async_context(self._sandbox)
        self._end = asyncio.ensure_future(self._expire())

    async def _expire(self) -> None:
        await asyncio.sleep(self._lifetime_s)
        self._end = None
        await self.cleanup()

    async def send_heartbeat(self, timeout: int = 30) -> None:
        """Do nothing: a slot needs no heartbeat."""

    async def run_command(
        self, command: str, workdir: str | None = None, timeout: int = 60, max_output_bytes: int | None = None
    ) -> SandboxResult:
        """Run a command. After a timeout, its process tree is killed and the exit code is 124."""
        found = await self._running().execute(
            command,
            cwd=workdir or "/workspace",
            timeout_s=timeout,
            max_output_bytes=max_output_bytes or MOST_OUTPUT_BYTES,
            spill=False,
            stderr=True,
        )
        return _sandbox_result(found.metadata["stdout"], found.metadata["stderr"], found.metadata["exit_code"])

    async def read_file(self, path: str, max_bytes: int | None = None, timeout: int = 60) -> SandboxResult:
        """Return the text of a file. If the file cannot be read, the result has exit code 1 and the reason."""
        try:
            slot = self._running()
            data = await (slot.read_bytes(path) if max_bytes is None else slot.read_bytes(path, max_bytes=max_bytes))
        except OSError as error:
            return _sandbox_result("", f"{path}: {error.strerror or error}", 1)
        return _sandbox_result(data.decode(errors="replace"))

    async def write_file(
        self, path: str, content: str | bytes, executable: bool = False, timeout: int = 60
    ) -> SandboxResult:
        """Write a file, and create its parent folders. If the file cannot be written, the result has exit code 1 and
        the reason."""
        data = content.encode() if isinstance(content, str) else content
        try:
            await self._running().write_bytes(path, data, mode=0o755 if executable else None)
        except OSError as error:
            return _sandbox_result("", f"{path}: {error.strerror or error}", 1)
        return _sandbox_result()

    async def cleanup(self) -> None:
        """End the slot and all its processes. Idempotent."""
        if self._end is not None:
            self._end.cancel()
        self._ended = True
        await self._open.aclose()

    def _running(self) -> Sandbox:
        if self._ended:
            raise SandboxTerminatedError(f"the sandbox {self.sandbox_id} has ended")
        return self._sandbox


def sandbox_factory(*, image: str | Callable[[Path], str] | None = None, **settings: Any) -> Callable[[Path, int], Any]:
    """Return a `SandboxFactory` whose sandboxes are slots on this machine.

    `image` is the root file system of all tasks, or a function that takes a task's `environment` folder and returns the
    root file system of that task. Dockerfiles are not built. `settings` are the other settings of `palaestra.Sandbox`,
    such as `network`, `memory` or `isolation`.
    """

    async def make(env_dir: Path, timeout: int) -> SlotSandbox:
        chosen = image(env_dir) if callable(image) else image
        made = SlotSandbox(Sandbox(image=chosen, **settings), timeout)
        await made.start()
        return made

    return make


def _sandbox_result(stdout: str = "", stderr: str = "", exit_code: int = 0) -> SandboxResult:
    return SandboxResult(stdout=stdout, stderr=stderr, exit_code=exit_code)

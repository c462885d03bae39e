"""Replays a recorded run in its environment and in fresh slots, with the recorded replies in place of a model.

A replay treats the run's folder as data and only reads it. The folder cannot choose isolation, programs or servers. The
environment is an installed one or a file that the caller names. If this user recorded the run on this machine, it may
also be the file that the record names. The caller chooses the settings that act on this machine (`decides`). Tools that
reach outside this machine answer from the recording, and slots have no network unless the caller allows it. (`--resume`
resumes a run; the policy `replay:FILE` starts a new run.)
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import get_annotations
from pathlib import Path
from tempfile import TemporaryDirectory

from palaestra.envs.config.build import make_pool
from palaestra.envs.config.command_line import said_settings, set_fields
from palaestra.envs.config.fields import DECLARED, BaseEnvConfig
from palaestra.envs.discovery import allow_old_imports, load_environment
from palaestra.envs.form import Form
from palaestra.envs.run.evaluate import EvaluatedEnvironment, Evaluation
from palaestra.envs.run.run import concurrency, opened
from palaestra.rollouts.events import GroupsPlanned, Subscriber
from palaestra.rollouts.journal.journal import EventStream, Journal
from palaestra.rollouts.journal.origin import is_ours
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.observe.console import Console
from palaestra.rollouts.recorded_tools.recording_policy import world_of_grading, world_of_run
from palaestra.rollouts.records import Group
from palaestra.rollouts.resume.replay import Comparison, OtherEnd, Playback, PlayedBack
from palaestra.rollouts.runner import Runner
from palaestra.rollouts.spec import Middleware, RecordedTools, RunContext, RunSettings
from palaestra.rollouts.workspaces import Workspaces
from palaestra_slots.core.config import DEFAULT
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.plugins import is_own
from palaestra_slots.core.types import JSON, Network
from palaestra_slots.sandbox.backends.registry import is_of_backends
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import Slot, SlotSpec, Snapshot
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.scripted import Policy, ScriptedEngine
from palaestra_tokens.server_group import ServerGroup

HOST_SETTINGS = frozenset({
    "isolation", "require_sandbox", "require_stateful_sandbox", "slot_prices", "terminal_backend", "tool_pool_mode",
    "browser_executable", "builder", "build_network", "force_build", "cache_dir", "memory_dir", "sessions_dir",
    "skills_dir", "timings_from", "metrics_port", "metrics_host", "metrics_token", "otel_endpoint", "otel_content",
    "use_wandb", "wandb_mode", "use_trackio", "rollout_server_url", "on", "rollout_server_token",
    "data_path_to_save_groups", "data_dir_to_save_evals", "world", "world_file",
})  # fmt: skip
"""Settings that act on this machine or that reach other machines. No recording decides them, nor those of backends."""

PORTABLE_SETTINGS = frozenset({
    "group_size", "total_steps", "seed", "short_groups", "infra_retries", "max_failures",
    "max_infra_rate", "acquire_timeout_s", "worker_timeout", "idle_limits", "drain_s", "include_messages",
    "ensure_scores_are_not_same", "held_out", "dataset_split", "prompt_field", "dataset_fields",
    "max_agent_turns", "max_token_length", "max_rollout_tokens", "max_rollout_completion_tokens",
    "max_rollout_output_bytes", "agent_temperature", "agent_max_steps", "agent_max_tokens", "agent_tool_delay_s",
    "system_prompt", "thinking_mode", "reasoning_effort", "max_reasoning_tokens", "custom_thinking_prompt",
    "tool_call_parser", "enabled_toolsets", "disabled_toolsets", "distribution", "strict_tools", "terminal_timeout",
    "freeze_slots", "grading", "live", "share_setup", "graded_paths", "graded_programs",
    "save_workspaces", "reward", "strict_labels", "world_miss", "browser_snapshot_chars", "vision_max_tokens",
    "moa_max_tokens",
    "only_tasks", "shuffle", "n", "level", "families", "areas", "task_filter", "skip_tasks", "max_items", "prompt_mode",
    "python_only", "score_include_fail_to_pass", "test_timeout", "test_timeout_s", "task_timeout", "keep_tests",
    "keep_programs", "live_tasks", "controls", "eval_limit_ratio", "steps_per_eval",
})  # fmt: skip
"""The settings that another person's run may decide: which tasks are played, how the agent works, and which files a
check sees. None of these settings names a program, a server, a key or a file of this machine, or opens the network."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Settings of a replay. `environment` is a reference, or None for the recorded environment; `groups` is the number
    of tasks to replay, from the first, or None for all."""

    environment: str | None = None
    groups: int | None = None
    concurrency: int | None = None
    network: bool = False
    isolation: str = "best"


def replayable_form(recording: Recording, environment: str | None) -> Form:
    """Return the environment to replay. Raises `ConfigError` if the run cannot be replayed."""
    if recording.last < 0:
        raise ConfigError(f"{recording.path} has no finished group, so there is nothing to replay")
    return recorded_form(recording, environment)


async def replay(recording: Recording, form: Form, settings: ReplaySettings, console: Console) -> Comparison:
    """Replay the finished groups of a recording in `form` (see `replayable_form`), and compare the replay with the
    recording."""
    with where_it_ran(recording):
        return await _Replay(recording, settings, form).run(console)


def differing(recording: Recording, form: Form, settings: ReplaySettings) -> list[str]:
    """Return the recorded settings that a replay does not use, as text for the user."""
    recorded = recording.meta.config
    taken = {"isolation": settings.isolation}
    lines = [
        f"{name}: {value!r} in the recording, {taken.get(name, 'not set')!r} here"
        for name, value in sorted(said_settings(recorded, "env", (DEFAULT, DECLARED)).items())
        if taken.get(name) != value and not _counts(recording, form, name, value)
    ]
    place, given = str(recorded.get("environment") or ""), settings.environment
    return [*lines, f"environment: {place!r} in the recording, {given!r} here"] if given not in (None, place) else lines


class _Replay:
    """Replays one run."""

    def __init__(self, recording: Recording, settings: ReplaySettings, form: Form) -> None:
        self.recording = recording
        self.settings = settings
        self.form = form
        self.playback = Playback(recording)
        self.comparison = Comparison()
        self._played: set[int] = set()

    async def run(self, console: Console) -> Comparison:
        limit = self.recording.last + 1 if self.settings.groups is None else self.settings.groups
        middleware = Middleware(chat=(self.playback.chat,))
        settings = self.settings
        async with reopened(
            self.recording,
            self.form,
            console,
            middleware,
            policy=PlayedBack(self.playback),
            network=settings.network,
            isolation=settings.isolation,
        ) as run:
            environment, context = _playable(run.environment), run.context
            workers = self.settings.concurrency or concurrency(run.config)
            console.follow(context.events.in_flight)
            context.events.announce(GroupsPlanned(limit, run.config.group_size))
            if self.recording.meta.config.get("command") == "evaluate":
                await Evaluation(environment, context, workers, self._compare, limit=limit).run()
            else:
                runner = Runner(environment, context, concurrency=workers, limit=limit, on_group=self._compare)
                await runner.run()
        for number in sorted(set(self.recording.numbers) - self._played):
            left_out = self.recording.numbered(number) if number < limit else None
            if left_out is not None:
                end = OtherEnd(left_out.group_id, "played", "whole", "no task has this number now")
                self.comparison.other_ends.append(end)
        return self.comparison

    def _compare(self, replayed: Group) -> None:
        """Compare a group with the recorded one. An evaluation also plays groups that the recording lacks."""
        self._played.add(replayed.number)
        recorded = self.recording.numbered(replayed.number)
        if recorded is not None:
            self.comparison.add(recorded, replayed)
            self.playback.forget(recorded)


@dataclass(frozen=True, slots=True)
class ReopenedRun:
    """The open environment of a recorded run, with a context for rollouts that leave no record."""

    environment: EvaluatedEnvironment
    config: BaseEnvConfig
    context: RunContext
    pool: SlotPool


@contextlib.asynccontextmanager
async def reopened(
    recording: Recording,
    form: Form,
    subscriber: Subscriber | None = None,
    middleware: Middleware | None = None,
    *,
    policy: Policy | None = None,
    network: bool = False,
    isolation: str = "best",
    changed: Mapping[str, JSON] = {},
    asks_models: bool = False,
) -> AsyncIterator[ReopenedRun]:
    """Open the environment of a recording with fresh slots, and with those recorded settings that a replay uses;
    `changed` replaces some of them. Slots have no network unless `network` allows it. Tools that reach outside this
    machine answer from the recording, and no model is called; with `asks_models`, the environment may ask a model what
    the recording lacks."""
    bound = form.bound
    said = said_settings(recording.meta.config, "env", (DEFAULT, DECLARED))
    said = {name: value for name, value in said.items() if _counts(recording, form, name, value)}
    said |= set_fields(bound) if bound is not None else {}
    said |= {**changed, "isolation": isolation, "world": "replay", "world_file": str(recording.path.parent)}
    config = form.config_type()(**said)
    # Also if the environment itself names a folder: a replay writes nothing.
    config.data_dir_to_save_evals = None
    server = APIServerConfig(server_type="scripted", model_name="noop")
    engine = ServerGroup(ScriptedEngine(server, policy))
    with TemporaryDirectory(prefix="palaestra-replay-") as folder:
        journal = Journal(Path(folder) / "journal.jsonl")
        open_recorded = world_of_grading if asks_models else world_of_run
        world = RecordedTools(lambda: open_recorded(recording.path.parent))
        pool = make_pool(config)
        if not network:
            pool = OfflinePool(pool.config, pool.backend)
        with contextlib.closing(world):
            async with pool:
                environment = form.build(config, [server], engine)
                environment.use_recordings(world)
                context = RunContext(
                    engine=engine,
                    workspaces=Workspaces(pool),
                    events=EventStream(journal, *(() if subscriber is None else (subscriber,))),
                    settings=RunSettings(
                        seed=recording.meta.seed,
                        group_size=config.group_size,
                        infra_retries=config.infra_retries,
                        idle_limits=config.idle_limits,
                    ),
                    recorded_tools=world,
                    middleware=middleware or Middleware(),
                )
                try:
                    async with opened(environment, config.only_tasks):
                        yield ReopenedRun(environment, config, context, pool)
                finally:
                    await context.workspaces.aclose()
                    journal.close()


def _counts(recording: Recording, form: Form, name: str, value: JSON) -> bool:
    """Return whether a replay uses a recorded setting. It uses `mcp_servers`, because no MCP server is started: the
    servers' tools answer from the recording."""
    return name == "mcp_servers" or decides(recording, form, name, value)


def decides(recording: Recording, form: Form, name: str, value: JSON) -> bool:
    """Return whether a replay, or a resumed run that this user did not record here, uses a recorded setting.

    A run that this user recorded here decides all settings except `HOST_SETTINGS` and those of backends. Any other run
    decides only `PORTABLE_SETTINGS`, and numeric settings that the user's own environment class declares.
    """
    if is_ours(recording):
        return name not in HOST_SETTINGS and not is_of_backends(name)
    # The class that declares the setting, not one that inherits it: settings of ours count only if they are listed.
    declared = next((each for each in form.config_type().__mro__ if name in get_annotations(each)), None)
    own = declared is not None and not is_own(declared.__module__)
    return name in PORTABLE_SETTINGS or (own and (value is None or isinstance(value, int | float)))


class OfflinePool(SlotPool):
    """A pool whose slots have no network in any phase."""

    async def make(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None) -> Slot:
        return await super().make(replace(spec, network=Network.OFF), trajectory_id, snapshot)


def recorded_form(recording: Recording, given: str | None) -> Form:
    """Return the environment that the caller names, or otherwise the recorded one. Raises `ConfigError` for a file that
    only the record names, unless this user recorded the run here."""
    if recording.meta.config.get("compat") is True:
        allow_old_imports()
    reference = given or str(recording.meta.config.get("environment") or "")
    form = load_environment(given, Path.cwd()) if given is not None else _by_record(recording, reference)
    if form.name != recording.meta.env:
        raise ConfigError(f"the run used the environment '{recording.meta.env}', but {reference} is '{form.name}'")
    return form


def _by_record(recording: Recording, recorded: str) -> Form:
    if not recorded:
        raise ConfigError(
            f"{recording.path} does not record the file of its environment '{recording.meta.env}'; specify it with "
            "--environment FILE.py:NAME"
        )
    if (".py" in recorded or "/" in recorded) and not is_ours(recording):
        raise ConfigError(
            f"the environment of this run was the file {recorded}. The run was not recorded here by you, so "
            f"its code is not run by default; specify the file with --environment {shlex.quote(recorded)}"
        )
    with where_it_ran(recording):
        path = Path(recorded.partition(":")[0])
        if path.suffix == ".py" and not path.is_file():
            raise ConfigError(
                f"the environment of this run, {path}, no longer exists; specify the file with --environment"
            )
        return load_environment(recorded, Path.cwd())


def _playable(environment: EvaluatedEnvironment) -> EvaluatedEnvironment:
    if environment.collects_rollouts:
        raise ConfigError(
            f"{environment.name} collects its rollouts in its own collect_ method; the record does not "
            "contain what that method did, so the run cannot be replayed"
        )
    return environment


@contextlib.contextmanager
def where_it_ran(recording: Recording) -> Iterator[None]:
    """While the block runs, work in the folder where this user started the run, if it still exists, because settings
    and environments may have relative paths. For another person's run, the working folder does not change, because
    files such as `.env` are read from it."""
    folder = Path(str(recording.meta.config.get("folder") or "."))
    with contextlib.chdir(folder) if is_ours(recording) and folder.is_dir() else contextlib.nullcontext():
        yield

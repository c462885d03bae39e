"""Trains a model on an environment: `palaestra train`, and `palaestra.train` for Python programs.

A training run is a run (`envs.run.run.run`) that `trainers.training.Training` drives, with the trainer's engine in
place of a model server. Its folder also has `training/`, with the settings, the metrics of each step, and the
checkpoints.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from palaestra.envs.config.dotenv import exported, read_keys, shell_variables
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.envs.form import Form
from palaestra.envs.run import library
from palaestra.envs.run.command import command_line, take_variables
from palaestra.envs.run.library import environment_form
from palaestra.envs.run.run import RunReport, Steering, run
from palaestra.envs.run.run_folder import RunLine
from palaestra.rollouts.export.token_rows import ExportedRow
from palaestra.rollouts.journal.reader import RUNS
from palaestra.rollouts.limits import RunStopped
from palaestra.rollouts.records import Group
from palaestra.rollouts.runner import Runner, Totals
from palaestra_slots.core.config import python_names
from palaestra_slots.core.errors import ConfigError, PalaestraError
from palaestra_slots.core.types import JSON, Task
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.token_engine import TokenChat
from palaestra_train.config import TrainerName, TrainingConfig
from palaestra_train.training import Training, TrainingResult
from palaestra_train.warm_start import ORACLE, demonstrations_in, demonstrations_of, located, warm_start_rows

if TYPE_CHECKING:
    from palaestra_train.trainer import Trainer

_ELSEWHERE = "192.0.2.1"
"""An address that is nowhere. Source: RFC 5737."""


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """A training run, and how the training ended."""

    run: RunReport
    result: TrainingResult

    def to_json(self) -> dict[str, JSON]:
        """Return the report as `--json` prints it."""
        result = {name: str(each) if isinstance(each, Path) else each for name, each in asdict(self.result).items()}
        return self.run.to_json() | {"training": result}


async def train(
    env: object,
    *,
    model: str | None = None,
    trainer: TrainerName | Trainer | None = None,
    tinker_url: str | None = None,
    folder: str | Path = RUNS,
    out: str | Path | None = None,
    progress: bool = False,
    training: TrainingConfig | Mapping[str, JSON] | None = None,
    **settings: JSON,
) -> TrainingReport:
    """Train `model` on an environment, as `palaestra train` does. If you pass a `Trainer`, its own model is trained.

    Without `trainer`, `make_trainer` chooses one. `training` contains the settings of `TrainingConfig`; `settings` are
    further settings of the environment or the model server, such as `group_size`; `resume` names the folder of a run to
    continue. The run's folder is `out`, or a new one below `folder`. Raises what `palaestra.run` raises,
    `TrainerError`, and `RunStopped` if the run stops before the training ends. Logs a warning if the reference solution
    of the first task, or every rollout of the first steps, earns nothing."""
    dotenv = read_keys(Path.cwd())
    with python_names(), exported(dotenv):
        form = environment_form(env)
        line = command_line(form, "palaestra.train", "process", [APIServerConfig(health_check=False)])
        given = {"model": model, **settings}
        parsed = line.take("process", given, shell_variables(dotenv), dotenv)
        take_variables(parsed, dotenv)
        config = training if isinstance(training, TrainingConfig) else TrainingConfig(**(training or {}))
        stream = sys.stderr if progress else StringIO()
        root, named = Path(folder), None if out is None else Path(out)
        return await train_line(
            form,
            parsed,
            trainer,
            config,
            root=root,
            folder=named,
            stream=stream,
            tinker_url=tinker_url,
            reference=None if settings.get("resume") is not None else lambda: _reference_reward(env),
        )


async def _reference_reward(env: object) -> float | None:
    """Play the reference solution of an environment's first task. Returns its reward, or None if it has none."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            played = await library.run(env, policy="oracle", tasks=1, group_size=1, folder=folder)
        except PalaestraError:
            return None
        return played.mean_reward


async def train_line(
    form: Form,
    parsed: RunLine,
    trainer: TrainerName | Trainer | None,
    config: TrainingConfig,
    *,
    root: Path = Path(RUNS),
    folder: Path | None = None,
    stream: TextIO | None = None,
    tinker_url: str | None = None,
    reference: Callable[[], Awaitable[float | None]] | None = None,
) -> TrainingReport:
    """Train a model to the end. `reference` returns the reward of a reference solution; if it earns nothing, the
    training run warns. The model is loaded before anything is written. The run's folder is `folder`, or a new
    one below `root`."""
    chosen = make_trainer(trainer, parsed, config, tinker_url, root) if isinstance(trainer, str | None) else trainer
    if config.warm_start is not None and parsed.resume is None:
        # Before the run begins, because `last` would name it.
        config = config.model_copy(update={"warm_start": located(config.warm_start)})
    training = Training(
        chosen, config, reference, lambda tasks, held: _demonstrated(form, parsed, chosen, config, tasks, held)
    )
    try:
        # Inside of the block, because it may fail when a part of the model is loaded.
        await chosen.open()
        report = await run(
            form,
            parsed,
            root=root,
            folder=folder,
            stream=stream,
            engines=[chosen.engine],
            steering=Steering(
                [chosen.busy],
                drive=training.drive,
                serve_nodes=lambda: _served(chosen, parsed),
                resumed_by=f"palaestra train{f' --tinker-url {tinker_url}' if tinker_url else ''} --resume",
            ),
        )
    finally:
        await chosen.aclose()
    if training.result is None:
        raise RunStopped(f"the training run in {report.folder} stopped ({report.reason}) and can be resumed")
    return TrainingReport(report, training.result)


async def _demonstrated(
    form: Form, parsed: RunLine, trainer: Trainer, config: TrainingConfig, tasks: Sequence[Task], held: Sequence[Task]
) -> list[ExportedRow]:
    """Return the rows of a warm start: of the reference solutions of as many tasks as its steps need, or of the
    conversations that the setting names. Tasks that are held out are left out."""
    assert config.warm_start is not None
    if config.warm_start == ORACLE:
        wanted = [task for task in tasks if task.solution][: config.warm * config.groups]
        found = demonstrations_in(await _reference_solutions(form, parsed, wanted))
    else:
        found = demonstrations_of(config.warm_start)
    body = getattr(parsed.env_config, "extra_body", None) or {}
    return warm_start_rows(found, trainer.engine, body.get("chat_template_kwargs"), {task.id for task in held})


async def _reference_solutions(form: Form, parsed: RunLine, tasks: Sequence[Task]) -> list[Group]:
    """Play the reference solutions of tasks, with the settings of the training run. Returns their groups."""
    server = APIServerConfig(server_type="scripted", model_name="oracle", health_check=False)
    quiet = {
        "group_size": 1, "use_wandb": False, "use_trackio": False, "on": None, "metrics_port": None,
        "data_path_to_save_groups": None, "otel_endpoint": None, "save_workspaces": False, "steps_per_eval": 0,
    }  # fmt: skip
    config = parsed.env_config.model_copy(update=quiet)
    # The flags of the training run have been checked, and some of them mean nothing here.
    line = replace(parsed, env_config=config, server_configs=[server], resume=None, sources={})
    groups: list[Group] = []

    async def drive(runner: Runner) -> Totals:
        places = asyncio.Semaphore(runner.concurrency)

        async def play_task(number: int, task: Task) -> None:
            async with places:
                groups.append(await runner.roll_out(number, task))

        async with asyncio.TaskGroup() as rollouts:
            for number, task in enumerate(tasks):
                rollouts.create_task(play_task(number, task))
        groups.sort(key=lambda group: group.number)
        return runner.totals

    with tempfile.TemporaryDirectory(prefix="palaestra-warm-start-") as folder:
        await run(form, line, root=Path(folder), stream=StringIO(), steering=Steering(drive=drive))
    return groups


@asynccontextmanager
async def _served(trainer: Trainer, parsed: RunLine) -> AsyncIterator[Sequence[APIServerConfig]]:
    """Serve the trainer's engine to the nodes of a cluster, and yield the settings with which they reach it.

    The server speaks plain HTTP, and only the nodes get its token. Raises `ConfigError` for an engine that cannot be
    served.
    """
    from palaestra_tokens.serving.model_server import (
        ModelServer,  # imported here, because most training runs use one machine
    )

    engine = trainer.engine
    if not isinstance(engine, TokenChat):
        raise ConfigError(f"the model of the trainer {trainer.name} cannot be served to nodes: leave out --on")
    token, address = secrets.token_urlsafe(24), _address_for(parsed.env_config.on or "")
    async with ModelServer(engine, host=address, token=token) as server:
        model = parsed.server_configs[0] if parsed.server_configs else APIServerConfig(model_name=engine.name)
        reached = {"server_type": "sglang", "base_url": server.url, "api_key": token}
        yield [model.model_copy(update={**reached, "history": "append", "health_check": False})]


def _address_for(cluster: str) -> str:
    """Return the address at which the nodes of a cluster reach this machine."""
    kind, _, words = cluster.partition(":")
    if kind == "processes":
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((words.rpartition(":")[0] or _ELSEWHERE, 9))  # sends nothing, but chooses a network device
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _is_for_laptop(server: APIServerConfig, temperature: float) -> bool:
    """Return whether an adapter on this machine is the better default: it can sample at temperature 1 only, and with no
    other server. A key of Tinker's service never makes it the default, because the service costs money."""
    if server.server_type in ("sglang", "vllm") or temperature != 1 or os.environ.get("TINKER_API_KEY"):
        return False
    if not all(map(find_spec, ("peft", "tinker", "torch"))):
        return False
    import torch

    return not torch.cuda.is_available()


def make_trainer(
    name: TrainerName | None, parsed: RunLine, config: TrainingConfig, tinker_url: str | None, root: Path
) -> Trainer:
    """Return the trainer with this name, for the settings of a run. The trainer has not loaded anything yet. Without a
    name, it is `tinker` on this machine if its extra is installed and there is no GPU, because AdamW on all weights
    takes three times the model's memory in addition; otherwise it is `trl`. Raises `ConfigError`."""
    env, servers = parsed.env_config, parsed.server_configs
    if len(servers) != 1 or servers[0].model_name in ("", "default"):
        raise ConfigError("specify the model to train with --model: a folder, or the OWNER/NAME of a model on the hub")
    temperature = env.agent_temperature if isinstance(env, HermesAgentEnvConfig) else 1.0
    if name == "tinker" or (name is None and (tinker_url is not None or _is_for_laptop(servers[0], temperature))):
        from palaestra_train.tinker_client import TinkerTrainer

        local = root / "tinker-states" if tinker_url is None and not os.environ.get("TINKER_API_KEY") else None
        return TinkerTrainer(servers[0], config, url=tinker_url, local=local, seed=env.seed)
    from palaestra_train.trl import TrlTrainer

    return TrlTrainer(servers[0], config, rollouts=config.groups * env.group_size, temperature=temperature)
